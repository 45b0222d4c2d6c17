"""Machine state: global memory, and the registers and LDS of the work-groups that execute together.

A `Batch` is some work-groups of one launch; a `Group` is a run of neighbouring waves of a batch
that stand at one program counter and execute together. Registers are arrays over [wave, lane], so
that one numpy operation serves all waves of a group.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .races import RaceFinder

Array = npt.NDArray[Any]
T = TypeVar("T")

LANES = 64
SGPRS = 128  # operand codes 0..127: s0-s101, FLAT_SCRATCH, XNACK, VCC, trap registers, M0, EXEC
VCC, M0, EXEC = 106, 124, 126
LITERALS = 256  # operand index of a program's first literal, counted like the source codes
POISON = 0xFFFFFFFF  # in registers and LDS before the kernel writes them: NaN as float32 and bf16
SHARED_APERTURE, PRIVATE_APERTURE = 0x10000, 0x20000  # upper halves of flat addresses
GUARD = 4096

LANE = np.arange(LANES)


class Fault(Exception):
    """The kernel did something that a GPU would not survive, or that has no defined result."""


class Memory:
    """Global memory: allocations with guard bands, and a fault for every byte outside of them.

    Byte 0 of the arena belongs to a block of zeros that lanes without a valid address are pointed
    at.
    """

    BASE = 0x7F00_0000_0000  # below 2**48: kernels mask the upper half of addresses with 0xffff

    def __init__(self, size: int = 64 << 20) -> None:
        size = (size + 15) // 16 * 16
        self.bytes: Array = np.zeros(size, np.uint8)
        self.words: Array = self.bytes.view(np.uint32)
        self.room: Array = np.zeros(size, np.uint8)  # valid bytes from here on, at most 255
        self.top = GUARD
        self.starts: list[int] = []
        self.names: list[str] = []
        self.code_base = 0  # address of the loaded code object's virtual address 0
        self.room[:256] = 255

    def allocate(self, nbytes: int, name: str = "buffer", align: int = 256) -> int:
        """Reserve `nbytes` and return the address."""
        start = (self.top + align - 1) // align * align
        if start + nbytes + GUARD > self.bytes.size:
            raise MemoryError(
                f"{name}: {nbytes} bytes do not fit in the {self.bytes.size} of this Memory"
            )
        self.top = start + nbytes + GUARD
        room = self.room[start : start + nbytes]
        room[:] = 255
        tail = min(nbytes, 254)
        if tail:
            room[nbytes - tail :] = np.arange(tail, 0, -1, dtype=np.uint8)
        self.starts.append(start)
        self.names.append(f"{name} ({nbytes} bytes)")
        return self.BASE + start

    def put(self, array: Array, name: str = "array") -> int:
        """Copy an array into a new allocation and return its address."""
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        address = self.allocate(raw.size, name)
        self.bytes[address - self.BASE : address - self.BASE + raw.size] = raw
        return address

    def get(self, address: int, like: Array) -> Array:
        """Read back an array of the shape and type of `like`."""
        start = address - self.BASE
        return self.bytes[start : start + like.nbytes].view(like.dtype).reshape(like.shape).copy()

    def check(self, index: Array, nbytes: int) -> None:
        """Fault unless all of `nbytes` at every index lie in one allocation."""
        try:
            room = self.room.take(index) >= nbytes
        except IndexError:
            room = (index >= 0) & (index < self.bytes.size)
        if 0 in room.tobytes():
            bad = int(index.reshape(-1)[np.argmin(room.reshape(-1))])
            near = bisect.bisect_right(self.starts, bad) - 1
            where = (
                f"{bad - self.starts[near]} bytes after the start of {self.names[near]}"
                if near >= 0
                else ""
            )
            raise Fault(
                f"memory access of {nbytes} bytes out of bounds: {bad + self.BASE:#x} {where}"
            )


class Mode(NamedTuple):
    """The part of a wave's state that instructions are compiled for."""

    mode: int = (
        0xF0  # MODE register: [3:0] rounding, [7:4] denormals, 8 DX10_CLAMP, 9 IEEE, 23 FP16_OVFL
    )
    index_mode: int = 0  # s_set_gpr_idx_on: 1 SRC0, 2 SRC1, 4 SRC2, 8 DST; 0 when off
    index_by: int = 0

    @property
    def flush_f32(self) -> bool:
        return self.mode >> 4 & 3 == 0

    @property
    def dx10_clamp(self) -> bool:
        return bool(self.mode >> 8 & 1)

    @property
    def ieee(self) -> bool:
        return bool(self.mode >> 9 & 1)

    @property
    def saturate(self) -> bool:
        return bool(self.mode >> 23 & 1)


class Where(NamedTuple):
    pc: int
    mode: Mode


