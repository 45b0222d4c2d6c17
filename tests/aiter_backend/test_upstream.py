"""What users of aiter, vLLM, SGLang, FlashMLA and FlashInfer have met, one test for each complaint,
named after it: it cannot happen here, or it is refused with the reason.

Met elsewhere in this folder: the page size (test_seed.py: ROCm/aiter#3095, sglang#25556),
signatures (test_signatures.py: ROCm/aiter#3689, vllm#46760, sglang#28037), NaN in slot 0
(test_decode.py: vllm#38719). transformers#47460 and #48761, latents that no kernel consumes, are
the business of mla_ops.integrations.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import BF16, FN, FNUZ, Case
from machines import Install, decode, judge, make, of_kind, run_and_judge
from running import same_bits

import mla_ops
from mla_ops import capability, selftest
from mla_ops.backends import aiter as backend
from mla_ops.backends import aiter_choice, aiter_plan, aiter_release
from mla_ops.plan_spec import AITER, AiterPlanSpec

STAGE1, METADATA = "mla_decode_stage1_asm_fwd", "get_mla_metadata_v1"
SMALL = Case(lengths=(130, 0, 64), page_size=16)


def aiter_serves(arch: str, **question: Any) -> bool:
    return mla_ops.supports(arch=arch, backend="aiter", **question)


@pytest.fixture
def there(install: Install) -> Any:
    return install("gfx942", workers=6)


# Of the ecosystem


def test_aiter_5765_2768_4452_caches_beyond_4_gib(there: Any) -> None:
    """Addresses wrap without an error: refused, and served by another."""
    assert aiter_serves("gfx942", cache_bytes=1 << 32)
    assert not aiter_serves("gfx942", cache_bytes=(1 << 32) + 1)
    assert mla_ops.supports(arch="gfx942", cache_bytes=1 << 40)
    q = torch.empty(1, 1, 16, 576, dtype=BF16, device="meta")
    cache = torch.empty(60_000, 64, 576, dtype=BF16, device="meta")
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="the cache must be at most 4 GiB, got a larger one"):
        capability.decide_for(device, q, cache, 512, True, False, "aiter")
    # It is the reach that counts: one layer of a small cache in a large pool.
    layer = torch.empty(1000, 61, 64, 576, dtype=BF16, device="meta")[:, 3]
    with pytest.raises(ValueError, match="the cache must be at most 4 GiB"):
        capability.decide_for(device, q, layer, 512, True, False, "aiter")


def test_aiter_4587_5193_no_cached_split_table(there: Any) -> None:
    """aiter's cached tables were freed under captured graphs: none is asked for, and what is passed
    lives as long as the plan or the call."""
    problem = make(of_kind(SMALL, "a8w8", "gfx942"))
    plan = mla_ops.plan(
        problem.seq_lens,
        problem.block_table,
        page_size=16,
        num_heads=16,
        kv_cache=problem.kv_cache,
        q_dtype=FNUZ,
    )
    decode(problem, plan=plan)
    call = there.last[STAGE1]
    assert call["num_kv_splits_indptr"] is None and call["work_meta_data"] is not None
    held = plan.tensor.untyped_storage().data_ptr()
    for name in ("work_indptr", "work_info_set", "kv_page_indices", "kv_last_page_lens"):
        assert call[name].untyped_storage().data_ptr() == held, name


def test_aiter_2996_200_2997_every_page_size_gives_the_same(there: Any) -> None:
    case = of_kind(Case(lengths=(130, 1, 64), page_size=64), "a16w8", "gfx942")
    problem = make(case)
    first = decode(problem)
    rows = problem.kv_cache.reshape(-1, 1, 576)
    token = torch.arange(problem.block_table.shape[1] * 64)
    by_row = problem.block_table[:, token // 64] * 64 + (token % 64).int()
    assert same_bits(first, decode(problem._replace(kv_cache=rows, block_table=by_row)))


def test_aiter_2720_three_query_tokens(there: Any) -> None:
    """Every position got the result of the first: three are served as four."""
    run_and_judge("a16w16", "gfx942", replace(SMALL, q_len=3))
    assert there.last[STAGE1]["max_seqlen_q"] == 4


def test_aiter_4752_4751_4872_no_kernel_no_abort(there: Any) -> None:
    for q_len in (5, 6, 7, 8):
        assert not aiter_serves("gfx942", cache_dtype=FNUZ, q_len=q_len)
        assert mla_ops.supports(arch="gfx942", cache_dtype=FNUZ, q_len=q_len)
    problem = make(of_kind(Case(lengths=(9, 20), q_len=5), "a16w8", "gfx942"))
    with pytest.raises(ValueError, match="cannot serve .*S=5.*; the nearest that can is 'torch'"):
        decode(problem)
    case = of_kind(Case(lengths=(9, 20), q_len=5), "a16w8", "gfx942")
    judge("a16w8", case, problem, decode(problem, backend="auto"))
    assert not there.calls


def test_aiter_2760_speculative_decoding_beyond_four_tokens(there: Any) -> None:
    assert all(mla_ops.supports(q_len=s, heads=h) for s in range(1, 9) for h in (1, 16, 128))


@pytest.mark.parametrize("heads", [4, 8, 12, 24, 32])
def test_aiter_726_548_1468_2821_vllm_35641_heads(heads: int, there: Any) -> None:
    assert all(aiter_serves(arch, heads=heads) for arch in ("gfx942", "gfx950"))
    run_and_judge("a16w16", "gfx942", replace(SMALL, heads=heads))


def test_aiter_2577_vllm_35850_padding_of_heads_is_ours(there: Any) -> None:
    problem = make(of_kind(replace(SMALL, heads=12), "a16w16", "gfx942"))
    assert decode(problem).shape == (3, 1, 12, 512)
    q = there.last[STAGE1]["Q"]
    assert q.shape == (3, 16, 576) and not q[:, 12:].any() and q[:, :12].any()


def test_aiter_4364_4378_batch_invariance(there: Any) -> None:
    """aiter splits by what else is in the batch; asked for, invariance is had from our kernels."""
    problem = make(of_kind(SMALL, "a16w16", "gfx942"))
    plan = mla_ops.plan(
        problem.seq_lens,
        problem.block_table,
        page_size=16,
        num_heads=16,
        kv_cache=problem.kv_cache,
        batch_invariant=True,
    )
    assert plan.spec.kind != AITER
    with pytest.raises(ValueError, match="plan must be aiter or none, got native"):
        decode(problem, plan=plan)


def test_aiter_2780_244_flashinfer_2733_what_is_written_is_said(there: Any) -> None:
    """aiter's ops say that they may write into everything, the cache too; ours say what they do."""
    written = {
        argument.name
        for argument in torch.ops.mla._decode_aiter.default._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert written == {"out", "lse"}
    problem = make(of_kind(SMALL, "a16w8", "gfx942"))
    before = [x.clone() for x in problem.arguments[:4]]
    compiled = torch.compile(
        lambda q: decode(problem._replace(q=q)), fullgraph=True, backend="aot_eager"
    )
    assert same_bits(compiled(problem.q), decode(problem))
    for old, new in zip(before, problem.arguments[:4], strict=True):
        assert same_bits(old, new)


def test_aiter_200_no_indptr_to_get_wrong() -> None:
    taken = set(inspect.signature(mla_ops.decode).parameters)
    assert not any("indptr" in name or "last_page" in name for name in taken)


def test_vllm_38719_53816_metadata_knows_the_dtypes(there: Any) -> None:
    for kind, q, cache in (("a8w8", FNUZ, FNUZ), ("a16w8", BF16, FNUZ), ("a16w16", BF16, BF16)):
        decode(make(of_kind(SMALL, kind, "gfx942")))
        call = there.last[METADATA]
        assert (call["dtype_q"], call["dtype_kv"]) == (q, cache)


def test_vllm_45227_a_plan_for_one_token_is_not_for_two(there: Any) -> None:
    one, two = (make(of_kind(replace(SMALL, q_len=s), "a16w8", "gfx942")) for s in (1, 2))
    plan = mla_ops.plan(
        one.seq_lens, one.block_table, page_size=16, num_heads=16, kv_cache=one.kv_cache
    )
    with pytest.raises(ValueError, match=r"made for \[batch, q_len, heads\] = \[3, 2, 16\]"):
        decode(two, plan=plan)


def test_vllm_51848_24148_27224_nothing_is_read_behind_the_table(there: Any) -> None:
    """Unused entries are huge in these tests, and there is no spare column."""
    case = Case(lengths=(64, 128, 3), q_len=2, page_size=64, extra_pages=0)
    run_and_judge("a16w16", "gfx942", case)


def test_vllm_45562_the_other_float8(there: Any) -> None:
    """A cache of e4m3fn on gfx942 would be read as twice the numbers: another backend serves it."""
    assert not aiter_serves("gfx942", cache_dtype=FN)
    assert not aiter_serves("gfx950", cache_dtype=FNUZ)
    case = replace(SMALL, cache_dtype=FN)
    problem = make(case)
    with pytest.raises(ValueError, match="cache must be float8_e4m3fnuz, got float8_e4m3fn"):
        decode(problem)
    judge("a16w8", case, problem, decode(problem, backend="auto"))


def test_vllm_53816_54639_lse_can_be_asked_about_and_had(there: Any) -> None:
    """In the pinned wheel no kernel writes it: it is had from partial results, on both chips."""
    for arch in ("gfx942", "gfx950"):
        assert aiter_serves(arch, lse=True) and aiter_serves(arch, lse=True, heads=128)
    run_and_judge("a8w8", "gfx942", SMALL)
    assert there.last[STAGE1].get("lse") is None


def test_flashmla_1_3_84_page_sizes() -> None:
    for arch in ("cpu", "gfx942", "sm_90"):
        assert all(mla_ops.supports(arch=arch, page_size=n) for n in (1, 7, 16, 128, 4096))


def test_flashmla_8_204_float8_cache_for_dense_decode(there: Any) -> None:
    assert aiter_serves("gfx942", cache_dtype=FNUZ) and aiter_serves("gfx950", cache_dtype=FN)
    assert mla_ops.supports(arch="cpu", cache_dtype=FN)


def test_flashmla_78_flashinfer_1330_rank_256(there: Any) -> None:
    assert mla_ops.supports(arch="gfx942", kv_lora_rank=256)
    text = mla_ops.explain(arch="gfx942", kv_lora_rank=256)
    assert "kv_lora_rank must be 512, got 256" in text and "SERVES" in text


def test_flashmla_60_66_other_hardware() -> None:
    assert all(mla_ops.supports(arch=arch) for arch in ("cpu", "sm_75", "sm_86", "gfx90a", "mps"))


def test_flashinfer_3136_no_index_overflows(there: Any) -> None:
    """A cache that aiter is given has rows below 2^24, and the indices fit 2 GiB."""
    assert (1 << 32) // 576 < 1 << 24
    assert 4 * aiter_plan.MOST_INDICES == 1 << 31


def test_vllm_33638_scales_of_a_float8_cache(there: Any) -> None:
    """Applied by every kernel, or made up for: those for four query tokens leave kv_scale out."""
    for q_len in (1, 2, 3, 4):
        run_and_judge("a8w8", "gfx942", replace(SMALL, q_len=q_len))
        scale = there.last[STAGE1]["kv_scale"]
        assert (float(scale) == 1.0) == (q_len > 2)


# Of the contract


def test_aiter_4420_nan_in_scratch_stays_there(there: Any) -> None:
    """Partial rows that no piece writes are NaN in these tests, and never reach the output."""
    problem = make(of_kind(replace(SMALL, lengths=(900, 0, 64)), "a8w8", "gfx942"))
    assert not decode(problem).isnan().any()
    assert there.last[STAGE1]["splitData"].isnan().any()


def test_aiter_4350_1455_repeated_runs_are_equal(there: Any) -> None:
    problem = make(of_kind(replace(SMALL, lengths=(900, 300, 64)), "a16w8", "gfx942"))
    first = decode(problem)
    for _ in range(3):
        assert same_bits(first, decode(problem))


def test_aiter_4076_vllm_47042_metadata_is_not_cached_by_shape(there: Any) -> None:
    """Two batches of one shape and other lengths, one after the other."""
    for lengths in ((900, 1, 64), (1, 900, 64), (900, 1, 64)):
        case = of_kind(replace(SMALL, lengths=lengths), "a16w8", "gfx942")
        problem = make(case)
        judge("a16w8", case, problem, decode(problem))
    assert there.calls[METADATA] == 3


def test_aiter_3855_5559_partials_are_few() -> None:
    """Not tiles * compute units, which was 32 GiB for a captured batch of 512."""
    spec = AiterPlanSpec(AITER, 512, 1, 128, 256, 64, -1, 8192, 64, 64, 0, 3, 0, 16)
    assert aiter_plan.partial_rows(spec) * 16 * 513 * 4 < 17 << 20
    capped = spec._replace(max_splits=32)
    assert aiter_plan.partial_rows(capped) * 16 * 513 * 4 < 150 << 20


def test_aiter_4363_4365_granularity() -> None:
    """16 faulted on gfx942 with float8."""
    assert aiter_choice.DEFAULT.granularity >= 32


def test_aiter_2983_3291_persistent_always(there: Any) -> None:
    """The kernels that fault in capture are the others."""
    run_and_judge("a16w16", "gfx942", replace(SMALL, heads=32))
    assert all(name.endswith("_ps") for name in there.kernels)


def test_vllm_39444_37442_padded_requests_are_defined(there: Any) -> None:
    case = of_kind(replace(SMALL, lengths=(130, 0, 0, 0)), "a16w8", "gfx942")
    out, lse = decode(make(case), return_lse=True)
    assert not out[1:].any() and bool((lse[1:] == -torch.inf).all())


def test_aiter_2656_5679_a_check_to_run_on_ones_own_machine(
    there: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`python -m mla_ops selftest`, here with fewer checks; and it fails where aiter is wrong."""
    from mla_ops.__main__ import main

    checks = {name: selftest.CHECKS[name] for name in ("ragged", "replay")}
    monkeypatch.setattr(selftest, "CHECKS", checks)
    monkeypatch.setattr(selftest, "RAGGED", (0, 65, 5))
    monkeypatch.setattr(selftest, "LATER", (64, 0, 5))
    some = [one for one in selftest.subjects(torch.device("cpu"), "aiter") if one.q_len in (1, 4)]
    monkeypatch.setattr(selftest, "subjects", lambda device, backend: some)
    arguments = ["selftest", "--device", "cpu", "--backend", "aiter"]
    assert main(arguments) == 0
    assert "7 of 7 right" in capsys.readouterr().out
    assert len(there.kernels) == 5

    def wrong(call: dict[str, Any]) -> None:
        call["kv_page_indices"] //= 2

    there.spoil[STAGE1] = wrong
    assert main(arguments) == 1
    assert "WRONG (bar 3e-03)" in capsys.readouterr().out


def test_aiter_4055_416_1552_import_is_lazy_and_warmup_explicit(there: Any) -> None:
    mla_ops.explain()
    assert aiter_release._loaded.cache_info().currsize == 0, "nothing was imported to answer"
    assert "not imported yet" in mla_ops.explain()
    ran = mla_ops.warmup("cpu")
    assert "mla_a8w8_qh16_qseqlen1_ps" in ran and there.calls[STAGE1] == 13
    assert ", imported" in mla_ops.explain()


def test_aiter_4437_what_is_installed_is_said(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And HIP_FORCE_DEV_KERNARG, which HIP reads when it starts, is reported and left alone."""
    monkeypatch.delenv("HIP_FORCE_DEV_KERNARG", raising=False)
    text = mla_ops.explain()
    assert "note: aiter in " in text
    assert "HIP_FORCE_DEV_KERNARG must be 1 in the environment before Python starts" in text
    monkeypatch.setenv("HIP_FORCE_DEV_KERNARG", "1")
    assert "HIP_FORCE_DEV_KERNARG" not in mla_ops.explain()
    assert "HIP_FORCE" not in inspect.getsource(backend)


def test_atom_611_1911_splits_are_not_capped(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there.workers = 40
    case = of_kind(Case(lengths=(64 * 40,)), "a8w8", "gfx942")
    problem = make(case)
    decode(problem)
    assert int(there.last[STAGE1]["work_indptr"][-1]) > 16
    # And where it was found to be better, they are.
    capped = aiter_choice.Choice(granularity=64, max_splits=2)
    monkeypatch.setattr(aiter_choice, "tuned", lambda shape: capped)
    judge("a8w8", case, problem, decode(problem))
    assert int(there.last[STAGE1]["work_indptr"][-1]) <= 3
