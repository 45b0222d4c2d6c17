"""Integer and bit operations on whole arrays, and the table of vector opcodes made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .state import LANE, Array

U, I64 = np.uint32, np.int64
Entries = dict[str, tuple[str, Callable[..., Array]]]  # opcode: types (see vector_ops.py), function


def shift(amount: Array, bits: int = 31) -> Array:
    return amount & amount.dtype.type(bits)


def u24(a: Array) -> Array:
    return (a & U(0xFFFFFF)).astype(np.uint64)


def i24(a: Array) -> Array:
    low = a.astype(I64) & 0xFFFFFF
    return low - ((low & 0x800000) << 1)


def low32(a: Array) -> Array:
    return (a & a.dtype.type(0xFFFFFFFF)).astype(U)


def high(a: Array, b: Array) -> Array:
    return (a.astype(np.uint64) * b >> np.uint64(32)).astype(U)


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


def clip(low: int, high: int, dtype: Any) -> Callable[[Array], Array]:
    return lambda a: np.clip(a, low, high).astype(dtype)


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


_BELOW = (below(0), below(32))

INTEGER_OPS: Entries = {
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
    "v_dot4c_i32_i8": ("uuu>u", byte_dot(True)),
    # 16 bits
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
}
for _kind, _types in (("u", "uuu>u"), ("i", "iii>i")):
    INTEGER_OPS[f"v_min3_{_kind}32"] = (_types, lambda a, b, c: np.minimum(np.minimum(a, b), c))
    INTEGER_OPS[f"v_max3_{_kind}32"] = (_types, lambda a, b, c: np.maximum(np.maximum(a, b), c))
    INTEGER_OPS[f"v_med3_{_kind}32"] = (_types, median)
