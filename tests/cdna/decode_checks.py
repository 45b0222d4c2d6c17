"""Checks of decode on AMD in the executor. Kernels may be those of a source with a mistake."""

from __future__ import annotations

import itertools

import torch
from cases import BF16, FN, FNUZ, FP16, HUGE, Case, Problem, make
from project import HARDWARE, Kernels
from project_decode import Call, Layout, Plan, check

from build_tools.cdna.schedule import Lockstep, RoundRobin

RAGGED = (0, 150, 64, 1, 37)
# The first and last tokens of tiles (16 or 32 tokens), of a round of four waves, of units (64).
BORDERS = (0, 15, 16, 31, 32, 47, 48, 63, 64, 127, 128, 129)


def cache_types(kernels: Kernels) -> tuple[torch.dtype, ...]:
    return BF16, FP16, HARDWARE[kernels.arch]


def case(cache: torch.dtype, **options: object) -> Case:
    """With the query's type of the cache's width."""
    options.setdefault("q_dtype", FP16 if cache == FP16 else BF16)
    options.setdefault("lengths", RAGGED)
    return Case(cache_dtype=cache, **options)  # type: ignore[arg-type]


def run(kernels: Kernels, problem: Case | Problem, *arguments: object, **options: object) -> Call:
    """Decode and compare with the oracle."""
    made = make(problem) if isinstance(problem, Case) else problem
    call = Call(kernels, made, *arguments, **options).run()  # type: ignore[arg-type]
    check(call)
    return call


def check_types(kernels: Kernels) -> None:
    """All pairs of query and cache that are served; with and without lse."""
    float8 = HARDWARE[kernels.arch]
    for q, cache in (
        *((q, BF16) for q in (BF16, FN, FNUZ)),
        *((q, FP16) for q in (FP16, BF16, FN, FNUZ)),
        *((q, float8) for q in (BF16, FP16, FN, FNUZ)),
    ):
        run(kernels, case(cache, q_dtype=q, page_size=16), with_lse=q == BF16)


def check_rows(kernels: Kernels, cache: torch.dtype) -> None:
    """Heads, query tokens and pages; rows that fill no matrix tile, and several."""
    for heads, q_len, page in ((1, 3, 7), (5, 1, 1), (16, 3, 16), (40, 1, 64)):
        run(kernels, case(cache, heads=heads, q_len=q_len, page_size=page, lengths=(0, 90, 1, 21)))
    run(kernels, case(cache, heads=40, q_len=3, lengths=(2, 40)), Plan(1))
    run(kernels, case(cache, heads=5, q_len=8, lengths=(5, 2, 40), causal=False), Plan(1))


def check_plans(kernels: Kernels, cache: torch.dtype) -> None:
    """Sequences whole and cut, workers without work, pieces that a row does not see."""
    lengths = (0, 130, 2, 65)
    for plan in (Plan(4, 16), Plan(16), Plan(1), Plan(3, 64, fixed_split=True)):
        run(kernels, case(cache, lengths=lengths, q_len=3, heads=3, page_size=16), plan)
    # More pieces than one group of threads merges.
    run(kernels, case(cache, lengths=(200,), heads=5), Plan(12, 16))


def check_batch_invariance(kernels: Kernels, cache: torch.dtype) -> None:
    """With a fixed split a sequence has the same bits alone, with others and with other workers."""
    problem = make(case(cache, lengths=(40, 200, 3), page_size=16))
    alone = problem._replace(
        q=problem.q[1:2],
        block_table=problem.block_table[1:2],
        seq_lens=problem.seq_lens[1:2],
    )
    several = run(kernels, problem, Plan(3, 64, fixed_split=True))
    one = run(kernels, alone, Plan(5, 64, fixed_split=True))
    assert torch.equal(several.results()[0][1], one.results()[0][0])
    assert torch.equal(several.lse[1], one.lse[0])


