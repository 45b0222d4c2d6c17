"""Run a kernel of a code object over a grid: arguments, initial registers, work-groups in batches.

Initial state: LLVM's "User Guide for AMDGPU Backend", "Initial Kernel Execution State", for
gfx942/gfx950 (architected flat scratch, work-item ids packed into v0).
"""

from __future__ import annotations

import contextlib
import gc
import struct
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .code_object import CodeObject, Kernel
from .program import Program, check_mode
from .races import Race, RaceFinder
from .schedule import Lockstep, RoundRobin, Schedule, Scheduler
from .state import EXEC, LANES, POISON, Array, Batch, Fault, Memory, Mode, Where

Dim = int | Sequence[int]
WAVES_AT_ONCE = 64  # one numpy operation serves at most so many waves

_programs: weakref.WeakKeyDictionary[CodeObject, dict[tuple[int, int, int], Program]] = (
    weakref.WeakKeyDictionary()
)


@dataclass
class Statistics:
    """What a launch did."""

    instructions: int = 0  # executed, counted once per wave
    counts: Counter[str] = field(default_factory=Counter)  # the same, by opcode
    races: Counter[Race] = field(default_factory=Counter)


def program_for(code: CodeObject, kernel: Kernel, schedule: Schedule) -> Program:
    """The compiled form of a code object, kept as long as the code object lives."""
    length = 1 if isinstance(schedule, RoundRobin) else 16
    key = (kernel.vgprs, kernel.agprs, length)
    programs = _programs.setdefault(code, {})
    if key not in programs:
        programs[key] = Program(code, kernel.vgprs, kernel.agprs, length)
    return programs[key]


def load_code(code: CodeObject, memory: Memory) -> None:
    """Map the segments into memory (kernels read constants through s_getpc) and apply
    relocations.
    """
    low = min(address for address, _ in code.segments)
    high = max(address + len(content) for address, content in code.segments)
    start = memory.allocate(high - low, "code object", 4096)
    memory.code_base = start - low
    for address, content in code.segments:
        at = start - memory.BASE + address - low
        memory.bytes[at : at + len(content)] = np.frombuffer(content, np.uint8)
    for where, addend in code.relocations:
        at = memory.code_base + where - memory.BASE
        memory.bytes[at : at + 8] = np.frombuffer(
            struct.pack("<Q", memory.code_base + addend), np.uint8
        )


def _three(dim: Dim) -> tuple[int, int, int]:
    parts = [dim] if isinstance(dim, int) else list(dim)
    x, y, z = (parts + [1, 1, 1])[:3]
    return x, y, z


