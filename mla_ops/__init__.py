"""Stand-in."""

import torch  # noqa: F401
