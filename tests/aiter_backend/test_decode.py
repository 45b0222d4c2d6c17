"""Our op on aiter's machine code: mla_ops.decode runs as it does on a GPU, and the attention in it
is the wheel's code object, executed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import stand_in
import torch
from cases import BF16, Case, Problem
from machines import (
    ARCHES,
    KINDS,
    UNSERVED,
    Install,
    decode,
    judge,
    make,
    of_kind,
    run_and_judge,
    served,
)
from running import oracle, poisoned, same_bits
from torch import Tensor

import mla_ops
from mla_ops import validate

RAGGED = (200, 64, 1, 0, 130, 2, 3)
CUT = Case(lengths=(900, 0, 300, 65), page_size=16)


@pytest.mark.parametrize(("arch", "kind", "q_len"), served(), ids=str)
def test_every_kernel_on_a_ragged_batch(arch: str, kind: str, q_len: int, install: Install) -> None:
    there = install(arch)
    run_and_judge(kind, arch, Case(lengths=RAGGED, q_len=q_len, page_size=7))
    assert sum(there.kernels.values()) == there.calls["mla_reduce_v1"] == 2
    (name,) = there.kernels
    assert kind in name


@pytest.mark.parametrize(("arch", "kind", "q_len"), sorted(UNSERVED), ids=str)
def test_what_the_newest_kernels_get_wrong_is_refused(
    arch: str, kind: str, q_len: int, install: Install
) -> None:
    install(arch)
    problem = make(of_kind(Case(lengths=(9, 5), q_len=q_len), kind, arch))
    with pytest.raises(ValueError, match="got the third and fourth query token wrong"):
        decode(problem)
    out = decode(problem, backend="auto")  # served by another
    assert out.shape == (2, q_len, 16, 512)


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ARCHES)
def test_page_sizes(arch: str, kind: str, page_size: int, install: Install) -> None:
    """Shuffled pages; aiter is given pages of one token, always."""
    there = install(arch)
    run_and_judge(kind, arch, Case(lengths=(150, 0, 64, 17), page_size=page_size))
    call = there.last["mla_decode_stage1_asm_fwd"]
    assert call["page_size"] == 1 and call["KV"].shape[1:] == (1, 1, 576)
    assert set(call["kv_last_page_lens"].tolist()) == {1}


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 20, 32, 48, 64, 96, 127])
@pytest.mark.parametrize("arch", ARCHES)
def test_heads(arch: str, heads: int, install: Install) -> None:
    install(arch)
    kind = KINDS[heads % 3]
    run_and_judge(kind, arch, Case(lengths=(90, 0, 5), heads=heads, page_size=16))


@pytest.mark.parametrize("heads", [65, 100, 128])
@pytest.mark.parametrize("arch", ARCHES)
def test_the_kernel_for_128_heads(arch: str, heads: int, install: Install) -> None:
    """For float8 queries; it reads the cache once for all heads."""
    there = install(arch, workers=6)
    case = Case(lengths=(900, 0, 65), heads=heads, page_size=16)
    run_and_judge("a8w8", arch, case)
    assert set(there.kernels) == {stand_in.FOR_128_HEADS}
    call = there.last["mla_decode_stage1_asm_fwd"]
    assert call["Q"].shape == (3, 128, 576)
    assert int(there.last["mla_reduce_v1"]["reduce_indptr"][-1]) > 0, "one is cut"
    for kind, q_len in (("a16w8", 1), ("a8w8", 2)):
        run_and_judge(kind, arch, replace(case, lengths=(70, 0), q_len=q_len))
        assert there.last["mla_decode_stage1_asm_fwd"]["Q"].shape[1] == 16


@pytest.mark.parametrize("heads", [5, 40])
@pytest.mark.parametrize("q_len", [2, 3])
def test_heads_and_query_tokens_together(heads: int, q_len: int, install: Install) -> None:
    install("gfx942")
    run_and_judge("a8w8", "gfx942", Case(lengths=(90, 1, 0, 5), heads=heads, q_len=q_len))


@pytest.mark.parametrize("workers", [1, 8, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_cut_sequences(kind: str, workers: int, install: Install) -> None:
    arch = ARCHES[workers % 2]
    there = install(arch, workers=workers)
    run_and_judge(kind, arch, CUT)
    cuts = there.last["mla_reduce_v1"]["reduce_indptr"][-1]
    assert (int(cuts) > 0) == (workers > 1), "or this shows nothing"


@pytest.mark.parametrize(("arch", "kind", "q_len"), [s for s in served() if s[2] > 1], ids=str)
def test_cut_sequences_of_several_query_tokens(
    arch: str, kind: str, q_len: int, install: Install
) -> None:
    install(arch, workers=6)
    lengths = (2 * 64 + 1, 4 * 64 + 2, 3 * 64 + 3, 66, 320)  # with tails shorter than the query
    run_and_judge(kind, arch, Case(lengths=lengths, q_len=q_len, page_size=16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ARCHES)
def test_needles(arch: str, kind: str, install: Install) -> None:
    install(arch, workers=7)
    case = Case(lengths=(300, 301, 257, 255, 128), page_size=7, data="needles")
    run_and_judge(kind, arch, case)


@pytest.mark.parametrize("data", ["shifted", "heavy", "flat"])
def test_other_data(data: str, install: Install) -> None:
    install("gfx942", workers=7)
    run_and_judge("a16w8", "gfx942", Case(lengths=(300, 1, 257), page_size=7, data=data))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (1,)], ids=str)
def test_little_or_nothing(lengths: tuple[int, ...], install: Install) -> None:
    install("gfx950")
    run_and_judge("a16w8", "gfx950", Case(lengths=lengths, heads=12))


def test_an_empty_cache(install: Install) -> None:
    there = install("gfx950")
    case = of_kind(Case(lengths=(0, 0)), "a16w16", "gfx950")
    problem = make(case)
    problem = problem._replace(kv_cache=problem.kv_cache[:0])
    out, lse = decode(problem, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(
        lse, torch.full_like(lse, -torch.inf)
    )
    assert not there.kernels


def test_empty_sequences_do_not_reach_aiter(install: Install) -> None:
    """Its kernels end a work-group at an empty piece, and leave undone what comes behind."""
    there = install("gfx942", workers=2)
    lengths = (0, 100, 0, 0, 70, 0, 30)
    run_and_judge("a8w8", "gfx942", Case(lengths=lengths, page_size=16))
    works = there.last["mla_decode_stage1_asm_fwd"]["work_info_set"]
    used = int(there.last["mla_decode_stage1_asm_fwd"]["work_indptr"][-1])
    assert bool((works[:used, 5] > works[:used, 4]).all())

    def empty_pieces(call: dict[str, Any]) -> None:
        whole = call["kv_indptr"].diff() == 1
        info = call["work_info_set"][:used]
        info[whole[info[:, 0].long()], 5] = info[whole[info[:, 0].long()], 4]

    there.spoil["mla_decode_stage1_asm_fwd"] = empty_pieces
    case = of_kind(Case(lengths=lengths, page_size=16), "a8w8", "gfx942")
    problem = make(case)
    out = decode(problem)
    lost = out.isnan().any(-1).any(-1)[:, 0].tolist()
    assert lost[1] or lost[4] or lost[6], "given empty pieces, it does lose sequences"


@pytest.mark.parametrize(("arch", "kind"), [(a, k) for a in ARCHES for k in KINDS])
def test_row_0_of_the_cache_has_to_be_finite(
    arch: str, kind: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiter reads it for the tokens that a last tile lacks: NaN for every sequence that has one."""
    install(arch)
    case = of_kind(Case(lengths=(17, 64, 70)), kind, arch)
    problem = make(case)
    cache = problem.kv_cache.clone()
    cache[0, 0] = torch.full((576,), torch.nan).to(cache.dtype)
    assert 0 not in problem.block_table[:, 0], "or it would be a token of a sequence"
    spoiled = problem._replace(kv_cache=cache)
    with pytest.raises(ValueError, match="row 0 of page 0 of kv_cache must be finite for aiter"):
        decode(spoiled)
    monkeypatch.setattr(validate, "first_row", lambda cache: None)
    nan = decode(spoiled).isnan().flatten(1).any(1)
    assert nan.tolist() == [True, False, True]


