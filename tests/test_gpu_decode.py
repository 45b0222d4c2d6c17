"""decode, plan and the merging of pieces on a card: every case that the native kernel takes against
the oracle, plans, graphs, compiled functions, streams, and what becomes of tables that lie."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, CORNER, CORRECTNESS, FN, FNUZ, FP16, LARGE, Case, Problem, make
from compare import check
from mutants import MUTANTS, Mutant, rejects
from running import oracle, same_bits
from torch import Tensor

import mla_ops
from mla_ops import _C

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.skipif(
        not _C.build_info()["gpu_architectures"], reason="built without GPU kernels (torch's kind)"
    ),
]

DEVICE = "cuda"


def is_native(case: Case) -> bool:
    return mla_ops.supports(
        q_dtype=case.q_dtype,
        cache_dtype=case.cache_dtype,
        heads=case.heads,
        q_len=case.q_len,
        page_size=case.page_size,
        kv_lora_rank=case.rank,
        rope=case.rope,
        causal=case.causal,
        backend="native",
    )


MANY = [
    Case(lengths=(700, 0, 1, 5000, 64, 63, 65, 2000), cache_dtype=c, heads=h, q_len=s, page_size=p)
    for c in (BF16, FP16, FN, FNUZ)
    for h, s in ((16, 1), (16, 2), (40, 1), (128, 1), (5, 3))
    for p in (1, 16, 64)
]
CASES = [
    case
    for case in (*CORRECTNESS, *CORNER, *LARGE, *MANY)
    if torch.cuda.is_available() and is_native(case)
]
SOME = [
    Case(lengths=(700, 0, 1, 5000, 64, 63, 65, 2000)),
    Case(lengths=(700, 0, 1, 5000, 64, 63, 65, 2000), cache_dtype=FN),
    Case(lengths=(3000, 17), cache_dtype=FN, heads=40, q_len=2, page_size=16),
    Case(lengths=(100, 900), rank=96, rope=40, cache_dtype=FN, data="shifted"),
    Case(lengths=(100, 900), rank=33, rope=7, data="shifted"),
    Case(lengths=(4000,) * 3, q_dtype=FN, cache_dtype=FN, q_len=4),
]


def on_card(problem: Problem) -> Problem:
    move = lambda x: x.to(DEVICE) if isinstance(x, Tensor) else x  # noqa: E731
    options = {name: move(value) for name, value in problem.options.items()}
    return Problem(*map(move, problem.arguments), options, problem.needles)


def run(problem: Problem, **more: object) -> tuple[Tensor, Tensor]:
    options = {**problem.options, **more}
    return mla_ops.decode(*problem.arguments, **options, return_lse=True, backend="native")


def plan_for(problem: Problem, **more: object) -> mla_ops.DecodePlan:
    q, cache, table, lengths, _ = problem.arguments
    sizes = {"page_size": cache.shape[1], "num_heads": q.shape[2], "q_len": q.shape[1]}
    return mla_ops.plan(lengths, table, **sizes, **more)


def test_native_serves_most_of_the_suite() -> None:
    assert len(CASES) > 150


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case: Case) -> None:
    problem = make(case)
    want, want_lse = oracle(problem)
    out, lse = run(on_card(problem))
    check(case, out.cpu(), want, lse.cpu(), want_lse)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_judgement_sees_each_mutant(mutant: Mutant) -> None:
    case = next(case for case in CASES if mutant.applies(case))
    problem = make(case)
    assert rejects(case, mutant.decode, problem, *oracle(problem))


@pytest.mark.parametrize("workers", (1, 2, 7, 132, 1000))
@pytest.mark.parametrize("case", SOME, ids=str)
def test_any_plan_is_right(case: Case, workers: int) -> None:
    problem = make(case)
    want, want_lse = oracle(problem)
    problem = on_card(problem)
    plan = plan_for(problem, workers=workers)
    out, lse = run(problem, plan=plan)
    check(case, out.cpu(), want, lse.cpu(), want_lse)
    for _ in range(2):
        again = run(problem, plan=plan)
        assert same_bits(out, again[0]) and same_bits(lse, again[1])


@pytest.mark.parametrize("batch", (0, 1, 5, 256, 5000))
def test_plans_are_those_of_the_cpu(batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 3000, (batch,), generator=generator, dtype=torch.int32)
    table = torch.zeros(batch, 3000 // 16, dtype=torch.int32)
    for unit in ({"batch_invariant": True}, {}):
        sizes = {"page_size": 16, "num_heads": 16, "workers": 100, **unit}
        want = mla_ops.plan(lengths, table, **sizes)
        got = mla_ops.plan(lengths.to(DEVICE), table.to(DEVICE), **sizes)
        assert torch.equal(got.tensor.cpu(), want.tensor)


@pytest.mark.parametrize("cache", (BF16, FN))
def test_batch_invariant(cache: torch.dtype) -> None:
    """The same bits alone, in a batch of 64, and at another place in it."""
    lengths = tuple(37 * i % 4000 + 1 for i in range(64))
    case = Case(lengths=lengths, cache_dtype=cache, data="shifted", page_size=16)
    problem = on_card(make(case))
    q, kv, table, lens, scale = problem.arguments

    def decode(rows: list[int]) -> Tensor:
        part = problem._replace(q=q[rows], block_table=table[rows], seq_lens=lens[rows])
        return run(part, plan=plan_for(part, batch_invariant=True))[0]

    together = decode(list(range(64)))
    backwards = decode(list(range(63, -1, -1)))
    assert same_bits(together, backwards.flip(0))
    for i in (0, 5, 33, 63):
        assert same_bits(decode([i])[0], together[i])


@pytest.mark.parametrize("case", SOME, ids=str)
def test_replayed_with_other_lengths(case: Case) -> None:
    """1,000 replays of one graph, plan included, with lengths that change: eager's bits."""
    problem = on_card(make(case))
    q, cache, table, lengths, _ = problem.arguments
    table.clamp_(max=cache.shape[0] - 1)
    cache.view(torch.uint8).bitwise_and_(0x3B if cache.element_size() == 1 else 0x3F)  # no NaN
    most, lens = lengths.clone(), lengths
    plan = plan_for(problem)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(problem, plan=plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            plan.update_(lens, table)
            out, lse = run(problem, plan=plan)
        generator = torch.Generator(device=DEVICE).manual_seed(1)
        for i in range(1000):
            part = torch.rand(most.shape, generator=generator, device=DEVICE)
            lens.copy_((part * (most + 1)).int().clamp(max=most))
            out.fill_(torch.nan)
            graph.replay()
            if i % 25 == 0:
                want = run(problem, plan=plan_for(problem))
                assert same_bits(out, want[0]) and same_bits(lse, want[1])
                assert not out.isnan().any()


@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
@pytest.mark.parametrize("case", SOME[:3], ids=str)
def test_compiled(case: Case, mode: str | None) -> None:
    problem = on_card(make(case))
    q, cache, table, lengths, scale = problem.arguments
    plan = plan_for(problem)
    for tensor in (cache, plan.tensor):
        torch._dynamo.mark_static_address(tensor)

    @torch.compile(fullgraph=True, mode=mode)
    def step(q: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        options = {**problem.options, "plan": plan, "return_lse": True, "backend": "native"}
        out, lse = mla_ops.decode(q * 1.0, cache, table, lengths, scale, **options)
        return out + 0.0, lse + 0.0

    want = run(problem, plan=plan)
    for _ in range(4):
        got = step(q, table, lengths)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_two_streams_at_once() -> None:
    problems = [on_card(make(case)) for case in SOME[:2]]
    want = [run(problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    got: list[tuple[Tensor, Tensor]] = []
    for _ in range(20):
        for problem, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run(problem))
    torch.cuda.synchronize()
    for i, (out, lse) in enumerate(got):
        assert same_bits(out, want[i % 2][0]) and same_bits(lse, want[i % 2][1])


def good_and_bad(case: Case) -> tuple[Problem, Tensor]:
    problem = on_card(make(case))
    return problem, run(problem)[0]


@pytest.mark.parametrize("page", (-1, 1 << 20, 0x7FFFFFFF))
@pytest.mark.parametrize("case", SOME[:3], ids=str)
def test_a_page_that_is_none_makes_nan_of_its_sequence_alone(case: Case, page: int) -> None:
    problem, want = good_and_bad(case)
    bad = problem.block_table.clone()
    bad[0, 3] = page
    out, lse = run(problem._replace(block_table=bad))
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert same_bits(out[1:], want[1:])


@pytest.mark.parametrize("length", (-1, 1 << 30))
def test_a_length_that_cannot_be_makes_nan_of_its_sequence_alone(length: int) -> None:
    problem, want = good_and_bad(SOME[1])
    bad = problem.seq_lens.clone()
    bad[3] = length
    out, lse = run(problem._replace(seq_lens=bad))
    assert out[3].isnan().all() and lse[3].isnan().all()
    rest = [0, 1, 2, 4, 5, 6, 7]
    torch.testing.assert_close(out[rest], want[rest], rtol=2e-2, atol=1e-3)


def test_a_plan_of_other_lengths_makes_nan() -> None:
    """Tokens would be left out without a word."""
    problem, want = good_and_bad(SOME[0])
    plan = plan_for(problem)
    longer = problem.seq_lens.clone()
    longer[2] = 3000
    problem.block_table.clamp_(max=problem.kv_cache.shape[0] - 1)
    out, _ = run(problem._replace(seq_lens=longer), plan=plan)
    assert out[2].isnan().all()
    rest = [0, 1, 3, 4, 5, 6, 7]
    torch.testing.assert_close(out[rest], want[rest], rtol=2e-2, atol=1e-3)


def test_views_and_outputs_with_strides() -> None:
    case = Case(lengths=(300, 1000), q_len=2, cache_dtype=FN)
    problem = make(case)
    want, want_lse = oracle(problem)
    q, cache, table, lengths, scale = on_card(problem).arguments
    wide = torch.full((2, 3, 17, 600), torch.nan, dtype=BF16, device=DEVICE)
    wide[:, 1:, :16, 8:584] = q
    padded = torch.full((cache.shape[0], 1, 64, 592), 0x7F, dtype=torch.uint8, device=DEVICE)
    padded[:, 0, :, :576] = cache.view(torch.uint8)
    paged = padded.view(FN)[:, 0, :, None, :576]
    out = torch.full((2, 2, 16, 520), torch.nan, dtype=BF16, device=DEVICE)
    lse = torch.full((2, 2, 20), torch.nan, device=DEVICE)
    options = on_card(problem).options
    mla_ops.decode(
        wide[:, 1:, :16, 8:584],
        paged,
        table,
        lengths,
        scale,
        **options,
        out=out[..., 3:515],
        lse=lse[..., :16],
        return_lse=True,
        backend="native",
    )
    check(case, out[..., 3:515].cpu(), want, lse[..., :16].cpu(), want_lse)
    assert out[..., :3].isnan().all() and out[..., 515:].isnan().all()
    assert lse[..., 16:].isnan().all()


@pytest.mark.parametrize("cache", (BF16, FN))
def test_beyond_four_gib(cache: torch.dtype) -> None:
    case = Case(lengths=(500, 200), cache_dtype=cache)
    problem = make(case)
    want, want_lse = oracle(problem)
    card = on_card(problem)
    pages = (5 << 30) // (64 * 576 * cache.itemsize)
    pool = torch.empty(pages, 64, 576, dtype=cache, device=DEVICE)
    far = torch.arange(pages - card.kv_cache.shape[0], pages, device=DEVICE)
    pool.view(torch.uint8)[far] = card.kv_cache.view(torch.uint8)
    table = (card.block_table.long() + int(far[0])).clamp(max=0x7FFFFFFF).int()
    out, lse = run(card._replace(kv_cache=pool, block_table=table))
    check(case, out.cpu(), want, lse.cpu(), want_lse)
