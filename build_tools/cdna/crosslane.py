"""Moves between lanes, between vector and scalar registers, and to and from the accumulation
registers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decoder import Instruction
from .operands import Step, Target, source_getter, writer
from .state import EXEC, Fault, Group


def _read_lane(target: Target, inst: Instruction) -> Step:
    """v_readfirstlane: the lowest active lane (lane 0 if none is); v_readlane: any lane. Ignores
    EXEC.
    """
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


CROSS_LANE: dict[str, Callable[[Target, Instruction], Step]] = {
    "v_readfirstlane_b32": _read_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_swap_b32": _swap,
    "v_permlane16_swap_b32": _swap,
    "v_permlane32_swap_b32": _swap,
    "v_accvgpr_write": _accvgpr,
    "v_accvgpr_read": _accvgpr,
    "v_accvgpr_mov_b32": _accvgpr,
}