class Batch:
    """Registers, LDS and scratch of some work-groups that execute together."""

    def __init__(
        self,
        work_groups: int,
        waves_per_group: int,
        vgprs: int,
        agprs: int,
        lds_bytes: int,
        memory: Memory,
        constants: Array,
        scratch_bytes: int = 0,
        poison: int = POISON,
    ) -> None:
        """`constants`: [n] uint32, the values behind operand codes 128 and up (inline ones, then
        literals).
        """
        waves = work_groups * waves_per_group
        self.waves, self.waves_per_group, self.work_groups = waves, waves_per_group, work_groups
        self.memory, self.constants = memory, constants
        self.vector: Array = np.full((vgprs + agprs, waves, LANES), poison, np.uint32)
        self.scalar: Array = np.full((waves, SGPRS), poison, np.uint32)
        self.scalar[:, EXEC : EXEC + 2] = 0xFFFFFFFF
        self.scc: Array = np.zeros((waves, 1), bool)
        self.lds_bytes = lds_bytes
        self.lds_stride = (lds_bytes + 15) // 16 * 16 + 16
        self.lds: Array = np.full(work_groups * self.lds_stride, poison & 0xFF, np.uint8)
        self.lds_base: Array = (np.arange(waves) // waves_per_group * self.lds_stride)[:, None]
        self.scratch_bytes = scratch_bytes
        self.scratch: Array = np.full(waves * LANES * scratch_bytes + 16, poison & 0xFF, np.uint8)
        self.waiting: Array = np.zeros(waves, bool)
        self.done: Array = np.zeros(waves, bool)
        self.races: RaceFinder | None = None
        self._groups: dict[tuple[int, int], Group] = {}

    def close(self) -> None:
        """Drop the groups, which refer back to the batch: its arrays are freed without the
        collector.
        """
        self._groups.clear()

    def group(self, first: int, last: int) -> Group:
        """The group of waves first..last-1; views are made once and kept."""
        key = (first, last)
        if key not in self._groups:
            self._groups[key] = Group(self, first, last)
        return self._groups[key]


class Group:
    """A run of waves of a batch, and numpy views of their state.

    Operands are numbered as in the `u`, `f`, `i` lists: vector registers (accumulation registers
    after the ordinary ones), then whatever a source code below 256 means, then literals. Vector
    entries are [waves, 64], scalar ones [waves, 1], constants [1, 1].
    """

    __slots__ = (
        "batch",
        "first",
        "last",
        "n",
        "u",
        "f",
        "i",
        "q",
        "scc",
        "mask",
        "where",
        "count",
        "memo",
        "memory",
        "lds",
        "lds32",
        "lds_base",
        "raw",
        "next",
        "_exec",
    )

    def __init__(self, batch: Batch, first: int, last: int) -> None:
        self.batch, self.first, self.last, self.n = batch, first, last, last - first
        self.memory, self.lds, self.lds32 = batch.memory, batch.lds, batch.lds.view(np.uint32)
        self.lds_base = batch.lds_base[first:last]
        self.raw: Array = batch.scalar[first:last]
        vector = batch.vector[:, first:last]
        scalar = self.raw.T[:, :, None]
        constants = batch.constants[:, None, None]
        self.u: list[Array] = [*vector, *scalar, *constants]
        self.f: list[Array] = [
            *vector.view(np.float32),
            *scalar.view(np.float32),
            *constants.view(np.float32),
        ]
        self.i: list[Array] = [
            *vector.view(np.int32),
            *scalar.view(np.int32),
            *constants.view(np.int32),
        ]
        self.q: list[Array] = list(self.raw.view(np.uint64).T[:, :, None])  # register pairs
        self.scc = batch.scc[first:last]
        self._exec: Array = self.raw[:, EXEC : EXEC + 2]
        self.mask: Array | None = None  # [waves, 64] bool, None when every lane is on
        self.where = Where(0, Mode())
        self.next: Where | list[Where] = self.where  # left by the last block
        self.count = 0  # instructions executed, to keep groups in step
        self.memo: dict[Any, Any] = {}

    def refresh(self) -> None:
        """Recompute the lane mask after EXEC was written."""
        raw = self._exec.tobytes()
        if raw == b"\xff" * len(raw):
            self.mask = None
        else:
            self.mask = lanes_of(self._exec)

    def view(self, key: Any, make: Callable[[Group], T]) -> T:
        """A view that depends on this group only; made once."""
        if key not in self.memo:
            self.memo[key] = make(self)
        return self.memo[key]

    def block(self, register: int, count: int) -> Array:
        """[count, waves, 64] uint32 view of consecutive vector registers."""
        key = (register, count)
        if key not in self.memo:
            self.memo[key] = self.batch.vector[register : register + count, self.first : self.last]
        return self.memo[key]


def lanes_of(pair: Array) -> Array:
    """Bool [waves, 64] from [waves, 2] uint32."""
    return np.unpackbits(pair.view(np.uint8), axis=1, bitorder="little").view(bool)


def pair_of(lanes: Array) -> Array:
    """[waves, 2] uint32 from bool [waves, 64]."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)