def run_kernel(
    code: CodeObject,
    kernel: Kernel,
    grid: Dim,
    block: Dim,
    kernarg: int,
    memory: Memory,
    *,
    schedule: Schedule = Lockstep(),  # noqa: B008  (frozen)
    find_races: bool = False,
    dynamic_lds: int = 0,
    poison: int = POISON,
    waves_at_once: int = WAVES_AT_ONCE,
    limit: int = 1_000_000_000,
) -> Statistics:
    """Run `grid` work-groups of `block` work-items; `kernarg` is the address of the argument block;
    `limit` is how many instructions all waves together may execute.

    Raises Fault for an invalid access, UnknownInstruction for what is not implemented.
    """
    if not memory.code_base:
        load_code(code, memory)
    groups, threads = _three(grid), _three(block)
    size = threads[0] * threads[1] * threads[2]
    waves = (size + LANES - 1) // LANES
    check_mode(kernel.mode, kernel.name)
    user = _user_registers(kernel, kernarg, memory, groups, threads)
    total = groups[0] * groups[1] * groups[2]
    at_once = max(waves_at_once // waves, 1)
    out = Statistics()
    with np.errstate(all="ignore"), _garbage_stays():
        program = program_for(code, kernel, schedule)
        program.reset()
        for first in range(0, total, at_once):
            ids = np.arange(first, min(first + at_once, total))
            batch = Batch(
                len(ids),
                waves,
                kernel.vgprs,
                kernel.agprs,
                kernel.lds_bytes + dynamic_lds,
                memory,
                program.constants,
                kernel.scratch_bytes,
                poison,
            )
            _initial_registers(batch, kernel, user, ids, groups, threads)
            if find_races:
                batch.races = RaceFinder(batch)
            start = Where(kernel.entry, Mode(kernel.mode))
            Scheduler(program, batch, start, limit).run(schedule)
            if batch.races is not None:
                out.races += batch.races.races
            batch.close()
    out.instructions, out.counts = program.executed, program.counts()
    return out


@contextlib.contextmanager
def _garbage_stays() -> Iterator[None]:
    """No cycle collection meanwhile: the thousands of closures of a program make it slow (a first
    run of one kernel took 0.3 s instead of 0.05) and nothing here is freed by it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _user_registers(
    kernel: Kernel, kernarg: int, memory: Memory, groups: tuple[int, ...], threads: tuple[int, ...]
) -> list[int]:
    """User SGPRs in the order of the enable bits. Kernel argument preloading is not done: code that
    uses it starts with loads for firmware that does not know it, and those are executed.
    """
    out: list[int] = []
    properties = kernel.properties
    if properties & 1:
        raise Fault(
            f"{kernel.name} wants a private segment buffer, which gfx942 and gfx950 do not have"
        )
    if properties & 2:
        sizes = [g * t for g, t in zip(groups, threads, strict=True)]
        packet = struct.pack(
            "<HH3HH3III3Q",
            0,
            3,
            *threads,
            0,
            *sizes,
            kernel.scratch_bytes,
            kernel.lds_bytes,
            0,
            kernarg,
            0,
        )
        address = memory.put(np.frombuffer(packet.ljust(64, b"\0"), np.uint8), "dispatch packet")
        out += [address & 0xFFFFFFFF, address >> 32]
    if properties & 4:
        raise Fault(f"{kernel.name} wants the queue pointer, which does not exist here")
    if properties & 8:
        out += [kernarg & 0xFFFFFFFF, kernarg >> 32]
    if properties & 16:
        out += [1, 0]
    if properties & 64:
        out.append(kernel.scratch_bytes)
    return out


def _initial_registers(
    batch: Batch,
    kernel: Kernel,
    user: list[int],
    ids: Array,
    groups: tuple[int, ...],
    threads: tuple[int, ...],
) -> None:
    waves = batch.waves_per_group
    batch.scalar[:, : len(user)] = user
    where = kernel.user_sgprs
    work_group = np.repeat(ids, waves)
    for bit, value in (
        (7, work_group % groups[0]),
        (8, work_group // groups[0] % groups[1]),
        (9, work_group // (groups[0] * groups[1])),
    ):
        if kernel.rsrc2 >> bit & 1:
            batch.scalar[:, where] = value
            where += 1
    thread = (np.arange(batch.waves) % waves)[:, None] * LANES + np.arange(LANES)
    x, y, z = (
        thread % threads[0],
        thread // threads[0] % threads[1],
        thread // (threads[0] * threads[1]),
    )
    batch.vector[0] = x | y << 10 | z << 20
    active = thread < threads[0] * threads[1] * threads[2]
    batch.scalar[:, EXEC : EXEC + 2] = np.packbits(active, axis=1, bitorder="little").view(
        np.uint32
    )


# ---- launching with ordinary arguments


def pack_arguments(
    code: CodeObject,
    kernel: Kernel,
    grid: Dim,
    block: Dim,
    values: Sequence[Any],
    dynamic_lds: int = 0,
) -> bytes:
    """The kernel argument block from the metadata: explicit arguments, then the hidden ones HIP
    code may read.

    Pointers are addresses. Python floats become float32, unless the metadata says eight bytes.
    """
    arguments = code.kernel_metadata(kernel.name).get(".args", [])
    size = max([kernel.kernarg_bytes] + [a[".offset"] + a[".size"] for a in arguments])
    out = bytearray(size)
    groups, threads = _three(grid), _three(block)
    hidden = {f"hidden_block_count_{d}": groups[k] for k, d in enumerate("xyz")}
    hidden |= {f"hidden_group_size_{d}": threads[k] for k, d in enumerate("xyz")}
    hidden |= {
        "hidden_grid_dims": 1 + (groups[1] * threads[1] > 1) + (groups[2] * threads[2] > 1),
        "hidden_dynamic_lds_size": dynamic_lds,
    }
    explicit = [a for a in arguments if not a[".value_kind"].startswith("hidden_")]
    if len(explicit) != len(values):
        raise ValueError(f"{kernel.name} takes {len(explicit)} arguments, got {len(values)}")
    for argument, value in zip(explicit, values, strict=True):
        raw = _argument_bytes(value, argument[".size"])
        out[argument[".offset"] : argument[".offset"] + len(raw)] = raw
    for argument in arguments:
        known = hidden.get(argument[".value_kind"])
        if known is not None:
            at, width = argument[".offset"], argument[".size"]
            out[at : at + width] = known.to_bytes(width, "little")
    return bytes(out)


def _argument_bytes(value: Any, size: int) -> bytes:
    if isinstance(value, tuple):
        raw = _struct_bytes(value).ljust(size, b"\0")
    elif isinstance(value, np.generic):
        raw = value.tobytes()
    elif isinstance(value, float):
        raw = struct.pack("<d" if size == 8 else "<f", value)
    else:
        raw = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    if len(raw) != size:
        raise ValueError(f"argument of {size} bytes, got {value!r} of {len(raw)}")
    return raw


def _struct_bytes(members: tuple[np.generic, ...]) -> bytes:
    """A C struct with natural alignment."""
    out = b""
    for member in members:
        if not isinstance(member, np.generic):
            raise TypeError(f"members of a struct need a numpy type, got {member!r}")
        raw = member.tobytes()
        out = out.ljust((len(out) + len(raw) - 1) // len(raw) * len(raw), b"\0") + raw
    return out


def launch(
    code: CodeObject,
    name: str | None,
    grid: Dim,
    block: Dim,
    *arguments: Any,
    memory_size: int | None = None,
    dynamic_lds: int = 0,
    **options: Any,
) -> Statistics:
    """Run a kernel on numpy arrays: they are copied in and, if writeable, copied back. Other
    arguments are scalars; a tuple of arrays and numpy scalars is a struct passed by value.

    `options` are those of run_kernel (schedule, find_races, poison, waves_at_once).
    """
    kernel = code.kernel(name)
    flat = [m for a in arguments for m in (a if isinstance(a, tuple) else (a,))]
    needed = sum(a.nbytes + 3 * 4096 for a in flat if isinstance(a, np.ndarray))
    needed += sum(len(content) for _, content in code.segments) + (1 << 20)
    memory = Memory(memory_size or needed)
    placed: list[tuple[Array, int]] = []

    def place(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(np.uint64(place(m)) if isinstance(m, np.ndarray) else m for m in argument)
        if not isinstance(argument, np.ndarray):
            return argument
        placed.append((argument, memory.put(argument, f"array argument {len(placed)}")))
        return placed[-1][1]

    values = [place(argument) for argument in arguments]
    packed = pack_arguments(code, kernel, grid, block, values, dynamic_lds)
    kernarg = memory.put(np.frombuffer(packed or bytes(8), np.uint8), "kernel arguments")
    out = run_kernel(code, kernel, grid, block, kernarg, memory, dynamic_lds=dynamic_lds, **options)
    for array, address in placed:
        if array.flags.writeable:
            array[...] = memory.get(address, array)
    return out
