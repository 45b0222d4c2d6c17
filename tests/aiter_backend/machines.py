"""Cases for aiter's kernels, and how they are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from cases import BF16, Case, Problem
from cases import make as make_case
from compare import check
from running import oracle
from stand_in import FLOAT8, StandIn
from torch import Tensor

import mla_ops

Install = Callable[..., StandIn]

ARCHES = tuple(FLOAT8)

# Relative L2 error of a row. With weights and output in bfloat16 as on a CPU (tests/compare.py).
# With weights in float8, of 3 bits: 2^-4 at most for each, 2.6e-2 on average.
BARS = {"a16w16": 3e-3, "a16w8": 3e-3, "a8w8": 5e-2}
KINDS = tuple(BARS)

# Query tokens that aiter serves.
Q_LENS = {"gfx942": (1, 2, 3, 4), "gfx950": (1, 2, 3, 4)}
UNSERVED = {("gfx950", kind, q_len) for kind in ("a8w8", "a16w16") for q_len in (3, 4)}


def of_kind(case: Case, kind: str, arch: str) -> Case:
    """The case with the bits of q and of the cache that a kind's name says."""
    q, cache = kind[1:].split("w")
    dtypes = {"8": FLOAT8[arch], "16": BF16}
    return replace(case, q_dtype=dtypes[q], cache_dtype=dtypes[cache])


def make(case: Case) -> Problem:
    """A case's problem, with zeros in the row that aiter's kernels read whatever a batch uses."""
    problem = make_case(case)
    first = problem.kv_cache[0, 0]
    if first.float().isnan().any():
        first.zero_()
    return problem


def served() -> list[tuple[str, str, int]]:
    every = [(arch, kind, s) for arch in ARCHES for kind in KINDS for s in Q_LENS[arch]]
    return [one for one in every if one not in UNSERVED]


def decode(problem: Problem, **more: Any) -> Any:
    return mla_ops.decode(*problem.arguments, **{**problem.options, "backend": "aiter", **more})


def judge(kind: str, case: Case, problem: Problem, out: Tensor, lse: Tensor | None = None) -> None:
    """Assert that a result is right."""
    want, want_lse = oracle(problem)
    check(case, out, want, lse, want_lse, bar=BARS[kind])
    if lse is not None:
        seen = want_lse != -torch.inf
        off = (lse.double() - want_lse).abs() / want_lse.abs().clamp(min=1.0)
        worst = float(off[seen].max()) if seen.any() else 0.0
        assert worst < 1e-6, f"lse error {worst:.1e}: it is float32 throughout"


def run_and_judge(kind: str, arch: str, case: Case, **more: Any) -> None:
    """A case with LSE and without."""
    case = of_kind(case, kind, arch)
    problem = make(case)
    out, lse = decode(problem, return_lse=True, **more)
    judge(kind, case, problem, out, lse)
    judge(kind, case, problem, decode(problem, **more))
