"""Raw buffers (MUBUF): bounds by num_records, loads to registers or straight to LDS."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .access import (
    ACCESSES,
    AHEAD,
    I64,
    Access,
    atomic_step,
    from_registers,
    global_space,
    into_lds,
    read,
    to_registers,
    vmem_atomic,
    write,
)
from .atomics import Atomic
from .decoder import Instruction, UnknownInstruction
from .operands import Step, Target, source_getter
from .state import Array, Fault, Group


def compile_buffer(target: Target, inst: Instruction) -> Step:
    """MUBUF on a raw buffer: base and num_records from four SGPRs; each dword is checked on its
    own.

    In range: offset + inst_offset + size <= num_records - soffset. Outside, loads give 0 and stores
    are dropped.
    """
    name = inst.name.removeprefix("buffer_")
    if name in ("wbl2", "inv"):
        return lambda g: None
    kind, _, size = name.partition("_")
    op = vmem_atomic(inst.name) if kind == "atomic" else None
    access = ACCESSES.get(size) if op is None else Access(op.dtype.itemsize)
    if access is None or kind not in ("load", "store", "atomic") or inst["idxen"]:
        raise UnknownInstruction(f"{inst} with idxen={inst['idxen']} is not implemented")
    resource, offset = inst["srsrc"] * 4, inst["offset"]
    if resource % 4 or resource > 124:
        raise UnknownInstruction(f"{inst}: buffer resource s{resource}")
    agpr = inst["acc"]
    lane_offset = target.vector(inst["vaddr"]) if inst["offen"] else None
    soffset = source_getter(target, inst, inst["soffset"], "u", 0)
    to_lds, store = bool(inst["lds"]), kind == "store"
    if to_lds and (store or access.nbytes < 4):
        raise UnknownInstruction(f"{inst} to LDS is not implemented")
    register = 0 if to_lds else target.vector(inst["vdata"], access.dwords, agpr)
    unit = access._replace(nbytes=min(access.nbytes, 4))
    ahead = 4 * AHEAD[access.dwords] if access.dwords > 1 else 0
    lanes = np.zeros((1, 64), I64)
    key = ("resource", resource)

    def locate(g: Group) -> tuple[Array, Array | None]:
        """Memory index of every dword, and which of them are in range and active (None: all)."""
        words = g.view(key, lambda g: g.raw[:, resource : resource + 4])
        if int(words[:, 1].max()) >> 31:
            raise Fault(f"{inst}: swizzled buffers are not implemented")
        extra = soffset(g).astype(I64)
        base = words[:, :1].astype(I64) | (words[:, 1:2].astype(I64) & 0xFFFF) << 32
        at = (lanes if lane_offset is None else g.u[lane_offset].astype(I64)) + offset
        if op is None:
            at = at + ahead
        width = unit.nbytes if op is None else access.nbytes
        valid = at + width <= words[:, 2:3].astype(I64) - extra
        if g.mask is not None:
            valid = valid & g.mask
        index = at + (base + extra - g.memory.BASE)
        if 0 not in valid.tobytes():
            if valid.shape[-2] != g.n:
                index = np.broadcast_to(index, (*index.shape[:-2], g.n, 64))
            return index, None
        return np.where(valid, index, 0), np.broadcast_to(
            valid, np.broadcast_shapes(valid.shape, index.shape)
        )

    if op is not None:
        return _buffer_atomic(target, inst, op, locate)

    def step(g: Group) -> None:
        index, valid = locate(g)
        g.memory.check(index, unit.nbytes)
        space = global_space(g)
        if store:
            values = from_registers(g, register, access)
            values = values if access.dwords > 1 else values[0]
            if valid is not None:
                index, values = index[valid], values[valid]
            write(space, index, values[None], unit)
            return
        values = read(space, index, unit)
        if access.dwords > 1:
            values = values[0]
        if to_lds:
            into_lds(g, values, access, offset, inst)
        else:
            to_registers(g, register, values, access)

    return step


def _buffer_atomic(
    target: Target,
    inst: Instruction,
    op: Atomic,
    locate: Callable[[Group], tuple[Array, Array | None]],
) -> Step:
    if inst["sc0"]:
        raise UnknownInstruction(f"{inst} with return is not implemented")
    current: list[Array] = []
    inner = atomic_step(
        target, inst, op, lambda g: (global_space(g), current[0]), inst["vdata"], 0, False
    )

    def step(g: Group) -> None:
        index, valid = locate(g)
        current[:] = [index]
        mask = g.mask
        g.mask = mask if valid is None else valid
        try:
            inner(g)
        finally:
            g.mask = mask

    return step
