"""Decode problems drawn at random, and the judgement of results by the float64 oracle.

DeepSeek's sizes, 16 heads, q in bfloat16, a float8 cache in pages of 64 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops import draw, reference

HEADS, RANK, ROPE, PAGE = 16, 512, 64, 64
WIDTH = RANK + ROPE
SOFTMAX_SCALE = 192**-0.5  # DeepSeek's: qk_nope_head_dim 128 + rope 64
KV_SCALE = draw.SCALES[torch.float8_e4m3fn]
BAR = 3e-3  # relative L2 error of a row: bfloat16 rounds it by 1.1e-3 on average
SHORTCUT = 8  # the contest program read the first token of every so many


class Case(NamedTuple):
    """`batch` sequences of `context` tokens each."""

    batch: int
    context: int

    @property
    def pages(self) -> int:
        return self.batch * -(-self.context // PAGE)

    @property
    def pool_bytes(self) -> int:
        return self.pages * PAGE * WIDTH

    @property
    def bytes_read(self) -> int:
        return self.batch * self.context * WIDTH


@dataclass(frozen=True)
class Problem:
    """A case's tensors."""

    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    kv_scale: Tensor

    def decode(self) -> Tensor:
        """Run the op."""
        return torch.ops.mla.decode(
            self.q,
            self.kv_cache,
            self.block_table,
            self.seq_lens,
            SOFTMAX_SCALE,
            kv_scale=self.kv_scale,
        )

    def oracle(self) -> Tensor:
        """Return the float64 result."""
        return reference.decode(
            self.q,
            self.kv_cache,
            self.block_table,
            self.seq_lens,
            SOFTMAX_SCALE,
            kv_scale=self.kv_scale,
        )[0]

    def only(self, sequences: list[int]) -> Problem:
        """Return these sequences alone, on the CPU."""
        table = self.block_table[sequences].long()
        codes = self.kv_cache.view(torch.uint8)[table.flatten()].cpu()
        return Problem(
            q=self.q[sequences].cpu(),
            kv_cache=codes.view(self.kv_cache.dtype),
            block_table=torch.arange(table.numel(), dtype=torch.int32).view(table.shape),
            seq_lens=self.seq_lens[sequences].cpu(),
            kv_scale=self.kv_scale.cpu(),
        )

    def skipping(self) -> Problem:
        """Return the problem that is left when pages of 8 rows are read and only the first row of
        each is taken."""
        return replace(
            self,
            kv_cache=self.kv_cache[:, ::SHORTCUT],
            seq_lens=(self.seq_lens + SHORTCUT - 1) // SHORTCUT,
        )


def draw_pool(
    size: int, device: torch.device, generator: torch.Generator, step: Callable[[], None]
) -> Tensor:
    """Return [pages, PAGE, WIDTH] random float8 codes, `size` bytes; calls `step` after each
    chunk."""
    shape = (size // (PAGE * WIDTH), PAGE, WIDTH)
    return draw.cache(shape, torch.float8_e4m3fn, device, generator, step)


def make(case: Case, pool: Tensor, generator: torch.Generator) -> Problem:
    """Build a case on the first pages of a pool, in shuffled order."""
    device = pool.device
    pages = torch.randperm(case.pages, generator=generator, device=device).to(torch.int32)
    q = torch.randn(case.batch, 1, HEADS, WIDTH, generator=generator, device=device)
    return Problem(
        q=q.bfloat16(),
        kv_cache=pool[: case.pages],
        block_table=pages.view(case.batch, -1),
        seq_lens=pages.new_full((case.batch,), case.context),
        kv_scale=torch.full((1,), KV_SCALE, device=device),
    )


def check(problem: Problem, out: Tensor) -> tuple[float, float]:
    """Return the error of a result, and what the shortcut's would have been, on all heads of the
    first, the last and two random sequences."""
    batch = problem.q.shape[0]
    some = sorted({0, batch - 1, *random.Random(batch).choices(range(batch), k=2)})
    sample = problem.only(some)
    want = sample.oracle()
    return worst_error(out[some].cpu(), want), worst_error(sample.skipping().oracle(), want)


def worst_error(got: Tensor, want: Tensor) -> float:
    """Return the largest relative L2 error of all rows; infinity where one has a NaN."""
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    return float(error.nan_to_num(torch.inf).max())


class Needles(NamedTuple):
    """Where the tokens that must win were, at how many places the op found them, and its error."""

    places: list[int]
    found: int
    error: float


def find_needles(context: int, pool: Tensor, generator: torch.Generator) -> Needles:
    """Ask, in one sequence per place, for the token there and no other: q is that token's row."""
    last = context - 1
    candidates = (0, 1, PAGE - 1, PAGE, last // 2, last - 1, last)
    places = sorted({min(place, last) for place in candidates})
    one = make(Case(1, context), pool, generator)
    token = torch.tensor(places, device=pool.device)
    page = one.block_table[0, token // PAGE].long()
    rows = one.kv_cache.view(torch.uint8)[page, token % PAGE].view(one.kv_cache.dtype)
    rows = rows.float()[:, None, None].expand(-1, 1, HEADS, -1) * KV_SCALE
    problem = replace(
        one,
        # Scores of about 576 / sqrt(192) = 42 for the needle, and 0 +- 1.7 for the others.
        q=rows.bfloat16(),
        block_table=one.block_table.expand(len(places), -1).contiguous(),
        seq_lens=one.seq_lens.expand(len(places)).contiguous(),
    )
    out = problem.decode()
    latents = rows[..., :RANK].double().cpu()
    found = sum(worst_error(out[i].cpu(), latents[i]) < 0.01 for i in range(len(places)))
    error = worst_error(out.cpu(), problem.only(list(range(len(places)))).oracle())
    return Needles(places, found, error)
