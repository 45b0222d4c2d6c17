"""Compiler and linker flags."""

from __future__ import annotations

import os
import shlex

from .isa import InstructionSet
from .toolchain import BuildError

SANITIZERS = ("address", "undefined")


def sanitizers() -> str:
    """Return $MLA_OPS_SANITIZE, checked: "", or a comma-separated choice of SANITIZERS."""
    asked = [word.strip() for word in os.environ.get("MLA_OPS_SANITIZE", "").split(",")]
    asked = [word for word in asked if word]
    for word in asked:
        if word not in SANITIZERS:
            known = ",".join(SANITIZERS)
            raise BuildError(
                f"MLA_OPS_SANITIZE takes {' and '.join(SANITIZERS)}, got {word!r}. Run:",
                f"MLA_OPS_SANITIZE={known} pip install --no-build-isolation .",
            )
    return ",".join(sorted(set(asked)))


def _code_generation() -> list[str]:
    if asked := sanitizers():
        return ["-O1", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={asked}"]
    flags = ["-O3"]
    # Python's own CFLAGS ask for -g, which makes the module ten times as large.
    if not any(flag.startswith("-g") for flag in shlex.split(os.environ.get("CFLAGS", ""))):
        flags.append("-g0")
    return flags


# Most Pythons were built with -fwrapv and hand it on: it makes signed overflow defined, which hides
# it from UBSan and keeps loops over 32-bit indices from being vectorized.
_LANGUAGE = ["-std=c++20", "-fvisibility=hidden", "-fno-wrapv"]


def common() -> list[str]:
    """Return the flags of the sources that are compiled once.

    -fopenmp: without it at::parallel_for silently runs on one thread.
    """
    return [*_code_generation(), *_LANGUAGE, "-fopenmp"]


def per_isa(isa: InstructionSet) -> list[str]:
    """Return the flags of the sources that are compiled once per instruction set.

    -ffp-contract=fast is GCC's default and not clang's: said here so that both fuse alike. Never
    -ffast-math: the kernels have to see NaN and infinity. -fno-trapping-math lets GCC compute both
    sides of a choice between floats, without which it does not vectorize one. GCC 12 warns of
    uninitialized variables in its own AVX-512 headers (GCC bug 105593).
    """
    return [
        *_code_generation(),
        *_LANGUAGE,
        *(
            "-ffp-contract=fast",
            "-fno-trapping-math",
            "-Wall",
            "-Wextra",
            "-Wno-maybe-uninitialized",
        ),
        *isa.flags,
    ]


def nvcc() -> list[str]:
    """Return nvcc's flags without the architectures. torch adds -fPIC."""
    return ["-O3", "-std=c++20", "-Xcompiler", "-fvisibility=hidden"]


def hipcc() -> list[str]:
    """Return hipcc's flags without the architectures. torch adds -fPIC and -fno-gpu-rdc."""
    return ["-O3", "-std=c++20", "-fvisibility=hidden"]


def link() -> list[str]:
    """Return the linker's flags."""
    flags = ["-fopenmp"]
    if asked := sanitizers():
        flags.append(f"-fsanitize={asked}")
    return flags
