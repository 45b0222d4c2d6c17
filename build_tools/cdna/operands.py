"""Source and destination operands: from the numbers in an instruction to functions on a `Group`.

Operand types are letters: u i f 32-bit unsigned, signed, float; h j k 16-bit float, unsigned,
signed; U I d 64-bit unsigned, signed, float; m one bit per lane from a scalar register pair.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .state import EXEC, LITERALS, VCC, Array, Fault, Group, Mode, lanes_of, pair_of

Step = Callable[[Group], None]
Getter = Callable[[Group], Array]

DTYPES: dict[str, Any] = {
    "u": np.uint32,
    "i": np.int32,
    "f": np.float32,
    "h": np.float16,
    "j": np.uint16,
    "k": np.int16,
    "U": np.uint64,
    "I": np.int64,
    "d": np.float64,
}
FLOATS = "fhd"
INLINE_FLOATS = {
    240: 0.5,
    241: -0.5,
    242: 1.0,
    243: -1.0,
    244: 2.0,
    245: -2.0,
    246: 4.0,
    247: -4.0,
    248: 0.15915494309189535,
}


def inline_integer(code: int) -> int | None:
    """Value of the source codes 128..208: 0..64, then -1..-16."""
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return 192 - code
    return None


def constant_table(literals: list[int]) -> Array:
    """uint32 values of operand codes 128.. as float32/int32 operations see them, then the
    literals.
    """
    table = np.zeros(LITERALS - 128 + len(literals), np.uint32)
    for code in range(128, 209):
        table[code - 128] = (inline_integer(code) or 0) & 0xFFFFFFFF
    for code, value in INLINE_FLOATS.items():
        table[code - 128] = np.float32(value).view(np.uint32)
    table[LITERALS - 128 :] = literals
    return table


@dataclass
class Target:
    """What instructions are compiled for: the chip, the registers of the kernel, and the wave's
    mode.
    """

    arch: str
    vgprs: int
    agprs: int
    mode: Mode = field(default_factory=Mode)
    literals: dict[int, int] = field(default_factory=dict)  # literal -> its number

    def vector(self, register: int, count: int = 1, agpr: int = 0) -> int:
        """Operand index of a vector register, checked against what the kernel declares."""
        if register + count > (self.agprs if agpr else self.vgprs):
            kind, limit = ("a", self.agprs) if agpr else ("v", self.vgprs)
            raise Fault(
                f"{kind}{register + count - 1} is beyond the {limit} registers the kernel declares"
            )
        return register + (self.vgprs if agpr else 0)

    def source(
        self, inst: Instruction, code: int, slot: int = 0, count: int = 1, agpr: int = 0
    ) -> int:
        """Operand index of source code `code`, with s_set_gpr_idx applied (slot 0, 1, 2)."""
        if code >= 256:
            moved = self.mode.index_by if self.mode.index_mode >> slot & 1 else 0
            return self.vector(code - 256 + moved, count, agpr)
        base = self.vgprs + self.agprs
        if code == 255:
            if inst.literal is None:
                raise UnknownInstruction(f"{inst}: literal operand without a literal")
            return base + LITERALS + self.literals[inst.literal]
        if 128 <= code <= 208 or code in INLINE_FLOATS or code < 128:
            return base + code
        raise UnknownInstruction(f"{inst}: source operand {code} is not implemented")

    def destination(self, register: int, count: int = 1, agpr: int = 0) -> int:
        moved = self.mode.index_by if self.mode.index_mode & 8 else 0
        return self.vector(register + moved, count, agpr)


def half_view(index: int, high: int, dtype: Any) -> Getter:
    """The lower or upper 16 bits of every lane."""
    key = ("half", index, high, dtype)

    def make(g: Group) -> Array:
        return g.u[index].view(np.uint16)[:, high::2].view(dtype)

    return lambda g: g.view(key, make)


def _constant(code: int, letter: str, literal: int | None) -> Array | None:
    """An inline constant or literal as the given type sees it, [1, 1]; None for registers."""
    dtype = np.dtype(DTYPES[letter])
    if code == 255 and literal is not None:
        if letter == "d":
            bits = literal << 32
        elif dtype.itemsize == 8 and literal >> 31:
            raise UnknownInstruction(
                f"64-bit operation with literal {literal:#x}: its extension is ambiguous"
            )
        else:
            bits = literal & (1 << 8 * dtype.itemsize) - 1
    elif code in INLINE_FLOATS:
        value = INLINE_FLOATS[code]
        packed = struct.pack({2: "<e", 4: "<f", 8: "<d"}[dtype.itemsize], value)
        bits = int.from_bytes(packed, "little")
    else:
        integer = inline_integer(code)
        if integer is None:
            return None
        bits = integer & (1 << 8 * dtype.itemsize) - 1
    return np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype).reshape(1, 1)


def wide_getter(target: Target, inst: Instruction, code: int, letter: str, slot: int) -> Getter:
    """A 64-bit operand as [waves, 64 or 1]."""
    dtype = DTYPES[letter]
    constant = _constant(code, letter, inst.literal)
    if constant is not None:
        return lambda g: constant
    if code < 128:
        if code & 1:
            raise UnknownInstruction(f"{inst}: odd register pair s{code}")
        pair = code // 2
        return lambda g: g.q[pair].view(dtype)
    low = target.source(inst, code, slot, 2)

    def get(g: Group) -> Array:
        both = np.empty(g.u[low].shape + (2,), np.uint32)
        both[..., 0] = g.u[low]
        both[..., 1] = g.u[low + 1]
        return both.view(dtype)[..., 0]

    return get


def lane_mask_getter(target: Target, inst: Instruction, code: int) -> Getter:
    """One bit per lane from a scalar register pair, as bool [waves, 64]."""
    if code < 127:
        key = ("pair", code)

        def make(g: Group) -> Array:
            return g.raw[:, code : code + 2]

        return lambda g: lanes_of(g.view(key, make))
    value = inline_integer(code)
    if value is None:
        raise UnknownInstruction(f"{inst}: lane mask operand {code} is not implemented")
    bits = (
        np.uint64(value & 0xFFFFFFFFFFFFFFFF) >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    ).astype(bool)
    return lambda g: np.broadcast_to(bits, (g.n, 64))


def source_getter(
    target: Target,
    inst: Instruction,
    code: int,
    letter: str,
    slot: int,
    high: int = 0,
    agpr: int = 0,
) -> Getter:
    """An operand of the given type without modifiers."""
    if letter == "m":
        return lane_mask_getter(target, inst, code)
    if letter in "UId":
        return wide_getter(target, inst, code, letter, slot)
    if letter in "hjk":
        constant = _constant(code, letter, inst.literal)
        if constant is not None:
            return lambda g: constant
        return half_view(target.source(inst, code, slot), high, DTYPES[letter])
    index = target.source(inst, code, slot, agpr=agpr)
    if letter == "f":
        return lambda g: g.f[index]
    if letter == "i":
        return lambda g: g.i[index]
    return lambda g: g.u[index]


def write_lane_mask(sdst: int) -> Callable[[Group, Array], None]:
    """Write one bit per lane into a scalar pair; inactive lanes give 0."""
    key = ("pair", sdst)

    def make(g: Group) -> Array:
        return g.raw[:, sdst : sdst + 2]

    def write(g: Group, lanes: Array) -> None:
        if lanes.shape[1] == 1 or len(lanes) != g.n:
            lanes = np.broadcast_to(lanes, (g.n, 64))
        if g.mask is not None:
            lanes = lanes & g.mask
        g.view(key, make)[...] = pair_of(lanes)
        if sdst == EXEC:
            g.refresh()

    return write


def writer(
    target: Target, register: int, letter: str, high: int = 0, keep: bool = False
) -> Callable[[Group, Array], None]:
    """Write a result of the given type under EXEC. 16-bit results clear the other half unless
    `keep`.
    """
    if letter in "UId":
        low = target.destination(register, 2)

        def write_wide(g: Group, value: Array) -> None:
            bits = np.ascontiguousarray(value).view(np.uint32).reshape(*value.shape, 2)
            if g.mask is None:
                g.u[low][...] = bits[..., 0]
                g.u[low + 1][...] = bits[..., 1]
            else:
                np.copyto(g.u[low], bits[..., 0], where=g.mask)
                np.copyto(g.u[low + 1], bits[..., 1], where=g.mask)

        return write_wide
    index = target.destination(register)
    if letter in "hjk":
        half = half_view(index, high, DTYPES[letter])
        other = half_view(index, 1 - high, np.uint16)

        def write_half(g: Group, value: Array) -> None:
            if g.mask is None:
                half(g)[...] = value
                if not keep:
                    other(g)[...] = 0
            else:
                np.copyto(half(g), value, where=g.mask)
                if not keep:
                    np.copyto(other(g), 0, where=g.mask)

        return write_half
    dtype = DTYPES[letter]

    def write(g: Group, value: Array) -> None:
        if g.mask is None:
            g.u[index][...] = value.view(np.uint32)
        else:
            np.copyto(g.u[index], value.view(np.uint32), where=g.mask)

    def write_float(g: Group, value: Array) -> None:
        if g.mask is None:
            g.f[index][...] = value
        else:
            np.copyto(g.f[index], value, where=g.mask)

    return write_float if dtype is np.float32 else write


__all__ = [
    "VCC",
    "Getter",
    "Step",
    "Target",
    "constant_table",
    "inline_integer",
    "lane_mask_getter",
    "source_getter",
    "wide_getter",
    "write_lane_mask",
    "writer",
]
