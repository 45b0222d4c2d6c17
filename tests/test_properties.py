"""What holds for every problem, tried on random ones: right, however it is cut, wherever pages and
sequences lie."""

from __future__ import annotations

from typing import Any

import torch
from cases import BF16, FN, FNUZ, FP16, FP32, HUGE, Case, make
from compare import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import oracle, run, same_bits

import mla_ops


def tries(count: int) -> Any:
    """The same random problems every time, whatever the machine's speed."""
    return settings(
        derandomize=True,
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


CACHES = st.sampled_from([BF16, FP16, FP32, FN, FNUZ])
LENGTHS = st.lists(
    st.one_of(st.integers(0, 9), st.integers(0, 300), st.sampled_from([63, 64, 65, 128, 700])),
    min_size=1,
    max_size=6,
).map(tuple)


@st.composite
def problems(draw: st.DrawFn, **fixed: Any) -> Case:
    """Any case. Rows of few numbers have no bfloat16 output, nor have rows of numbers that are all
    alike: rounding these costs up to 2^-8 wherever they lie (1.0038 between 1 and 1.0078), whoever
    does it. Rows of very few numbers have nothing that cancels to nearly 0: see compare.py."""
    q_dtype = draw(st.sampled_from([BF16, FP16, FP32, FP32, FN, FNUZ]))
    if q_dtype in (FP16, FP32):
        rank, rope = draw(st.integers(1, 130)), draw(st.integers(0, 70))
        kinds = ["normal", "shifted", "heavy", "flat"] if rank >= 16 else ["flat"]
        data = draw(st.sampled_from(kinds))
    else:
        rank, rope = draw(st.sampled_from([(512, 64), (256, 32), (257, 3), (300, 0)]))
        data = draw(st.sampled_from(["normal", "shifted"]))
    values = {
        "lengths": draw(LENGTHS),
        "heads": draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 128]))),
        "q_len": draw(st.sampled_from([1, 1, 2, 3, 5, 8])),
        "page_size": draw(st.one_of(st.integers(1, 20), st.sampled_from([64, 100, 1000]))),
        "rank": rank,
        "rope": rope,
        "q_dtype": q_dtype,
        "cache_dtype": draw(CACHES),
        "causal": draw(st.booleans()),
        "data": data,
        "extra_pages": draw(st.integers(0, 5)),
        "share_pages": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }
    return Case(**{**values, **fixed})


def plan_for(case: Case, problem: Any, **options: Any) -> mla_ops.DecodePlan:
    sizes = {"page_size": case.page_size, "num_heads": case.heads, "q_len": case.q_len}
    return mla_ops.plan(problem.seq_lens, problem.block_table, **sizes, **options)


@tries(120)
@given(problems())
def test_both_backends_are_right(case: Case) -> None:
    problem = make(case)
    want, want_lse = oracle(problem)
    for backend in ("native", "torch"):
        out, lse = run(problem, backend)
        check(case, out, want, lse, want_lse)


@tries(60)
@given(problems(), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 200)))
def test_any_cut_is_right(case: Case, workers: int, split_tokens: int | None) -> None:
    """Any number of workers, and a fixed split of any size, multiples of a tile or not."""
    problem = make(case)
    want, want_lse = oracle(problem)
    fixed = {} if split_tokens is None else {"batch_invariant": True, "split_tokens": split_tokens}
    out, lse = run(problem, plan=plan_for(case, problem, workers=workers, **fixed))
    check(case, out, want, lse, want_lse)


@tries(40)
@given(problems(q_dtype=FP32, rank=96, rope=16), st.floats(0, 1))
def test_two_halves_merge_to_the_whole(case: Case, where: float) -> None:
    """Without a mask, at any page: the columns of the table before it, and those from it on."""
    problem = make(case)
    problem = problem._replace(options={**problem.options, "causal": False})
    page = round(where * problem.block_table.shape[1])
    first = problem.seq_lens.clamp(max=page * case.page_size)
    a = run(problem._replace(block_table=problem.block_table[:, :page], seq_lens=first))
    rest = problem.seq_lens - first
    b = run(problem._replace(block_table=problem.block_table[:, page:], seq_lens=rest))
    out, lse = mla_ops.merge_states(*a, *b)
    want, want_lse = oracle(problem)
    check(case, out, want, lse, want_lse)


@tries(40)
@given(problems(), st.randoms(use_true_random=False), st.sampled_from(["native", "torch"]))
def test_where_pages_lie_does_not_matter(case: Case, random: Any, backend: str) -> None:
    problem = make(case)
    order = list(range(len(problem.kv_cache)))
    random.shuffle(order)
    to = torch.tensor(order, dtype=torch.int32)
    table = problem.block_table.clone()
    table[table != HUGE] = to[table[table != HUGE].long()]
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[problem.kv_cache.element_size()]
    cache = torch.empty_like(problem.kv_cache)
    cache.view(raw)[to.long()] = problem.kv_cache.view(raw)
    want, got = (
        run(problem, backend),
        run(problem._replace(kv_cache=cache, block_table=table), backend),
    )
    assert same_bits(want[0], got[0]) and same_bits(want[1], got[1])


@tries(40)
@given(problems(), st.randoms(use_true_random=False), st.integers(1, 150), st.integers(1, 9))
def test_order_of_a_batch_does_not_matter(
    case: Case, random: Any, split_tokens: int, workers: int
) -> None:
    """With a batch-invariant plan: the same bits at another place, for other workers."""
    problem = make(case)
    order = list(range(len(case.lengths)))
    random.shuffle(order)
    moved = problem._replace(
        q=problem.q[order],
        block_table=problem.block_table[order],
        seq_lens=problem.seq_lens[order],
    )
    fixed = {"batch_invariant": True, "split_tokens": split_tokens}
    want = run(problem, plan=plan_for(case, problem, **fixed, workers=2))
    got = run(moved, plan=plan_for(case, moved, **fixed, workers=workers))
    assert same_bits(want[0][order], got[0]) and same_bits(want[1][order], got[1])
