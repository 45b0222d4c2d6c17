"""A kernel's code, compiled lazily into blocks of Python functions, and the instructions that
change where a wave stands: branches, barriers, the end, and changes of mode.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import length_hint

import numpy as np

from .buffers import compile_buffer
from .code_object import CodeObject
from .decoder import Instruction, UnknownInstruction, sweep
from .lds import compile_lds
from .matrix import compile_matrix
from .memory import compile_memory
from .operands import Step, Target, constant_table
from .packed import compile_packed
from .scalar import compile_scalar, operand, write_scalar
from .state import EXEC, M0, VCC, Array, Batch, Fault, Group, Mode, Where
from .vector import compile_vector

NO_OPS = {
    "s_nop",
    "s_waitcnt",
    "s_sleep",
    "s_setprio",
    "s_icache_inv",
    "s_sethalt",
    "s_wakeup",
    "s_sendmsg",
    "s_incperflevel",
    "s_decperflevel",
    "s_ttracedata",
    "s_inst_prefetch",
}
ONLY_GFX950 = re.compile(
    r"v_permlane(16|32)_swap|v_bitop3|v_cvt_pk_(bf16|f16)_f32|v_cvt_f32_bf16|v_cvt_scalef32|v_prng"
    r"|v_dot2c?_f32_bf16|v_mfma_.*f8f6f4|v_mfma_f32_(16x16x32|32x32x16)_b?f16|ds_read_b\d+_tr_"
    r"|v_mfma_i32_(16x16x64|32x32x32)_i8|global_load_lds_dwordx"
)
MODE_REGISTER = 1  # hwreg(HW_REG_MODE)
Next = Where | list[Where]


@dataclass
class Block:
    """Straight-line code: the steps, then how to go on."""

    instructions: list[Instruction]
    steps: tuple[Step, ...]
    step_of: list[Instruction]  # the instruction of each step
    then: Callable[[Group], Next]
    runs: int = 0  # wave executions

    @property
    def length(self) -> int:
        return len(self.instructions)


def compile_step(target: Target, inst: Instruction) -> Step:
    """The function for an instruction that does not change control flow; raises
    UnknownInstruction.
    """
    fmt = inst.format
    to_lds = fmt == "MUBUF" and inst["lds"] and inst.name.startswith("buffer_load_dwordx")
    if target.arch != "gfx950" and (ONLY_GFX950.match(inst.name) or to_lds):
        raise UnknownInstruction(f"{inst}: not an instruction of {target.arch}")
    if fmt in ("SOP1", "SOP2", "SOPC", "SOPK", "SMEM"):
        return compile_scalar(target, inst)
    if fmt == "DS":
        return compile_lds(target, inst)
    if fmt in ("GLOBAL", "FLAT", "SCRATCH"):
        return compile_memory(target, inst)
    if fmt == "MUBUF":
        return compile_buffer(target, inst)
    if "mfma" in inst.name:
        return compile_matrix(target, inst)
    if fmt.startswith("VOP3P") and not inst.name.startswith("v_accvgpr"):
        return compile_packed(target, inst)
    if fmt.startswith("VOP"):
        return compile_vector(target, inst)
    raise UnknownInstruction(f"{inst} is not implemented")


@dataclass
class Program:
    """The text of a code object for a kernel's register allocation."""

    code: CodeObject
    vgprs: int
    agprs: int
    block_length: int = 16
    blocks: dict[Where, Block] = field(default_factory=dict)
    executed: int = 0  # wave-instructions

    def __post_init__(self) -> None:
        self.instructions: dict[int, Instruction | UnknownInstruction] = {}
        self.leaders: set[int] = set()
        offset = self.code.text_address
        literals: dict[int, int] = {}
        for item in sweep(self.code.text, self.code.text_address):
            self.instructions[item.pc if isinstance(item, Instruction) else offset] = item
            offset += item.size if isinstance(item, Instruction) else 4
            if isinstance(item, Instruction):
                if item.literal is not None:
                    literals.setdefault(item.literal, len(literals))
                if item.format == "SOPP" and "branch" in item.name or item.name == "s_call_b64":
                    self.leaders.add(branch_target(item))
        self.literals = literals
        self.constants = constant_table(list(literals))

    def block(self, where: Where) -> Block:
        found = self.blocks.get(where)
        if found is None:
            found = self.blocks[where] = self._compile(where)
        return found

    def _compile(self, where: Where) -> Block:
        target = Target(self.code.arch, self.vgprs, self.agprs, where.mode, self.literals)
        pc = where.pc
        instructions: list[Instruction] = []
        steps: list[Step] = []
        step_of: list[Instruction] = []
        while True:
            item = self.instructions.get(pc)
            if item is None:
                raise Fault(f"execution reaches {pc:#x}, where no instruction starts")
            if isinstance(item, UnknownInstruction):
                if not instructions:
                    raise item
                break
            try:
                then = compile_control(target, item, where.mode)
                step = (
                    None if then is not None or item.name in NO_OPS else compile_step(target, item)
                )
            except (UnknownInstruction, Fault):
                if not instructions:
                    raise  # only when it is reached, not when a block before it is compiled
                break
            instructions.append(item)
            pc += item.size
            if then is not None:
                return Block(instructions, tuple(steps), step_of, then)
            if step is not None:
                steps.append(step)
                step_of.append(item)
            if len(instructions) >= self.block_length or pc in self.leaders:
                break
        after = Where(pc, where.mode)
        return Block(instructions, tuple(steps), step_of, lambda g: after)

    def execute(self, group: Group) -> None:
        """Run one block for a group, leaving `group.where` or the per-wave positions behind."""
        block = self.block(group.where)
        block.runs += group.n
        self.executed += block.length * group.n
        group.count += block.length
        remaining = iter(block.steps)
        try:
            for step in remaining:
                step(group)
            group.next = block.then(group)
        except (Fault, IndexError, ValueError, TypeError) as error:
            at = len(block.steps) - length_hint(remaining) - 1
            culprit = block.step_of[at] if 0 <= at < len(block.step_of) else block.instructions[-1]
            if str(culprit) in str(error):
                raise
            raise Fault(f"{culprit}, waves {group.first}..{group.last - 1}: {error}") from error

    def untranslatable(self, mode: int) -> list[str]:
        """Messages for the instructions that have no implementation, from a full pass over the
        text.
        """
        target = Target(self.code.arch, self.vgprs, self.agprs, Mode(mode), self.literals)
        out = []
        for item in self.instructions.values():
            if isinstance(item, UnknownInstruction):
                out.append(str(item))
                continue
            try:
                if compile_control(target, item, target.mode) is None and item.name not in NO_OPS:
                    compile_step(target, item)
            except (UnknownInstruction, Fault) as error:
                out.append(str(error))
        return out

    def reset(self) -> None:
        """Forget the execution counts."""
        self.executed = 0
        for block in self.blocks.values():
            block.runs = 0

    def counts(self) -> Counter[str]:
        """Executed wave-instructions by name."""
        out: Counter[str] = Counter()
        for block in self.blocks.values():
            if block.runs:
                for inst in block.instructions:
                    out[inst.name] += block.runs
        return out