def test_what_is_uninitialised_is_nan_in_these_tests(install: Install) -> None:
    install("gfx942")
    assert torch.empty(3).isnan().all() and torch.empty(3, dtype=torch.bfloat16).isnan().all()


def test_the_same_bits_each_time(install: Install) -> None:
    install("gfx950", workers=8)
    problem = make(of_kind(CUT, "a8w8", "gfx950"))
    first = decode(problem, return_lse=True)
    again = decode(problem, return_lse=True)
    assert same_bits(first[0], again[0]) and same_bits(first[1], again[1])


def test_buffers_of_the_caller(install: Install) -> None:
    install("gfx942")
    for heads in (16, 20):
        case = of_kind(Case(lengths=(90, 0, 70), heads=heads), "a16w8", "gfx942")
        problem = make(case)
        for space in (heads, heads + 3):
            wide = poisoned(3, 1, space, 512, dtype=BF16)
            lse = poisoned(3, 1, heads, dtype=torch.float32)
            out = wide[:, :, :heads]
            decode(problem, out=out, lse=lse, return_lse=True)
            judge("a16w8", case, problem, out, lse)
            assert wide[:, :, heads:].isnan().all()
            out.fill_(torch.nan)
            decode(problem, out=out)
            judge("a16w8", case, problem, out)


