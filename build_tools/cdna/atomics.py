"""Read-modify-write operations on memory cells, applied lane after lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .floats import round_bf16, widen_bf16
from .state import Array


@dataclass(frozen=True)
class Atomic:
    """`combine(old, data, other)` -> new, on numpy scalars of `dtype`."""

    dtype: np.dtype[Any]
    combine: Callable[[Any, Any, Any], Any]
    compare: bool = False

    def apply(self, cells: Array, index: Array, data: Array, other: Array) -> Array:
        """Update the cells in lane order; returns what each lane found."""
        old = np.empty_like(data)
        for k, at in enumerate(index.tolist()):
            old[k] = cells[at]
            cells[at] = self.combine(cells[at], data[k], other[k])
        return old


def _add_pairs(dtype: Any) -> Callable[[Any, Any, Any], Any]:
    def combine(old: Any, data: Any, other: Any) -> Any:
        x, y = (np.array([v], np.uint32).view(np.uint16) for v in (old, data))
        if dtype is np.float16:
            return (x.view(np.float16) + y.view(np.float16)).view(np.uint32)[0]
        return round_bf16(widen_bf16(x) + widen_bf16(y)).astype(np.uint16).view(np.uint32)[0]

    return combine


def _increment(old: Any, limit: Any, other: Any) -> Any:
    return old * 0 if old >= limit else old + old.dtype.type(1)


def _decrement(old: Any, limit: Any, other: Any) -> Any:
    return limit if old == 0 or old > limit else old - old.dtype.type(1)


def _table() -> dict[str, Atomic]:
    table = {}
    for width in (32, 64):
        unsigned, signed = np.dtype(f"uint{width}"), np.dtype(f"int{width}")
        for name, combine in (
            ("add", lambda o, d, x: o + d),
            ("sub", lambda o, d, x: o - d),
            ("rsub", lambda o, d, x: d - o),
            ("inc", _increment),
            ("dec", _decrement),
            ("swap", lambda o, d, x: d),
            ("min", lambda o, d, x: min(o, d)),
            ("max", lambda o, d, x: max(o, d)),
            ("and", lambda o, d, x: o & d),
            ("or", lambda o, d, x: o | d),
            ("xor", lambda o, d, x: o ^ d),
        ):
            table[f"{name}_u{width}"] = Atomic(unsigned, combine)
            table[f"{name}_b{width}"] = Atomic(unsigned, combine)
        # data is the comparand, other the new value
        table[f"cmpswap_u{width}"] = Atomic(unsigned, lambda o, d, x: x if o == d else o, True)
        table[f"min_i{width}"] = Atomic(signed, lambda o, d, x: min(o, d))
        table[f"max_i{width}"] = Atomic(signed, lambda o, d, x: max(o, d))
    for width in (32, 64):
        floating = np.dtype(f"float{width}")
        table[f"add_f{width}"] = Atomic(floating, lambda o, d, x: o + d)
        table[f"min_f{width}"] = Atomic(floating, lambda o, d, x: np.fmin(o, d))
        table[f"max_f{width}"] = Atomic(floating, lambda o, d, x: np.fmax(o, d))
    table["pk_add_f16"] = Atomic(np.dtype(np.uint32), _add_pairs(np.float16))
    table["pk_add_bf16"] = Atomic(np.dtype(np.uint32), _add_pairs("bf16"))
    return table


ATOMICS = _table()
