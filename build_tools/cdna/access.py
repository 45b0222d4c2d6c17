"""What all vector memory instructions share: sizes of accesses, address spaces, atomics, and writes
to LDS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .atomics import ATOMICS, Atomic
from .decoder import Instruction
from .operands import Step, Target
from .state import LANE, M0, Array, Fault, Group

I64, U = np.int64, np.uint32
AHEAD = {k: np.arange(k, dtype=I64)[:, None, None] for k in (1, 2, 3, 4)}
LDS_ADDRESS_BITS = 0x3FFFF  # M0 of LDS loads: gfx950 has 160 KiB


class Access(NamedTuple):
    """Shape of one lane's access."""

    nbytes: int
    signed: bool = False
    half: str = ""  # "lo" or "hi" of a register whose other half is kept (d16)

    @property
    def dwords(self) -> int:
        return max(self.nbytes // 4, 1)


def _accesses() -> dict[str, Access]:
    table = {"dword": Access(4), "short": Access(2), "byte": Access(1)}
    for k in (2, 3, 4):
        table[f"dwordx{k}"] = Access(4 * k)
    for name, size in (("byte", 1), ("short", 2)):
        for prefix, signed in (("u", False), ("s", True)):
            table[prefix + name] = Access(size, signed)
            table[f"{prefix}{name}_d16"] = Access(size, signed, "lo")
            table[f"{prefix}{name}_d16_hi"] = Access(size, signed, "hi")
        table[f"{name}_d16"] = Access(size, False, "lo")
        table[f"{name}_d16_hi"] = Access(size, False, "hi")
    for bits in (32, 64, 96, 128):
        table[f"b{bits}"] = Access(bits // 8)
    for bits in (8, 16):
        table[f"b{bits}"] = Access(bits // 8)
        table[f"b{bits}_d16_hi"] = Access(bits // 8, False, "hi")
        for prefix, signed in (("u", False), ("i", True)):
            table[f"{prefix}{bits}"] = Access(bits // 8, signed)
            table[f"{prefix}{bits}_d16"] = Access(bits // 8, signed, "lo")
            table[f"{prefix}{bits}_d16_hi"] = Access(bits // 8, signed, "hi")
    return table


ACCESSES = _accesses()


class Space(NamedTuple):
    """An address space: its bytes, and how a group's accesses to it are checked."""

    bytes: Array
    words: Array
    check: Callable[[Array, int], None]


def read(space: Space, index: Array, access: Access) -> Array:
    """[dwords, ...] uint32 from byte indices of any shape."""
    if access.nbytes >= 4:
        if int(np.bitwise_or.reduce(index, axis=None)) & 3:
            raw = space.bytes.take(index[..., None] + np.arange(access.nbytes))
            return np.moveaxis(raw.view(U), -1, 0)
        if access.nbytes == 4:
            return space.words.take(index >> 2)[None]
        return space.words.take((index >> 2) + AHEAD[access.dwords])
    value = space.bytes.take(index)
    if access.nbytes == 2:
        high = space.bytes.take(index + 1)
        value = value.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)
    if access.signed:
        value = value.view(np.int8 if access.nbytes == 1 else np.int16).astype(np.int32).view(U)
    return value.astype(U)[None]


def write(space: Space, index: Array, values: Array, access: Access) -> None:
    """Store [dwords, ...] uint32 at byte indices [...]. Where lanes collide, the last one wins."""
    if access.nbytes >= 4 and not int(np.bitwise_or.reduce(index, axis=None)) & 3:
        for k in range(access.dwords):
            space.words[(index >> 2) + k] = values[k]
        return
    for k in range(access.nbytes):
        space.bytes[index + k] = (values[k // 4] >> U(8 * (k % 4))).astype(np.uint8)


def to_registers(g: Group, register: int, values: Array, access: Access) -> None:
    """Write loaded values under EXEC."""
    if access.half:
        old = g.u[register]
        low = values[0] & U(0xFFFF)
        merged = (
            old & U(0xFFFF0000) | low if access.half == "lo" else old & U(0xFFFF) | low << U(16)
        )
        values = merged[None]
    block = g.block(register, access.dwords)
    if g.mask is None:
        block[...] = values
    else:
        np.copyto(block, values, where=g.mask)


def from_registers(g: Group, register: int, access: Access) -> Array:
    block = g.block(register, access.dwords)
    return block >> U(16) if access.half == "hi" else block


def perform(
    g: Group, space: Space, index: Array, access: Access, register: int, store: bool
) -> None:
    """Load to, or store from, `register` for all active lanes; index [waves, 64] may be garbage
    elsewhere.
    """
    mask = g.mask
    if not store:
        if mask is not None:
            index = np.where(mask, index, 0)
        space.check(index, access.nbytes)
        to_registers(g, register, read(space, index, access), access)
        return
    values = from_registers(g, register, access)
    if mask is not None:
        index, values = index[mask], values[:, mask]
    space.check(index, access.nbytes)
    write(space, index, values, access)


def global_space(g: Group) -> Space:
    memory = g.memory
    return Space(memory.bytes, memory.words, memory.check)


def lds_space(g: Group) -> Space:
    """`check` is done on LDS addresses before the work-group's base is added, by lds_index."""
    return Space(g.lds, g.lds32, unchecked)


def unchecked(index: Array, nbytes: int) -> None:
    return None


def lds_index(g: Group, address: Array, nbytes: int, is_write: bool, inst: Instruction) -> Array:
    """Index into the batch's LDS from addresses [waves, 64] int64; faults outside the work-group's
    allocation.
    """
    if g.mask is not None:
        address = np.where(g.mask, address, 0)
    top = int(np.maximum.reduce(address, axis=None)) + nbytes
    if top > g.batch.lds_bytes and (g.mask is None or g.mask.any()):
        raise Fault(f"{inst}: LDS access up to byte {top} of {g.batch.lds_bytes}")
    if g.batch.races is not None:
        g.batch.races.record(g, address, nbytes, is_write, inst)
    return address + g.lds_base


def atomic_step(
    target: Target,
    inst: Instruction,
    op: Atomic,
    where: Callable[[Group], tuple[Space, Array]],
    data0: int,
    data1: int,
    returns: bool,
) -> Step:
    """Read-modify-write, lane after lane. `data1` is the new value of a compare-and-swap on LDS."""
    k = op.dtype.itemsize // 4
    agpr = inst["acc"]
    compare = op.compare
    vdata = target.vector(data0, k * (2 if compare and inst.format != "DS" else 1), agpr)
    second = target.vector(data1, k, agpr) if compare and inst.format == "DS" else vdata + k
    vdst = (
        target.vector(inst["vdst"] if "vdst" in inst.fields else data0, k, agpr) if returns else 0
    )

    def lanes_of_block(g: Group, register: int, active: Array) -> Array:
        block = np.moveaxis(g.block(register, k), 0, -1)
        return np.ascontiguousarray(block[active]).view(op.dtype)[:, 0]

    def step(g: Group) -> None:
        space, index = where(g)
        active = np.ones((g.n, 64), bool) if g.mask is None else g.mask
        at = index[active]
        space.check(at, op.dtype.itemsize)
        if at.size and int(np.bitwise_or.reduce(at)) % op.dtype.itemsize:
            raise Fault(f"{inst}: unaligned atomic")
        cells = space.bytes[: space.bytes.size // 8 * 8].view(op.dtype)
        data = lanes_of_block(g, vdata, active)
        other = lanes_of_block(g, second, active) if compare else data
        if compare and inst.format != "DS":
            data, other = other, data  # global: the new value comes first; DS: the comparand does
        old = op.apply(cells, at // op.dtype.itemsize, data, other)
        if returns:
            full = np.zeros((g.n, 64), op.dtype)
            full[active] = old
            values = np.moveaxis(full.view(U).reshape(g.n, 64, k), -1, 0)
            to_registers(g, vdst, values, Access(4 * k))

    return step


def vmem_atomic(name: str) -> Atomic | None:
    """The operation behind global_atomic_*, flat_atomic_*, buffer_atomic_*."""
    base = name.split("_atomic_")[1]
    if base.endswith("_x2"):
        kind = {"smin": "min_i64", "smax": "max_i64", "umin": "min_u64", "umax": "max_u64"}
        return ATOMICS.get(kind.get(base[:-3], base[:-3] + "_u64"))
    kind = {"smin": "min_i32", "smax": "max_i32", "umin": "min_u32", "umax": "max_u32"}
    return ATOMICS.get(kind.get(base, base)) or ATOMICS.get(base + "_u32")


def into_lds(g: Group, values: Array, access: Access, offset: int, inst: Instruction) -> None:
    """LDS[M0 + offset + lane * size] = values: every lane's data lies after the previous lane's."""
    m0 = g.raw[:, M0 : M0 + 1].astype(I64) & LDS_ADDRESS_BITS
    address = m0 + (offset + access.nbytes * LANE)
    index = lds_index(g, address, access.nbytes, True, inst)
    if g.mask is not None:
        index, values = index[g.mask], values[:, g.mask]
    write(lds_space(g), index, values, access)
