"""The compiled module: importing it registers its kernels. Nothing else of the package imports it
directly."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from pathlib import Path
from types import ModuleType

logger = logging.getLogger("mla_ops")

REBUILD = "pip install --no-build-isolation ."

# Why there are no compiled kernels, or None where there are.
missing: str | None = None


def load() -> ModuleType | None:
    """Import `mla_ops._C`; None where it was not built, with a warning where it was but cannot be
    loaded."""
    global missing
    if importlib.util.find_spec("mla_ops._C") is None:
        tree = Path(__file__).resolve().parent.parent
        if (tree / "setup.py").exists():
            missing = (
                f"this is the source tree in {tree}, without compiled kernels, and hides an "
                "installed mla_ops: run from another folder, or build in place: make build"
            )
            warnings.warn(missing, RuntimeWarning, stacklevel=2)
            return None
        missing = f"mla_ops was installed without compiled kernels; to build them: {REBUILD}"
        logger.info("%s", missing)
        return None
    try:
        return importlib.import_module("mla_ops._C")
    except Exception as error:
        # A module built against another torch fails in many ways; all of them leave the torch
        # backend usable.
        missing = f"the compiled kernels cannot be loaded ({error}); to rebuild them: {REBUILD}"
        warnings.warn(missing, RuntimeWarning, stacklevel=2)
        return None
