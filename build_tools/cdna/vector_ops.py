"""What the vector ALU computes: a function on whole arrays for each opcode.

An entry is `sources>result` in the letters of operands.py and a function. Written from the
pseudocode of AMD's CDNA3 and CDNA4 ISA documents, which
tinygrad.runtime.autogen.amd.cdna.str_pcode carries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .float_ops import FLOAT_OPS, fma16, max3, med3, min3
from .integer_ops import INTEGER_OPS, Entries
from .state import Array


class VectorOp(NamedTuple):
    """Types of the sources, type of the result, and the function between them."""

    sources: str
    result: str
    compute: Callable[..., Array]
    keep: bool = False  # a 16-bit result leaves the other half of the register alone


# Opcodes new with gfx9 keep the half of the register that they do not write; older ones clear it
# (LLVM, GCNSubtarget::zeroesHigh16BitsOfDest).
KEEPING_OPS: Entries = {
    "v_fma_f16": ("hhh>h", fma16),
    "v_max3_f16": ("hhh>h", max3),
    "v_min3_f16": ("hhh>h", min3),
    "v_med3_f16": ("hhh>h", med3),
    "v_mad_u16": ("jjj>j", lambda a, b, c: a * b + c),
    "v_mad_i16": ("kkk>k", lambda a, b, c: a * b + c),
}


def _table(entries: Entries, keep: bool = False) -> dict[str, VectorOp]:
    out = {}
    for name, (types, compute) in entries.items():
        sources, result = types.split(">")
        out[name] = VectorOp(sources, result, compute, keep)
    return out


VECTOR_OPS = _table(INTEGER_OPS) | _table(FLOAT_OPS) | _table(KEEPING_OPS, True)
