"""Vector ALU instructions: the encodings (VOP1, VOP2, VOP3, VOPC, with SDWA or DPP) around the
tables of operations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from .arithmetic import ARITHMETIC, classes
from .conversions import CONVERSIONS
from .crosslane import CROSS_LANE
from .decoder import Instruction, UnknownInstruction
from .division import DIVISION
from .modifiers import getters_of, output_modifier, source_codes
from .operands import FLOATS, VCC, Step, Target, write_lane_mask, writer
from .state import EXEC, LANE, Array, Group
from .vector_ops import VECTOR_OPS, VectorOp

_COMPARE = re.compile(r"v_cmp(x?)_(\w+)_([fiu])(16|32|64)$")
_TESTS: dict[str, Callable[[Array, Array], Array]] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
    "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}
_TYPE_LETTERS = {
    "f16": "h",
    "f32": "f",
    "f64": "d",
    "i16": "k",
    "u16": "j",
    "i32": "i",
    "u32": "u",
    "i64": "I",
    "u64": "U",
}


def compile_vector(target: Target, inst: Instruction) -> Step:
    """The function that executes a VALU instruction on a group."""
    return _dpp(target, inst) if inst.variant == "DPP16" else _compile(target, inst)


def _compile(target: Target, inst: Instruction) -> Step:
    if inst.name in _SPECIAL:
        return _SPECIAL[inst.name](target, inst)
    compare = _COMPARE.match(inst.name)
    if compare:
        test = _TESTS.get(compare[2])
        if test is None:
            raise UnknownInstruction(str(inst))
        letter = _TYPE_LETTERS[compare[3] + compare[4]]
        return _compare(target, inst, letter + letter, test, bool(compare[1]))
    op = VECTOR_OPS.get(inst.name)
    if op is None:
        raise UnknownInstruction(f"{inst} is not implemented")
    return _table_op(target, inst, op)


def _integer_clamp(inst: Instruction, op: VectorOp) -> VectorOp:
    """Saturating forms of the additions and subtractions that have one."""
    kind = {
        "v_add_u32": (0, 1),
        "v_sub_u32": (0, -1),
        "v_add_i32": (1, 1),
        "v_sub_i32": (1, -1),
    }.get(inst.name)
    if kind is None:
        raise UnknownInstruction(f"{inst}: clamp is not implemented for this opcode")
    signed, sign = kind
    source, low, high = ("i", -(2**31), 2**31 - 1) if signed else ("u", 0, 2**32 - 1)

    def saturating(a: Array, b: Array) -> Array:
        wide = a.astype(np.int64) + sign * b.astype(np.int64)
        return np.clip(wide, low, high).astype(a.dtype)

    return VectorOp(source * 2, source, saturating)


def _table_op(target: Target, inst: Instruction, op: VectorOp) -> Step:
    if inst["clmp"] and op.result not in FLOATS:
        op = _integer_clamp(inst, op)
        inst = replace(inst, fields={**inst.fields, "clmp": 0})
    modify = output_modifier(target, inst, op.result)
    if inst.variant == "SDWA" and inst["dst_sel"] != 6:
        return _sdwa_destination(target, inst, op, modify)
    simple = (
        modify is None
        and inst.variant == ""
        and not (inst["abs"] or inst["neg"] or target.mode.flush_f32 and "f" in op.sources)
        and len(set(op.sources)) == 1
        and op.sources[0] in "uif"
        and op.result in "uif"
    )
    if simple:
        return _fast(target, inst, op)
    high = inst["opsel"] >> 3 & 1 if inst.format.startswith("VOP3") else 0
    write = writer(target, inst["vdst"], op.result, high, op.keep or bool(high))
    getters = getters_of(target, inst, op.sources)
    compute = op.compute
    if modify is not None:
        plain, adjust = compute, modify
        compute = lambda *sources: adjust(plain(*sources))  # noqa: E731
    if len(getters) == 1:
        (first,) = getters
        return lambda g: write(g, compute(first(g)))
    if len(getters) == 2:
        first, second = getters
        return lambda g: write(g, compute(first(g), second(g)))
    first, second, third = getters
    return lambda g: write(g, compute(first(g), second(g), third(g)))


def _fast(target: Target, inst: Instruction, op: VectorOp) -> Step:
    """Sources and result of one 32-bit type without modifiers: straight from and to the register
    lists.
    """
    codes = source_codes(inst)[: len(op.sources)]
    index = [target.source(inst, code, slot) for slot, code in enumerate(codes)]
    d = target.destination(inst["vdst"])
    compute = op.compute
    registers: Callable[[Group], list[Array]] = attrgetter(op.sources[0])
    results: Callable[[Group], list[Array]] = attrgetter(op.result)
    if inst.name == "v_mov_b32":
        (s,) = index

        def move(g: Group) -> None:
            if g.mask is None:
                g.u[d][...] = g.u[s]
            else:
                np.copyto(g.u[d], g.u[s], where=g.mask)

        return move
    if isinstance(compute, np.ufunc) and op.sources[0] == op.result:
        function: Any = compute  # numpy's stubs do not know positional outputs
        if len(index) == 1:
            (s,) = index

            def unary(g: Group) -> None:
                r = registers(g)
                if g.mask is None:
                    function(r[s], out=r[d])
                else:
                    function(r[s], out=r[d], where=g.mask)

            return unary
        s0, s1 = index

        def binary(g: Group) -> None:
            r = registers(g)
            if g.mask is None:
                function(r[s0], r[s1], out=r[d])
            else:
                function(r[s0], r[s1], out=r[d], where=g.mask)

        return binary

    def general(g: Group) -> None:
        r = registers(g)
        value = compute(*[r[s] for s in index])
        if g.mask is None:
            results(g)[d][...] = value
        else:
            np.copyto(results(g)[d], value, where=g.mask, casting="unsafe")

    return general


def _sdwa_destination(
    target: Target, inst: Instruction, op: VectorOp, modify: Callable[[Array], Array] | None
) -> Step:
    """Write a byte or word of the destination; the rest is cleared, sign-filled or kept (dst_unused
    0, 1, 2).
    """
    select, unused = inst["dst_sel"], inst["dst_unused"]
    shift, width = (8 * select, 8) if select < 4 else (16 * (select - 4), 16)
    if select > 5 or unused > 2 or op.result in "UId":
        raise UnknownInstruction(f"{inst}: SDWA destination select {select}, unused {unused}")
    getters = getters_of(target, inst, op.sources)
    index = target.destination(inst["vdst"])
    write = writer(target, inst["vdst"], "u")
    field = np.uint32((1 << width) - 1)

    def step(g: Group) -> None:
        value = op.compute(*[get(g) for get in getters])
        if modify is not None:
            value = modify(value)
        bits = (
            value.view(np.uint16 if value.dtype.itemsize == 2 else np.uint32).astype(np.uint32)
            & field
        )
        out = bits << np.uint32(shift)
        if unused == 2:
            out = out | g.u[index] & np.uint32(~(int(field) << shift) & 0xFFFFFFFF)
        elif unused == 1:
            sign = bits >> np.uint32(width - 1)
            above = np.uint32(0xFFFFFFFF << shift + width & 0xFFFFFFFF)
            out = out | np.where(sign == 1, above, np.uint32(0))
        write(g, out)

    return step


def _dpp_lanes(inst: Instruction) -> tuple[Array, Array]:
    """Source lane of every lane, and whether there is one (CDNA3 ISA, "DPP_CTRL")."""
    control, row, column = inst["dpp"], LANE & ~15, LANE & 15
    always = np.ones(64, bool)
    if control <= 0xFF:
        return (LANE & ~3) + np.array([control >> 2 * k & 3 for k in range(4)])[LANE & 3], always
    amount = control & 15
    if 0x101 <= control <= 0x10F:  # row_shl
        return LANE + amount, column + amount < 16
    if 0x111 <= control <= 0x11F:  # row_shr
        return LANE - amount, column >= amount
    if 0x121 <= control <= 0x12F:  # row_ror
        return row + (column - amount & 15), always
    if 0x150 <= control <= 0x15F:  # row_newbcast
        return row + amount, always
    table: dict[int, tuple[Array, Array]] = {
        0x130: (LANE + 1, LANE < 63),  # wave_shl
        0x134: (LANE + 1 & 63, always),  # wave_rol
        0x138: (LANE - 1, LANE > 0),  # wave_shr
        0x13C: (LANE - 1 & 63, always),  # wave_ror
        0x140: (row + 15 - column, always),  # row_mirror
        0x141: ((LANE & ~7) + 7 - (LANE & 7), always),  # row_half_mirror
        0x142: (row - 1, LANE >= 16),  # row_bcast15
        0x143: (np.full(64, 31), LANE >= 32),  # row_bcast31
    }
    if control not in table:
        raise UnknownInstruction(f"{inst}: DPP control {control:#x}")
    return table[control]


def _dpp(target: Target, inst: Instruction) -> Step:
    """src0 comes from another lane. Lanes whose source does not exist or is inactive read 0
    (bound_ctrl) or are left alone; row_mask and bank_mask leave lanes alone too.
    """
    lanes, exists = _dpp_lanes(inst)
    lanes = np.where(exists, lanes, 0)
    enabled = (inst["row_mask"] >> (LANE >> 4) & 1 & inst["bank_mask"] >> (LANE >> 2 & 3)).astype(
        bool
    )
    bound = bool(inst["bc"])
    source = target.source(inst, inst["vsrc0"] + 256)
    inner = _compile(target, inst)  # its src0 getter takes g.memo["dpp"]
    everything = bool(exists.all() and enabled.all())

    def step(g: Group) -> None:
        mask = g.mask
        moved = g.u[source].take(lanes, axis=1)
        if everything and mask is None:
            write_mask = None
        else:
            valid = (
                np.broadcast_to(exists, (g.n, 64))
                if mask is None
                else exists & mask.take(lanes, axis=1)
            )
            moved = np.where(valid, moved, np.uint32(0))
            write_mask = np.broadcast_to(enabled, (g.n, 64))
            if mask is not None:
                write_mask = write_mask & mask
            if not bound:
                write_mask = write_mask & valid
        g.memo["dpp"], g.mask = moved, write_mask
        try:
            inner(g)
        finally:
            g.mask = mask

    return step


def _compare(
    target: Target,
    inst: Instruction,
    letters: str,
    test: Callable[[Array, Array], Array],
    set_exec: bool,
) -> Step:
    """V_CMP: one bit per lane into VCC or a scalar pair; V_CMPX into EXEC as well."""
    first, second = getters_of(target, inst, letters)
    sdst = VCC
    if inst.format.startswith("VOP3"):
        sdst = inst["sdst"] if "sdst" in inst.fields else inst["vdst"]
    elif inst.variant == "SDWA" and inst["sd"]:
        sdst = inst["sdst"]
    write = write_lane_mask(sdst)
    if not set_exec:
        return lambda g: write(g, test(first(g), second(g)))
    write_exec = write_lane_mask(EXEC)

    def step(g: Group) -> None:
        lanes = test(first(g), second(g))
        write(g, lanes)
        write_exec(g, lanes)

    return step


def _class(target: Target, inst: Instruction) -> Step:
    letter = _TYPE_LETTERS[inst.name.rsplit("_", 1)[1]]
    return _compare(
        target, inst, letter + ("u" if letter != "h" else "j"), classes, "cmpx" in inst.name
    )


_SPECIAL: dict[str, Callable[[Target, Instruction], Step]] = {
    "v_nop": lambda target, inst: lambda g: None,
    **ARITHMETIC,
    **CONVERSIONS,
    **CROSS_LANE,
    **DIVISION,
    **{f"v_cmp{x}_class_{t}": _class for x in ("", "x") for t in ("f16", "f32", "f64")},
}
