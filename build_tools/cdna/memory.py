"""Vector memory: LDS (DS), global and flat, scratch, raw buffers, and loads that go straight to LDS."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .atomics import ATOMICS, Atomic
from .decoder import Instruction, UnknownInstruction
from .operands import Getter, Step, Target, source_getter
from .state import LANE, M0, PRIVATE_APERTURE, SHARED_APERTURE, Array, Fault, Group

I64, U = np.int64, np.uint32
_AHEAD = {k: np.arange(k, dtype=I64)[:, None, None] for k in (1, 2, 3, 4)}
LDS_ADDRESS_BITS = 0x3FFFF  # M0 of LDS loads: gfx950 has 160 KiB


class Access(NamedTuple):
    """Shape of one lane's access."""

    nbytes: int
    signed: bool = False
    half: str = ""  # "lo" or "hi" of a register whose other half is kept (d16)

    @property
    def dwords(self) -> int:
        return max(self.nbytes // 4, 1)


def _accesses() -> dict[str, Access]:
    table = {"dword": Access(4), "short": Access(2), "byte": Access(1)}
    for k in (2, 3, 4):
        table[f"dwordx{k}"] = Access(4 * k)
    for name, size in (("byte", 1), ("short", 2)):
        for prefix, signed in (("u", False), ("s", True)):
            table[prefix + name] = Access(size, signed)
            table[f"{prefix}{name}_d16"] = Access(size, signed, "lo")
            table[f"{prefix}{name}_d16_hi"] = Access(size, signed, "hi")
        table[f"{name}_d16"] = Access(size, False, "lo")
        table[f"{name}_d16_hi"] = Access(size, False, "hi")
    for bits in (32, 64, 96, 128):
        table[f"b{bits}"] = Access(bits // 8)
    for bits in (8, 16):
        table[f"b{bits}"] = Access(bits // 8)
        table[f"b{bits}_d16_hi"] = Access(bits // 8, False, "hi")
        for prefix, signed in (("u", False), ("i", True)):
            table[f"{prefix}{bits}"] = Access(bits // 8, signed)
            table[f"{prefix}{bits}_d16"] = Access(bits // 8, signed, "lo")
            table[f"{prefix}{bits}_d16_hi"] = Access(bits // 8, signed, "hi")
    return table


ACCESSES = _accesses()


class Space(NamedTuple):
    """An address space: its bytes, and how a group's accesses to it are checked."""

    bytes: Array
    words: Array
    check: Callable[[Array, int, Array | None], None]


def read(space: Space, index: Array, access: Access) -> Array:
    """[dwords, ...] uint32 from byte indices of any shape."""
    if access.nbytes >= 4:
        if int(np.bitwise_or.reduce(index, axis=None)) & 3:
            raw = space.bytes.take(index[..., None] + np.arange(access.nbytes))
            return np.moveaxis(raw.view(U), -1, 0)
        if access.nbytes == 4:
            return space.words.take(index >> 2)[None]
        return space.words.take((index >> 2) + _AHEAD[access.dwords])
    value = space.bytes.take(index)
    if access.nbytes == 2:
        high = space.bytes.take(index + 1)
        value = value.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)
    if access.signed:
        value = value.view(np.int8 if access.nbytes == 1 else np.int16).astype(np.int32).view(U)
    return value.astype(U)[None]


def write(space: Space, index: Array, values: Array, access: Access) -> None:
    """Store [dwords, ...] uint32 at byte indices [...]. Where lanes collide, the last one wins."""
    if access.nbytes >= 4 and not int(np.bitwise_or.reduce(index, axis=None)) & 3:
        for k in range(access.dwords):
            space.words[(index >> 2) + k] = values[k]
        return
    for k in range(access.nbytes):
        space.bytes[index + k] = (values[k // 4] >> U(8 * (k % 4))).astype(np.uint8)


def to_registers(g: Group, register: int, values: Array, access: Access) -> None:
    """Write loaded values under EXEC."""
    if access.half:
        old = g.u[register]
        low = values[0] & U(0xFFFF)
        merged = old & U(0xFFFF0000) | low if access.half == "lo" else old & U(0xFFFF) | low << U(16)
        values = merged[None]
    block = g.block(register, access.dwords)
    if g.mask is None:
        block[...] = values
    else:
        np.copyto(block, values, where=g.mask)


def from_registers(g: Group, register: int, access: Access) -> Array:
    block = g.block(register, access.dwords)
    return block >> U(16) if access.half == "hi" else block


def perform(g: Group, space: Space, index: Array, access: Access, register: int, store: bool) -> None:
    """Load to, or store from, `register` for all active lanes; index [waves, 64] may be garbage elsewhere."""
    mask = g.mask
    if not store:
        if mask is not None:
            index = np.where(mask, index, 0)
        space.check(index, access.nbytes, mask)
        to_registers(g, register, read(space, index, access), access)
        return
    values = from_registers(g, register, access)
    if mask is not None:
        index, values = index[mask], values[:, mask]
    space.check(index, access.nbytes, None)
    write(space, index, values, access)


def global_space(g: Group) -> Space:
    memory = g.memory
    return Space(memory.bytes, memory.words, memory.check)


def lds_space(g: Group) -> Space:
    """`check` is done on LDS addresses before the work-group's base is added, by lds_index."""
    return Space(g.lds, g.lds32, _unchecked)


def _unchecked(index: Array, nbytes: int, mask: Array | None) -> None:
    return None


def lds_index(g: Group, address: Array, nbytes: int, is_write: bool, inst: Instruction) -> Array:
    """Index into the batch's LDS from addresses [waves, 64] int64; faults outside the work-group's allocation."""
    if g.mask is not None:
        address = np.where(g.mask, address, 0)
    top = int(np.maximum.reduce(address, axis=None)) + nbytes
    if top > g.batch.lds_bytes and (g.mask is None or g.mask.any()):
        raise Fault(f"{inst}: LDS access up to byte {top} of {g.batch.lds_bytes}")
    if g.batch.races is not None:
        g.batch.races.record(g, address, nbytes, is_write, inst)
    return address + g.lds_base


def compile_memory(target: Target, inst: Instruction) -> Step:
    """The function that executes a DS, GLOBAL, FLAT, SCRATCH or MUBUF instruction."""
    if inst.format == "DS":
        return _ds(target, inst)
    if inst.format == "MUBUF":
        return _buffer(target, inst)
    if inst.format == "SCRATCH":
        return _scratch(target, inst)
    return _global(target, inst)


# ---- LDS


def _ds(target: Target, inst: Instruction) -> Step:
    name = inst.name
    if name in _DS_SPECIAL:
        return _DS_SPECIAL[name](target, inst)
    if inst["gds"]:
        raise UnknownInstruction(f"{inst}: global data share")
    address = target.vector(inst["addr"])
    offset = inst["offset1"] << 8 | inst["offset0"]
    match = re.match(r"ds_(read|write)2(st64)?_b(32|64)$", name)
    if match:
        return _ds_two(target, inst, address, match[1] == "write", bool(match[2]), int(match[3]) // 8)
    match = re.match(r"ds_(read|write)_(\w+)$", name)
    if match and match[2] in ACCESSES:
        access, store = ACCESSES[match[2]], match[1] == "write"
        register = target.vector(inst["data0" if store else "vdst"], access.dwords, inst["acc"])

        def step(g: Group) -> None:
            index = lds_index(g, g.u[address].astype(I64) + offset, access.nbytes, store, inst)
            perform(g, lds_space(g), index, access, register, store)

        return step
    match = re.match(r"ds_(\w+?)(_rtn)?_(\w\d+)$", name)
    if match:
        key = {"cmpst": "cmpswap", "wrxchg": "swap"}.get(match[1], match[1])
        op = ATOMICS.get(f"{key}_{match[3].replace('b', 'u') if key in ('cmpswap', 'swap') else match[3]}")
        if op is not None:
            returns = match[2] is not None

            def where(g: Group) -> tuple[Space, Array]:
                nbytes = op.dtype.itemsize
                return lds_space(g), lds_index(g, g.u[address].astype(I64) + offset, nbytes, True, inst)

            return _atomic(target, inst, op, where, inst["data0"], inst["data1"], returns)
    raise UnknownInstruction(f"{inst} is not implemented")


def _ds_two(target: Target, inst: Instruction, address: int, store: bool, wide_step: bool, nbytes: int) -> Step:
    unit = nbytes * (64 if wide_step else 1)
    access = Access(nbytes)
    k = access.dwords
    offsets = [inst["offset0"] * unit, inst["offset1"] * unit]
    if store:
        data = [target.vector(inst[f"data{i}"], k, inst["acc"]) for i in (0, 1)]
    else:
        first = target.vector(inst["vdst"], 2 * k, inst["acc"])
        data = [first, first + k]

    def step(g: Group) -> None:
        base = g.u[address].astype(I64)
        indices = [lds_index(g, base + offset, nbytes, store, inst) for offset in offsets]
        space = lds_space(g)
        if store:
            for index, register in zip(indices, data, strict=True):
                perform(g, space, index, access, register, True)
            return
        values = [read(space, index, access) for index in indices]  # the address may be overwritten
        for value, register in zip(values, data, strict=True):
            to_registers(g, register, value, access)

    return step


def _permute(target: Target, inst: Instruction) -> Step:
    """ds_bpermute (pull) and ds_permute (push): lanes by byte address / 4; inactive sources give 0."""
    address, data, vdst = (target.vector(inst[name]) for name in ("addr", "data0", "vdst"))
    offset = U(inst["offset1"] << 8 | inst["offset0"])
    push = inst.name == "ds_permute_b32"

    def step(g: Group) -> None:
        lane = ((g.u[address] + offset >> U(2)) & U(63)).astype(np.intp)
        values = g.u[data] if g.mask is None else np.where(g.mask, g.u[data], U(0))
        if not push:
            out = np.take_along_axis(values, lane, 1)
        else:
            out = np.zeros_like(values)
            for w in range(g.n):
                active = slice(None) if g.mask is None else g.mask[w]
                out[w, lane[w, active]] = values[w, active]
        to_registers(g, vdst, out[None], Access(4))

    return step


def _swizzle(target: Target, inst: Instruction) -> Step:
    """ds_swizzle_b32: quad permutation (bit 15), or and/or/xor masks on the lane within 32."""
    vdst = target.vector(inst["vdst"])
    data = target.vector(inst["addr"])
    pattern = inst["offset1"] << 8 | inst["offset0"]
    if pattern >> 15:
        if pattern >= 0xC000:
            raise UnknownInstruction(f"{inst}: swizzle pattern {pattern:#x}")
        lanes = (LANE & ~3) + np.array([pattern >> 2 * k & 3 for k in range(4)])[LANE & 3]
    else:
        within = ((LANE & 31 & pattern) | pattern >> 5 & 31) ^ (pattern >> 10 & 31)
        lanes = (LANE & 32) + within

    def step(g: Group) -> None:
        values = g.u[data] if g.mask is None else np.where(g.mask, g.u[data], U(0))
        to_registers(g, vdst, values.take(lanes, axis=1)[None], Access(4))

    return step


def _transpose(target: Target, inst: Instruction) -> Step:
    """gfx950 ds_read_b64_tr_b8 / b16: each 16 lanes read a tile and lane i gets its column i.

    b8: 8 rows of 16 bytes, two lanes to a row. b16: 4 rows of 16 elements, four lanes to a row.
    """
    if target.arch != "gfx950":
        raise UnknownInstruction(f"{inst}: not an instruction of {target.arch}")
    address, vdst = target.vector(inst["addr"]), target.vector(inst["vdst"], 2, inst["acc"])
    offset = inst["offset1"] << 8 | inst["offset0"]
    if inst.name.endswith("b8"):
        rows, dtype = 8, np.dtype(np.uint8)
    else:
        rows, dtype = 4, np.dtype(np.uint16)

    def step(g: Group) -> None:
        if g.mask is not None:
            raise Fault(f"{inst}: what a transposing read does with inactive lanes is not known here")
        index = lds_index(g, g.u[address].astype(I64) + offset, 8, False, inst)
        raw = np.ascontiguousarray(np.moveaxis(read(lds_space(g), index, Access(8)), 0, -1))
        tile = raw.view(dtype).reshape(g.n, 4, rows, 16)
        columns = np.ascontiguousarray(tile.transpose(0, 1, 3, 2)).view(U).reshape(g.n, 64, 2)
        to_registers(g, vdst, np.moveaxis(columns, -1, 0), Access(8))

    return step


_DS_SPECIAL: dict[str, Callable[[Target, Instruction], Step]] = {
    "ds_bpermute_b32": _permute,
    "ds_permute_b32": _permute,
    "ds_swizzle_b32": _swizzle,
    "ds_read_b64_tr_b8": _transpose,
    "ds_read_b64_tr_b16": _transpose,
    "ds_nop": lambda target, inst: lambda g: None,
}


# ---- atomics


def _atomic(
    target: Target,
    inst: Instruction,
    op: Atomic,
    where: Callable[[Group], tuple[Space, Array]],
    data0: int,
    data1: int,
    returns: bool,
) -> Step:
    """Read-modify-write, lane after lane. `data1` is the new value of a compare-and-swap on LDS."""
    k = op.dtype.itemsize // 4
    agpr = inst["acc"]
    compare = op.compare
    vdata = target.vector(data0, k * (2 if compare and inst.format != "DS" else 1), agpr)
    second = target.vector(data1, k, agpr) if compare and inst.format == "DS" else vdata + k
    vdst = target.vector(inst["vdst"] if "vdst" in inst.fields else data0, k, agpr) if returns else 0

    def lanes_of_block(g: Group, register: int, active: Array) -> Array:
        block = np.moveaxis(g.block(register, k), 0, -1)
        return np.ascontiguousarray(block[active]).view(op.dtype)[:, 0]

    def step(g: Group) -> None:
        space, index = where(g)
        active = np.ones((g.n, 64), bool) if g.mask is None else g.mask
        at = index[active]
        space.check(at, op.dtype.itemsize, None)
        if at.size and int(np.bitwise_or.reduce(at)) % op.dtype.itemsize:
            raise Fault(f"{inst}: unaligned atomic")
        cells = space.bytes[: space.bytes.size // 8 * 8].view(op.dtype)
        data = lanes_of_block(g, vdata, active)
        other = lanes_of_block(g, second, active) if compare else data
        if compare and inst.format != "DS":
            data, other = other, data  # global: the new value comes first; DS: the comparand does
        old = op.apply(cells, at // op.dtype.itemsize, data, other)
        if returns:
            full = np.zeros((g.n, 64), op.dtype)
            full[active] = old
            values = np.moveaxis(full.view(U).reshape(g.n, 64, k), -1, 0)
            to_registers(g, vdst, values, Access(4 * k))

    return step


def _vmem_atomic(name: str) -> Atomic | None:
    """The operation behind global_atomic_*, flat_atomic_*, buffer_atomic_*."""
    base = name.split("_atomic_")[1]
    if base.endswith("_x2"):
        kind = {"smin": "min_i64", "smax": "max_i64", "umin": "min_u64", "umax": "max_u64"}
        return ATOMICS.get(kind.get(base[:-3], base[:-3] + "_u64"))
    kind = {"smin": "min_i32", "smax": "max_i32", "umin": "min_u32", "umax": "max_u32"}
    return ATOMICS.get(kind.get(base, base)) or ATOMICS.get(base + "_u32")


# ---- global, flat, scratch


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
        access = ACCESSES.get(name[9:])
        if access is None or access.nbytes < 4:
            raise UnknownInstruction(f"{inst} is not implemented")
        offset = _signed13(inst["offset"])

        def to_lds(g: Group) -> None:
            index = address(g) if g.mask is None else np.where(g.mask, address(g), 0)
            g.memory.check(index, access.nbytes, g.mask)
            _into_lds(g, read(global_space(g), index, access), access, offset, inst)

        return to_lds
    if "_atomic_" in inst.name:
        op = _vmem_atomic(inst.name)
        if op is None:
            raise UnknownInstruction(f"{inst} is not implemented")
        _reject_aperture = _flat_guard(target, inst)

        def where(g: Group) -> tuple[Space, Array]:
            _reject_aperture(g)
            return global_space(g), address(g)

        return _atomic(target, inst, op, where, inst["data"], 0, bool(inst["sc0"]))
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


def _flat_guard(target: Target, inst: Instruction) -> Step:
    if inst.format != "FLAT":
        return lambda g: None
    high = target.vector(inst["addr"] + 1)

    def guard(g: Group) -> None:
        upper = g.u[high] if g.mask is None else g.u[high][g.mask]
        if ((upper == SHARED_APERTURE) | (upper == PRIVATE_APERTURE)).any():
            raise Fault(f"{inst}: flat atomic on LDS or scratch is not implemented")

    return guard


def _into_lds(g: Group, values: Array, access: Access, offset: int, inst: Instruction) -> None:
    """LDS[M0 + offset + lane * size] = values: every lane's data lies after the previous lane's."""
    m0 = g.raw[:, M0 : M0 + 1].astype(I64) & LDS_ADDRESS_BITS
    address = m0 + (offset + access.nbytes * LANE)
    index = lds_index(g, address, access.nbytes, True, inst)
    if g.mask is not None:
        index, values = index[g.mask], values[:, g.mask]
    write(lds_space(g), index, values, access)


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
        space = Space(g.batch.scratch, g.batch.scratch[: g.batch.scratch.size // 4 * 4].view(U), _unchecked)
        perform(g, space, address + thread * size, access, register, store)

    return step


# ---- raw buffers


def _buffer(target: Target, inst: Instruction) -> Step:
    """MUBUF on a raw buffer: base and num_records from four SGPRs; each dword is checked on its own.

    In range: offset + inst_offset + size <= num_records - soffset. Outside, loads give 0 and stores are dropped.
    """
    name = inst.name.removeprefix("buffer_")
    if name in ("wbl2", "inv"):
        return lambda g: None
    kind, _, size = name.partition("_")
    op = _vmem_atomic(inst.name) if kind == "atomic" else None
    access = ACCESSES.get(size) if op is None else Access(op.dtype.itemsize)
    if access is None or kind not in ("load", "store", "atomic") or inst["idxen"]:
        raise UnknownInstruction(f"{inst} with idxen={inst['idxen']} is not implemented")
    resource, offset = inst["srsrc"] * 4, inst["offset"]
    if resource % 4 or resource > 124:
        raise UnknownInstruction(f"{inst}: buffer resource s{resource}")
    agpr = inst["acc"]
    lane_offset = target.vector(inst["vaddr"]) if inst["offen"] else None
    soffset = source_getter(target, inst, inst["soffset"], "u", 0)
    into_lds, store = bool(inst["lds"]), kind == "store"
    if into_lds and (store or access.nbytes < 4):
        raise UnknownInstruction(f"{inst} to LDS is not implemented")
    register = 0 if into_lds else target.vector(inst["vdata"], access.dwords, agpr)
    unit = access._replace(nbytes=min(access.nbytes, 4))
    ahead = 4 * _AHEAD[access.dwords] if access.dwords > 1 else 0
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
        return np.where(valid, index, 0), np.broadcast_to(valid, np.broadcast_shapes(valid.shape, index.shape))

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
        if into_lds:
            _into_lds(g, values, access, offset, inst)
        else:
            to_registers(g, register, values, access)

    return step


def _buffer_atomic(
    target: Target, inst: Instruction, op: Atomic, locate: Callable[[Group], tuple[Array, Array | None]]
) -> Step:
    if inst["sc0"]:
        raise UnknownInstruction(f"{inst} with return is not implemented")
    current: list[Array] = []
    inner = _atomic(target, inst, op, lambda g: (global_space(g), current[0]), inst["vdata"], 0, False)

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
