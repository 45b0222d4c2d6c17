"""Scalar ALU and scalar memory: SOP1, SOP2, SOPC, SOPK without the branches, and SMEM.

Scalar operands are [waves, 1] arrays like everything else: waves that execute together may hold
different values.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .operands import Getter, Step, Target, wide_getter
from .scalar_ops import COMPARE, SAVEEXEC, SOP1, SOP2, SOP2_WIDE, signed_sum
from .state import EXEC, PRIVATE_APERTURE, SHARED_APERTURE, Array, Fault, Group

I32, I64, U, U64 = np.int32, np.int64, np.uint32, np.uint64
_CMP = re.compile(r"s_cmp(k?)_(\w\w)_([iu])(32|64)$")


def operand(target: Target, inst: Instruction, code: int, letter: str = "u") -> Getter:
    """A scalar source, [waves or 1, 1]."""
    if letter == "U":
        aperture = {235: SHARED_APERTURE, 237: PRIVATE_APERTURE}.get(code)
        if aperture is not None:
            value = np.array([[aperture << 32]], U64)
            return lambda g: value
        return wide_getter(target, inst, code, "U", 0)
    if code == 253:
        return lambda g: g.scc.astype(U)
    index = target.source(inst, code)
    return lambda g: g.u[index]


def write_scalar(target: Target, sdst: int, wide: bool = False) -> Callable[[Group, Array], None]:
    """Write an SGPR (or an aligned pair); EXEC changes the lane mask."""
    touches_exec = sdst >= EXEC
    if wide:
        if sdst & 1:
            raise UnknownInstruction(f"odd destination pair s{sdst}")
        pair = sdst // 2

        def write_pair(g: Group, value: Array) -> None:
            g.q[pair][...] = value
            if touches_exec:
                g.refresh()

        return write_pair
    index = target.vgprs + target.agprs + sdst

    def write(g: Group, value: Array) -> None:
        g.u[index][...] = value
        if touches_exec:
            g.refresh()

    return write


def compile_scalar(target: Target, inst: Instruction) -> Step:
    """The function that executes a scalar instruction that does not branch."""
    if inst.format == "SMEM":
        return _load(target, inst)
    if inst.format == "SOPC":
        return _compare(target, inst)
    if inst.format == "SOPK":
        return _sopk(target, inst)
    return _sop1(target, inst) if inst.format == "SOP1" else _sop2(target, inst)


def _sop2(target: Target, inst: Instruction) -> Step:
    if inst.name in SOP2:
        letters, compute, wide = "uu", SOP2[inst.name], False
    elif inst.name in SOP2_WIDE:
        (letters, compute), wide = SOP2_WIDE[inst.name], True
    else:
        raise UnknownInstruction(f"{inst} is not implemented")
    a, b = (operand(target, inst, inst[f"ssrc{k}"], letters[k]) for k in (0, 1))
    write = write_scalar(target, inst["sdst"], wide)

    def step(g: Group) -> None:
        value, scc = compute(a(g), b(g), g.scc)
        write(g, value)
        if scc is not None:
            g.scc[...] = scc

    return step


def _sop1(target: Target, inst: Instruction) -> Step:
    name, sdst = inst.name, inst["sdst"]
    if name.endswith("_saveexec_b64"):
        return _save_exec(target, inst, SAVEEXEC[name.split("_")[1]])
    if name in ("s_cmov_b32", "s_cmov_b64"):
        letter = "U" if name.endswith("64") else "u"
        get, old = operand(target, inst, inst["ssrc0"], letter), operand(target, inst, sdst, letter)
        write = write_scalar(target, sdst, letter == "U")
        return lambda g: write(g, np.where(g.scc, get(g), old(g)))
    if name in ("s_bitset0_b32", "s_bitset1_b32"):
        bit, old = operand(target, inst, inst["ssrc0"]), operand(target, inst, sdst)
        write = write_scalar(target, sdst)
        if name == "s_bitset1_b32":
            return lambda g: write(g, old(g) | U(1) << (bit(g) & U(31)))
        return lambda g: write(g, old(g) & ~(U(1) << (bit(g) & U(31))))
    if name == "s_getpc_b64":
        write = write_scalar(target, sdst, True)
        return lambda g: write(g, np.array([[g.memory.code_base + inst.pc + 4]], U64))
    if name not in SOP1:
        raise UnknownInstruction(f"{inst} is not implemented")
    source, destination, compute = SOP1[name]
    a, write = (
        operand(target, inst, inst["ssrc0"], source),
        write_scalar(target, sdst, destination == "U"),
    )
    if name == "s_mov_b32":
        return lambda g: write(g, a(g))

    def step(g: Group) -> None:
        value, scc = compute(a(g))
        write(g, value)
        if scc is not None:
            g.scc[...] = scc

    return step


def _save_exec(target: Target, inst: Instruction, combine: Callable[[Array, Array], Array]) -> Step:
    a, sdst = operand(target, inst, inst["ssrc0"], "U"), inst["sdst"]
    write, write_exec = write_scalar(target, sdst, True), write_scalar(target, EXEC, True)

    def step(g: Group) -> None:
        old = g.q[EXEC // 2].copy()
        new = combine(a(g), old)
        write(g, old)
        write_exec(g, new)
        g.scc[...] = new != 0

    return step


def _compare(target: Target, inst: Instruction) -> Step:
    if inst.name.startswith("s_bitcmp"):
        a, b = operand(target, inst, inst["ssrc0"]), operand(target, inst, inst["ssrc1"])
        if not inst.name.endswith("b32"):
            raise UnknownInstruction(f"{inst} is not implemented")
        wanted = U(inst.name[8] == "1")

        def bit(g: Group) -> None:
            g.scc[...] = (a(g) >> (b(g) & U(31)) & U(1)) == wanted

        return bit
    match = _CMP.match(inst.name)
    if match is None:
        raise UnknownInstruction(f"{inst} is not implemented")
    letter = "U" if match[4] == "64" else "u"
    a, b = (
        operand(target, inst, inst["ssrc0"], letter),
        operand(target, inst, inst["ssrc1"], letter),
    )
    test = COMPARE[match[2]]
    if match[3] == "i":

        def signed(g: Group) -> None:
            g.scc[...] = test(a(g).view(I32), b(g).view(I32))

        return signed

    def step(g: Group) -> None:
        g.scc[...] = test(a(g), b(g))

    return step


def _sopk(target: Target, inst: Instruction) -> Step:
    name, sdst = inst.name, inst["sdst"]
    unsigned = inst["simm16"]
    signed = unsigned - 0x10000 if unsigned & 0x8000 else unsigned
    constant = np.array([[signed]], I32).view(U)
    if name.startswith("s_cmpk"):
        match = _CMP.match(name)
        if match is None:
            raise UnknownInstruction(f"{inst} is not implemented")
        value, test = operand(target, inst, sdst), COMPARE[match[2]]
        limit = constant.view(I32) if match[3] == "i" else np.array([[unsigned]], U)
        view = I32 if match[3] == "i" else U

        def compare(g: Group) -> None:
            g.scc[...] = test(value(g).view(view), limit)

        return compare
    write, old = write_scalar(target, sdst), operand(target, inst, sdst)
    if name == "s_movk_i32":
        return lambda g: write(g, constant)
    if name == "s_cmovk_i32":
        return lambda g: write(g, np.where(g.scc, constant, old(g)))
    if name == "s_mulk_i32":
        return lambda g: write(g, old(g) * constant)
    if name == "s_addk_i32":
        add = signed_sum(1)

        def step(g: Group) -> None:
            out, overflow = add(old(g), constant, g.scc)
            write(g, out)
            g.scc[...] = overflow

        return step
    raise UnknownInstruction(f"{inst} is not implemented")


def _load(target: Target, inst: Instruction) -> Step:
    """s_load_dword[x2..x16]: addresses are rounded down to dwords."""
    name = inst.name
    if name in ("s_dcache_inv", "s_dcache_wb", "s_dcache_inv_vol", "s_dcache_wb_vol"):
        return lambda g: None
    match = re.match(r"s_load_dword(x(\d+))?$", name)
    if match is None:
        raise UnknownInstruction(f"{inst} is not implemented")
    count, base, sdst = int(match[2] or 1), inst["sbase"], inst["sdata"]
    offset = 0
    register = None
    if inst["imm"]:
        offset = inst["offset"] - (1 << 21 if inst["offset"] >> 20 & 1 else 0)
        if inst["soffset_en"]:
            register = inst["soffset"]
    else:
        register = inst["soffset"] if inst["soffset_en"] else inst["offset"] & 0x7F
    extra = None if register is None else operand(target, inst, register)
    ahead = 4 * np.arange(count, dtype=I64)
    key = ("scalars", sdst, count)

    def step(g: Group) -> None:
        address = (g.q[base] & U64(0xFFFF_FFFF_FFFF)).astype(I64) + (offset - g.memory.BASE)
        if extra is not None:
            address = address + extra(g)
        index = (address & ~3) + ahead
        g.memory.check(index, 4)
        g.view(key, lambda g: g.raw[:, sdst : sdst + count])[...] = g.memory.words.take(index >> 2)
        if sdst + count > EXEC:
            raise Fault(f"{inst}: scalar load into EXEC")

    return step
