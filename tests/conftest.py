"""One thread per process of pytest-xdist: two that each start a thread per processor spend most of
their time waiting for each other. Tests of threads ask for the number they want."""

from __future__ import annotations

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
