"""The kernels of csrc/hip compiled and launched in the executor, with torch tensors as memory.

Sources may be a copy with a mistake in it: `Kernels(arch, folder)` compiles what lies in
`folder/hip`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from build_tools.cdna.code_object import CodeObject
from build_tools.cdna.compiler import compile_cached
from build_tools.cdna.launch import Dim, Statistics, pack_arguments, run_kernel
from build_tools.cdna.state import Memory

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FILES = ("quantize", "kv_cache", "merge")
THREADS = 256
LANES = 64

TYPES = {
    "Float32": torch.float32,
    "Float16": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float8E4M3FN": torch.float8_e4m3fn,
    "Float8E4M3FNUZ": torch.float8_e4m3fnuz,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}
WIDE = [torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
HARDWARE = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Template arguments that are no types; those of an enumeration as they are written in a name.
Numbers = int | tuple[int | str, ...]


def mangled(kernel: str, *types: torch.dtype, number: Numbers = 0) -> str:
    """How the name of an instantiation begins in the Itanium C++ ABI: mla::gpu::kernel<types>, or
    kernel<types, numbers>. Without types it is no template.
    """
    arguments: list[str] = []
    for dtype in types:
        name = f"NS0_{len(NAMES[dtype])}{NAMES[dtype]}E"  # S0_ stands for mla::gpu
        arguments.append("S2_" if name in arguments else name)  # S2_: the first argument again
    numbers = number if isinstance(number, tuple) else (number,) if number else ()
    last = "".join(
        n if isinstance(n, str) else f"L{'b' if isinstance(n, bool) else 'i'}{n:d}E"
        for n in numbers
    )
    if not types and not numbers:
        return f"_ZN3mla3gpu{len(kernel)}{kernel}E"
    return f"_ZN3mla3gpu{len(kernel)}{kernel}I{''.join(arguments)}{last}EEv"


class Kernels:
    """The kernels of one source tree for one architecture; what is needed gets compiled."""

    def __init__(self, arch: str, folder: Path = CSRC) -> None:
        self.arch, self.folder = arch, folder

    def code(self, file: str) -> CodeObject:
        return compile_cached(
            self.folder / "hip" / f"{file}.hip", self.arch, ("-DMLA_DEVICE_ONLY",)
        )

    def find(self, file: str, kernel: str, *types: torch.dtype, number: Numbers = 0) -> str:
        """The full name of kernel<types> or kernel<types, numbers>; exactly one has to be there."""
        start = mangled(kernel, *types, number=number)
        (name,) = (name for name in self.code(file).kernels if name.startswith(start))
        return name


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """The numbers of a tensor, in order, as bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(RAW[flat.element_size()]).numpy().view(np.uint8).reshape(-1)


class Device:
    """Memory in which every tensor has bounds of its own, and launches on it."""

    def __init__(self, kernels: Kernels, file: str, megabytes: int = 4) -> None:
        self.kernels, self.file = kernels, file
        self.code = kernels.code(file)
        self.memory = Memory(megabytes << 20)
        self.executed: Counter[str] = Counter()

    def put(self, tensor: Tensor, offset: int = 0) -> int:
        """Copy a tensor; its address is `offset` elements behind a multiple of 256 bytes."""
        data = raw_bytes(tensor)
        skip = offset * tensor.element_size()
        return self.memory.put(np.concatenate([np.full(skip, 0xA5, np.uint8), data])) + skip

    def full(self, count: int, dtype: torch.dtype, offset: int = 0) -> int:
        """Memory for results, filled with 0xA5."""
        filler = torch.full((count * dtype.itemsize,), 0xA5, dtype=torch.uint8)
        return self.put(filler.view(dtype), offset)

    def get(self, address: int, count: int, dtype: torch.dtype) -> Tensor:
        raw = self.memory.get(address, np.empty(count * dtype.itemsize, np.uint8))
        return torch.from_numpy(raw.copy()).view(dtype)

    def call(
        self,
        kernel: str,
        types: tuple[torch.dtype, ...],
        grid: Dim,
        *arguments: Any,
        number: Numbers = 0,
        threads: int = THREADS,
        **options: Any,
    ) -> Statistics:
        """Launch kernel<types>. A race on LDS is an AssertionError."""
        entry = self.code.kernel(self.kernels.find(self.file, kernel, *types, number=number))
        packed = pack_arguments(self.code, entry, grid, threads, arguments)
        kernarg = self.memory.put(np.frombuffer(packed, np.uint8), "kernel arguments")
        stats = run_kernel(
            self.code, entry, grid, threads, kernarg, self.memory, find_races=True, **options
        )
        assert not stats.races, f"{kernel}: {[str(race) for race in stats.races]}"
        self.executed += stats.counts
        return stats


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal bits; any NaN is equal to any NaN."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape)
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan), "NaN in other places"
    raw = RAW[got.element_size()]
    wrong = (got.contiguous().view(raw) != want.contiguous().view(raw)) & ~nan
    assert not wrong.any(), (
        f"{int(wrong.sum())} differ, the first at {wrong.nonzero()[0].tolist()}: "
        f"{got[wrong][0]} instead of {want[wrong][0]}"
    )


def patterns(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a type of two bytes."""
    return torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(dtype)
