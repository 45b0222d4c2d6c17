"""Context parallel decode against one oracle over the whole cache: in gloo processes, and with all
ranks in one process for what does not need them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import BF16, FN, FP32, Case, Problem, make
from compare import check
from running import oracle
from torch import Tensor

import mla_ops
from mla_ops import distributed
from mla_ops.distributed import context_parallel_decode, merge_partials, shard_seq_lens

INF = torch.inf
WORLDS = (1, 2, 3, 4)
SMALL = Case(
    lengths=(0, 1, 2, 3, 7, 64, 65, 150),
    heads=3,
    page_size=8,
    rank=64,
    rope=16,
    q_dtype=FP32,
    cache_dtype=FP32,
)
CASES = [
    SMALL,
    replace(SMALL, q_len=3),
    replace(SMALL, q_len=3, causal=False),
    replace(SMALL, q_len=3, lengths=(0, 0)),
    replace(SMALL, lengths=()),
    replace(SMALL, rank=256, rope=32, q_len=3, q_dtype=BF16, cache_dtype=BF16),
    replace(SMALL, cache_dtype=FN, q_len=3, data="shifted"),
]
INTERLEAVES = (1, 16, SMALL.page_size)
CALLS = list(itertools.product(CASES, INTERLEAVES))


def share(case: Case, world: int, rank: int, interleave: int) -> Problem:
    """A rank's own cache and table, NaN and huge numbers where it may not look; whole lengths."""
    whole = make(case)
    held = [
        [p for p in range(length) if p // interleave % world == rank] for length in case.lengths
    ]
    mine = make(replace(case, lengths=tuple(map(len, held))))
    page = case.page_size
    codes = whole.kv_cache.view(torch.uint8), mine.kv_cache.view(torch.uint8)
    for b, tokens in enumerate(held):
        for j, p in enumerate(tokens):
            row = codes[0][whole.block_table[b, p // page], p % page]
            codes[1][mine.block_table[b, j // page], j % page] = row
    return whole._replace(kv_cache=mine.kv_cache, block_table=mine.block_table)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=max(WORLDS),
        timeout=timedelta(seconds=60),
    )
    for world in WORLDS:
        group = None if world == max(WORLDS) else dist.new_group(list(range(world)))
        if rank >= world:
            continue
        results = []
        for case, interleave in CALLS:
            given = share(case, world, rank, interleave)

            arguments = (*given.arguments, group, interleave)
            options = {"return_lse": True, **given.options}
            calls = [context_parallel_decode] * 2
            if interleave == 1 and case in CASES[:2]:
                torch._dynamo.reset()  # else dynamo counts the groups as reasons to give up
                calls.append(
                    torch.compile(context_parallel_decode, fullgraph=True, backend="aot_eager")
                )
            results.append([call(*arguments, **options) for call in calls])
        torch.save(results, f"{folder}/{world}-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gloo")
    torch.multiprocessing.spawn(worker, (str(path),), nprocs=max(WORLDS))
    return path


@pytest.mark.parametrize("world", WORLDS)
def test_processes_agree_with_one_oracle_and_with_each_other(folder: Path, world: int) -> None:
    """To the bit: with each other, when repeated, and compiled."""
    ranks = [torch.load(folder / f"{world}-{rank}") for rank in range(world)]
    for (case, _), *of_ranks in zip(CALLS, *ranks, strict=True):
        out, lse = of_ranks[0][0]
        check(case, out, *_wanted(case, lse))
        for results in of_ranks:
            for again, lse_again in results:
                assert torch.equal(out, again) and torch.equal(lse, lse_again)


def _wanted(case: Case, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    want, want_lse = oracle(make(case))
    return want, lse, want_lse


Shard = Callable[..., Tensor]
Merge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def simulated(case: Case, world: int, interleave: int, merge: Merge) -> tuple[Tensor, Tensor]:
    """All ranks, one after the other."""
    parts = []
    for rank in range(world):
        given = share(case, world, rank, interleave)
        parts.append(
            distributed._partial(*given.arguments, world, rank, interleave, **given.options)
        )
    return merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))


def mean(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.mean(0), lses.logsumexp(0)


def base_two(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    weights = (lses - lses.amax(0).clamp(min=-1e30)).exp2()
    out = (outs * weights[..., None]).sum(0) / weights.sum(0).clamp(min=1e-30)[..., None]
    return out, lses.logsumexp(0)


def last_rank_lost(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return merge_partials(outs[:-1], lses[:-1])


def not_normalised(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return (outs * (lses - lses.amax(0).clamp(min=-1e30)).exp()[..., None]).sum(0), lses.logsumexp(
        0
    )


def largest_lse(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return merge_partials(outs, lses)[0], lses.amax(0)


def empties_not_masked(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    weights = (lses - lses.logsumexp(0)).exp()
    return (outs * weights[..., None]).sum(0), lses.logsumexp(0)


MUTANTS = [mean, base_two, last_rank_lost, not_normalised, largest_lse, empties_not_masked]


def rejected(case: Case, merge: Merge) -> bool:
    out, lse = simulated(case, 3, 1, merge)
    try:
        check(case, out, *_wanted(case, lse))
    except AssertionError:
        return True
    return False


def test_the_right_merge_is_not_rejected() -> None:
    assert not any(rejected(case, merge_partials) for case in CASES)


@pytest.mark.parametrize("merge", MUTANTS, ids=lambda m: m.__name__)
def test_wrong_merges_are_caught(merge: Merge) -> None:
    assert rejected(SMALL, merge)


def cut_off_the_share(seq_lens: Tensor, world: int, rank: int, each: int, q_len: int) -> Tensor:
    behind = torch.arange(q_len - 1, -1, -1, dtype=torch.int32)
    share = shard_seq_lens(seq_lens, world, rank, each)
    return (share[:, None] - behind).clamp(min=0).flatten()


def cut_not_at_all(seq_lens: Tensor, world: int, rank: int, each: int, q_len: int) -> Tensor:
    return shard_seq_lens(seq_lens, world, rank, each).repeat_interleave(q_len)


@pytest.mark.parametrize("shard", [cut_off_the_share, cut_not_at_all], ids=lambda s: s.__name__)
def test_wrong_cuts_are_caught(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "shard_seq_lens", shard)
    assert rejected(CASES[1], merge_partials)


@pytest.mark.parametrize("q_len", [1, 3, 8])
@pytest.mark.parametrize("interleave", [1, 5, 16, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_lengths_are_those_of_counting(world: int, interleave: int, q_len: int) -> None:
    lengths = torch.arange(300, dtype=torch.int32)
    for rank in range(world):
        held = torch.arange(300) // interleave % world == rank
        before = torch.cat((torch.zeros(1), held.cumsum(0)))
        seen = (lengths[:, None] - torch.arange(q_len - 1, -1, -1)).clamp(min=0)
        got = shard_seq_lens(lengths, world, rank, interleave, q_len)
        assert got.dtype == torch.int32
        assert torch.equal(got, before[seen].flatten().int())


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_parts_that_saw_nothing_may_hold_anything(dtype: torch.dtype) -> None:
    """A single part that saw something comes back to the bit."""
    outs = torch.full((3, 4, 5), torch.nan, dtype=dtype)
    lses = torch.tensor([-INF, INF, -INF])[:, None].repeat(1, 4)
    outs[1, :2] = torch.randn(2, 5).to(dtype)
    lses[1, :2] = torch.tensor([3.0, -2000.0])
    out, lse = merge_partials(outs, lses)
    assert torch.equal(out[:2], outs[1, :2]) and torch.equal(lse[:2], lses[1, :2])
    assert out[2:].eq(0).all() and lse[2:].eq(-INF).all()


def test_a_nan_that_has_weight_is_not_hidden() -> None:
    outs, lses = torch.zeros(2, 2, 4), torch.zeros(2, 2)
    outs[0, 0, 1], lses[1, 1] = torch.nan, torch.nan
    out, lse = merge_partials(outs, lses)
    assert out[0].isnan().tolist() == [False, True, False, False]
    assert out[1].isnan().all() and lse.isnan().tolist() == [False, True]


def test_two_parts_are_merge_states() -> None:
    outs, lses = torch.randn(2, 6, 40), torch.randn(2, 6) * 5
    want = mla_ops.merge_states(outs[0], lses[0], outs[1], lses[1])
    torch.testing.assert_close(merge_partials(outs, lses), want, rtol=2e-6, atol=1e-6)


LENGTHS = torch.tensor([5], dtype=torch.int32)
OUTS, LSES = torch.zeros(2, 3, 4), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: shard_seq_lens(LENGTHS, 2, 2), ValueError, "rank must be between 0 and 1"),
        (lambda: shard_seq_lens(LENGTHS, 0, 0), ValueError, "world must be"),
        (lambda: shard_seq_lens(LENGTHS, 2, 0, 0), ValueError, "interleave must be"),
        (lambda: shard_seq_lens(LENGTHS, 2, 0, 1.5), TypeError, "interleave must be an integer"),
        (lambda: shard_seq_lens(LENGTHS, 2, 0, 1, 9), ValueError, "q_len must be"),
        (lambda: shard_seq_lens(LENGTHS.long(), 2, 0), TypeError, "seq_lens must be int32"),
        (lambda: shard_seq_lens(LENGTHS[None], 2, 0), ValueError, "seq_lens must be"),
        (lambda: merge_partials(OUTS, LSES[:, :2]), ValueError, "lses must be"),
        (lambda: merge_partials(OUTS[:0], LSES[:0]), ValueError, "outs must be"),
        (lambda: merge_partials(OUTS, LSES.double()), TypeError, "lses must be float32"),
        (lambda: merge_partials(OUTS.double(), LSES), TypeError, "outs must be"),
        (
            lambda: distributed._partial(*[None] * 5, 1, 0, 1, causal=True, plan=1),
            TypeError,
            "options must be .*, got plan",
        ),
    ],
)
def test_errors_name_what_was_expected(call: Callable, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        call()
