"""How aiter's kernels are driven where there is a choice: the default rule, and the place where
tuning plugs in. docs/scheduling.md derives the rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class Shape(NamedTuple):
    """What a choice may depend on: known on the host before anything runs."""

    batch: int
    q_len: int
    heads: int
    max_tokens: int  # of a sequence: what the block table has room for
    q_dtype: torch.dtype
    cache_dtype: torch.dtype


class Choice(NamedTuple):
    """granularity: tokens, a power of two; sequences are cut at multiples of it. max_splits: pieces
    for each sequence, as a budget of the whole batch, or -1 for no limit."""

    granularity: int
    max_splits: int


DEFAULT = Choice(granularity=32, max_splits=-1)

# Set by whoever knows better for a shape; None from it means the default.
tuned: Callable[[Shape], Choice | None] = lambda shape: None  # noqa: E731


def choose(shape: Shape) -> Choice:
    """Return the schedule for a shape."""
    return tuned(shape) or DEFAULT


def group_heads(q_dtype: torch.dtype, cache_dtype: torch.dtype, q_len: int, heads: int) -> int:
    """Return the heads of the kernel: 16, or 128 where that is there and at least half of them are.

    Groups read the cache once each.
    """
    a8w8 = q_dtype in FLOAT8 or rounds_q(q_dtype, cache_dtype)
    return 128 if a8w8 and q_len == 1 and heads > 64 else 16


def rounding_allowed() -> bool:
    """Say whether MLA_OPS_AITER_Q=fp8 allows bfloat16 queries to be rounded to float8."""
    wanted = os.environ.get("MLA_OPS_AITER_Q") or "bf16"
    if wanted not in ("bf16", "fp8"):
        raise ValueError(f"MLA_OPS_AITER_Q must be bf16 or fp8, got {wanted!r}")
    return wanted == "fp8"


def rounds_q(q_dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Say whether q is rounded to the cache's float8, for the a8w8 kernels.

    Not unless it is allowed: they round the weights too, for errors of 2 % instead of 0.2 %.
    """
    return q_dtype == torch.bfloat16 and cache_dtype in FLOAT8 and rounding_allowed()