def test_layouts(install: Install) -> None:
    """q with gaps; a cache that is one layer of several, with its rows at one distance or not."""
    install("gfx942")
    case = of_kind(Case(lengths=(90, 0, 70), page_size=16), "a16w8", "gfx942")
    problem = make(case)
    wide = torch.zeros(3, 1, 18, 640, dtype=BF16)
    q = wide[:, :, 1:17, 32:608]
    q.copy_(problem.q)
    pages, size, width = problem.kv_cache.shape
    raw = problem.kv_cache.view(torch.uint8)
    dtype = problem.kv_cache.dtype
    by_row = torch.full((pages, size, 3, width), 0x7F, dtype=torch.uint8)
    by_row[:, :, 1] = raw
    by_page = torch.full((pages, 2, size, width), 0x7F, dtype=torch.uint8)
    by_page[:, 1] = raw
    four = problem.kv_cache.unsqueeze(2)
    for cache in (by_row[:, :, 1].view(dtype), by_page[:, 1].view(dtype), four):
        moved = problem._replace(q=q, kv_cache=cache)
        judge("a16w8", case, problem, decode(moved))
        plan = mla_ops.plan(
            problem.seq_lens, problem.block_table, page_size=16, num_heads=16, kv_cache=cache
        )
        judge("a16w8", case, problem, decode(moved, plan=plan))
    uneven = torch.zeros(pages, size * width + 16, dtype=torch.uint8)[:, : size * width]
    uneven = uneven.unflatten(1, (size, width)).view(dtype)
    with pytest.raises(ValueError, match="rows must lie evenly and at multiples of 16 bytes"):
        decode(problem._replace(kv_cache=uneven))


def test_one_token_without_a_causal_mask_is_the_same(install: Install) -> None:
    install("gfx950")
    case = of_kind(Case(lengths=(90, 0, 70), causal=False), "a16w8", "gfx950")
    problem = make(case)
    judge("a16w8", case, problem, decode(problem))
    several = make(replace(case, q_len=2))
    with pytest.raises(ValueError, match="cannot serve .* causal=False"):
        decode(several)


def test_q_rounded_where_it_is_allowed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    there = install("gfx950")
    case = of_kind(Case(lengths=(90, 0, 70), heads=20), "a16w8", "gfx950")
    problem = make(case)
    monkeypatch.setenv("MLA_OPS_AITER_Q", "fp8")
    judge("a8w8", case, problem, decode(problem))
    assert list(there.kernels) == ["mla_a8w8_qh16_qseqlen1_gqaratio16_ps"]
    monkeypatch.delenv("MLA_OPS_AITER_Q")
    judge("a16w8", case, problem, decode(problem))
    monkeypatch.setenv("MLA_OPS_AITER_Q", "int4")
    with pytest.raises(ValueError, match="MLA_OPS_AITER_Q must be bf16 or fp8, got 'int4'"):
        decode(problem)


@pytest.mark.parametrize("release", list(stand_in.RELEASES))
def test_every_release(release: str, install: Install) -> None:
    """Each signature, with the meaning that its arguments have in that release."""
    for arch, kind in (("gfx942", "a8w8"), ("gfx950", "a16w8")):
        install(arch, release, workers=6)
        run_and_judge(kind, arch, replace(CUT, heads=20))


# ---- it can fail: the seven mistakes of the design, made between our code and aiter's


def first_token_of_each_page(call: dict[str, Any]) -> None:
    indices = call["kv_page_indices"]
    indices -= indices % CUT.page_size


def first_eighth(call: dict[str, Any]) -> None:
    info = call["work_info_set"][: int(call["work_indptr"][-1])]
    info[:, 5] = info[:, 4] + (info[:, 5] - info[:, 4] + 7) // 8


def neighbours_page(call: dict[str, Any]) -> None:
    pitch = len(call["kv_page_indices"]) // len(CUT.lengths)
    call["kv_page_indices"][: CUT.page_size] = call["kv_page_indices"][2 * pitch :][: CUT.page_size]


def zeros(call: dict[str, Any]) -> None:
    for name in ("partial_output", "final_output"):
        call[name].zero_()


def one_split_dropped(call: dict[str, Any]) -> None:
    call["partial_lse"][int(call["reduce_partial_map"][0])] = -torch.inf


STAGE1 = (first_token_of_each_page, first_eighth, neighbours_page)
REDUCE = (zeros, one_split_dropped)


def rejected(kind: str, case: Case, problem: Problem, out: Tensor) -> bool:
    try:
        judge(kind, case, problem, out)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ARCHES)
def test_the_seven_mutants_are_caught(arch: str, kind: str, install: Install) -> None:
    there = install(arch)
    case = of_kind(CUT, kind, arch)
    problem = make(case)
    assert not rejected(kind, case, problem, decode(problem))
    spoils = [("mla_decode_stage1_asm_fwd", one) for one in STAGE1]
    spoils += [("mla_reduce_v1", one) for one in REDUCE]
    for function, spoil in spoils:
        there.spoil = {function: spoil}
        assert rejected(kind, case, problem, decode(problem)), spoil.__name__
    there.spoil = {}
    there.skip = {"mla_reduce_v1"}
    assert rejected(kind, case, problem, decode(problem)), "reduce skipped"
    there.skip = set()
    no_cache_read = (problem.q.double() / 24)[..., :512].to(BF16)
    assert rejected(kind, case, problem, no_cache_read)
    assert oracle(problem)[0].abs().max() > 0
