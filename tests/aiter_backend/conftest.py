"""Helpers of this folder and of tests/cdna are imported by name; the repository root makes
build_tools importable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "cdna", HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import stand_in  # noqa: E402


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[..., stand_in.StandIn]]:
    """`install(arch, release, workers)`; what torch leaves uninitialised is NaN or huge."""
    with ExitStack() as stack, np.errstate(all="ignore"):
        count = 0

        def enter(*args: Any, **kwargs: Any) -> stand_in.StandIn:
            nonlocal count
            count += 1
            return stack.enter_context(stand_in.installed(tmp_path / str(count), *args, **kwargs))

        torch.use_deterministic_algorithms(True)
        try:
            yield enter
        finally:
            torch.use_deterministic_algorithms(False)