# ---- control


def branch_target(inst: Instruction) -> int:
    offset = inst["simm16"]
    return inst.pc + 4 + 4 * (offset - 0x10000 if offset & 0x8000 else offset)


def _pair_is_zero(register: int, g: Group) -> list[bool]:
    return [not (a or b) for a, b in g.raw[:, register : register + 2].tolist()]


_CONDITIONS: dict[str, Callable[[Group], list[bool]]] = {
    "s_cbranch_scc0": lambda g: [not b for b in g.scc.tobytes()],
    "s_cbranch_scc1": lambda g: [bool(b) for b in g.scc.tobytes()],
    "s_cbranch_vccz": lambda g: _pair_is_zero(VCC, g),
    "s_cbranch_vccnz": lambda g: [not z for z in _pair_is_zero(VCC, g)],
    "s_cbranch_execz": lambda g: _pair_is_zero(EXEC, g),
    "s_cbranch_execnz": lambda g: [not z for z in _pair_is_zero(EXEC, g)],
}


def compile_control(
    target: Target, inst: Instruction, mode: Mode
) -> Callable[[Group], Next] | None:
    """Where a group goes after `inst`; None if the instruction does not end a block."""
    name = inst.name
    after = Where(inst.pc + inst.size, mode)
    if inst.format == "SOPP":
        if name in NO_OPS:
            return None
        there = Where(branch_target(inst), mode)
        if name == "s_branch":
            return lambda g: there
        if name in _CONDITIONS:
            condition = _CONDITIONS[name]

            def branch(g: Group) -> Next:
                taken = condition(g)
                if all(taken):
                    return there
                return [there if t else after for t in taken] if any(taken) else after

            return branch
        if name == "s_endpgm":
            return lambda g: _flag(g.batch.done, g, after)
        if name == "s_barrier":
            return lambda g: _flag(g.batch.waiting, g, after)
        if name == "s_set_gpr_idx_off":
            off = Where(after.pc, mode._replace(index_mode=0, index_by=0))
            return lambda g: off
        raise UnknownInstruction(f"{inst} is not implemented")
    if name == "s_set_gpr_idx_on":
        value, bits = operand(target, inst, inst["ssrc0"]), inst["ssrc1"] & 15

        def index_on(g: Group) -> Next:
            index = np.broadcast_to(value(g) & np.uint32(0xFF), (g.n, 1))
            m0 = g.raw[:, M0 : M0 + 1]
            m0[...] = m0 & np.uint32(0xFFFF0F00) | index | np.uint32(bits << 12)
            return [
                Where(after.pc, mode._replace(index_mode=bits, index_by=int(k)))
                for k in index[:, 0]
            ]

        return index_on
    if name in ("s_setreg_b32", "s_setreg_imm32_b32"):
        return _set_register(target, inst, mode)
    if name in ("s_setpc_b64", "s_swappc_b64"):
        where_to = operand(target, inst, inst["ssrc0"], "U")
        save = write_scalar(target, inst["sdst"], True) if name == "s_swappc_b64" else None

        def jump(g: Group) -> Next:
            to = np.broadcast_to(where_to(g), (g.n, 1))[:, 0].astype(np.int64) - g.memory.code_base
            if save is not None:
                save(g, np.array([[g.memory.code_base + after.pc]], np.uint64))
            return [Where(int(pc), mode) for pc in to]

        return jump
    return None


