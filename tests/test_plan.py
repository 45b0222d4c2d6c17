"""A plan is good for the problem it was made for, wherever it lies, and for no other; a
batch-invariant one gives a sequence the same bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, FN, FP32, Case, Problem, make
from compare import check
from running import BACKENDS, bits, oracle, poisoned, run, same_bits, solved

import mla_ops
from mla_ops.backends import torch as torch_backend

CASE = Case(lengths=(700, 64, 1, 0, 130), q_len=2, heads=5)


def plan_for(problem: Problem, **options: Any) -> mla_ops.DecodePlan:
    sizes = {"page_size": problem.kv_cache.shape[1], "num_heads": problem.q.shape[2]}
    sizes["q_len"] = problem.q.shape[1]
    return mla_ops.plan(problem.seq_lens, problem.block_table, **sizes, **options)


def rows_of(problem: Problem, order: list[int]) -> Problem:
    """The sequences named, in that order."""
    return problem._replace(
        q=problem.q[order],
        block_table=problem.block_table[order],
        seq_lens=problem.seq_lens[order],
    )


LENGTHS_OF_64 = [(37 * i * i + 11 * i) % 900 for i in range(64)]
LENGTHS_OF_64[7] = 4000
INVARIANT = {"batch_invariant": True, "split_tokens": 256}


@pytest.mark.parametrize("cache_dtype", [BF16, FN, FP32], ids=str)
@pytest.mark.parametrize("q_len", [1, 3])
def test_batch_invariance(cache_dtype: torch.dtype, q_len: int) -> None:
    """The same bits alone, in a batch of 64, and at another place of another batch."""
    case = Case(tuple(LENGTHS_OF_64), heads=6, q_len=q_len, cache_dtype=cache_dtype, page_size=16)
    problem = make(case)
    out, lse = run(problem, plan=plan_for(problem, **INVARIANT))
    check(case, out, *(lambda want: (want[0], lse, want[1]))(oracle(problem)))
    assert sum(length > 256 for length in case.lengths) > 30, "most sequences are merged of pieces"
    for b in (0, 7, 20, 63):
        alone = rows_of(problem, [b])
        one = run(alone, plan=plan_for(alone, **INVARIANT, workers=1))
        assert same_bits(out[b : b + 1], one[0]) and same_bits(lse[b : b + 1], one[1])
    order = [(i * 29 + 5) % 64 for i in range(40)]
    moved = rows_of(problem, order)
    for workers in (1, 2, 7, 500):
        got = run(moved, plan=plan_for(moved, **INVARIANT, workers=workers))
        assert same_bits(out[order], got[0]) and same_bits(lse[order], got[1])


def test_without_batch_invariance_bits_do_depend_on_the_company() -> None:
    """Or the test above would show nothing."""
    problem = make(Case((700, 900, 300), heads=6, q_dtype=FP32, cache_dtype=FP32))
    together = run(problem, plan=plan_for(problem, workers=7))[0][:1]
    alone = rows_of(problem, [0])
    assert not same_bits(together, run(alone, plan=plan_for(alone, workers=7))[0])


@pytest.mark.parametrize("options", [{}, {"workers": 3}, INVARIANT], ids=str)
def test_refreshed_in_place(options: dict) -> None:
    """One step on: other lengths, the same tensor."""
    problem, _, _ = solved(CASE)
    plan = plan_for(problem, **options)
    where = plan.tensor.data_ptr()
    shorter = problem._replace(seq_lens=torch.tensor([650, 2, 0, 0, 64], dtype=torch.int32))
    assert plan.update_(shorter.seq_lens, shorter.block_table) is plan
    assert plan.tensor.data_ptr() == where
    assert torch.equal(plan.tensor, plan_for(shorter, **options).tensor)
    out, lse = run(shorter, plan=plan)
    want, want_lse = oracle(shorter)
    check(CASE, out, want, lse, want_lse)


def test_a_stale_plan_is_refused_and_nothing_written() -> None:
    problem = make(CASE)
    plan = plan_for(problem)
    other = problem._replace(seq_lens=torch.tensor([640, 64, 1, 0, 130], dtype=torch.int32))
    out = poisoned(5, 2, 5, 512, dtype=BF16)
    before = bits(out).clone()
    with pytest.raises(ValueError, match="plan must be made for the lengths in seq_lens"):
        run(other, plan=plan, out=out)
    assert torch.equal(before, bits(out))
    # Lengths that need the same units are the same plan.
    run(problem._replace(seq_lens=torch.tensor([690, 60, 1, 0, 129], dtype=torch.int32)), plan=plan)


def test_a_refresh_that_cannot_be_leaves_the_plan_as_it_was() -> None:
    problem = make(CASE)
    plan = plan_for(problem)
    before = plan.tensor.clone()
    for lengths in ([10**6, 1, 1, 1, 1], [5, 5, 5, 5, -1]):
        with pytest.raises(ValueError, match="seq_lens"):
            plan.update_(torch.tensor(lengths, dtype=torch.int32), problem.block_table)
        assert torch.equal(plan.tensor, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "other",
    [Case((700, 64, 1, 0), q_len=2, heads=5), Case(CASE.lengths, 5, 1), Case(CASE.lengths, 6, 2)],
    ids=str,
)
def test_a_plan_for_another_problem_is_refused(other: Case, backend: str) -> None:
    plan = plan_for(make(CASE))
    sizes = f"{[len(other.lengths), other.q_len, other.heads]}, got {[5, 2, 5]}"
    with pytest.raises(ValueError, match="plan must be made for") as caught:
        run(make(other), backend, plan=plan)
    assert sizes in str(caught.value)


def test_a_plan_may_move() -> None:
    """It holds offsets, so a copy of it is as good, at any address."""
    problem, want, want_lse = solved(CASE)
    plan = plan_for(problem, workers=3)
    inside = torch.full((20,), -1, dtype=torch.int32)
    inside[7:13] = plan.tensor
    first = run(problem, plan=plan)
    check(CASE, first[0], want, first[1], want_lse)
    for tensor in (plan.tensor.clone(), inside[7:13]):
        again = run(problem, plan=mla_ops.DecodePlan(tensor, plan.spec))
        assert same_bits(first[0], again[0]) and same_bits(first[1], again[1])


def test_nbytes() -> None:
    plan = plan_for(make(CASE))
    assert plan.nbytes == 4 * (len(CASE.lengths) + 1)


@pytest.mark.parametrize("options", [{}, {"workers": 9}, INVARIANT], ids=str)
@pytest.mark.parametrize("lengths", [(700, 64, 1, 0, 130), (), (0,), tuple(range(200))], ids=len)
def test_the_plan_of_plain_torch_is_the_same(lengths: tuple, options: dict) -> None:
    problem = make(Case(lengths, heads=2, rank=8, rope=0))
    plan = plan_for(problem, **options)
    got = torch.full_like(plan.tensor, -7)
    torch_backend.KERNELS["_plan"](problem.seq_lens, problem.block_table, plan.spec, got)
    assert torch.equal(plan.tensor, got)
