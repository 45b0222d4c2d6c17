"""Vector arithmetic that is more than a function of its sources: carries, accumulators, division
steps, classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .floats import fma32
from .modifiers import adjusted, flushed, getters_of, output_modifier
from .operands import (
    VCC,
    Step,
    Target,
    source_getter,
    wide_getter,
    write_lane_mask,
    writer,
)
from .state import Array, Group
from .vector_ops import VECTOR_OPS


def classes(value: Array, wanted: Array) -> Array:
    """V_CMP_CLASS: bit 0 signalling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0,
    ... 9 +inf.
    """
    info = np.finfo(value.dtype)
    bits = value.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[value.dtype.itemsize])
    quiet = (bits >> bits.dtype.type(info.nmant - 1) & bits.dtype.type(1)).astype(bool)
    magnitude = np.abs(value)
    rank = np.where(
        magnitude == 0, 0, np.where(magnitude < info.tiny, 1, np.where(magnitude <= info.max, 2, 3))
    )
    number = np.where(
        np.isnan(value), np.where(quiet, 1, 0), np.where(np.signbit(value), 5 - rank, 6 + rank)
    )
    return (wanted.astype(np.uint32) >> number.astype(np.uint32) & np.uint32(1)).astype(bool)


def _carry(target: Target, inst: Instruction) -> Step:
    """32-bit additions and subtractions with carry out, and in for addc/subb."""
    name = inst.name
    carry_in = name.startswith(("v_addc", "v_subb"))
    a, b, *rest = getters_of(target, inst, "uum" if carry_in else "uu")
    if "rev" in name:
        a, b = b, a
    sdst = inst["sdst"] if inst.format.startswith("VOP3") else VCC
    if inst.variant == "SDWA" or inst["clmp"]:
        raise UnknownInstruction(f"{inst}: SDWA or clamp on a carry operation")
    write, write_carry = writer(target, inst["vdst"], "u"), write_lane_mask(sdst)
    subtract = name.startswith("v_sub")

    def step(g: Group) -> None:
        x, y = a(g).astype(np.int64), b(g).astype(np.int64)
        c = rest[0](g).astype(np.int64) if rest else 0
        total = x - y - c if subtract else x + y + c
        write(g, total.astype(np.uint32))
        write_carry(g, total < 0 if subtract else total > 0xFFFFFFFF)

    return step


def _mad64(target: Target, inst: Instruction) -> Step:
    """64-bit sum of a 32-bit product and a 64-bit addend, with carry out."""
    signed = "i64" in inst.name
    letters = "ii" if signed else "uu"
    a, b = getters_of(target, inst, letters)
    c = wide_getter(target, inst, inst["src2"], "U", 2)
    write, write_carry = writer(target, inst["vdst"], "U"), write_lane_mask(inst["sdst"])
    wide: Any = np.int64 if signed else np.uint64

    def step(g: Group) -> None:
        product = a(g).astype(wide) * b(g).astype(wide)
        addend = c(g)
        total = product.view(np.uint64) + addend
        carry = total < addend
        if signed:  # carry out of the 65-bit signed sum
            carry = ((product < 0) ^ (addend >> np.uint64(63)).astype(bool)) ^ carry
        write(g, total)
        write_carry(g, carry)

    return step


def _fmac(target: Target, inst: Instruction) -> Step:
    """v_fmac and the v_dot*c: the destination is also the addend; v_fmamk/v_fmaak carry a literal
    factor/addend.
    """
    name = inst.name
    if name in ("v_fmamk_f32", "v_fmaak_f32"):
        if inst.literal is None:
            raise UnknownInstruction(f"{inst}: no literal")
        a = source_getter(target, inst, inst["src0"], "f", 0)
        b = source_getter(target, inst, inst["vsrc1"] + 256, "f", 1)
        k = source_getter(target, inst, 255, "f", 2)
        if target.mode.flush_f32:
            a, b, k = flushed(a), flushed(b), flushed(k)
        factors = (a, k, b) if name == "v_fmamk_f32" else (a, b, k)
        modify = output_modifier(target, inst, "f")
        write = writer(target, inst["vdst"], "f")
        return lambda g: write(g, adjusted(fma32(*[get(g) for get in factors]), modify))
    op = VECTOR_OPS[{"v_fmac_f32": "v_fma_f32", "v_fmac_f64": "v_fma_f64"}.get(name, name)]
    getters = getters_of(target, inst, op.sources[:2])
    addend = source_getter(target, inst, inst["vdst"] + 256, op.sources[2], 2)
    modify = output_modifier(target, inst, op.result)
    write = writer(target, inst["vdst"], op.result)
    return lambda g: write(g, adjusted(op.compute(*[get(g) for get in getters], addend(g)), modify))


def _bitop3(target: Target, inst: Instruction) -> Step:
    """Any function of three bits; the truth table is spread over the modifier fields."""
    table = inst["omod"] << 6 | inst["abs"] << 3 | inst["neg"]
    plain = replace(inst, fields={**inst.fields, "omod": 0, "abs": 0, "neg": 0})
    letter = "u" if inst.name.endswith("b32") else "j"
    a, b, c = getters_of(target, plain, letter * 3)
    write = writer(target, inst["vdst"], letter, inst["opsel"] >> 3 & 1, keep=True)

    def step(g: Group) -> None:
        x, y, z = a(g), b(g), c(g)
        out = np.zeros((g.n, 64), x.dtype)
        for k in range(8):
            if table >> k & 1:
                out |= (x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z)
        write(g, out)

    return step


ARITHMETIC: dict[str, Callable[[Target, Instruction], Step]] = {
    **{f"v_{op}_co_u32": _carry for op in ("add", "sub", "subrev", "addc", "subb", "subbrev")},
    "v_mad_u64_u32": _mad64,
    "v_mad_i64_i32": _mad64,
    **dict.fromkeys(
        (
            "v_fmac_f32",
            "v_fmac_f64",
            "v_fmamk_f32",
            "v_fmaak_f32",
            "v_dot2c_f32_f16",
            "v_dot2c_f32_bf16",
            "v_dot4c_i32_i8",
        ),
        _fmac,
    ),
    "v_bitop3_b32": _bitop3,
    "v_bitop3_b16": _bitop3,
}
