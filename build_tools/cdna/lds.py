"""LDS: reads and writes, permutations between lanes, transposing reads, atomics."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .access import (
    ACCESSES,
    I64,
    Access,
    Space,
    U,
    atomic_step,
    lds_index,
    lds_space,
    perform,
    read,
    to_registers,
)
from .atomics import ATOMICS
from .decoder import Instruction, UnknownInstruction
from .operands import Step, Target
from .state import LANE, Array, Fault, Group


def compile_lds(target: Target, inst: Instruction) -> Step:
    """The function that executes a DS instruction."""
    name = inst.name
    if name in _DS_SPECIAL:
        return _DS_SPECIAL[name](target, inst)
    if inst["gds"]:
        raise UnknownInstruction(f"{inst}: global data share")
    address = target.vector(inst["addr"])
    # Added in 32 bits, as the sums below are: clang uses negative bases that the offset makes good.
    offset = inst["offset1"] << 8 | inst["offset0"]
    match = re.match(r"ds_(read|write)2(st64)?_b(32|64)$", name)
    if match:
        return _ds_two(
            target, inst, address, match[1] == "write", bool(match[2]), int(match[3]) // 8
        )
    match = re.match(r"ds_(read|write)_(\w+)$", name)
    if match and match[2] in ACCESSES:
        access, store = ACCESSES[match[2]], match[1] == "write"
        register = target.vector(inst["data0" if store else "vdst"], access.dwords, inst["acc"])

        def step(g: Group) -> None:
            index = lds_index(g, (g.u[address] + offset).astype(I64), access.nbytes, store, inst)
            perform(g, lds_space(g), index, access, register, store)

        return step
    match = re.match(r"ds_(\w+?)(_rtn)?_(\w\d+)$", name)
    if match:
        key = {"cmpst": "cmpswap", "wrxchg": "swap"}.get(match[1], match[1])
        op = ATOMICS.get(
            f"{key}_{match[3].replace('b', 'u') if key in ('cmpswap', 'swap') else match[3]}"
        )
        if op is not None:
            returns = match[2] is not None

            def where(g: Group) -> tuple[Space, Array]:
                nbytes = op.dtype.itemsize
                return lds_space(g), lds_index(
                    g, (g.u[address] + offset).astype(I64), nbytes, True, inst
                )

            return atomic_step(target, inst, op, where, inst["data0"], inst["data1"], returns)
    raise UnknownInstruction(f"{inst} is not implemented")


def _ds_two(
    target: Target, inst: Instruction, address: int, store: bool, wide_step: bool, nbytes: int
) -> Step:
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
        base = g.u[address]
        indices = [
            lds_index(g, (base + offset).astype(I64), nbytes, store, inst) for offset in offsets
        ]
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
    """ds_bpermute (pull) and ds_permute (push): lanes by byte address / 4; inactive sources
    give 0.
    """
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
    address, vdst = target.vector(inst["addr"]), target.vector(inst["vdst"], 2, inst["acc"])
    offset = inst["offset1"] << 8 | inst["offset0"]
    rows = 8 if inst.name.endswith("b8") else 4
    dtype = np.dtype(f"u{8 // rows}")

    def step(g: Group) -> None:
        if g.mask is not None:
            raise Fault(
                f"{inst}: what a transposing read does with inactive lanes is not known here"
            )
        index = lds_index(g, (g.u[address] + offset).astype(I64), 8, False, inst)
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
