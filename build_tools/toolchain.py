"""What a build needs, and errors that name the command that mends them.

A missing torch or compiler is an error, not a wheel without kernels: pip hides what setup.py
prints when it succeeds, so nobody would learn that the kernels are not there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from . import isa

MIN_TORCH = (2, 11)  # also in pyproject.toml's dependencies; a test holds the two together
INSTALL = "pip install --no-build-isolation ."
PURE = "MLA_OPS_SKIP_BUILD=1 pip install ."


class BuildError(SystemExit):
    """A build that cannot go on: what is wrong, and the commands that mend it."""

    def __init__(self, problem: str, *mend: str) -> None:
        commands = "\n".join(f"    {line}" for line in mend)
        self.text = f"\nmla_ops: {problem}\n{commands}\n"
        super().__init__(self.text)


def skip_build() -> bool:
    """Whether the pure-Python wheel was asked for."""
    return os.environ.get("MLA_OPS_SKIP_BUILD", "").lower() not in ("", "0", "false", "no")


def settle_cxx() -> None:
    """Leave one word in $CXX, where some keep a command: torch takes all of it for a path.

    Arguments go to $CFLAGS, which distutils hands on; ccache and sccache torch finds by itself.
    """
    words = shlex.split(os.environ.get("CXX", ""))
    while len(words) > 1 and Path(words[0]).name in ("ccache", "sccache"):
        del words[0]
    if words:
        os.environ["CXX"] = words[0]
    if words[1:]:
        os.environ["CFLAGS"] = f"{shlex.join(words[1:])} {os.environ.get('CFLAGS', '')}".strip()


def cxx() -> list[str]:
    """Return the command that C++ is compiled with: $CXX and $CFLAGS."""
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    return [os.environ.get("CXX") or "c++", *flags]


def require_torch() -> str:
    """Return the version of the torch that is built against; an error where there is none."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise BuildError(
            f"it is compiled against your torch, and none can be imported here ({error}). One of:",
            INSTALL + "    (torch is installed: pip's isolated build has hidden it)",
            f"pip install torch && {INSTALL}    (no torch yet; your device's: https://pytorch.org)",
            PURE + "    (no kernels: pure Python, slow)",
        ) from None
    version = str(torch.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TORCH:
        minimum = ".".join(map(str, MIN_TORCH))
        raise BuildError(
            f"it needs torch {minimum} or newer, and torch {version} is installed. Run:",
            f"pip install 'torch>={minimum}' && {INSTALL}",
        )
    return version


def require_ninja() -> None:
    """Find ninja, on PATH or beside this interpreter: a venv's scripts need not be on PATH."""
    if shutil.which("ninja"):
        return
    folders = [sysconfig.get_path("scripts")]
    if importlib.util.find_spec("ninja"):
        folders.append(str(importlib.import_module("ninja").BIN_DIR))
    for folder in folders:
        if shutil.which("ninja", path=folder):
            os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")
            return
    raise BuildError("ninja is missing. Run:", f"pip install ninja && {INSTALL}")


def require_python_headers() -> None:
    """Python.h is a package of its own on Debian, Ubuntu, Fedora and their kin."""
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise BuildError(
            f"Python.h is not in {include}. Install this Python's headers:",
            f"apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev"
            "    (Debian, Ubuntu)",
            "dnf install python3-devel    (Fedora, RHEL)",
        )


def require_compiler() -> str:
    """Return the C++ compiler's version line; an error where it is missing or does not compile."""
    command = cxx()
    mend = (
        "apt-get install g++    (Debian, Ubuntu)",
        "dnf install gcc-c++    (Fedora, RHEL)",
        "CXX=/path/to/g++ " + INSTALL + "    (one that is elsewhere)",
        PURE + "    (no kernels: pure Python, slow)",
    )
    if shutil.which(command[0]) is None:
        raise BuildError(f"there is no C++ compiler {command[0]!r}. One of:", *mend)
    reason = isa.reason_against([*command, "-std=c++20"], isa.BASELINE)
    if reason is not None:
        raise BuildError(f"{shlex.join(command)} compiles no C++20: {reason}\nOne of:", *mend)
    told = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False)
    return told.stdout.partition("\n")[0].strip() or "unknown"


def failed_compile() -> BuildError:
    """Return the error for a compile that failed; the compiler's own words stand above it."""
    return BuildError(
        f"compiling with {shlex.join(cxx())} failed; its errors are above. Things that mend it:",
        "CXX=g++-13 " + INSTALL + "    (with another compiler)",
        "MAX_JOBS=1 " + INSTALL + "    (when it was killed for want of memory)",
        PURE + "    (no kernels: pure Python, slow)",
    )
