"""What the vector ALU computes: one line per opcode, as functions on whole arrays.

An entry is `sources>result` in the letters of operands.py and a function. Written from the
pseudocode of AMD's CDNA3/CDNA4 ISA documents (tinygrad.runtime.autogen.amd.cdna.str_pcode carries
it).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from .floats import fma32, round_bf16, widen_bf16
from .state import LANE, Array

U, I64, F = np.uint32, np.int64, np.float32


class VectorOp(NamedTuple):
    sources: str
    result: str
    compute: Callable[..., Array]
    keep: bool = False  # a 16-bit result leaves the other half of the register alone


def vector_op(types: str, compute: Callable[..., Array], keep: bool = False) -> VectorOp:
    sources, result = types.split(">")
    return VectorOp(sources, result, compute, keep)


def shift(amount: Array, bits: int = 31) -> Array:
    return amount & amount.dtype.type(bits)


def u24(a: Array) -> Array:
    return (a & U(0xFFFFFF)).astype(np.uint64)


def i24(a: Array) -> Array:
    low = a.astype(I64) & 0xFFFFFF
    return low - ((low & 0x800000) << 1)


def low32(a: Array) -> Array:
    return (a & a.dtype.type(0xFFFFFFFF)).astype(U)


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


def median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def perm(a: Array, b: Array, selector: Array) -> Array:
    """V_PERM_B32: bytes 0-3 are src1, 4-7 src0, 8-11 sign of a 16-bit part, 12 zero, above 0xff."""
    if selector.size == 1 or (selector == selector.flat[0]).all():
        return _perm_uniform(a, b, int(selector.flat[0]))
    wide = a.astype(np.uint64) << np.uint64(32) | b
    out = np.zeros(np.broadcast_shapes(wide.shape, selector.shape), U)
    for byte in range(4):
        s = (selector >> U(8 * byte)) & U(0xFF)
        value = (wide >> (np.minimum(s, U(7)).astype(np.uint64) << np.uint64(3))).astype(U) & U(
            0xFF
        )
        sign = (wide >> ((s & U(3)).astype(np.uint64) * np.uint64(16) + np.uint64(15))) & np.uint64(
            1
        )
        value = np.where(s >= 8, np.where(sign == 1, U(0xFF), U(0)), value)
        value = np.where(s == 12, U(0), np.where(s > 12, U(0xFF), value))
        out |= value << U(8 * byte)
    return out


def _perm_uniform(a: Array, b: Array, selector: int) -> Array:
    if selector == 0x07060302:  # pack the upper halves: what bf16 rounding ends with
        return (a & U(0xFFFF0000)) | (b >> U(16))
    shape = np.broadcast_shapes(a.shape, b.shape)
    both = [np.broadcast_to(x, shape) for x in (b, a)]
    parts = [np.ascontiguousarray(x).view(np.uint8).reshape(*shape, 4) for x in both]
    out = np.empty((*shape, 4), np.uint8)
    for byte in range(4):
        s = selector >> 8 * byte & 0xFF
        if s < 8:
            out[..., byte] = parts[s >> 2][..., s & 3]
        elif s < 12:
            out[..., byte] = np.where(parts[(s & 3) >> 1][..., (s & 1) * 2 + 1] & 0x80, 0xFF, 0)
        else:
            out[..., byte] = 0 if s == 12 else 0xFF
    return out.view(U)[..., 0]


def bit_field(a: Array, offset: Array, width: Array) -> Array:
    mask = (np.uint64(1) << shift(width).astype(np.uint64)) - np.uint64(1)
    return ((a >> shift(offset)).astype(np.uint64) & mask).astype(U)


def signed_field(a: Array, offset: Array, width: Array) -> Array:
    w = shift(width).astype(I64)
    field = (a.view(np.int32).astype(I64) >> shift(offset)) & ((I64(1) << w) - 1)
    sign = np.where(w > 0, I64(1) << np.maximum(w - 1, 0), 0)
    return ((field ^ sign) - sign).astype(np.int32).view(U)


def leading(a: Array) -> Array:
    """Zeros above the highest one bit; -1 for 0."""
    return np.where(a == 0, -1, 32 - np.frexp(a.astype(np.float64))[1]).astype(np.int32).view(U)


def leading_sign(a: Array) -> Array:
    s = a.view(np.int32) >> 31
    return leading(a ^ s.view(U))


def trailing(a: Array) -> Array:
    lowest = a & (~a + U(1))
    return np.where(a == 0, -1, np.frexp(lowest.astype(np.float64))[1] - 1).astype(np.int32).view(U)


def reverse(a: Array) -> Array:
    for s, m in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        a = (a >> U(s) & U(m)) | (a & U(m)) << U(s)
    return a >> U(16) | a << U(16)


def below(first: int) -> Array:
    """For each lane, the mask of the 32 lanes from `first` on that come before it."""
    count = np.clip(LANE - first, 0, 32).astype(np.uint64)
    return ((np.uint64(1) << count) - np.uint64(1)).astype(U)


_BELOW = (below(0), below(32))


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


def _fma64(a: float, b: float, c: float) -> float:
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def fma64(a: Array, b: Array, c: Array) -> Array:
    return np.vectorize(_fma64, otypes=[np.float64])(a, b, c)


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


def byte_dot(signed: bool) -> Callable[[Array, Array, Array], Array]:
    dtype = np.int8 if signed else np.uint8

    def compute(a: Array, b: Array, c: Array) -> Array:
        total = c.astype(I64)
        for s in (0, 8, 16, 24):
            total = total + (a >> U(s)).astype(dtype).astype(I64) * (b >> U(s)).astype(
                dtype
            ).astype(I64)
        return (total & 0xFFFFFFFF).astype(U)

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


def clip(low: int, high: int, dtype: Any) -> Callable[[Array], Array]:
    return lambda a: np.clip(a, low, high).astype(dtype)


def legacy_product(a: Array, b: Array) -> Array:
    return np.where((a == 0) | (b == 0), F(0), a * b)


def select(a: Array, b: Array, lanes: Array) -> Array:
    return np.where(lanes, b, a)


def sad_words(a: Array, b: Array, c: Array) -> Array:
    return np.where(a > b, a - b, b - a) + c


def sad_bytes(a: Array, b: Array, c: Array) -> Array:
    total = c
    for s in (0, 8, 16, 24):
        x, y = a >> U(s) & U(255), b >> U(s) & U(255)
        total = total + np.where(x > y, x - y, y - x)
    return total


def _table() -> dict[str, VectorOp]:
    def high(a: Array, b: Array) -> Array:
        return (a.astype(np.uint64) * b >> np.uint64(32)).astype(U)

    entries: dict[str, tuple[str, Callable[..., Array]]] = {
        "v_mov_b32": ("u>u", lambda a: a),
        "v_mov_b64": ("U>U", lambda a: a),
        "v_not_b32": ("u>u", np.invert),
        "v_bfrev_b32": ("u>u", reverse),
        "v_ffbh_u32": ("u>u", leading),
        "v_ffbh_i32": ("u>u", leading_sign),
        "v_ffbl_b32": ("u>u", trailing),
        "v_and_b32": ("uu>u", np.bitwise_and),
        "v_or_b32": ("uu>u", np.bitwise_or),
        "v_xor_b32": ("uu>u", np.bitwise_xor),
        "v_xnor_b32": ("uu>u", lambda a, b: ~(a ^ b)),
        "v_add_u32": ("uu>u", np.add),
        "v_sub_u32": ("uu>u", np.subtract),
        "v_subrev_u32": ("uu>u", lambda a, b: b - a),
        "v_add_i32": ("uu>u", np.add),
        "v_sub_i32": ("uu>u", np.subtract),
        "v_lshlrev_b32": ("uu>u", lambda a, b: b << shift(a)),
        "v_lshrrev_b32": ("uu>u", lambda a, b: b >> shift(a)),
        "v_ashrrev_i32": ("ii>i", lambda a, b: b >> shift(a)),
        "v_mul_lo_u32": ("uu>u", np.multiply),
        "v_mul_hi_u32": ("uu>u", high),
        "v_mul_hi_i32": ("ii>i", lambda a, b: (a.astype(I64) * b >> 32).astype(np.int32)),
        "v_mul_i32_i24": ("uu>u", lambda a, b: low32(i24(a) * i24(b))),
        "v_mul_hi_i32_i24": ("uu>u", lambda a, b: low32(i24(a) * i24(b) >> 32)),
        "v_mul_u32_u24": ("uu>u", lambda a, b: low32(u24(a) * u24(b))),
        "v_mul_hi_u32_u24": ("uu>u", lambda a, b: (u24(a) * u24(b) >> np.uint64(32)).astype(U)),
        "v_mad_i32_i24": ("uuu>u", lambda a, b, c: low32(i24(a) * i24(b) + c)),
        "v_mad_u32_u24": ("uuu>u", lambda a, b, c: low32(u24(a) * u24(b) + c)),
        "v_min_u32": ("uu>u", np.minimum),
        "v_max_u32": ("uu>u", np.maximum),
        "v_min_i32": ("ii>i", np.minimum),
        "v_max_i32": ("ii>i", np.maximum),
        "v_add3_u32": ("uuu>u", lambda a, b, c: a + b + c),
        "v_lshl_add_u32": ("uuu>u", lambda a, b, c: (a << shift(b)) + c),
        "v_add_lshl_u32": ("uuu>u", lambda a, b, c: (a + b) << shift(c)),
        "v_lshl_or_b32": ("uuu>u", lambda a, b, c: (a << shift(b)) | c),
        "v_and_or_b32": ("uuu>u", lambda a, b, c: (a & b) | c),
        "v_or3_b32": ("uuu>u", lambda a, b, c: a | b | c),
        "v_xad_u32": ("uuu>u", lambda a, b, c: (a ^ b) + c),
        "v_bfe_u32": ("uuu>u", bit_field),
        "v_bfe_i32": ("uuu>u", signed_field),
        "v_bfi_b32": ("uuu>u", lambda a, b, c: (a & b) | (~a & c)),
        "v_bfm_b32": ("uu>u", lambda a, b: ((U(1) << shift(a)) - U(1)) << shift(b)),
        "v_bcnt_u32_b32": ("uu>u", lambda a, b: np.bitwise_count(a) + b),
        "v_mbcnt_lo_u32_b32": ("uu>u", lambda a, b: np.bitwise_count(a & _BELOW[0]) + b),
        "v_mbcnt_hi_u32_b32": ("uu>u", lambda a, b: np.bitwise_count(a & _BELOW[1]) + b),
        "v_alignbit_b32": (
            "uuu>u",
            lambda a, b, c: low32(
                (a.astype(np.uint64) << np.uint64(32) | b) >> shift(c).astype(np.uint64)
            ),
        ),
        "v_alignbyte_b32": (
            "uuu>u",
            lambda a, b, c: low32(
                (a.astype(np.uint64) << np.uint64(32) | b) >> (shift(c, 3) * U(8)).astype(np.uint64)
            ),
        ),
        "v_perm_b32": ("uuu>u", perm),
        "v_sad_u8": ("uuu>u", sad_bytes),
        "v_sad_u32": ("uuu>u", sad_words),
        "v_cndmask_b32": ("uum>u", select),
        "v_lshlrev_b64": ("uU>U", lambda a, b: b << shift(a, 63).astype(np.uint64)),
        "v_lshrrev_b64": ("uU>U", lambda a, b: b >> shift(a, 63).astype(np.uint64)),
        "v_ashrrev_i64": ("uI>I", lambda a, b: b >> shift(a, 63).astype(I64)),
        "v_lshl_add_u64": ("UuU>U", lambda a, b, c: (a << shift(b, 7).astype(np.uint64)) + c),
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
        "v_add_u16": ("jj>j", np.add),
        "v_sub_u16": ("jj>j", np.subtract),
        "v_subrev_u16": ("jj>j", lambda a, b: b - a),
        "v_mul_lo_u16": ("jj>j", np.multiply),
        "v_lshlrev_b16": ("jj>j", lambda a, b: b << shift(a, 15)),
        "v_lshrrev_b16": ("jj>j", lambda a, b: b >> shift(a, 15)),
        "v_ashrrev_i16": ("kk>k", lambda a, b: b >> shift(a, 15)),
        "v_max_u16": ("jj>j", np.maximum),
        "v_min_u16": ("jj>j", np.minimum),
        "v_max_i16": ("kk>k", np.maximum),
        "v_min_i16": ("kk>k", np.minimum),
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
    }
    for byte in range(4):
        entries[f"v_cvt_f32_ubyte{byte}"] = ("u>f", byte_to_float(U(8 * byte)))
    for kind, least, most, middle in (
        ("u", np.minimum, np.maximum, "uuu>u"),
        ("i", np.minimum, np.maximum, "iii>i"),
    ):
        entries[f"v_min3_{kind}32"] = (middle, lambda a, b, c, f=least: f(f(a, b), c))
        entries[f"v_max3_{kind}32"] = (middle, lambda a, b, c, f=most: f(f(a, b), c))
        entries[f"v_med3_{kind}32"] = (middle, median)
    halves: tuple[tuple[str, str, Callable[..., Array]], ...] = (
        ("v_fma_f16", "hhh>h", fma16),
        ("v_max3_f16", "hhh>h", max3),
        ("v_min3_f16", "hhh>h", min3),
        ("v_med3_f16", "hhh>h", med3),
        ("v_mad_u16", "jjj>j", lambda a, b, c: a * b + c),
        ("v_mad_i16", "kkk>k", lambda a, b, c: a * b + c),
    )
    table = {name: vector_op(types, compute) for name, (types, compute) in entries.items()}
    return table | {name: vector_op(types, compute, True) for name, types, compute in halves}


VECTOR_OPS = _table()
