"""Where sources, objects and generated files lie."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"


def build_dir(torch_version: str, sanitizers: str = "") -> Path:
    """Return the folder of everything one kind of build produces.

    ninja rebuilds what is older than its inputs, and files out of a wheel carry old dates: objects
    of another torch would look fresh. So interpreter and torch version are part of the name, and
    the sanitizers too, whose build must not disturb the normal one.
    """
    base = Path(os.environ.get("MLA_OPS_BUILD_DIR") or ROOT / "build")
    name = f"{sys.implementation.cache_tag}-torch{torch_version}"
    if sanitizers:
        name += "-" + sanitizers.replace(",", "-")
    return base.resolve() / name


def relative(path: Path) -> str:
    """Return a source path as setuptools wants it: relative to the root, with slashes."""
    return path.relative_to(ROOT).as_posix()


def common_sources(gpu: bool = False) -> list[str]:
    """Return the C++ sources that are compiled once."""
    folders = [CSRC, CSRC / "cpu", *([CSRC / "gpu"] if gpu else [])]
    return sorted(relative(path) for folder in folders for path in folder.glob("*.cpp"))


def hip_sources() -> list[Path]:
    """Return the GPU sources, for nvcc or hipcc."""
    return sorted((CSRC / "hip").glob("*.hip"))


def isa_sources() -> list[str]:
    """Return the sources that are compiled once per instruction set."""
    return sorted(relative(path) for path in (CSRC / "cpu" / "isa").glob("*.cpp"))


def isa_dir(build: Path, isa: str) -> Path:
    """Return the folder of one instruction set's objects."""
    return build / "isa" / isa


def isa_objects(build: Path, isa: str) -> list[Path]:
    """Return the objects of one instruction set, as the sources of today name them."""
    folder = isa_dir(build, isa)
    return [(folder / source).with_suffix(".o") for source in isa_sources()]


def gpu_dir(build: Path) -> Path:
    """Return the folder of the GPU sources' objects."""
    return build / "gpu"


def generated_dir(build: Path) -> Path:
    """Return the folder of generated files."""
    return build / "generated"
