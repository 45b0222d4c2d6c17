"""Run a few instructions, written in assembly, on given registers.

LLVM's assembler (from ziglang) encodes them, so the tests share no bit layout with the decoder
under test. The bytes are kept in build/ because assembling takes longer than executing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiter_wheel import ROOT

from build_tools.cdna.code_object import CodeObject
from build_tools.cdna.compiler import assemble
from build_tools.cdna.program import Program
from build_tools.cdna.races import RaceFinder
from build_tools.cdna.schedule import Lockstep, Schedule, Scheduler
from build_tools.cdna.state import EXEC, Batch, Memory, Mode, Where

HIP_MODE = 0x3F0  # denormals kept, DX10_CLAMP, IEEE: what clang's kernels start with
AITER_MODE = 0xC0  # float32 denormals flushed, no DX10_CLAMP, no IEEE
CACHE = ROOT / "build" / "cdna-assembly"


def assembled(lines: Sequence[str], arch: str) -> bytes:
    """Machine code of some lines of assembly."""
    text = "\n".join(lines)
    path = CACHE / hashlib.sha256(f"{arch}\n{text}".encode()).hexdigest()
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(assemble(text, arch))
        partial.rename(path)
    return path.read_bytes()


@dataclass
class After:
    """The machine when the code has ended."""

    batch: Batch

    def v(self, register: int, dtype: Any = np.uint32) -> np.ndarray:
        """[waves, 64]; accumulation register k is 64 + k. 64-bit types take two registers."""
        pair = self.batch.vector[register : register + np.dtype(dtype).itemsize // 4]
        return np.ascontiguousarray(np.moveaxis(pair, 0, -1)).view(dtype)[..., 0]

    def s(self, register: int, wave: int = 0) -> int:
        return int(self.batch.scalar[wave, register])

    def s64(self, register: int, wave: int = 0) -> int:
        return self.s(register, wave) | self.s(register + 1, wave) << 32

    @property
    def scc(self) -> bool:
        return bool(self.batch.scc[0, 0])


def run(
    code: str | Sequence[str] | bytes,
    arch: str = "gfx942",
    *,
    v: Mapping[int, Any] | None = None,
    s: Mapping[int, Any] | None = None,
    exec_mask: int = 0xFFFFFFFFFFFFFFFF,
    scc: bool = False,
    mode: int = HIP_MODE,
    lds: np.ndarray | None = None,
    lds_bytes: int = 0,
    scratch_bytes: int = 0,
    waves: int = 1,
    work_groups: int = 1,
    memory: Memory | None = None,
    schedule: Schedule = Lockstep(),  # noqa: B008
    find_races: bool = False,
    limit: int = 10_000_000,
) -> After:
    """Execute assembly (or its bytes) with 64 vector and 64 accumulation registers.

    v: register -> [64] or [waves, 64] of a 32- or 64-bit type. s: register -> int (64-bit if it
    needs to be) or one value per wave.
    """
    if not isinstance(code, bytes):
        lines = [code] if isinstance(code, str) else list(code)
        code = assembled([*lines, "s_endpgm"], arch)
    code_object = CodeObject(arch, [(0, code)], code, 0, {}, [])
    program = Program(code_object, 64, 64, 16 if isinstance(schedule, Lockstep) else 1)
    size = max(lds_bytes, 0 if lds is None else lds.nbytes)
    batch = Batch(
        work_groups,
        waves,
        64,
        64,
        size,
        memory or Memory(1 << 16),
        program.constants,
        scratch_bytes,
    )
    for register, value in (v or {}).items():
        array = np.broadcast_to(np.asarray(value), (waves * work_groups, 64))
        words = np.ascontiguousarray(array).view(np.uint32).reshape(waves * work_groups, 64, -1)
        for k in range(words.shape[-1]):
            batch.vector[register + k] = words[..., k]
    for register, value in (s or {}).items():
        if isinstance(value, int):
            batch.scalar[:, register] = value & 0xFFFFFFFF
            if value >> 32:
                batch.scalar[:, register + 1] = value >> 32 & 0xFFFFFFFF
        else:
            batch.scalar[:, register] = value
    batch.scalar[:, EXEC] = exec_mask & 0xFFFFFFFF
    batch.scalar[:, EXEC + 1] = exec_mask >> 32
    batch.scc[:] = scc
    if lds is not None:
        for k in range(work_groups):
            start = k * batch.lds_stride
            batch.lds[start : start + lds.nbytes] = lds.view(np.uint8).reshape(-1)
    if find_races:
        batch.races = RaceFinder(batch)
    with np.errstate(all="ignore"):
        Scheduler(program, batch, Where(0, Mode(mode)), limit).run(schedule)
    return After(batch)


def float_bits(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


SPECIAL_INTEGERS = [
    0,
    1,
    2,
    31,
    32,
    63,
    0x7FFFFF,
    0x800000,
    0xFFFFFF,
    0x1000000,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFF,
    0x8000,
    0xFFFFFFFF,
    0xFFFF0000,
    0xAAAAAAAA,
]
SPECIAL_FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    3.4028235e38,
    -3.4028235e38,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -1e-45,
    1.1754942e-38,
    1.1754944e-38,
    2**31,
    2**32,
    -(2**31),
    448.0,
    464.0,
    0.49999997,
    8388609.0,
    1e-20,
    1e20,
]


def integers(seed: int, waves: int = 8) -> np.ndarray:
    """[waves, 64] uint32 with many special values."""
    random = np.random.default_rng(seed)
    plain = random.integers(0, 1 << 32, (waves, 64), dtype=np.uint32)
    special = random.choice(np.array(SPECIAL_INTEGERS, np.uint32), (waves, 64))
    small = random.integers(0, 70, (waves, 64), dtype=np.uint32)
    kind = random.integers(0, 3, (waves, 64))
    return np.choose(kind, [plain, special, small])


def floats(seed: int, waves: int = 8) -> np.ndarray:
    """[waves, 64] float32: special values, moderate ones, and any bit patterns."""
    random = np.random.default_rng(seed)
    anything = random.integers(0, 1 << 32, (waves, 64), dtype=np.uint32).view(np.float32)
    special = random.choice(np.array(SPECIAL_FLOATS, np.float32), (waves, 64))
    moderate = random.standard_normal((waves, 64)).astype(np.float32) * np.float32(8)
    kind = random.integers(0, 3, (waves, 64))
    return np.choose(kind, [anything, special, moderate])


def same_floats(got: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bit for bit, except that any NaN equals any NaN."""
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[got.dtype.itemsize]
    nan = np.isnan(expected)
    return bool(
        np.array_equal(np.isnan(got), nan) and (got.view(bits) == expected.view(bits))[~nan].all()
    )
