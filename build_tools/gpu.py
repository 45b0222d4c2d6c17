"""Compiling csrc/hip: with nvcc where the torch that is there is for CUDA, with hipcc where it is
for ROCm. The torch decides, not a card: none is visible where containers are built."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import flags, gpu_arch, layout
from .toolchain import INSTALL, BuildError

WITHOUT = f"MLA_OPS_GPU=0 {INSTALL}"


@dataclass(frozen=True)
class Gpu:
    """How a build makes its GPU part."""

    compiler: str  # its version, in words
    architectures: Sequence[str]
    flags: Sequence[str]
    wrapped: bool  # nvcc takes .cu alone: files that include the .hip ones are generated
    include_dirs: Sequence[str] = field(default_factory=tuple)
    library_dirs: Sequence[str] = field(default_factory=tuple)
    libraries: Sequence[str] = field(default_factory=tuple)

    def sources(self, build_dir: Path) -> list[str]:
        """Return what is compiled, generating it where it has to be."""
        found = layout.hip_sources()
        if not self.wrapped:
            return [layout.relative(path) for path in found]
        return [str(_wrapper(build_dir, path)) for path in found]


def _wrapper(build_dir: Path, source: Path) -> Path:
    path = layout.generated_dir(build_dir) / f"{source.stem}.cu"
    text = f'#include "{source}"\n'
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def wanted(cuda: str | None, hip: str | None) -> bool:
    """Return whether there is a GPU part: MLA_OPS_GPU, or else what torch is for."""
    asked = os.environ.get("MLA_OPS_GPU", "").lower()
    if asked in ("0", "false", "no"):
        return False
    if asked not in ("", "1", "true", "yes"):
        raise BuildError(f"MLA_OPS_GPU takes 0 or 1, got {asked!r}. Run:", WITHOUT)
    if asked and cuda is None and hip is None:
        raise BuildError(
            "MLA_OPS_GPU=1 asks for GPU kernels, and the torch that is there is for CPUs. Run:",
            f"pip install torch && {INSTALL}    (your device's: https://pytorch.org)",
            f"{INSTALL}    (CPU kernels alone)",
        )
    return cuda is not None or hip is not None


def find() -> Gpu | None:
    """Return how the GPU part is made; None for a torch without one, or where it is not wanted."""
    import torch

    hip = getattr(torch.version, "hip", None)
    if not wanted(torch.version.cuda, hip):
        return None
    return _rocm(str(hip)) if hip is not None else _cuda(str(torch.version.cuda))


def _told(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stdout + done.stderr


def _compiler(home: str | None, name: str) -> Path | None:
    path = Path(home or "/nonexistent") / "bin" / name
    return path if os.access(path, os.X_OK) else None


def _cuda(torch_cuda: str) -> Gpu:
    from torch.utils import cpp_extension

    major = torch_cuda.partition(".")[0]
    mend = (
        f"apt-get install cuda-nvcc-{torch_cuda.replace('.', '-')}"
        f" cuda-cudart-dev-{torch_cuda.replace('.', '-')}    (from NVIDIA's repository)",
        f"CUDA_HOME=/usr/local/cuda-{torch_cuda} {INSTALL}    (where it is elsewhere)",
        f"{WITHOUT}    (CPU kernels alone, on purpose; MLA_OPS_GPU=0 make works too)",
    )
    nvcc = _compiler(cpp_extension.CUDA_HOME, "nvcc")
    if nvcc is None:
        raise BuildError(
            f"the torch that is there is for CUDA {torch_cuda}, and there is no nvcc in "
            f"{cpp_extension.CUDA_HOME or 'CUDA_HOME, PATH or /usr/local/cuda'}. One of:",
            *mend,
        )
    told = _told(str(nvcc), "--version")
    release = re.search(r"release (\d+)\.(\d+)", told)
    if release is None:
        raise BuildError(f"{nvcc} does not run: {told.strip()[:500]}\nOne of:", *mend)
    version = f"{release[1]}.{release[2]}"
    if release[1] != major:
        raise BuildError(
            f"the torch that is there is for CUDA {torch_cuda}, and {nvcc} is of CUDA {version}."
            " One of:",
            *mend,
        )
    targets = gpu_arch.cuda_targets(os.environ, _told(str(nvcc), "--list-gpu-arch"), version)
    return Gpu(
        compiler=f"nvcc {version}",
        architectures=[target.name for target in targets],
        flags=[*flags.nvcc(), *(target.flag for target in targets)],
        wrapped=True,
        library_dirs=[
            *cpp_extension.library_paths("cuda"),
            *_toolkit_library_dirs(nvcc),
        ],
        libraries=["cudart", "c10_cuda", "torch_cuda"],
    )


def _toolkit_library_dirs(nvcc: Path) -> list[str]:
    """Return where this nvcc's libraries are. torch looks in lib64 two folders above the nvcc that
    it found, which may be a script or a link far from its toolkit."""
    told = _told(str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull)
    top = re.search(r"^#\$ TOP=(.*)$", told, re.MULTILINE)
    home = Path(top[1]).resolve() if top else nvcc.parent.parent
    folders = (home / "lib64", home / "lib", *home.glob("targets/*/lib"))
    return [str(folder) for folder in folders if folder.is_dir()]


def _rocm(torch_hip: str) -> Gpu:
    from torch.utils import cpp_extension

    mend = (
        "apt-get install hipcc hip-dev    (from AMD's repository)",
        f"ROCM_HOME=/opt/rocm {INSTALL}    (where it is elsewhere)",
        f"{WITHOUT}    (CPU kernels alone, on purpose; MLA_OPS_GPU=0 make works too)",
    )
    hipcc = _compiler(cpp_extension.ROCM_HOME, "hipcc")
    if hipcc is None or not cpp_extension.IS_HIP_EXTENSION:
        raise BuildError(
            f"the torch that is there is for ROCm {torch_hip}, and there is no hipcc in "
            f"{cpp_extension.ROCM_HOME or 'ROCM_HOME, PATH or /opt/rocm'}. One of:",
            *mend,
        )
    version = re.search(r"HIP version: *(\S+)", _told(str(hipcc), "--version"))
    architectures = gpu_arch.rocm_architectures(os.environ)
    return Gpu(
        compiler=f"hipcc {version[1] if version else '(unknown version)'}",
        architectures=architectures,
        flags=[*flags.hipcc(), *(f"--offload-arch={name}" for name in architectures)],
        # Never CUDAExtension or hipify: it would write renamed copies of csrc into the source tree.
        wrapped=False,
        include_dirs=cpp_extension.include_paths("cuda"),
        library_dirs=cpp_extension.library_paths("cuda"),
        libraries=["amdhip64", "c10_hip", "torch_hip"],
    )
