"""Vector ALU instructions: every encoding (VOP1, VOP2, VOP3, VOPC, SDWA, DPP) around the table of vector_ops.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .floats import E4M3, E5M2, flush, fma32, round_bf16
from .operands import (
    FLOATS,
    VCC,
    Getter,
    Step,
    Target,
    lane_mask_getter,
    source_getter,
    wide_getter,
    write_lane_mask,
    writer,
)
from .state import EXEC, LANE, Array, Fault, Group
from .vector_ops import VECTOR_OPS, VectorOp, ldexp

_COMPARE = re.compile(r"v_cmp(x?)_(\w+)_([fiu])(16|32|64)$")
_TESTS: dict[str, Callable[[Array, Array], Array]] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
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
}  # fmt: skip
_TYPE_LETTERS = {"f16": "h", "f32": "f", "f64": "d", "i16": "k", "u16": "j", "i32": "i", "u32": "u",
                 "i64": "I", "u64": "U"}  # fmt: skip


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


def source_codes(inst: Instruction) -> list[int]:
    """Source operand codes in the order src0, src1, src2 (vsrc1 is always a VGPR)."""
    if inst.variant == "SDWA":
        return [
            inst["vsrc0"] + (0 if inst["s0"] else 256),
            inst["vsrc1"] + (0 if inst["s1"] else 256),
        ]
    if inst.variant == "DPP16":
        return [inst["vsrc0"] + 256, inst["vsrc1"] + 256]
    if inst.format.startswith("VOP3"):
        return [inst["src0"], inst["src1"], inst["src2"]]
    return [inst["src0"], inst["vsrc1"] + 256]


def _modified(get: Getter, absolute: int, negate: int) -> Getter:
    """abs, then neg; both only touch the sign bit, also of a NaN."""
    if absolute and negate:
        return lambda g: np.negative(np.abs(get(g)))
    if absolute:
        return lambda g: np.abs(get(g))
    if negate:
        return lambda g: np.negative(get(g))
    return get


def _getters(target: Target, inst: Instruction, letters: str) -> list[Getter]:
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
            get = _dpp_source(letter)
        else:
            get = source_getter(target, inst, codes[slot], letter, slot, high)
        if inst.format.startswith("VOP3"):
            absolute, negate = inst["abs"] >> slot & 1, inst["neg"] >> slot & 1
        else:  # the modifiers of DPP; absent fields read as 0
            absolute, negate = inst[f"src{slot}_abs"], inst[f"src{slot}_neg"]
        if (absolute or negate) and letter not in FLOATS:
            raise UnknownInstruction(f"{inst}: abs/neg on an integer operand")
        get = _modified(get, absolute, negate)
        if letter == "f" and target.mode.flush_f32:
            get = _flushed(get)
        out.append(get)
    return out


def _flushed(get: Getter) -> Getter:
    return lambda g: flush(get(g))


def _sdwa_source(target: Target, inst: Instruction, code: int, letter: str, slot: int) -> Getter:
    """A byte, a word or the whole of a register (CDNA3 ISA, "SDWA")."""
    select, extend = inst[f"src{slot}_sel"], inst[f"src{slot}_sext"]
    index = target.source(inst, code, slot)
    absolute, negate = inst[f"src{slot}_abs"], inst[f"src{slot}_neg"]
    if select > 6 or letter in "UId":
        raise UnknownInstruction(f"{inst}: SDWA select {select} on operand type {letter}")
    shift, width = ((8 * select, 8) if select < 4 else (16 * (select - 4), 16)) if select < 6 else (0, 32)
    low, mask, sign = np.uint32(shift), np.uint32((1 << width) - 1), np.uint32(1 << width - 1)

    def get(g: Group) -> Array:
        value = g.u[index] >> low & mask
        if extend:
            value = (value ^ sign) - sign
        if letter in "hjk":
            return value.astype(np.uint16).view(_DTYPES[letter])
        return value.view(_DTYPES[letter])

    return _modified(get, absolute, negate)


_DTYPES: dict[str, Any] = {"u": np.uint32, "i": np.int32, "f": np.float32, "h": np.float16, "j": np.uint16,
                           "k": np.int16}  # fmt: skip


def _output_modifier(target: Target, inst: Instruction, letter: str) -> Callable[[Array], Array] | None:
    """omod, clamp and denormal flushing of the result, in that order; None when there is nothing to do."""
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


def _integer_clamp(inst: Instruction, op: VectorOp) -> VectorOp:
    """Saturating forms of the additions and subtractions that have one."""
    kind = {"v_add_u32": (0, 1), "v_sub_u32": (0, -1), "v_add_i32": (1, 1), "v_sub_i32": (1, -1)}.get(inst.name)
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
    modify = _output_modifier(target, inst, op.result)
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
    getters = _getters(target, inst, op.sources)
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
    """Sources and result of one 32-bit type without modifiers: straight from and to the register lists."""
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
                    function(r[s], r[d])
                else:
                    function(r[s], r[d], where=g.mask)

            return unary
        s0, s1 = index

        def binary(g: Group) -> None:
            r = registers(g)
            if g.mask is None:
                function(r[s0], r[s1], r[d])
            else:
                function(r[s0], r[s1], r[d], where=g.mask)

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
    """Write a byte or word of the destination; the rest is cleared, sign-filled or kept (dst_unused 0, 1, 2)."""
    select, unused = inst["dst_sel"], inst["dst_unused"]
    shift, width = (8 * select, 8) if select < 4 else (16 * (select - 4), 16)
    if select > 5 or unused > 2 or op.result in "UId":
        raise UnknownInstruction(f"{inst}: SDWA destination select {select}, unused {unused}")
    getters = _getters(target, inst, op.sources)
    index = target.destination(inst["vdst"])
    write = writer(target, inst["vdst"], "u")
    field = np.uint32((1 << width) - 1)

    def step(g: Group) -> None:
        value = op.compute(*[get(g) for get in getters])
        if modify is not None:
            value = modify(value)
        bits = value.view(np.uint16 if value.dtype.itemsize == 2 else np.uint32).astype(np.uint32) & field
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
    """src0 comes from another lane. Lanes whose source does not exist or is inactive read 0 (bound_ctrl) or are
    left alone; row_mask and bank_mask leave lanes alone too."""
    lanes, exists = _dpp_lanes(inst)
    lanes = np.where(exists, lanes, 0)
    enabled = (inst["row_mask"] >> (LANE >> 4) & 1 & inst["bank_mask"] >> (LANE >> 2 & 3)).astype(bool)
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
            valid = np.broadcast_to(exists, (g.n, 64)) if mask is None else exists & mask.take(lanes, axis=1)
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


def _dpp_source(letter: str) -> Getter:
    if letter in "hjk":
        return lambda g: g.memo["dpp"].astype(np.uint16).view(_DTYPES[letter])
    return lambda g: g.memo["dpp"].view(_DTYPES[letter])


def _compare(
    target: Target, inst: Instruction, letters: str, test: Callable[[Array, Array], Array], set_exec: bool
) -> Step:
    """V_CMP: one bit per lane into VCC or a scalar pair; V_CMPX into EXEC as well."""
    first, second = _getters(target, inst, letters)
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


def _classes(value: Array, wanted: Array) -> Array:
    """V_CMP_CLASS: bit 0 signalling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, ... 9 +inf."""
    info = np.finfo(value.dtype)
    bits = value.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[value.dtype.itemsize])
    quiet = (bits >> bits.dtype.type(info.nmant - 1) & bits.dtype.type(1)).astype(bool)
    magnitude = np.abs(value)
    rank = np.where(magnitude == 0, 0, np.where(magnitude < info.tiny, 1, np.where(magnitude <= info.max, 2, 3)))
    number = np.where(np.isnan(value), np.where(quiet, 1, 0), np.where(np.signbit(value), 5 - rank, 6 + rank))
    return (wanted.astype(np.uint32) >> number.astype(np.uint32) & np.uint32(1)).astype(bool)


def _class(target: Target, inst: Instruction) -> Step:
    letter = _TYPE_LETTERS[inst.name.rsplit("_", 1)[1]]
    return _compare(target, inst, letter + ("u" if letter != "h" else "j"), _classes, "cmpx" in inst.name)


def _carry(target: Target, inst: Instruction) -> Step:
    """32-bit additions and subtractions with carry out, and in for addc/subb."""
    name = inst.name
    carry_in = name.startswith(("v_addc", "v_subb"))
    a, b, *rest = _getters(target, inst, "uum" if carry_in else "uu")
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
    a, b = _getters(target, inst, letters)
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
    """v_fmac_f32 and v_dot2c: the destination is also the addend; v_fmamk/v_fmaak carry a literal factor/addend."""
    name = inst.name
    if name in ("v_fmamk_f32", "v_fmaak_f32"):
        if inst.literal is None:
            raise UnknownInstruction(f"{inst}: no literal")
        a = source_getter(target, inst, inst["src0"], "f", 0)
        b = source_getter(target, inst, inst["vsrc1"] + 256, "f", 1)
        k = source_getter(target, inst, 255, "f", 2)
        if target.mode.flush_f32:
            a, b, k = _flushed(a), _flushed(b), _flushed(k)
        factors = (a, k, b) if name == "v_fmamk_f32" else (a, b, k)
        modify = _output_modifier(target, inst, "f")
        write = writer(target, inst["vdst"], "f")
        return lambda g: write(g, _adjusted(fma32(*[get(g) for get in factors]), modify))
    op = VECTOR_OPS[{"v_fmac_f32": "v_fma_f32", "v_fmac_f64": "v_fma_f64"}.get(name, name)]
    getters = _getters(target, inst, op.sources[:2])
    addend = source_getter(target, inst, inst["vdst"] + 256, op.sources[2], 2)
    modify = _output_modifier(target, inst, op.result)
    write = writer(target, inst["vdst"], op.result)
    return lambda g: write(g, _adjusted(op.compute(*[get(g) for get in getters], addend(g)), modify))


def _adjusted(value: Array, modify: Callable[[Array], Array] | None) -> Array:
    return value if modify is None else modify(value)


def _read_lane(target: Target, inst: Instruction) -> Step:
    """v_readfirstlane: the lowest active lane (lane 0 if none is); v_readlane: any lane. Ignores EXEC."""
    source = target.source(inst, inst["src0"], agpr=0)
    sdst = inst["vdst"]
    key = ("scalar", sdst)
    select = None
    if inst.name == "v_readlane_b32":
        select = source_getter(target, inst, inst["src1"], "u", 1)

    def step(g: Group) -> None:
        values = np.broadcast_to(g.u[source], (g.n, 64))
        if select is not None:
            lane = np.broadcast_to(select(g)[:, :1] & np.uint32(63), (g.n, 1)).astype(np.intp)
            out = np.take_along_axis(values, lane, 1)
        elif g.mask is None:
            out = values[:, :1]
        else:
            out = np.take_along_axis(values, g.mask.argmax(axis=1)[:, None], 1)
        g.view(key, lambda g: g.raw[:, sdst : sdst + 1])[...] = out
        if sdst >= EXEC:
            g.refresh()

    return step


def _write_lane(target: Target, inst: Instruction) -> Step:
    value = source_getter(target, inst, inst["src0"], "u", 0)
    select = source_getter(target, inst, inst["src1"], "u", 1)
    d = target.destination(inst["vdst"])

    def step(g: Group) -> None:
        lane = np.broadcast_to(select(g)[:, :1] & np.uint32(63), (g.n, 1)).astype(np.intp)
        np.put_along_axis(g.u[d], lane, np.broadcast_to(value(g)[:, :1], (g.n, 1)), 1)

    return step


def _swap(target: Target, inst: Instruction) -> Step:
    """v_swap_b32 under EXEC; v_permlane{16,32}_swap exchange rows between two registers."""
    a, b = target.destination(inst["vdst"]), target.source(inst, inst["src0"])
    if inst.name == "v_swap_b32":
        to_a, to_b = writer(target, inst["vdst"], "u"), writer(target, inst["src0"] - 256, "u")

        def exchange(g: Group) -> None:
            x, y = g.u[a].copy(), g.u[b].copy()
            to_a(g, y)
            to_b(g, x)

        return exchange
    rows = 32 if "32" in inst.name.split("_")[1] else 16

    def step(g: Group) -> None:
        if g.mask is not None:
            raise Fault(f"{inst}: what a permlane swap does with inactive lanes is not known here")
        # vdst's odd rows change places with src0's even rows
        x = g.u[a].reshape(g.n, -1, 2, rows)
        y = g.u[b].reshape(g.n, -1, 2, rows)
        x[:, :, 1], y[:, :, 0] = y[:, :, 0].copy(), x[:, :, 1].copy()

    return step


def _encode_float8(target: Target, inst: Instruction) -> Step:
    """v_cvt_pk_fp8_f32 / bf8: two codes into the half that op_sel[3] names; the other half stays."""
    fmt = (E4M3 if "fp8" in inst.name else E5M2)[target.arch]
    a, b = _getters(target, inst, "ff")
    index, high = target.destination(inst["vdst"]), inst["opsel"] >> 3 & 1
    write = writer(target, inst["vdst"], "j", high, keep=True)
    saturate = target.mode.saturate
    del index

    def step(g: Group) -> None:
        code = fmt.encode(a(g), saturate) | fmt.encode(b(g), saturate) << np.uint32(8)
        write(g, code.astype(np.uint16))

    return step


def _decode_float8(target: Target, inst: Instruction) -> Step:
    """v_cvt_pk_f32_fp8 / bf8 (two codes of a word) and v_cvt_f32_fp8 / bf8 (one byte)."""
    fmt = (E4M3 if "fp8" in inst.name else E5M2)[target.arch]
    if "_pk_" not in inst.name:
        if inst.variant == "SDWA":
            (byte,) = _getters(target, inst, "u")
        else:
            (raw,) = _getters(target, replace(inst, fields={**inst.fields, "opsel": 0}), "u")
            # VOP3: op_sel[1:0] selects the byte, with op_sel[0] the upper bit (LLVM, V_CVT_F32_FP8_e64)
            select = inst["opsel"] & 3 if inst.format == "VOP3" else 0
            if select:
                raise UnknownInstruction(f"{inst}: byte selection by op_sel is not implemented")
            byte = raw
        write = writer(target, inst["vdst"], "f")
        return lambda g: write(g, fmt.decode(byte(g) & np.uint32(255)))
    (word,) = _getters(target, inst, "j")
    low, high = writer(target, inst["vdst"], "f"), writer(target, inst["vdst"] + 1, "f")
    target.destination(inst["vdst"], 2)

    def step(g: Group) -> None:
        bits = word(g)
        a, b = fmt.decode(bits & np.uint16(255)), fmt.decode(bits >> np.uint16(8))
        low(g, a)
        high(g, b)

    return step


def _scaled_float8(target: Target, inst: Instruction) -> Step:
    """gfx950 v_cvt_scalef32_pk_{bf16,f32}_{fp8,bf8}: two codes of the word op_sel[0] names, times 2^(e-127) with e
    the exponent field of src1; and v_cvt_scalef32_pk_{fp8,bf8}_f32: two floats divided by it."""
    if target.arch != "gfx950":
        raise UnknownInstruction(f"{inst}: not an instruction of {target.arch}")
    name = inst.name
    codes = re.findall(r"_(fp8|bf8)", name)[0]
    fmt = (E4M3 if codes == "fp8" else E5M2)[target.arch]
    plain = replace(inst, fields={**inst.fields, "opsel": 0})

    def scale_of(bits: Array) -> Array:
        return np.ldexp(np.float64(1), (bits >> np.uint32(23) & np.uint32(255)).astype(np.int32) - 127)

    if name.endswith("_f32"):
        a, b, s = _getters(target, plain, "ffu")
        write_word = writer(target, inst["vdst"], "j", inst["opsel"] >> 3 & 1, keep=True)
        saturate = target.mode.saturate

        def encode(g: Group) -> None:
            scale = scale_of(s(g))
            x, y = (fmt.encode((v.astype(np.float64) / scale).astype(np.float32), saturate) for v in (a(g), b(g)))
            write_word(g, (x | y << np.uint32(8)).astype(np.uint16))

        return encode
    raw, s = _getters(target, plain, "uu")
    half = np.uint32(16 * (inst["opsel"] & 1))
    target.destination(inst["vdst"], 2 if "pk_f32" in name else 1)
    writes = [writer(target, inst["vdst"] + k, "f") for k in range(2 if "pk_f32" in name else 1)]
    write = writer(target, inst["vdst"], "u")

    def step(g: Group) -> None:
        bits, scale = raw(g) >> half, scale_of(s(g))
        x, y = (
            (fmt.decode(bits >> np.uint32(k) & np.uint32(255)).astype(np.float64) * scale).astype(np.float32)
            for k in (0, 8)
        )
        if len(writes) == 2:
            writes[0](g, x)
            writes[1](g, y)
        else:
            write(g, round_bf16(x) | round_bf16(y) << np.uint32(16))

    return step


def _bitop3(target: Target, inst: Instruction) -> Step:
    """Any function of three bits; the truth table is spread over the modifier fields."""
    table = inst["omod"] << 6 | inst["abs"] << 3 | inst["neg"]
    plain = replace(inst, fields={**inst.fields, "omod": 0, "abs": 0, "neg": 0})
    a, b, c = _getters(target, plain, "uuu")
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
    """V_DIV_SCALE_F32: scale numerator or denominator by 2^64 where the division would leave the range."""
    plain = replace(inst, fields={**inst.fields, "clmp": 0})
    value, denominator, numerator = _getters(target, plain, "fff")
    write, write_vcc = writer(target, inst["vdst"], "f"), write_lane_mask(inst["sdst"])

    def step(g: Group) -> None:
        s0, s1, s2 = np.broadcast_arrays(value(g), denominator(g), numerator(g), np.empty((g.n, 64)))[:3]
        denormal = lambda x: (x != 0) & (np.abs(x) < np.float64(2.0**-126))  # noqa: E731
        zero = (s2 == 0) | (s1 == 0)
        huge = _exponent(s2) - _exponent(s1) >= 96
        tiny_denominator = denormal(s1)
        inverse = 1 / s1.astype(np.float64)
        # The ISA writes DENORM.f64 for 1/S1, meaning that the float32 reciprocal is a denormal.
        small_inverse = denormal(inverse)
        small_quotient = denormal(s2.astype(np.float64) / s1)
        tiny_numerator = _exponent(s2) <= 23
        up, down = ldexp(s0, np.int32(64)), ldexp(s0, np.int32(-64))
        is_denominator, is_numerator = s0 == s1, s0 == s2
        conditions = [zero, huge, tiny_denominator, small_inverse & small_quotient, small_inverse,
                      small_quotient, tiny_numerator]  # fmt: skip
        results = [np.full_like(s0, np.nan), np.where(is_denominator, up, s0), up,
                   np.where(is_denominator, up, s0), down, np.where(is_numerator, up, s0), up]  # fmt: skip
        vcc = np.select(conditions, [np.full(s0.shape, k) for k in (False, True, False, True, False, True, False)])
        write(g, np.select(conditions, results, s0).astype(np.float32))
        write_vcc(g, vcc.astype(bool))

    return step


def _div_fmas(target: Target, inst: Instruction) -> Step:
    a, b, c = _getters(target, inst, "fff")
    scaled = lane_mask_getter(target, inst, VCC)
    write = writer(target, inst["vdst"], "f")

    def step(g: Group) -> None:
        out = fma32(a(g), b(g), c(g))
        write(g, np.where(scaled(g), out * np.float32(2.0**32), out))

    return step


def _div_fixup(target: Target, inst: Instruction) -> Step:
    """V_DIV_FIXUP_F32: the special cases of a quotient s0 of s2 / s1."""
    q, d, n = _getters(target, inst, "fff")
    write = writer(target, inst["vdst"], "f")

    def step(g: Group) -> None:
        s0, s1, s2 = np.broadcast_arrays(q(g), d(g), n(g))
        sign = np.where(np.signbit(s1) ^ np.signbit(s2), np.float32(-1), np.float32(1))
        infinite1, infinite2 = np.isinf(s1), np.isinf(s2)
        conditions = [np.isnan(s2), np.isnan(s1), (s1 == 0) & (s2 == 0) | infinite1 & infinite2,
                      (s1 == 0) | infinite2, infinite1 | (s2 == 0),
                      _exponent(s2) - _exponent(s1) < -150]  # fmt: skip
        results = [s2, s1, np.full_like(s0, -np.nan), sign * np.float32(np.inf), sign * np.float32(0),
                   sign * np.float32(0)]  # fmt: skip
        write(g, np.select(conditions, results, sign * np.abs(s0)).astype(np.float32))

    return step


def _accvgpr(target: Target, inst: Instruction) -> Step:
    """Moves to and from the accumulation registers."""
    kind = inst.name.split("_")[2]
    if kind == "write":
        d = target.vector(inst["vdst"], 1, 1)
        s = target.source(inst, inst["src0"])
    elif kind == "read":
        d, s = target.vector(inst["vdst"]), target.vector(inst["src0"] - 256, 1, 1)
    else:
        d, s = target.vector(inst["vdst"], 1, 1), target.vector(inst["src0"] - 256, 1, 1)

    def step(g: Group) -> None:
        if g.mask is None:
            g.u[d][...] = g.u[s]
        else:
            np.copyto(g.u[d], g.u[s], where=g.mask)

    return step


def _nothing(target: Target, inst: Instruction) -> Step:
    return lambda g: None


_SPECIAL: dict[str, Callable[[Target, Instruction], Step]] = {
    "v_nop": _nothing,
    **{f"v_{op}_co_u32": _carry for op in ("add", "sub", "subrev", "addc", "subb", "subbrev")},
    "v_mad_u64_u32": _mad64,
    "v_mad_i64_i32": _mad64,
    **dict.fromkeys(("v_fmac_f32", "v_fmac_f64", "v_fmamk_f32", "v_fmaak_f32", "v_dot2c_f32_f16",
                     "v_dot2c_f32_bf16"), _fmac),
    "v_readfirstlane_b32": _read_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_swap_b32": _swap,
    "v_permlane16_swap_b32": _swap,
    "v_permlane32_swap_b32": _swap,
    "v_cvt_pk_fp8_f32": _encode_float8,
    "v_cvt_pk_bf8_f32": _encode_float8,
    **dict.fromkeys(("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8", "v_cvt_f32_fp8", "v_cvt_f32_bf8"), _decode_float8),
    **{f"v_cvt_scalef32_pk_{to}_{of}": _scaled_float8 for to in ("bf16", "f32") for of in ("fp8", "bf8")},
    **{f"v_cvt_scalef32_pk_{to}_f32": _scaled_float8 for to in ("fp8", "bf8")},
    "v_bitop3_b32": _bitop3,
    "v_div_scale_f32": _div_scale,
    "v_div_fmas_f32": _div_fmas,
    "v_div_fixup_f32": _div_fixup,
    "v_accvgpr_write": _accvgpr,
    "v_accvgpr_read": _accvgpr,
    "v_accvgpr_mov_b32": _accvgpr,
    **{f"v_cmp{x}_class_{t}": _class for x in ("", "x") for t in ("f16", "f32", "f64")},
}  # fmt: skip
