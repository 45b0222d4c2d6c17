"""plan.hip, decode.hip and merge_pieces of merge.hip in the executor, one after the other, as
mla_plan and mla_decode launch them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cases import FLOAT8, FP16, Problem
from compare import errors
from project import RAW, TYPES, Device, Kernels
from torch import Tensor
from torch.nn.functional import pad

from mla_ops import reference

KINDS = list(TYPES.values())  # in the order of mla::Type
ROWS_AT_ONCE = 16
WHOLE = 576  # the width of rows that the quick kernels are for
PLAN_THREADS, PIECE_THREADS = 1024, 512
PIECE_GROUPS, PIECES_AT_ONCE = 4, 9
UNTOUCHED = 0xA5  # bytes of the output before it is written
RESULTS = ("out", "lse", "partials")

# Of a whole output row, relative L2: rounding to bfloat16 alone is 1.7e-3 on average.
OUT_BAR, LSE_BAR = 3e-3, 1e-3


@dataclass(frozen=True)
class Plan:
    """What make_plan is asked for; `lengths` other than the problem's make it a stale one."""

    workers: int = 3
    unit_tokens: int = 64
    fixed_split: bool = False
    lengths: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """Numbers between the rows of q, cache and output, and in front of their first."""

    gap: int = 0
    offset: int = 0

    def spread(self, x: Tensor) -> Tensor:
        """x with its rows apart, the gaps NaN. The dimension before the last has them too."""
        raw = x.view(RAW[x.element_size()])
        nan = torch.full((), torch.nan).to(x.dtype).view(raw.dtype)
        return pad(raw, (0, self.gap, 0, self.gap), value=nan.item()).view(x.dtype)

    def is_aligned(self, x: Tensor) -> bool:
        """Whether rows of x are whole units of 16 bytes, at multiples of 16 bytes."""
        return all(n * x.element_size() % 16 == 0 for n in (x.shape[-1], self.gap, self.offset))


