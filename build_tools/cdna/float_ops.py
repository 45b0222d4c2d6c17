"""Floating-point operations and conversions on whole arrays, and the opcodes made of them."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from .floats import fma32, round_bf16, widen_bf16
from .integer_ops import Entries, clip
from .state import Array

U, F = np.uint32, np.float32


def maximum(a: Array, b: Array) -> Array:
    """The number wins over NaN, and +0 over -0."""
    out = np.fmax(a, b)
    zeros = (a == b) & (out == 0)
    if 1 not in zeros.tobytes():
        return out
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[out.dtype.itemsize]
    return np.where(zeros, (a.view(bits) & b.view(bits)).view(out.dtype), out)


def minimum(a: Array, b: Array) -> Array:
    return -maximum(-a, -b)


def max3(a: Array, b: Array, c: Array) -> Array:
    return maximum(maximum(a, b), c)


def min3(a: Array, b: Array, c: Array) -> Array:
    return minimum(minimum(a, b), c)


def med3(a: Array, b: Array, c: Array) -> Array:
    """The median; with any NaN, the minimum of the others (ISA: V_MED3_F32)."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    return np.where(nan, min3(a, b, c), middle)


def to_integer(
    low: float, high: float, dtype: Any, rounding: Callable[..., Array] = np.trunc
) -> Callable[[Array], Array]:
    """Float to integer with saturation; NaN gives 0."""

    def convert(a: Array) -> Array:
        wide = np.nan_to_num(rounding(a.astype(np.float64)), nan=0.0, posinf=high, neginf=low)
        return np.clip(wide, low, high).astype(np.int64).astype(dtype)

    return convert


def to_half(a: Array) -> Array:
    return a.astype(np.float16)


def half_toward_zero(a: Array) -> Array:
    half = a.astype(np.float16)
    over = np.abs(half.astype(F)) > np.abs(a)
    return np.where(over & ~np.isnan(a), half.view(np.uint16) - np.uint16(1), half.view(np.uint16))


def pack_half(a: Array, b: Array) -> Array:
    return half_toward_zero(a).astype(U) | half_toward_zero(b).astype(U) << U(16)


def pack_bf16(a: Array, b: Array) -> Array:
    return round_bf16(a) | round_bf16(b) << U(16)


def ldexp(a: Array, exponent: Array) -> Array:
    return np.ldexp(a.astype(np.float64), np.clip(exponent, -4000, 4000).astype(np.int32)).astype(
        a.dtype
    )


def ldexp64(a: Array, exponent: Array) -> Array:
    return np.ldexp(a, np.clip(exponent, -4000, 4000))


def fma16(a: Array, b: Array, c: Array) -> Array:
    """Exact: a product of two float16 has 22 bits, and float64 holds any sum of it with a
    float16... but one that spans more than 53 bits, where the small term is a sticky bit far below
    the last place of float16.
    """
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)


def _fma64(a: float, b: float, c: float, power: int) -> float:
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        return a * b + c
    exact = (Fraction(a) * Fraction(b) + Fraction(c)) * Fraction(2) ** int(power)
    if exact == 0:
        return a * b + c
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def fma64(a: Array, b: Array, c: Array, power: Array | int = 0) -> Array:
    """float64 fused multiply-add times 2^power, rounded once; exact rationals, lane by lane."""
    return np.vectorize(_fma64, otypes=[np.float64])(a, b, c, power)


def fraction(a: Array) -> Array:
    return np.minimum(a - np.floor(a), np.nextafter(a.dtype.type(1), a.dtype.type(0)))


def mantissa(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[0], a).astype(a.dtype)


def exponent_of(dtype: Any) -> Callable[[Array], Array]:
    return lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(dtype)


def dot2(widen: Callable[[Array], Array]) -> Callable[[Array, Array, Array], Array]:
    def compute(a: Array, b: Array, c: Array) -> Array:
        pairs = [
            (widen((a >> U(s)).astype(np.uint16)), widen((b >> U(s)).astype(np.uint16)))
            for s in (0, 16)
        ]
        exact = sum(x.astype(np.float64) * y for x, y in pairs) + c
        return exact.astype(F)

    return compute


