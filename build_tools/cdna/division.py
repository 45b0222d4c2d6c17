"""The steps of a division: V_DIV_SCALE, V_DIV_FMAS, V_DIV_FIXUP.

clang divides by scaling both operands into a safe range, refining a reciprocal with fused
multiply-adds, scaling back in the last one, and mending the special cases. Two places of the
ISA's pseudocode cannot be meant: it scales up a denominator whose reciprocal is denormal when
the quotient is denormal too, and lets V_DIV_FMAS multiply by 2^32 where the operands were
scaled by 2^64. Here that denominator is scaled down, and V_DIV_FMAS undoes the scaling; only so
is the quotient right. Tests check that it is correctly rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .decoder import Instruction
from .float_ops import fma64
from .floats import fma32
from .modifiers import getters_of
from .operands import VCC, Step, Target, lane_mask_getter, write_lane_mask, writer
from .state import Array, Group


@dataclass(frozen=True)
class _Format:
    letter: str  # operand type
    dtype: Any
    bits: Any
    fraction: int
    bias: int
    shift: int  # operands are scaled by 2^shift
    far: int  # exponents this far apart: the quotient is near the largest number
    tiny: int  # numerators with such an exponent field lose bits in the residual
    underflow: int  # exponents this far apart the other way: the quotient is zero

    def exponent(self, x: Array) -> Array:
        """The exponent field."""
        field = x.view(self.bits) >> self.bits(self.fraction) & self.bits(2 * self.bias + 1)
        return field.astype(np.int32)

    def denormal(self, x: Array) -> Array:
        return (x != 0) & (np.abs(x) < np.float64(2.0 ** (1 - self.bias)))

    def scaled(self, x: Array, sign: int) -> Array:
        return np.ldexp(x, sign * self.shift).astype(self.dtype)


_F32 = _Format("f", np.float32, np.uint32, 23, 127, 64, 96, 23, -150)
_F64 = _Format("d", np.float64, np.uint64, 52, 1023, 128, 768, 53, -1075)
_F16 = _Format("h", np.float16, np.uint16, 10, 15, 0, 0, 0, -1000)  # has the fixup only


def _scale(fmt: _Format) -> Callable[[Target, Instruction], Step]:
    """V_DIV_SCALE: the denominator (src0 = src1) or the numerator (src0 = src2), scaled by a
    power of two where the steps that follow would leave the range. VCC tells V_DIV_FMAS to
    scale the quotient back.
    """

    def compile_step(target: Target, inst: Instruction) -> Step:
        plain = replace(inst, fields={**inst.fields, "clmp": 0})
        value, denominator, numerator = getters_of(target, plain, fmt.letter * 3)
        write = writer(target, inst["vdst"], fmt.letter)
        write_vcc = write_lane_mask(inst["sdst"])

        def step(g: Group) -> None:
            everything = np.empty((g.n, 64), fmt.dtype)
            s0, s1, s2, _ = np.broadcast_arrays(value(g), denominator(g), numerator(g), everything)
            up, down = fmt.scaled(s0, 1), fmt.scaled(s0, -1)
            small_inverse = fmt.denormal(1 / s1.astype(np.float64))
            small_quotient = fmt.denormal(s2.astype(np.float64) / s1)
            cases = [  # condition, VCC, result; the first that holds
                ((s2 == 0) | (s1 == 0), False, np.full_like(s0, np.nan)),
                (fmt.exponent(s2) - fmt.exponent(s1) >= fmt.far, True, np.where(s0 == s1, up, s0)),
                (fmt.denormal(s1), False, up),
                (small_inverse & small_quotient, True, np.where(s0 == s1, down, s0)),
                (small_inverse, False, down),
                (small_quotient, True, np.where(s0 == s2, up, s0)),
                (fmt.exponent(s2) <= fmt.tiny, False, up),
            ]
            conditions = [condition for condition, _, _ in cases]
            write(
                g, np.select(conditions, [result for _, _, result in cases], s0).astype(fmt.dtype)
            )
            write_vcc(
                g, np.select(conditions, [np.full(s0.shape, vcc) for _, vcc, _ in cases], False)
            )

        return step

    return compile_step


def _fmas(fmt: _Format) -> Callable[[Target, Instruction], Step]:
    """V_DIV_FMAS: the last fma, scaled where VCC says so: up if the quotient so far (src2) is
    large, because then the denominator was scaled up, else down. A denormal result is rounded
    once.
    """

    def compile_step(target: Target, inst: Instruction) -> Step:
        a, b, c = getters_of(target, inst, fmt.letter * 3)
        scaled = lane_mask_getter(target, inst, VCC)
        write = writer(target, inst["vdst"], fmt.letter)

        def step(g: Group) -> None:
            quotient = c(g)
            back = np.where(fmt.exponent(quotient) > fmt.bias, fmt.shift, -fmt.shift)
            power = np.where(scaled(g), back, 0)
            if fmt.dtype is np.float64:
                write(g, fma64(a(g), b(g), quotient, power))
            else:  # float64 holds the scaled operands exactly
                factor = np.ldexp(1.0, power)
                write(g, fma32(a(g) * factor, b(g).astype(np.float64), quotient * factor))

        return step

    return compile_step


def _fixup(fmt: _Format) -> Callable[[Target, Instruction], Step]:
    """V_DIV_FIXUP: the special cases of a quotient s0 of s2 / s1.

    The ISA's condition for overflow, all ones in the exponent of s1, cannot be reached; here a
    quotient that became a NaN from finite operands is one that overflowed on the way.
    """

    def compile_step(target: Target, inst: Instruction) -> Step:
        q, d, n = getters_of(target, inst, fmt.letter * 3)
        write = writer(target, inst["vdst"], fmt.letter, inst["opsel"] >> 3 & 1, keep=True)

        def step(g: Group) -> None:
            s0, s1, s2 = np.broadcast_arrays(q(g), d(g), n(g))
            sign = np.where(np.signbit(s1) ^ np.signbit(s2), -1, 1).astype(fmt.dtype)
            infinite1, infinite2 = np.isinf(s1), np.isinf(s2)
            infinity, zero = sign * fmt.dtype(np.inf), sign * fmt.dtype(0)
            cases = [  # condition, result; the first that holds
                (np.isnan(s2), s2),
                (np.isnan(s1), s1),
                ((s1 == 0) & (s2 == 0) | infinite1 & infinite2, np.full_like(s0, -np.nan)),
                ((s1 == 0) | infinite2, infinity),
                (infinite1 | (s2 == 0), zero),
                (fmt.exponent(s2) - fmt.exponent(s1) < fmt.underflow, zero),
                (np.isnan(s0), infinity),
            ]
            conditions, results = zip(*cases, strict=True)
            write(g, np.select(conditions, results, sign * np.abs(s0)).astype(fmt.dtype))

        return step

    return compile_step


DIVISION: dict[str, Callable[[Target, Instruction], Step]] = {
    "v_div_scale_f32": _scale(_F32),
    "v_div_scale_f64": _scale(_F64),
    "v_div_fmas_f32": _fmas(_F32),
    "v_div_fmas_f64": _fmas(_F64),
    "v_div_fixup_f32": _fixup(_F32),
    "v_div_fixup_f64": _fixup(_F64),
    "v_div_fixup_f16": _fixup(_F16),
}
