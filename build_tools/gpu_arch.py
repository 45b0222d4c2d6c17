"""The GPU architectures that csrc/hip is compiled for, and which of them a compiler knows.

Chosen here and not from the cards that are visible: a container is built where there are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .toolchain import INSTALL, BuildError

# Machine code for the A100, H100 and B200, and PTX, from which the driver makes code for what has
# none. sm_80 runs on 8.6 and 8.9 too; code for 9.0a and 10.0a runs on that architecture alone.
CUDA_DEFAULT = ("8.0", "9.0a", "10.0a")
ROCM_DEFAULT = ("gfx942", "gfx950")

# torch's names in TORCH_CUDA_ARCH_LIST.
_NAMED = {
    "Ampere": ("8.0", "8.6+PTX"),
    "Ada": ("8.9+PTX",),
    "Hopper": ("9.0+PTX",),
    "Blackwell": ("10.0", "10.3", "12.0", "12.1+PTX"),
}


@dataclass(frozen=True)
class Target:
    """One `-gencode` of nvcc: machine code (sm_90a) or PTX (compute_100) for an architecture."""

    number: int
    suffix: str = ""
    ptx: bool = False

    @property
    def name(self) -> str:
        """The name nvcc gives to what is made."""
        return f"{'compute' if self.ptx else 'sm'}_{self.number}{self.suffix}"

    @property
    def flag(self) -> str:
        """The option of nvcc."""
        return f"-gencode=arch=compute_{self.number}{self.suffix},code={self.name}"


def known_to_nvcc(listed: str) -> set[int]:
    """Return the architectures in what `nvcc --list-gpu-arch` prints."""
    return {int(number) for number in re.findall(r"^compute_(\d+)$", listed, re.MULTILINE)}


def _parse(word: str) -> list[Target] | None:
    """Return the targets of one word of TORCH_CUDA_ARCH_LIST; None where it is not one."""
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", word)
    if match is None:
        return None
    major, minor, suffix, ptx = match.groups()
    number = int(major) * 10 + int(minor)
    targets = [Target(number, suffix)]
    if ptx:
        # PTX for 9.0a would run on 9.0 alone, and that has machine code already.
        targets.append(Target(number, "", ptx=True))
    return targets


def _has(known: set[int], target: Target) -> bool:
    # --list-gpu-arch names no suffixes: "a" came with 9.0, "f" with 10.0.
    least = {"": 0, "a": 90, "f": 100}[target.suffix]
    return target.number in known and target.number >= least


def cuda_targets(environment: Mapping[str, str], listed: str, version: str) -> list[Target]:
    """Return what to compile for with an nvcc that lists `listed`.

    TORCH_CUDA_ARCH_LIST overrides the default. An architecture that it names and the compiler does
    not know is an error; of the default, what is not known is left out.
    """
    known = known_to_nvcc(listed)
    asked = environment.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not asked:
        targets = [one for word in CUDA_DEFAULT for one in _parse(word) or [] if _has(known, one)]
        if not targets:
            raise _unknown("any of " + ", ".join(CUDA_DEFAULT), known, version)
        return [*targets, Target(targets[-1].number, "", ptx=True)]
    result: list[Target] = []
    for word in [word for name in asked for word in _NAMED.get(name, (name,))]:
        parsed = _parse(word)
        if parsed is None or not all(_has(known, target) for target in parsed):
            raise _unknown(repr(word), known, version)
        result += [target for target in parsed if target not in result]
    return result


def _unknown(what: str, known: set[int], version: str) -> BuildError:
    names = " ".join(f"{number // 10}.{number % 10}" for number in sorted(known))
    return BuildError(
        f"this nvcc ({version}) cannot compile for {what} of TORCH_CUDA_ARCH_LIST. It knows\n"
        f"    {names or 'nothing'}\n"
        "(9.0a and newer with an a, 10.0f and newer with an f, each with +PTX). Run, for one:",
        f"TORCH_CUDA_ARCH_LIST='{';'.join(CUDA_DEFAULT)}' {INSTALL}",
    )


def rocm_architectures(environment: Mapping[str, str]) -> Sequence[str]:
    """Return $PYTORCH_ROCM_ARCH, or the default. Whether they are known, hipcc says."""
    asked = environment.get("PYTORCH_ROCM_ARCH", "").replace(";", " ").replace(",", " ").split()
    for name in asked:
        if not re.fullmatch(r"gfx[0-9a-f]+(:[a-z]+[+-])*", name):
            raise BuildError(
                f"PYTORCH_ROCM_ARCH takes names like gfx942, got {name!r}. Run, for one:",
                f"PYTORCH_ROCM_ARCH='{';'.join(ROCM_DEFAULT)}' {INSTALL}",
            )
        # CDNA alone: platform.h takes a wave to be 64 lanes.
        if not name.startswith("gfx9"):
            raise BuildError(
                f"csrc/hip is for CDNA (gfx90a, gfx942, gfx950), got {name!r} in PYTORCH_ROCM_ARCH."
                " Run one of:",
                f"PYTORCH_ROCM_ARCH='{';'.join(ROCM_DEFAULT)}' {INSTALL}",
                f"MLA_OPS_GPU=0 {INSTALL}    (CPU kernels alone)",
            )
    return asked or ROCM_DEFAULT