def byte_to_float(position: np.uint32) -> Callable[[Array], Array]:
    return lambda a: (a >> position & U(255)).astype(F)


def half_bits(a: Array) -> Array:
    return a.view(np.float16).astype(F)


def reciprocal(a: Array) -> Array:
    return (1 / a.astype(np.float64)).astype(a.dtype)


def reciprocal_root(a: Array) -> Array:
    return (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype)


def turns(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Sine and cosine take revolutions."""
    return lambda a: function(a.astype(np.float64) * (2 * np.pi)).astype(a.dtype)


def legacy_product(a: Array, b: Array) -> Array:
    return np.where((a == 0) | (b == 0), F(0), a * b)


FLOAT_OPS: Entries = {
    # float32
    "v_add_f32": ("ff>f", np.add),
    "v_sub_f32": ("ff>f", np.subtract),
    "v_subrev_f32": ("ff>f", lambda a, b: b - a),
    "v_mul_f32": ("ff>f", np.multiply),
    "v_mul_legacy_f32": ("ff>f", legacy_product),
    "v_max_f32": ("ff>f", maximum),
    "v_min_f32": ("ff>f", minimum),
    "v_max3_f32": ("fff>f", max3),
    "v_min3_f32": ("fff>f", min3),
    "v_med3_f32": ("fff>f", med3),
    "v_fma_f32": ("fff>f", fma32),
    "v_exp_f32": ("f>f", np.exp2),
    "v_log_f32": ("f>f", np.log2),
    "v_rcp_f32": ("f>f", reciprocal),
    "v_rcp_iflag_f32": ("f>f", reciprocal),
    "v_rsq_f32": ("f>f", reciprocal_root),
    "v_sqrt_f32": ("f>f", np.sqrt),
    "v_sin_f32": ("f>f", turns(np.sin)),
    "v_cos_f32": ("f>f", turns(np.cos)),
    "v_trunc_f32": ("f>f", np.trunc),
    "v_ceil_f32": ("f>f", np.ceil),
    "v_floor_f32": ("f>f", np.floor),
    "v_rndne_f32": ("f>f", np.rint),
    "v_fract_f32": ("f>f", fraction),
    "v_ldexp_f32": ("fi>f", ldexp),
    "v_frexp_mant_f32": ("f>f", mantissa),
    "v_frexp_exp_i32_f32": ("f>i", exponent_of(np.int32)),
    # conversions
    "v_cvt_f32_u32": ("u>f", lambda a: a.astype(F)),
    "v_cvt_f32_i32": ("i>f", lambda a: a.astype(F)),
    "v_cvt_u32_f32": ("f>u", to_integer(0, 2**32 - 1, U)),
    "v_cvt_i32_f32": ("f>i", to_integer(-(2**31), 2**31 - 1, np.int32)),
    "v_cvt_flr_i32_f32": ("f>i", to_integer(-(2**31), 2**31 - 1, np.int32, np.floor)),
    "v_cvt_rpi_i32_f32": (
        "f>i",
        to_integer(-(2**31), 2**31 - 1, np.int32, lambda a: np.floor(a + 0.5)),
    ),
    "v_cvt_f32_f16": ("h>f", lambda a: a.astype(F)),
    "v_cvt_f16_f32": ("f>h", to_half),
    "v_cvt_f32_bf16": ("j>f", lambda a: widen_bf16(np.ascontiguousarray(a))),
    "v_cvt_pkrtz_f16_f32": ("ff>u", pack_half),
    "v_cvt_pk_f16_f32": (
        "ff>u",
        lambda a, b: (
            to_half(a).view(np.uint16).astype(U) | to_half(b).view(np.uint16).astype(U) << U(16)
        ),
    ),
    "v_cvt_pk_bf16_f32": ("ff>u", pack_bf16),
    "v_cvt_f64_f32": ("f>d", lambda a: a.astype(np.float64)),
    "v_cvt_f32_f64": ("d>f", lambda a: a.astype(F)),
    "v_cvt_f64_i32": ("i>d", lambda a: a.astype(np.float64)),
    "v_cvt_f64_u32": ("u>d", lambda a: a.astype(np.float64)),
    "v_cvt_i32_f64": ("d>i", to_integer(-(2**31), 2**31 - 1, np.int32)),
    "v_cvt_u32_f64": ("d>u", to_integer(0, 2**32 - 1, U)),
    "v_cvt_f16_u16": ("j>h", lambda a: a.astype(np.float16)),
    "v_cvt_f16_i16": ("k>h", lambda a: a.astype(np.float16)),
    "v_cvt_u16_f16": ("h>j", to_integer(0, 65535, np.uint16)),
    "v_cvt_i16_f16": ("h>k", to_integer(-32768, 32767, np.int16)),
    "v_cvt_pk_u16_u32": (
        "uu>u",
        lambda a, b: np.minimum(a, U(65535)) | np.minimum(b, U(65535)) << U(16),
    ),
    "v_cvt_pk_i16_i32": (
        "ii>u",
        lambda a, b: (
            clip(-32768, 32767, np.int16)(a).view(np.uint16).astype(U)
            | clip(-32768, 32767, np.int16)(b).view(np.uint16).astype(U) << U(16)
        ),
    ),
    "v_pack_b32_f16": (
        "hh>u",
        lambda a, b: a.view(np.uint16).astype(U) | b.view(np.uint16).astype(U) << U(16),
    ),
    "v_dot2c_f32_f16": ("uuf>f", dot2(half_bits)),
    "v_dot2c_f32_bf16": ("uuf>f", dot2(widen_bf16)),
    # float16 and 16-bit integers
    "v_add_f16": ("hh>h", np.add),
    "v_sub_f16": ("hh>h", np.subtract),
    "v_subrev_f16": ("hh>h", lambda a, b: b - a),
    "v_mul_f16": ("hh>h", np.multiply),
    "v_max_f16": ("hh>h", maximum),
    "v_min_f16": ("hh>h", minimum),
    "v_ldexp_f16": ("hk>h", ldexp),
    "v_rcp_f16": ("h>h", reciprocal),
    "v_rsq_f16": ("h>h", reciprocal_root),
    "v_sqrt_f16": ("h>h", np.sqrt),
    "v_exp_f16": ("h>h", lambda a: np.exp2(a.astype(F)).astype(np.float16)),
    "v_log_f16": ("h>h", lambda a: np.log2(a.astype(F)).astype(np.float16)),
    "v_trunc_f16": ("h>h", np.trunc),
    "v_ceil_f16": ("h>h", np.ceil),
    "v_floor_f16": ("h>h", np.floor),
    "v_rndne_f16": ("h>h", np.rint),
    # float64
    "v_add_f64": ("dd>d", np.add),
    "v_mul_f64": ("dd>d", np.multiply),
    "v_max_f64": ("dd>d", maximum),
    "v_min_f64": ("dd>d", minimum),
    "v_fma_f64": ("ddd>d", fma64),
    "v_rcp_f64": ("d>d", reciprocal),
    "v_rsq_f64": ("d>d", reciprocal_root),
    "v_sqrt_f64": ("d>d", np.sqrt),
    "v_trunc_f64": ("d>d", np.trunc),
    "v_ceil_f64": ("d>d", np.ceil),
    "v_floor_f64": ("d>d", np.floor),
    "v_rndne_f64": ("d>d", np.rint),
    "v_fract_f64": ("d>d", fraction),
    "v_ldexp_f64": ("di>d", ldexp64),
    "v_frexp_mant_f64": ("d>d", mantissa),
    "v_frexp_exp_i32_f64": ("d>i", exponent_of(np.int32)),
    **{f"v_cvt_f32_ubyte{byte}": ("u>f", byte_to_float(U(8 * byte))) for byte in range(4)},
}