def check_widths(kernels: Kernels, cache: torch.dtype) -> None:
    """Rows that are not 576 numbers, not whole units, shorter than one; gaps and any alignment."""
    whole = 16 // cache.itemsize
    for rank, rope, layout in (
        (512, 64, Layout(whole, whole)),
        (512, 64, Layout(1, 1)),
        (500, 76, Layout()),
        (256, 32, Layout()),
        (512, 0, Layout()),
        (129, 0, Layout(2, 3)),
        (333, 7, Layout(0, 1)),
        (3, 2, Layout(1, 1)),
        (1, 0, Layout()),
    ):
        # Few numbers, or ones that cancel, do not average their roundings: see compare.py.
        data = "normal" if rank > 250 else "shifted" if rank > 16 else "flat"
        run(
            kernels,
            case(cache, rank=rank, rope=rope, lengths=(50, 0, 3), data=data),
            Plan(2),
            layout,
        )


def with_needles(problem: Problem, places: tuple[int, ...]) -> Problem:
    """In every sequence one row that has all the weight."""
    raw = problem.kv_cache.view(torch.uint8)
    page = problem.kv_cache.shape[1]
    for b, place in enumerate(places):
        at = int(problem.block_table[b, place // page]), place % page
        signs = torch.where(torch.randn(problem.q.shape[-1]) < 0, -1.0, 1.0)
        raw[at] = (signs * 2).to(problem.kv_cache.dtype).view(torch.uint8)
        problem.q[b] = signs.to(problem.q.dtype)
    options = dict(problem.options, kv_scale=None)
    return problem._replace(softmax_scale=0.1, options=options)


def check_needles(kernels: Kernels, cache: torch.dtype) -> None:
    """At every border there is. All the weight on one token: its row comes out, to the bit."""
    torch.manual_seed(1)
    count = len(BORDERS)
    problem = make(case(cache, lengths=(BORDERS[-1] + 1,) * count, heads=2, page_size=16))
    raw = problem.kv_cache.view(torch.uint8)
    plain = torch.randn(problem.kv_cache.shape).clamp(-3, 3).to(cache).view(torch.uint8)
    problem.kv_cache.view(torch.uint8)[:] = torch.where(
        problem.kv_cache.isnan().any(-1)[..., None], raw, plain
    )
    call = run(kernels, with_needles(problem, BORDERS), Plan(7, 16))
    out, _ = call.results()
    for b, place in enumerate(BORDERS):
        row = problem.kv_cache[int(problem.block_table[b, place // 16]), place % 16, :512]
        assert torch.equal(out[b].float(), row.float().expand(1, 2, 512)), place


def check_reference(kernels: Kernels, cache: torch.dtype) -> None:
    """Scores that grow along the sequence move what weights are relative to, again and again; and
    sharp ones, all of one sign.
    """
    problem = make(case(cache, lengths=(300, 90), heads=5))
    run(kernels, problem._replace(softmax_scale=0.4), Plan(1))
    growing = make(case(cache, lengths=(320,), heads=5, page_size=320, data="flat", extra_pages=0))
    page = int(growing.block_table[0, 0])
    rows = torch.randn(320, 576) * 0.3 + torch.linspace(0, 3, 320)[:, None]
    growing.kv_cache[page] = rows.to(cache)
    growing.q[:] = 1 + growing.q * 0.1
    options = dict(growing.options, kv_scale=None)
    run(kernels, growing._replace(softmax_scale=0.1, options=options), Plan(1))


def check_equal_values(kernels: Kernels, cache: torch.dtype) -> None:
    """Where all rows have the same values, they come out whatever the weights were rounded to: in
    the float32 of partial results, to float32's precision.
    """
    problem = make(case(cache, lengths=(150,), heads=5, page_size=16, extra_pages=0))
    problem.kv_cache.view(torch.uint8)[:] = torch.ones_like(problem.kv_cache).view(torch.uint8)
    rope = torch.randn(*problem.kv_cache.shape[:2], 64).clamp(-3, 3).to(cache)
    problem.kv_cache.view(torch.uint8)[..., -64 * cache.itemsize :] = rope.view(torch.uint8)
    options = dict(problem.options, kv_scale=None)
    call = run(
        kernels, problem._replace(options=options, softmax_scale=0.3), Plan(1, fixed_split=True)
    )
    parts = call.partials[: call.slots * 5 * 512].reshape(-1, 512)[: 3 * 5]
    assert (parts - 1).abs().max() < 1e-6


def check_long_tail(kernels: Kernels, cache: torch.dtype) -> None:
    """One token far above many: together the many count, though each has a weight that e4m3 would
    make 0.
    """
    length = 2048
    problem = make(case(cache, lengths=(length,), heads=1, page_size=length, extra_pages=0))
    page = int(problem.block_table[0, 0])
    rows = torch.ones(length, 576)
    rows[:, 512:] = 0
    rows[0, :512] = -1
    rows[0, 512:] = 1
    problem.kv_cache[page] = rows.to(cache)
    problem.q[:] = 0
    problem.q[..., 512:] = 1
    options = dict(problem.options, kv_scale=None)
    # 64 * scale above the others: 15.5 powers of two.
    scale = 15.5 * 0.6931472 / 64
    run(kernels, problem._replace(softmax_scale=scale, options=options), Plan(1))


def check_magnitudes(kernels: Kernels, cache: torch.dtype) -> None:
    """Query rows far from 1, each in its own way, and of zeros."""
    problem = make(case(cache, lengths=(70, 9), heads=16, q_dtype=BF16))
    powers = torch.tensor([0, 20, -20, 60, -60, 100, -100, 5] * 2)
    up = torch.exp2(powers.double()).reshape(16, 1)
    q = (problem.q.double() * up).to(BF16)
    q[:, :, 7] = 0
    for power in (0, 20, -20, 60, -60, 100, -100):
        one = q.clone()
        one[:, :, powers != power] = 0
        run(kernels, problem._replace(q=one, softmax_scale=2.0**-power / 24), Plan(1))


# What cannot be right is NaN, the other sequences are right, and nothing is touched that was not to
# be read: unused pages are NaN, and memory has bounds.


def some_sequences(cache: torch.dtype) -> Problem:
    # The table has room for 176 tokens, within a unit; it ends with the last sequence's pages.
    return make(case(cache, lengths=(150, 40, 70, 0, 33), page_size=16, heads=5, extra_pages=1))


def check_bad_pages(kernels: Kernels, cache: torch.dtype) -> None:
    problem = some_sequences(cache)
    plans = itertools.cycle((Plan(4, 16), Plan(1)))
    for column, page in ((5, problem.kv_cache.shape[0]), (0, -1), (9, HUGE), (3, -HUGE - 1)):
        call = Call(kernels, problem, next(plans))
        call.table[0, column] = page
        check(call.run(), but=(0,))


def check_no_pages(kernels: Kernels, cache: torch.dtype) -> None:
    call = Call(kernels, some_sequences(cache))
    call.pages, call.cache = 0, call.cache[:0]
    check(call.run(), but=(0, 1, 2, 4))


def check_bad_lengths(kernels: Kernels, cache: torch.dtype) -> None:
    problem = some_sequences(cache)
    plans = itertools.cycle((Plan(1), Plan(4, 16)))
    for length in (problem.block_table.shape[1] * 16 + 1, -1, HUGE):
        call = Call(kernels, problem, next(plans))
        call.lengths[4] = length
        check(call.run(), but=(4,))


def check_stale_plans(kernels: Kernels, cache: torch.dtype) -> None:
    """Made for lengths that have other numbers of units: every one shorter, every one longer."""
    for lengths, wrong in (((1, 1, 1, 0, 1), (0, 2)), ((150, 170, 70, 0, 90), (1, 4))):
        call = Call(kernels, some_sequences(cache), Plan(3, 64, lengths=lengths))
        check(call.run(), but=wrong)


def check_schedules(kernels: Kernels, cache: torch.dtype) -> None:
    """The same bits in any order of the waves."""
    problem = make(case(cache, lengths=(90, 0, 33), page_size=7, heads=5))
    want = run(kernels, problem, Plan(2), schedule=Lockstep())
    for schedule in (RoundRobin(1), RoundRobin(40, 1), RoundRobin(300, 2), RoundRobin(100_000)):
        got = run(kernels, problem, Plan(2), schedule=schedule)
        assert torch.equal(got.out.view(torch.uint8), want.out.view(torch.uint8)), schedule
        assert torch.equal(got.lse, want.lse), schedule