class Call:
    """The tensors of one decode call in the executor's memory. What a test sets to something else
    before run() is what the kernels see.
    """

    def __init__(
        self,
        kernels: Kernels,
        problem: Problem,
        plan: Plan = Plan(),  # noqa: B008  (frozen)
        layout: Layout = Layout(),  # noqa: B008
        with_lse: bool = True,
        **launch_options: Any,
    ) -> None:
        q, cache, options = problem.q, problem.kv_cache, problem.options
        self.kernels, self.problem, self.plan, self.layout = kernels, problem, plan, layout
        self.with_lse, self.launch_options = with_lse, launch_options
        self.batch, self.q_len, self.heads, self.width = q.shape
        self.latent, self.rows = options["kv_lora_rank"], self.q_len * self.heads
        self.pages, self.page_size = cache.shape[:2]
        self.table, self.lengths = problem.block_table.clone(), problem.seq_lens.clone()
        self.out_dtype = torch.bfloat16 if q.dtype in FLOAT8 else q.dtype
        self.capacity = self.batch * max(
            -(-self.table.shape[1] * self.page_size // plan.unit_tokens), 1
        )
        self.slots = self.capacity if plan.fixed_split else plan.workers + self.batch
        self.partial_width = (self.latent + 3) // 4 * 4
        self.q, self.cache = layout.spread(q), layout.spread(cache)
        shape = (self.batch, self.q_len, self.heads, self.latent)
        self.out = layout.spread(torch.empty(shape, dtype=self.out_dtype))
        self.out.view(torch.uint8).fill_(UNTOUCHED)
        self.lse = torch.full(shape[:3], torch.nan)
        floats = self.slots * self.rows * (self.partial_width + 1) + 2 * self.batch
        self.partials = torch.full((floats,), torch.nan)
        self.first_unit = torch.empty(0, dtype=torch.int32)
        self.executed: Counter[str] = Counter()

    def run(self) -> Call:
        """Plan, decode, merge."""
        self.make_plan()
        types, is_whole = (self.cache.dtype,), self.width == WHOLE and self._is_aligned(self.cache)
        parts = 1 if self.cache.dtype not in FLOAT8 else 3 if self.q.dtype == FP16 else 2
        grid = (self.plan.workers, -(-self.rows // ROWS_AT_ONCE))
        self._launch("decode", "decode_tiles", types, grid, number=(parts, is_whole))
        self._merge()
        return self

    def _merge(self) -> None:
        """merge_pieces, as mla_merge_pieces launches it."""
        workers = self.plan.workers
        shares_pieces = self.plan.fixed_split or workers > PIECES_AT_ONCE * self.batch
        rows_each = (
            1 if shares_pieces else PIECE_GROUPS if workers > self.batch else 8 * PIECE_GROUPS
        )
        grid = self.batch * -(-self.rows // rows_each)
        share = f"LNS0_5ShareE{0 if shares_pieces else 1}E"
        options = {"number": (share,), "threads": PIECE_THREADS}
        self._launch("merge", "merge_pieces", (), grid, np.int32(rows_each), **options)

    def make_plan(self) -> None:
        """first_unit from the plan kernel."""
        lengths = self.lengths
        if self.plan.lengths is not None:
            lengths = torch.tensor(self.plan.lengths, dtype=torch.int32)
        device = Device(self.kernels, "plan", 1)
        out = device.full(self.batch + 1, torch.int32)
        most = np.int32(self.capacity // max(self.batch, 1))
        unit_tokens = np.int32(self.plan.unit_tokens)
        arguments = (device.put(lengths), self.batch, unit_tokens, most, out)
        device.call("plan", (), 1, *arguments, threads=PLAN_THREADS)
        self.first_unit = device.get(out, self.batch + 1, torch.int32)

    def rows_of(self, sequence: int) -> tuple[Tensor, Tensor]:
        """out [S, H, R] and lse [S, H] of a sequence."""
        return self.results()[0][sequence], self.lse[sequence]

    def results(self) -> tuple[Tensor, Tensor]:
        return self.out[:, : self.q_len, : self.heads, : self.latent], self.lse

    def assert_gaps_are_untouched(self) -> None:
        """Between the output's rows, and all of lse where none was asked for."""
        gaps = torch.ones(self.out.shape, dtype=torch.bool)
        gaps[:, : self.q_len, : self.heads, : self.latent] = False
        raw = self.out.view(torch.uint8).reshape(*self.out.shape, self.out.element_size())
        assert (raw[gaps] == UNTOUCHED).all(), "written beside the output's rows"
        assert self.with_lse or self.lse.isnan().all()

    def _is_aligned(self, x: Tensor) -> bool:
        gap, offset = self.layout.gap, self.layout.offset
        return all(n * x.element_size() % 16 == 0 for n in (self.width, gap, offset))

    def _launch(
        self, file: str, kernel: str, types: Any, grid: Any, *more: Any, **options: Any
    ) -> None:
        tensors = (self.q, self.cache, self.out, self.partials, self.table)
        size = sum(x.numel() * x.element_size() for x in tensors)
        device = Device(self.kernels, file, 2 + (size >> 20))
        offset = self.layout.offset
        at = {
            "out": device.put(self.out, offset),
            "lse": device.put(self.lse),
            "partials": device.put(self.partials),
        }
        members = self._members(device, at)
        device.call(kernel, types, grid, members, *more, **options, **self.launch_options)
        for name in RESULTS:
            old = getattr(self, name)
            setattr(self, name, device.get(at[name], old.numel(), old.dtype).reshape(old.shape))
        self.executed += device.executed

    def _members(self, device: Device, at: dict[str, int]) -> tuple[np.generic, ...]:
        """struct MlaDecode of csrc/hip/launchers.h."""
        pointer, number, kind = np.uint64, np.int64, np.int32
        options, plan = self.problem.options, self.plan
        put = lambda x: pointer(0 if x is None else device.put(x))  # noqa: E731
        shift, size = (self.page_size - 1).bit_length(), self.cache.element_size()
        return (
            *map(number, (self.batch, self.q_len, self.heads, self.latent, self.width)),
            *map(number, (self.pages, self.page_size)),
            *(kind(KINDS.index(t)) for t in (self.q.dtype, self.cache.dtype, self.out_dtype)),
            np.uint8(options["causal"]),
            np.float32(self.problem.softmax_scale),
            put(options.get("q_scale")),
            put(options.get("kv_scale")),
            pointer(device.put(self.q, self.layout.offset)),
            *map(number, self.q.stride()[:3]),
            pointer(device.put(self.cache, self.layout.offset)),
            *map(number, self.cache.stride()[:2]),
            put(self.table),
            number(self.table.stride(0)),
            number(self.table.shape[1]),
            put(self.lengths),
            pointer(at["out"]),
            *map(number, self.out.stride()[:3]),
            pointer(at["lse"] if self.with_lse else 0),
            *map(number, self.lse.stride()),
            pointer(at["partials"]),
            # Schedule
            put(self.first_unit),
            *map(kind, (self.batch, plan.workers, plan.unit_tokens)),
            np.uint8(plan.fixed_split),
            # MlaDecode's own
            number(self.slots),
            number(self.partial_width),
            *map(np.uint32, (self.pages, -(-(1 << 31 + shift) // self.page_size), shift)),
            *map(np.uint32, (self.cache.stride(0) * size, self.cache.stride(1) * size)),
            kind(self._is_aligned(self.cache)),
            kind(self._is_aligned(self.q)),
        )


def check(call: Call, but: tuple[int, ...] = ()) -> float:
    """Against the float64 oracle, and nothing else written; sequences in `but` are NaN. The largest
    error of an output row.
    """
    arguments = call.problem.arguments
    live = [b for b in range(call.batch) if b not in but]
    some = [x[live] if i in (0, 2, 3) else x for i, x in enumerate(arguments)]
    want, want_lse = reference.decode(*some, **call.problem.options)
    out, lse = call.results()
    call.assert_gaps_are_untouched()
    for b in but:
        assert out[b].isnan().all() and lse[b].isnan().all(), f"sequence {b} cannot be right"
    assert not out[live].isnan().any(), "NaN: memory was read that holds nothing"
    worst = errors(out[live], want)[0]
    assert worst < OUT_BAR, f"relative L2 error {worst:.2e}"
    if call.with_lse:
        empty = want_lse == -torch.inf
        assert torch.equal(lse[live] == -torch.inf, empty), "-inf where a row sees nothing"
        wrong = (lse[live].double() - want_lse)[~empty].abs()
        assert not wrong.numel() or wrong.max() < LSE_BAR, f"lse error {wrong.max():.2e}"
    return worst