def _flag(flags: Array, g: Group, after: Where) -> Where:
    flags[g.first : g.last] = True
    return after


def check_mode(mode: int, who: str) -> None:
    """Fault on what MODE can ask for and this executor cannot do."""
    if mode & 0xF:
        raise Fault(f"{who}: only rounding to nearest even is implemented, MODE={mode:#x}")
    if mode >> 6 & 3 != 3:
        raise Fault(f"{who}: float16/float64 denormals are always kept here, MODE={mode:#x}")


def _set_register(target: Target, inst: Instruction, mode: Mode) -> Callable[[Group], Next]:
    register, offset, size = (
        inst["simm16"] & 63,
        inst["simm16"] >> 6 & 31,
        (inst["simm16"] >> 11) + 1,
    )
    if register != MODE_REGISTER:
        raise UnknownInstruction(f"{inst}: hardware register {register}")
    mask = (1 << size) - 1 << offset
    if inst.literal is not None and inst.name == "s_setreg_imm32_b32":
        literal = inst.literal
        values: Callable[[Group], list[int]] = lambda g: [literal] * g.n  # noqa: E731
    else:
        source = operand(target, inst, inst["sdst"])
        values = lambda g: [int(v) for v in np.broadcast_to(source(g), (g.n, 1))[:, 0]]  # noqa: E731

    def step(g: Group) -> Next:
        out = []
        for value in values(g):
            new = mode.mode & ~mask | value << offset & mask
            check_mode(new, str(inst))
            out.append(Where(inst.pc + inst.size, mode._replace(mode=new)))
        return out

    return step


__all__ = ["Batch", "Block", "Program", "compile_control", "compile_step"]
