"""Helpers of this folder are imported by name; the repository root makes build_tools
importable.

test_mutations.py runs the other tests on a patched copy of build_tools, named by
MLA_OPS_BUILD_TOOLS_ROOT.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
MUTANT = os.environ.get("MLA_OPS_BUILD_TOOLS_ROOT")
for folder in (HERE, Path(MUTANT) if MUTANT else HERE.parents[1]):
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
if MUTANT:
    import build_tools

    assert Path(str(build_tools.__file__)).is_relative_to(MUTANT), (
        "a mutant run must not see the real one"
    )


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """The expected values are computed from infinities and NaN too."""
    with np.errstate(all="ignore"):
        yield
