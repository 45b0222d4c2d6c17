"""What stands between an operand and the operation: abs, neg, op_sel, SDWA and DPP on the way in;
omod, clamp and denormal flushing on the way out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .floats import flush
from .operands import DTYPES, FLOATS, VCC, Getter, Target, lane_mask_getter, source_getter
from .state import Array, Group


def source_codes(inst: Instruction) -> list[int]:
    """Source operand codes in the order src0, src1, src2 (vsrc1 is always a VGPR)."""
    if inst.format.startswith("VOP3"):
        return [inst["src0"], inst["src1"], inst["src2"]]
    second = inst.fields.get("vsrc1", 0)  # VOP1 has none
    if inst.variant == "SDWA":
        return [
            inst["vsrc0"] + (0 if inst["s0"] else 256),
            second + (0 if inst["s1"] else 256),
        ]
    return [inst["vsrc0"] + 256 if inst.variant == "DPP16" else inst["src0"], second + 256]


def _modified(get: Getter, absolute: int, negate: int) -> Getter:
    """abs, then neg; both only touch the sign bit, also of a NaN."""
    if absolute and negate:
        return lambda g: np.negative(np.abs(get(g)))
    if absolute:
        return lambda g: np.abs(get(g))
    if negate:
        return lambda g: np.negative(get(g))
    return get


def _sign_modified(get: Getter, absolute: int, negate: int) -> Getter:
    """The same on the bits: V_CNDMASK_B32 moves floats without touching them otherwise."""
    keep, flip = np.uint32(0x7FFFFFFF if absolute else 0xFFFFFFFF), np.uint32(negate << 31)
    return lambda g: get(g) & keep ^ flip


def getters_of(target: Target, inst: Instruction, letters: str) -> list[Getter]:
    """One getter for each source, with modifiers, SDWA selection and op_sel applied."""
    out = []
    codes = source_codes(inst)
    for slot, letter in enumerate(letters):
        if letter == "m":
            code = codes[2] if inst.format.startswith("VOP3") else VCC
            out.append(lane_mask_getter(target, inst, code))
            continue
        if inst.variant == "SDWA":
            out.append(_sdwa_source(target, inst, codes[slot], letter, slot))
            continue
        high = inst["opsel"] >> slot & 1 if inst.format.startswith("VOP3") else 0
        if inst.variant == "DPP16" and slot == 0:
            get = dpp_source(letter)
        else:
            get = source_getter(target, inst, codes[slot], letter, slot, high)
        if inst.format.startswith("VOP3"):
            absolute, negate = inst["abs"] >> slot & 1, inst["neg"] >> slot & 1
        else:  # the modifiers of DPP; absent fields read as 0
            absolute, negate = inst[f"src{slot}_abs"], inst[f"src{slot}_neg"]
        if (absolute or negate) and inst.name == "v_cndmask_b32":
            get = _sign_modified(get, absolute, negate)
            absolute = negate = 0
        if (absolute or negate) and letter not in FLOATS:
            raise UnknownInstruction(f"{inst}: abs/neg on an integer operand")
        get = _modified(get, absolute, negate)
        if letter == "f" and target.mode.flush_f32:
            get = flushed(get)
        out.append(get)
    return out


def flushed(get: Getter) -> Getter:
    return lambda g: flush(get(g))


def _sdwa_source(target: Target, inst: Instruction, code: int, letter: str, slot: int) -> Getter:
    """A byte, a word or the whole of a register (CDNA3 ISA, "SDWA")."""
    select, extend = inst[f"src{slot}_sel"], inst[f"src{slot}_sext"]
    index = target.source(inst, code, slot)
    absolute, negate = inst[f"src{slot}_abs"], inst[f"src{slot}_neg"]
    if select > 6 or letter in "UId":
        raise UnknownInstruction(f"{inst}: SDWA select {select} on operand type {letter}")
    shift, width = (
        ((8 * select, 8) if select < 4 else (16 * (select - 4), 16)) if select < 6 else (0, 32)
    )
    low, mask, sign = np.uint32(shift), np.uint32((1 << width) - 1), np.uint32(1 << width - 1)

    def get(g: Group) -> Array:
        value = g.u[index] >> low & mask
        if extend:
            value = (value ^ sign) - sign
        if letter in "hjk":
            return value.astype(np.uint16).view(DTYPES[letter])
        return value.view(DTYPES[letter])

    return _modified(get, absolute, negate)


def dpp_source(letter: str) -> Getter:
    if letter in "hjk":
        return lambda g: g.memo["dpp"].astype(np.uint16).view(DTYPES[letter])
    return lambda g: g.memo["dpp"].view(DTYPES[letter])


def output_modifier(
    target: Target, inst: Instruction, letter: str
) -> Callable[[Array], Array] | None:
    """omod, clamp and denormal flushing of the result, in that order; None when there is nothing to
    do.
    """
    steps: list[Callable[[Array], Array]] = []
    omod = inst["omod"]
    if omod and letter in FLOATS and not target.mode.ieee:
        # The ISA: output modifiers are ignored with output denormals or with IEEE mode.
        denormals = target.mode.mode >> (4 if letter == "f" else 6) & 3
        if not denormals & 2:
            scale = (1.0, 2.0, 4.0, 0.5)[omod]
            steps.append(lambda v: v * v.dtype.type(scale) + v.dtype.type(0))  # -0 becomes +0
    if inst["clmp"]:
        if letter not in FLOATS:
            raise UnknownInstruction(f"{inst}: integer clamp is not implemented")
        dx10 = target.mode.dx10_clamp

        def clamp(v: Array) -> Array:
            out = np.minimum(np.maximum(v, v.dtype.type(0)), v.dtype.type(1))
            return np.where(np.isnan(v), v.dtype.type(0) if dx10 else v, out)

        steps.append(clamp)
    if letter == "f" and target.mode.flush_f32:
        steps.append(flush)
    if not steps:
        return None

    def apply(value: Array) -> Array:
        for step in steps:
            value = step(value)
        return value

    return apply


def adjusted(value: Array, modify: Callable[[Array], Array] | None) -> Array:
    return value if modify is None else modify(value)
