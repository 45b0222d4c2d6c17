"""decode is right on every token: each case, on each backend, against the float64 oracle; the same
bits every time, nothing but the outputs written, and those to the last element."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, CORNER, CORRECTNESS, FN, FP32, LARGE, Case, make
from compare import check, out_dtype
from running import BACKENDS, bits, oracle, poisoned, run, same_bits, solved, threads

import mla_ops

CASES = CORRECTNESS + CORNER + LARGE
NEEDLES = [case for case in CASES if case.data == "needles"]
# A few that differ in all that matters to the way a result is written.
SOME = [
    Case(),
    Case(cache_dtype=FN, q_len=3, heads=5),
    Case(q_dtype=FP32, cache_dtype=FP32, rank=33, rope=7),
    Case(lengths=(0, 1, 700, 64, 5), q_len=2, heads=40, page_size=7),
    Case(lengths=(3000,), q_dtype=FN, cache_dtype=FN),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case: Case, backend: str) -> None:
    problem, want, want_lse = solved(case)
    out, lse = run(problem, backend)
    check(case, out, want, lse, want_lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", NEEDLES, ids=str)
def test_needles_win(case: Case, backend: str) -> None:
    """The output is the one row that every query asks for, wherever it lies."""
    problem = make(case)
    q, cache, table, lengths, _ = problem.arguments
    out, _ = run(problem, backend)
    scale = problem.options["kv_scale"]
    for b, needle in enumerate(problem.needles):
        if needle is None:
            continue
        assert needle < lengths[b]
        row = cache[int(table[b, needle // case.page_size]), needle % case.page_size].float()
        row = (row if scale is None else row * scale)[: case.rank]
        torch.testing.assert_close(out[b].float(), row.expand_as(out[b]), rtol=8e-3, atol=0.0)


def test_the_needles_lie_in_every_class_of_position() -> None:
    """First, last, both sides of a page's edge, the middle."""
    for case in NEEDLES:
        needles, last = make(case).needles, [n - case.q_len for n in case.lengths]
        assert needles[0] == 0 and needles[1] == last[1]
        assert needles[2] == case.page_size - 1 and needles[3] == case.page_size
        assert needles[4] == last[4] // 2


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_calls_give_the_same_bits(case: Case, backend: str) -> None:
    problem = make(case)
    first = run(problem, backend)
    for _ in range(2):
        again = run(problem, backend)
        assert same_bits(first[0], again[0]) and same_bits(first[1], again[1])


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_threads_is_right(case: Case, backend: str) -> None:
    problem, want, want_lse = solved(case)
    for count in (1, 2, 3):
        with threads(count):
            check(case, *_pairs(run(problem, backend), want, want_lse))


@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_plan_gives_the_same_bits_on_any_number_of_threads(case: Case) -> None:
    """The plan says how the work is cut; who does it does not matter."""
    problem = make(case)
    sizes = {"page_size": case.page_size, "num_heads": case.heads, "q_len": case.q_len}
    plan = mla_ops.plan(problem.seq_lens, problem.block_table, **sizes, workers=5)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(run(problem, plan=plan))
    assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_stay_as_they_are(case: Case, backend: str) -> None:
    problem = make(case)
    tensors = [*problem.arguments[:4], problem.options["q_scale"], problem.options["kv_scale"]]
    before = [None if x is None else bits(x).clone() for x in tensors]
    run(problem, backend)
    for old, new in zip(before, tensors, strict=True):
        assert old is None or torch.equal(old, bits(new))


@pytest.mark.parametrize("case", [*SOME, Case(lengths=(0, 0, 3), q_len=4)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_element_of_the_outputs_is_written(case: Case, backend: str) -> None:
    problem, want, want_lse = solved(case)
    out = poisoned(*want.shape, dtype=out_dtype(case))
    lse = poisoned(*want_lse.shape, dtype=FP32)
    got = run(problem, backend, out=out, lse=lse)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    check(case, *_pairs((out, lse), want, want_lse))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, -0.05, 1e-30])
def test_any_softmax_scale(backend: str, scale: float) -> None:
    """0 averages the rows, a negative one prefers the least similar."""
    case = Case(q_dtype=FP32, cache_dtype=BF16)
    problem = make(case)._replace(softmax_scale=scale)
    want, want_lse = oracle(problem)
    check(case, *_pairs(run(problem, backend), want, want_lse))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_far_beyond_the_range_of_exp(backend: str, sign: float) -> None:
    """Scores of thousands, all of one sign; exp of them overflows, or is 0 for the whole row."""
    case = Case(lengths=(300, 65, 1), q_dtype=FP32, cache_dtype=FP32, heads=4)
    problem = make(case)
    # Multiples of 1/8 and few of them different from 0: the scores are exact in float32.
    q = torch.zeros_like(problem.q)
    q[..., 0] = sign * 64.0
    cache = (problem.kv_cache * 8).round() / 8
    cache[..., 0] += 128.0
    problem = problem._replace(q=q, kv_cache=cache, softmax_scale=0.5)
    want, want_lse = oracle(problem)
    assert want_lse.abs().min() > 3000
    out, lse = run(problem, backend)
    check(case, out, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache_dtype", [BF16, FP32, FN])
def test_a_nan_that_is_visible_is_not_hidden(backend: str, cache_dtype: torch.dtype) -> None:
    """A broken cache must show, and in the sequence that has it only."""
    problem = make(Case(lengths=(100, 70), cache_dtype=cache_dtype, heads=3))
    page = int(problem.block_table[0, 1])
    problem.kv_cache[page, 7] = poisoned(576, dtype=cache_dtype)
    out, lse = run(problem, backend)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert not out[1].isnan().any() and not lse[1].isnan().any()


def _pairs(got: tuple, want: torch.Tensor, want_lse: torch.Tensor) -> tuple:
    """Arguments of `check`: out, its oracle, lse, its oracle."""
    return got[0], want, got[1], want_lse
