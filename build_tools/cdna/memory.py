"""Global, flat and scratch memory."""

from __future__ import annotations

import numpy as np

from .access import (
    ACCESSES,
    I64,
    Access,
    Space,
    U,
    atomic_step,
    global_space,
    into_lds,
    lds_index,
    lds_space,
    perform,
    read,
    unchecked,
    vmem_atomic,
)
from .decoder import Instruction, UnknownInstruction
from .operands import Getter, Step, Target, source_getter
from .state import LANE, PRIVATE_APERTURE, SHARED_APERTURE, Array, Fault, Group


def compile_memory(target: Target, inst: Instruction) -> Step:
    """The function that executes a GLOBAL, FLAT or SCRATCH instruction."""
    return _scratch(target, inst) if inst.format == "SCRATCH" else _global(target, inst)


def _signed13(value: int) -> int:
    return value - 0x2000 if value & 0x1000 else value


def _global_address(target: Target, inst: Instruction) -> Getter:
    """Index into Memory of each lane's address, [waves, 64] int64."""
    offset = inst["offset"] if inst.format == "FLAT" else _signed13(inst["offset"])
    if inst.format == "GLOBAL" and inst["saddr"] != 0x7F:
        pair, low = inst["saddr"] // 2, target.vector(inst["addr"])
        if inst["saddr"] & 1:
            raise UnknownInstruction(f"{inst}: odd address pair")

        def from_scalar(g: Group) -> Array:
            return g.q[pair].view(I64) + (offset - g.memory.BASE) + g.u[low].astype(I64)

        return from_scalar
    low = target.vector(inst["addr"], 2)

    def from_vector(g: Group) -> Array:
        both = np.empty((g.n, 64, 2), U)
        both[..., 0] = g.u[low]
        both[..., 1] = g.u[low + 1]
        return both.view(I64)[..., 0] + (offset - g.memory.BASE)

    return from_vector


def _global(target: Target, inst: Instruction) -> Step:
    name = inst.name.split("_", 1)[1]
    address = _global_address(target, inst)
    if name.startswith("load_lds_"):
        return _global_to_lds(inst, address, ACCESSES.get(name[9:]))
    if "_atomic_" in inst.name:
        op = vmem_atomic(inst.name)
        if op is None:
            raise UnknownInstruction(f"{inst} is not implemented")
        _reject_aperture = _flat_guard(target, inst)

        def where(g: Group) -> tuple[Space, Array]:
            _reject_aperture(g)
            return global_space(g), address(g)

        return atomic_step(target, inst, op, where, inst["data"], 0, bool(inst["sc0"]))
    kind, _, size = name.partition("_")
    access = ACCESSES.get(size)
    if access is None or kind not in ("load", "store"):
        raise UnknownInstruction(f"{inst} is not implemented")
    store = kind == "store"
    register = target.vector(inst["data" if store else "vdst"], access.dwords, inst["acc"])
    if inst.format != "FLAT":
        return lambda g: perform(g, global_space(g), address(g), access, register, store)
    high, offset = target.vector(inst["addr"] + 1), inst["offset"]
    low = high - 1

    def flat(g: Group) -> None:
        upper = g.u[high] if g.mask is None else g.u[high][g.mask]
        if (upper == SHARED_APERTURE).any():
            if not (upper == SHARED_APERTURE).all():
                raise Fault(f"{inst}: lanes mix LDS and global addresses")
            index = lds_index(g, g.u[low].astype(I64) + offset, access.nbytes, store, inst)
            perform(g, lds_space(g), index, access, register, store)
        elif (upper == PRIVATE_APERTURE).any():
            raise Fault(f"{inst}: flat access to scratch is not implemented")
        else:
            perform(g, global_space(g), address(g), access, register, store)

    return flat


def _global_to_lds(inst: Instruction, address: Getter, access: Access | None) -> Step:
    if access is None or access.nbytes < 4:
        raise UnknownInstruction(f"{inst} is not implemented")
    offset = _signed13(inst["offset"])

    def step(g: Group) -> None:
        index = address(g) if g.mask is None else np.where(g.mask, address(g), 0)
        g.memory.check(index, access.nbytes)
        into_lds(g, read(global_space(g), index, access), access, offset, inst)

    return step


def _flat_guard(target: Target, inst: Instruction) -> Step:
    if inst.format != "FLAT":
        return lambda g: None
    high = target.vector(inst["addr"] + 1)

    def guard(g: Group) -> None:
        upper = g.u[high] if g.mask is None else g.u[high][g.mask]
        if ((upper == SHARED_APERTURE) | (upper == PRIVATE_APERTURE)).any():
            raise Fault(f"{inst}: flat atomic on LDS or scratch is not implemented")

    return guard


def _scratch(target: Target, inst: Instruction) -> Step:
    """Private memory: an address per lane below the kernel's declared size."""
    kind, _, size = inst.name.removeprefix("scratch_").partition("_")
    access = ACCESSES.get(size)
    if access is None or kind not in ("load", "store"):
        raise UnknownInstruction(f"{inst} is not implemented")
    offset, store = _signed13(inst["offset"]), kind == "store"
    register = target.vector(inst["data" if store else "vdst"], access.dwords, inst["acc"])
    lane_address = target.vector(inst["addr"]) if inst["sve"] else None
    scalar = None if inst["saddr"] == 0x7F else source_getter(target, inst, inst["saddr"], "i", 0)

    def step(g: Group) -> None:
        size = g.batch.scratch_bytes
        address = np.full((g.n, 64), offset, I64)
        if lane_address is not None:
            address += g.i[lane_address]
        if scalar is not None:
            address += scalar(g)
        active = address if g.mask is None else address[g.mask]
        if active.size and (int(active.min()) < 0 or int(active.max()) + access.nbytes > size):
            raise Fault(f"{inst}: scratch access at {int(active.max())} of {size} bytes")
        thread = np.arange(g.first, g.last)[:, None] * 64 + LANE
        space = Space(
            g.batch.scratch, g.batch.scratch[: g.batch.scratch.size // 4 * 4].view(U), unchecked
        )
        perform(g, space, address + thread * size, access, register, store)

    return step
