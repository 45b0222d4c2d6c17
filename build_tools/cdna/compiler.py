"""HIP -> code object for gfx942 or gfx950, with the clang of PyPI's `ziglang` and a device-only HIP
header.

No ROCm is needed, and none of its device library is linked: what a kernel calls has to come from
clang builtins or from hip_shim/.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .code_object import CodeObject, parse

ARCHES = ("gfx942", "gfx950")
SHIM = Path(__file__).parent / "hip_shim"
HIP_FLAGS = (
    "-x",
    "hip",
    "--cuda-device-only",
    "-nogpulib",
    "-nogpuinc",
    "-std=c++17",
    "-O3",
    f"-I{SHIM}",
    "-Wno-unused-command-line-argument",
    "-fno-lto",
)


class CompileError(Exception):
    """clang's messages."""


def _zig(*arguments: str) -> str:
    command = [sys.executable, "-m", "ziglang", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{' '.join(command)}\n{done.stderr}")
    return done.stderr


def _link(object_file: Path, output: Path) -> bytes:
    # clang's own link step wants a ROCm linker; lld makes the same shared object.
    _zig("ld.lld", "-shared", str(object_file), "-o", str(output))
    return output.read_bytes()


def compile_hip(
    source: str | Path, arch: str, flags: Sequence[str] = (), keep_assembly: Path | None = None
) -> CodeObject:
    """Compile a HIP file (a Path) or text for the device side of one architecture.

    Raises CompileError with clang's messages.
    """
    if arch not in ARCHES:
        raise ValueError(f"expected one of {ARCHES}, got {arch}")
    with tempfile.TemporaryDirectory(prefix="cdna-") as folder:
        work = Path(folder)
        if isinstance(source, str):
            path = work / "kernel.hip"
            path.write_text(source)
        else:
            path = source
        assembly = work / "kernel.s"
        _zig(
            "clang",
            *HIP_FLAGS,
            f"--offload-arch={arch}",
            *flags,
            "-S",
            "-o",
            str(assembly),
            str(path),
        )
        if keep_assembly is not None:
            keep_assembly.write_bytes(assembly.read_bytes())
        return parse(_assemble(assembly, arch, work), arch)


def assemble(text: str, arch: str) -> bytes:
    """The bytes of .text for some assembly, without linking: an encoder that shares nothing with
    the decoder.
    """
    with tempfile.TemporaryDirectory(prefix="cdna-") as folder:
        source, output = Path(folder) / "text.s", Path(folder) / "text.o"
        source.write_text(f".text\n{text}\n")
        _zig(
            "clang",
            "-target",
            "amdgcn-amd-amdhsa",
            f"-mcpu={arch}",
            "-c",
            "-o",
            str(output),
            str(source),
        )
        return parse(output.read_bytes(), arch).text


def _assemble(source: Path, arch: str, work: Path) -> bytes:
    target = ("-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}")
    _zig("clang", *target, "-c", "-o", str(work / "kernel.o"), str(source))
    return _link(work / "kernel.o", work / "kernel.co")


@functools.lru_cache(maxsize=64)
def compile_cached(source: str | Path, arch: str, flags: tuple[str, ...] = ()) -> CodeObject:
    """compile_hip, once per process for the same arguments."""
    return compile_hip(source, arch, flags)


def available() -> str | None:
    """None if the compiler runs, otherwise why it does not."""
    try:
        _zig("clang", "--version")
    except (CompileError, OSError) as error:
        return str(error)
    return None
