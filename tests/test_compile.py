"""torch.compile(fullgraph=True): few graphs, the same bits, no copy of the cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import FN, Case, Problem, make
from running import same_bits
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mla_ops

SMALL = Case(rank=64, rope=16, heads=3, page_size=16)
SHAPE = {"rank": 64, "rope": 16, "heads": 3, "page_size": 16}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(size: int, seed: int = 0, q_len: int = 1, **changes: Any) -> Problem:
    """A problem of this batch, with a pool and a table of one size whatever the lengths."""
    lengths = tuple((37 * (b + 1 + seed)) % 128 for b in range(size))
    problem = make(Case(lengths=lengths, seed=seed, q_len=q_len, **SHAPE, **changes))
    table = torch.zeros(size, 8, dtype=torch.int32)
    table[:, : problem.block_table.shape[1]] = problem.block_table[:, :8]
    in_use = torch.arange(8) * 16 < problem.seq_lens[:, None]
    pool = torch.zeros(100, 16, 80, dtype=problem.kv_cache.dtype)
    pool[: len(problem.kv_cache)] = problem.kv_cache[:100]
    return problem._replace(kv_cache=pool, block_table=torch.where(in_use, table, -1))


def with_options(problem: Problem, **more: Any) -> Tensor | tuple[Tensor, Tensor]:
    return mla_ops.decode(*problem.arguments, **problem.options, **more)


def plain(problem: Problem) -> Any:
    return with_options(problem)


def with_lse(problem: Problem) -> Any:
    return with_options(problem, return_lse=True)


def into_buffers(problem: Problem) -> Any:
    out = problem.q.new_full((*problem.q.shape[:3], 64), -7.0)
    lse = problem.q.new_full(problem.q.shape[:3], -7.0, dtype=torch.float32)
    with_options(problem, out=out, lse=lse, return_lse=True)
    return out, lse


def planned(problem: Problem) -> Any:
    """The plan is made in the graph too."""
    q_len, heads = problem.q.shape[1:3]
    sizes = {"page_size": 16, "num_heads": heads, "q_len": q_len, "workers": 3}
    plan = mla_ops.plan(problem.seq_lens, problem.block_table, **sizes)
    return with_options(problem, plan=plan)


def invariant(problem: Problem) -> Any:
    sizes = {"page_size": 16, "num_heads": problem.q.shape[2], "q_len": problem.q.shape[1]}
    plan = mla_ops.plan(
        problem.seq_lens, problem.block_table, **sizes, batch_invariant=True, split_tokens=32
    )
    return with_options(problem, plan=plan, return_lse=True)


WAYS = (plain, with_lse, into_buffers, planned, invariant)


def same_results(got: Any, want: Any) -> bool:
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    return all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_few_graphs_for_all_batches_and_the_bits_of_eager(way: Callable[[Problem], Any]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(way, backend=counter, fullgraph=True)
    for size in (2, 3, 5, 8, 1, 7):
        problem = batch(size)
        assert same_results(compiled(problem), way(problem))
    assert counter.frame_count <= 3
    graphs = counter.frame_count
    for size in (2, 5, 1):
        for seed in (1, 2):
            problem = batch(size, seed)
            assert same_results(compiled(problem), way(problem))
    assert counter.frame_count == graphs, "other lengths and tables made another graph"


@pytest.mark.parametrize("way", (plain, into_buffers, planned), ids=lambda way: way.__name__)
@pytest.mark.parametrize("cache", (torch.bfloat16, FN), ids=str)
def test_query_tokens_and_float8(way: Callable[[Problem], Any], cache: torch.dtype) -> None:
    compiled = torch.compile(way, backend="aot_eager", fullgraph=True)
    for q_len in (1, 4):
        problem = batch(3, q_len=q_len, cache_dtype=cache)
        assert same_results(compiled(problem), way(problem))


def test_a_plan_from_outside_is_refreshed_without_a_new_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(problem: Problem, plan: mla_ops.DecodePlan) -> Tensor:
        plan.update_(problem.seq_lens, problem.block_table)
        return with_options(problem, plan=plan)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    first = batch(4)
    plan = mla_ops.plan(first.seq_lens, first.block_table, page_size=16, num_heads=3)
    for seed in range(3):
        problem = batch(4, seed)
        assert same_results(compiled(problem, plan), plain(problem))
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode), ids=lambda m: m.__name__)
def test_without_gradients(mode: Any) -> None:
    problem = batch(2)
    want = plain(problem)
    with mode():
        assert same_results(plain(problem), want)
        assert same_results(
            torch.compile(plain, backend="aot_eager", fullgraph=True)(problem), want
        )
        assert same_results(into_buffers(problem)[0], want)


def test_backward_raises() -> None:
    problem = batch(2)
    q = problem.q.clone().requires_grad_()
    for way in (plain, torch.compile(plain, backend="eager", fullgraph=True)):
        out = way(problem._replace(q=q))
        assert out.requires_grad
        with pytest.raises(RuntimeError, match="mla::decode is not implemented"):
            out.sum().backward()
    # aot_autograd traces the backward, and meets the error, when it compiles.
    with pytest.raises(RuntimeError, match="mla::decode is not implemented"):
        torch.compile(plain, backend="aot_eager", fullgraph=True)(problem._replace(q=q))
    assert q.grad is None


def test_the_cache_written_in_a_graph_is_the_callers() -> None:
    def write(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        mla_ops.write_kv_cache(kv_c, k_pe, cache, slots)
        return cache[0, 0].clone()  # after the write

    kv_c, k_pe, slots = torch.randn(3, 8), torch.randn(3, 4), torch.tensor([0, 7, -1])
    want = torch.zeros(2, 4, 12)
    row = write(kv_c, k_pe, want, slots)
    assert torch.equal(row, torch.cat((kv_c[0], k_pe[0])))
    for backend in ("eager", "aot_eager"):
        cache = torch.zeros(2, 4, 12)
        got = torch.compile(write, backend=backend, fullgraph=True)(kv_c, k_pe, cache, slots)
        assert torch.equal(cache, want) and torch.equal(got, row)


@pytest.mark.slow
def test_inductor_copies_no_cache() -> None:
    from torch._inductor.utils import run_and_get_code

    def step(problem: Problem, kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        scale = problem.options["kv_scale"]
        mla_ops.write_kv_cache(kv_c * 2, k_pe, problem.kv_cache, slots, scale)
        out = with_options(problem)
        return (out + 1, *mla_ops.quantize_fp8(out))

    tokens = torch.randn(3, 64).bfloat16(), torch.randn(3, 16).bfloat16(), torch.tensor([9, -1, 3])
    problem = batch(3, cache_dtype=FN)
    copy = problem._replace(kv_cache=problem.kv_cache.clone())
    want = step(problem, *tokens)
    got, code = run_and_get_code(torch.compile(step, fullgraph=True), copy, *tokens)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    raw = torch.uint8
    assert torch.equal(copy.kv_cache.view(raw), problem.kv_cache.view(raw))
    [source] = code
    for op in ("write_kv_cache", "decode", "quantize_fp8"):
        assert f"torch.ops.mla.{op}.default(" in source, op
    # No buffer of the cache's shape is made, and none is copied from or to it.
    assert "(100, 16, 80)" in source
    made = re.findall(r"empty_strided\w*\(\((\d+), 16, 80\)", source)
    assert not made and not re.search(r"\.clone\(|\.copy_\(", source), source
