"""Vector arithmetic that is more than a function of its sources: carries, accumulators, division
steps, classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .float_ops import ldexp
from .floats import fma32
from .modifiers import adjusted, flushed, getters_of, output_modifier
from .operands import (
    VCC,
    Step,
    Target,
    lane_mask_getter,
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
    """v_fmac_f32 and v_dot2c: the destination is also the addend; v_fmamk/v_fmaak carry a literal
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
    a, b, c = getters_of(target, plain, "uuu")
    write = writer(target, inst["vdst"], "u")

    def step(g: Group) -> None:
        x, y, z = a(g), b(g), c(g)
        out = np.zeros((g.n, 64), np.uint32)
        for k in range(8):
            if table >> k & 1:
                out |= (x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z)
        write(g, out)

    return step


def _exponent(x: Array) -> Array:
    return (x.view(np.uint32) >> np.uint32(23) & np.uint32(255)).astype(np.int32)


def _div_scale(target: Target, inst: Instruction) -> Step:
    """V_DIV_SCALE_F32: the denominator (src0 = src1) or the numerator (src0 = src2) of a division,
    scaled by 2^64 or 2^-64 where the steps that follow would leave the range of float32. VCC tells
    V_DIV_FMAS that the quotient has to be scaled back.

    Two places of the ISA's text cannot be meant: it scales a denominator above 2^126 up when the
    quotient is denormal too, and lets V_DIV_FMAS multiply by 2^32. Here that denominator is scaled
    down and V_DIV_FMAS undoes the scaling; only so is the quotient right, and tests check that it
    is correctly rounded.
    """
    plain = replace(inst, fields={**inst.fields, "clmp": 0})
    value, denominator, numerator = getters_of(target, plain, "fff")
    write, write_vcc = writer(target, inst["vdst"], "f"), write_lane_mask(inst["sdst"])

    def step(g: Group) -> None:
        everything = np.empty((g.n, 64), np.float32)
        s0, s1, s2, _ = np.broadcast_arrays(value(g), denominator(g), numerator(g), everything)
        up, down = ldexp(s0, np.array(64)), ldexp(s0, np.array(-64))
        small_inverse = _denormal(1 / s1.astype(np.float64))
        small_quotient = _denormal(s2.astype(np.float64) / s1)
        cases = [  # condition, VCC, result; the first that holds
            ((s2 == 0) | (s1 == 0), False, np.full_like(s0, np.nan)),
            (_exponent(s2) - _exponent(s1) >= 96, True, np.where(s0 == s1, up, s0)),
            (_denormal(s1), False, up),
            (small_inverse & small_quotient, True, np.where(s0 == s1, down, s0)),
            (small_inverse, False, down),
            (small_quotient, True, np.where(s0 == s2, up, s0)),
            (_exponent(s2) <= 23, False, up),
        ]
        conditions = [condition for condition, _, _ in cases]
        write(g, np.select(conditions, [result for _, _, result in cases], s0).astype(np.float32))
        write_vcc(g, np.select(conditions, [np.full(s0.shape, vcc) for _, vcc, _ in cases], False))

    return step


def _denormal(x: Array) -> Array:
    return (x != 0) & (np.abs(x) < np.float64(2.0**-126))


def _div_fmas(target: Target, inst: Instruction) -> Step:
    """V_DIV_FMAS_F32: the last fma of a division, scaled where VCC says so: by 2^64 if the quotient
    so far (src2) is large, because then the denominator was scaled up, else by 2^-64.
    """
    a, b, c = getters_of(target, inst, "fff")
    scaled = lane_mask_getter(target, inst, VCC)
    write = writer(target, inst["vdst"], "f")

    def step(g: Group) -> None:
        quotient = c(g)
        back = np.where(_exponent(quotient) > 127, 2.0**64, 2.0**-64)
        scale = np.where(scaled(g), back, 1.0)
        # The scale goes into the exact operands, so that a denormal result is rounded once.
        write(g, fma32(a(g) * scale, b(g).astype(np.float64), quotient * scale))

    return step


def _div_fixup(target: Target, inst: Instruction) -> Step:
    """V_DIV_FIXUP_F32: the special cases of a quotient s0 of s2 / s1.

    The ISA's condition for overflow, an exponent of 255 in s1, cannot be reached; here a quotient
    that became a NaN from finite operands is one that overflowed on the way.
    """
    q, d, n = getters_of(target, inst, "fff")
    write = writer(target, inst["vdst"], "f")

    def step(g: Group) -> None:
        s0, s1, s2 = np.broadcast_arrays(q(g), d(g), n(g))
        sign = np.where(np.signbit(s1) ^ np.signbit(s2), np.float32(-1), np.float32(1))
        infinite1, infinite2 = np.isinf(s1), np.isinf(s2)
        infinity, zero = sign * np.float32(np.inf), sign * np.float32(0)
        cases = [  # condition, result; the first that holds
            (np.isnan(s2), s2),
            (np.isnan(s1), s1),
            ((s1 == 0) & (s2 == 0) | infinite1 & infinite2, np.full_like(s0, -np.nan)),
            ((s1 == 0) | infinite2, infinity),
            (infinite1 | (s2 == 0), zero),
            (_exponent(s2) - _exponent(s1) < -150, zero),
            (np.isnan(s0), infinity),
        ]
        conditions, results = zip(*cases, strict=True)
        write(g, np.select(conditions, results, sign * np.abs(s0)).astype(np.float32))

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
        ),
        _fmac,
    ),
    "v_bitop3_b32": _bitop3,
    "v_div_scale_f32": _div_scale,
    "v_div_fmas_f32": _div_fmas,
    "v_div_fixup_f32": _div_fixup,
}
