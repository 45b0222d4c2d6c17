"""What the scalar ALU computes: the value and, where the instruction writes it, SCC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .integer_ops import bit_field, leading, leading_sign, reverse, signed_field, trailing
from .state import Array

U, I32, I64, U64 = np.uint32, np.int32, np.int64, np.uint64
Result = tuple[Array, Array | None]  # value, and SCC where the instruction writes it


def _logic(compute: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Array], Result]:
    def run(a: Array, b: Array, scc: Array) -> Result:
        out = compute(a, b)
        return out, out != 0

    return run


def _add(a: Array, b: Array, scc: Array) -> Result:
    out = a + b
    return out, out < a


def _addc(a: Array, b: Array, scc: Array) -> Result:
    out = a.astype(U64) + b + scc
    return out.astype(U), out > 0xFFFFFFFF


def _subb(a: Array, b: Array, scc: Array) -> Result:
    out = a.astype(I64) - b - scc
    return out.astype(U), out < 0


def signed_sum(sign: int) -> Callable[[Array, Array, Array], Result]:
    def run(a: Array, b: Array, scc: Array) -> Result:
        out = a.view(I32).astype(I64) + sign * b.view(I32).astype(I64)
        return out.astype(U), (out < -(2**31)) | (out >= 2**31)

    return run


def _smaller(view: Any, largest: bool) -> Callable[[Array, Array, Array], Result]:
    def run(a: Array, b: Array, scc: Array) -> Result:
        x: Array = a.view(view)
        y: Array = b.view(view)
        first = x > y if largest else x < y
        return np.where(first, a, b), first

    return run


def _shifted_add(amount: int) -> Callable[[Array, Array, Array], Result]:
    def run(a: Array, b: Array, scc: Array) -> Result:
        out = (a.astype(U64) << U64(amount)) + b
        return out.astype(U), out > 0xFFFFFFFF

    return run


def _field(
    extract: Callable[[Array, Array, Array], Array],
) -> Callable[[Array, Array, Array], Result]:
    def run(a: Array, b: Array, scc: Array) -> Result:
        width = np.minimum(b >> U(16) & U(127), U(32))
        out = extract(a, b, np.minimum(width, U(31)))
        whole = (
            (a.view(I32) >> (b & U(31)).astype(I32)).view(U)
            if extract is signed_field
            else a >> (b & U(31))
        )
        out = np.where(width >= 32, whole, out)
        return out, out != 0

    return run


def _field64(signed: bool) -> Callable[[Array, Array, Array], Result]:
    def run(a: Array, b: Array, scc: Array) -> Result:
        offset, width = (b & U(63)).astype(U64), np.minimum(b >> U(16) & U(127), U(64)).astype(U64)
        moved = (a.view(I64) >> offset.astype(I64)).view(U64) if signed else a >> offset
        kept = np.where(width == 0, U64(0), moved << (U64(64) - np.maximum(width, U64(1))))
        drop = U64(64) - np.maximum(width, U64(1))
        out = (kept.view(I64) >> drop.astype(I64)).view(U64) if signed else kept >> drop
        return out, out != 0

    return run


SOP2: dict[str, Callable[[Array, Array, Array], Result]] = {
    "s_add_u32": _add,
    "s_sub_u32": lambda a, b, scc: (a - b, a < b),
    "s_addc_u32": _addc,
    "s_subb_u32": _subb,
    "s_add_i32": signed_sum(1),
    "s_sub_i32": signed_sum(-1),
    "s_absdiff_i32": lambda a, b, scc: (lambda d: (d.astype(U), d != 0))(
        np.abs(a.view(I32).astype(I64) - b.view(I32))
    ),
    "s_mul_i32": lambda a, b, scc: (a * b, None),
    "s_mul_hi_u32": lambda a, b, scc: ((a.astype(U64) * b >> U64(32)).astype(U), None),
    "s_mul_hi_i32": lambda a, b, scc: (
        (a.view(I32).astype(I64) * b.view(I32) >> 32).astype(U),
        None,
    ),
    "s_min_u32": _smaller(U, False),
    "s_max_u32": _smaller(U, True),
    "s_min_i32": _smaller(I32, False),
    "s_max_i32": _smaller(I32, True),
    "s_cselect_b32": lambda a, b, scc: (np.where(scc, a, b), None),
    "s_and_b32": _logic(np.bitwise_and),
    "s_or_b32": _logic(np.bitwise_or),
    "s_xor_b32": _logic(np.bitwise_xor),
    "s_andn2_b32": _logic(lambda a, b: a & ~b),
    "s_orn2_b32": _logic(lambda a, b: a | ~b),
    "s_nand_b32": _logic(lambda a, b: ~(a & b)),
    "s_nor_b32": _logic(lambda a, b: ~(a | b)),
    "s_xnor_b32": _logic(lambda a, b: ~(a ^ b)),
    "s_lshl_b32": _logic(lambda a, b: a << (b & U(31))),
    "s_lshr_b32": _logic(lambda a, b: a >> (b & U(31))),
    "s_ashr_i32": _logic(lambda a, b: (a.view(I32) >> (b & U(31)).view(I32)).view(U)),
    "s_bfm_b32": lambda a, b, scc: (((U(1) << (a & U(31))) - U(1)) << (b & U(31)), None),
    "s_bfe_u32": _field(bit_field),
    "s_bfe_i32": _field(signed_field),
    "s_pack_ll_b32_b16": lambda a, b, scc: (a & U(0xFFFF) | b << U(16), None),
    "s_pack_lh_b32_b16": lambda a, b, scc: (a & U(0xFFFF) | b & U(0xFFFF0000), None),
    "s_pack_hh_b32_b16": lambda a, b, scc: (a >> U(16) | b & U(0xFFFF0000), None),
    **{f"s_lshl{k}_add_u32": _shifted_add(k) for k in (1, 2, 3, 4)},
}

# 64-bit: the letters are the widths of the sources
SOP2_WIDE: dict[str, tuple[str, Callable[[Array, Array, Array], Result]]] = {
    "s_and_b64": ("UU", _logic(np.bitwise_and)),
    "s_or_b64": ("UU", _logic(np.bitwise_or)),
    "s_xor_b64": ("UU", _logic(np.bitwise_xor)),
    "s_andn2_b64": ("UU", _logic(lambda a, b: a & ~b)),
    "s_orn2_b64": ("UU", _logic(lambda a, b: a | ~b)),
    "s_nand_b64": ("UU", _logic(lambda a, b: ~(a & b))),
    "s_nor_b64": ("UU", _logic(lambda a, b: ~(a | b))),
    "s_xnor_b64": ("UU", _logic(lambda a, b: ~(a ^ b))),
    "s_cselect_b64": ("UU", lambda a, b, scc: (np.where(scc, a, b), None)),
    "s_lshl_b64": ("Uu", _logic(lambda a, b: a << (b & U(63)).astype(U64))),
    "s_lshr_b64": ("Uu", _logic(lambda a, b: a >> (b & U(63)).astype(U64))),
    "s_ashr_i64": ("Uu", _logic(lambda a, b: (a.view(I64) >> (b & U(63)).astype(I64)).view(U64))),
    "s_bfm_b64": (
        "uu",
        lambda a, b, scc: (
            ((U64(1) << (a & U(63)).astype(U64)) - U64(1)) << (b & U(63)).astype(U64),
            None,
        ),
    ),
    "s_bfe_u64": ("Uu", _field64(False)),
    "s_bfe_i64": ("Uu", _field64(True)),
}


def _lowest(a: Array) -> Array:
    """Index of the lowest one of 64 bits, -1 without one."""
    low, high = trailing(a.astype(U)), trailing((a >> U64(32)).astype(U))
    return np.where(a == 0, U(0xFFFFFFFF), np.where(low == U(0xFFFFFFFF), high + U(32), low))


def _highest(a: Array) -> Array:
    low, high = leading(a.astype(U)), leading((a >> U64(32)).astype(U))
    return np.where(a == 0, U(0xFFFFFFFF), np.where(high == U(0xFFFFFFFF), low + U(32), high))


def _counted(compute: Callable[[Array], Array]) -> Callable[[Array], Result]:
    def run(a: Array) -> Result:
        out = compute(a).astype(a.dtype if a.dtype == U else U)
        return out, out != 0

    return run


def _reverse64(a: Array) -> Array:
    return reverse(a.astype(U)).astype(U64) << U64(32) | reverse((a >> U64(32)).astype(U))


# name: width of source, width of destination, function
SOP1: dict[str, tuple[str, str, Callable[[Array], Result]]] = {
    "s_mov_b32": ("u", "u", lambda a: (a, None)),
    "s_mov_b64": ("U", "U", lambda a: (a, None)),
    "s_not_b32": ("u", "u", lambda a: (~a, ~a != 0)),
    "s_not_b64": ("U", "U", lambda a: (~a, ~a != 0)),
    "s_abs_i32": ("u", "u", _counted(lambda a: np.abs(a.view(I32)).view(U))),
    "s_brev_b32": ("u", "u", lambda a: (reverse(a), None)),
    "s_brev_b64": ("U", "U", lambda a: (_reverse64(a), None)),
    "s_bcnt0_i32_b32": ("u", "u", _counted(lambda a: np.bitwise_count(~a))),
    "s_bcnt1_i32_b32": ("u", "u", _counted(np.bitwise_count)),
    "s_bcnt0_i32_b64": ("U", "u", _counted(lambda a: np.bitwise_count(~a))),
    "s_bcnt1_i32_b64": ("U", "u", _counted(np.bitwise_count)),
    "s_ff0_i32_b32": ("u", "u", lambda a: (trailing(~a), None)),
    "s_ff1_i32_b32": ("u", "u", lambda a: (trailing(a), None)),
    "s_ff0_i32_b64": ("U", "u", lambda a: (_lowest(~a), None)),
    "s_ff1_i32_b64": ("U", "u", lambda a: (_lowest(a), None)),
    "s_flbit_i32_b32": ("u", "u", lambda a: (leading(a), None)),
    "s_flbit_i32_b64": ("U", "u", lambda a: (_highest(a), None)),
    "s_flbit_i32": ("u", "u", lambda a: (leading_sign(a), None)),
    "s_sext_i32_i8": ("u", "u", lambda a: (a.astype(np.int8).astype(I32).view(U), None)),
    "s_sext_i32_i16": ("u", "u", lambda a: (a.astype(np.int16).astype(I32).view(U), None)),
}

# saveexec: new EXEC from (source, old EXEC)
SAVEEXEC: dict[str, Callable[[Array, Array], Array]] = {
    "and": lambda s, e: s & e,
    "or": lambda s, e: s | e,
    "xor": lambda s, e: s ^ e,
    "andn1": lambda s, e: ~s & e,
    "andn2": lambda s, e: s & ~e,
    "orn1": lambda s, e: ~s | e,
    "orn2": lambda s, e: s | ~e,
    "nand": lambda s, e: ~(s & e),
    "nor": lambda s, e: ~(s | e),
    "xnor": lambda s, e: ~(s ^ e),
}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}
