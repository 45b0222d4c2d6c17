"""Code written for FlashMLA, FlashInfer and aiter gets what those give: each convention of theirs
against the oracle, with the mistake (a mutant) that its test is there to catch."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, Problem, make
from compare import check
from running import oracle, poisoned
from torch import Tensor

from mla_ops.compat import aiter, flashinfer, flashmla

Result = tuple[Tensor, Tensor]

# Rows that see nothing: an empty sequence, and one shorter than the query.
CASE = Case(lengths=(70, 0, 1, 33), q_len=2, heads=3, page_size=16)
PAGES = (1, 16, 64)


def indices(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qo_indptr, kv_indptr, kv_indices and the rows of the last pages, for a block table."""
    q, cache, table, lengths = problem[:4]
    page, batch = cache.shape[1], len(lengths)
    pages = (lengths + page - 1) // page
    kv_indptr = torch.cat((pages.new_zeros(1), pages.cumsum(0))).int()
    kv_indices = torch.cat([table[b, : pages[b]] for b in range(batch)])
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    return qo_indptr, kv_indptr, kv_indices, lengths - (pages - 1).clamp(min=0) * page


def call_flashmla(problem: Problem, **more: Any) -> Result:
    q, cache, table, lengths, scale = problem.arguments
    meta, none = flashmla.get_mla_metadata()
    options = {"softmax_scale": scale, "causal": problem.options["causal"], **more}
    return flashmla.flash_mla_with_kvcache(
        q, cache.unsqueeze(2), table, lengths, 512, meta, none, **options
    )


def call_flashinfer(
    problem: Problem, in_place: bool = True, plan: dict | None = None, **more: Any
) -> Result:
    q, cache, _, lengths, scale = problem.arguments
    qo, kv, pages, _ = indices(problem)
    workspace = torch.empty(1 << 27, dtype=torch.int8, device=q.device)  # as it recommends
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace)
    causal, kinds = problem.options["causal"], (q.dtype, cache.dtype)
    sizes = (q.shape[2], 512, 64, cache.shape[1])
    arguments = [qo, kv, pages, lengths, *sizes, causal, scale, *kinds]
    names = list(inspect.signature(wrapper.plan).parameters)
    wrapper.plan(**{**dict(zip(names, arguments, strict=False)), **(plan or {})})
    q_nope, q_pe = q.flatten(0, 1).split((512, 64), -1)
    ckv, kpe = cache.split((512, 64), -1)
    if not in_place:
        ckv, kpe = ckv.clone(), kpe.clone()
    return wrapper.run(q_nope, q_pe, ckv, kpe, **{"return_lse": True, **more})


def call_aiter(problem: Problem, **more: Any) -> Result:
    q, cache, _, _, scale = problem.arguments
    qo, kv, pages, last = indices(problem)
    o = poisoned(*q.flatten(0, 1).shape[:2], 512, dtype=torch.bfloat16).to(q.device)
    begin = o.data_ptr()
    options = {
        "page_size": cache.shape[1],
        "sm_scale": scale,
        "causal": problem.options["causal"],
        "q_scale": problem.options["q_scale"],
        "kv_scale": problem.options["kv_scale"],
        "return_lse": True,
        **more,
    }
    arguments = (q.flatten(0, 1), cache.unsqueeze(2), o, qo, kv, pages, last, q.shape[1])
    _, lse = aiter.mla_decode_fwd(*arguments, **options)
    assert o.data_ptr() == begin
    return o, lse


# What each library would have given, turned into ours: out [B, S, H, R], lse [B, S, H], natural
# logarithm, -inf for a row that sees nothing. A shape or value of another convention fails `check`.
def from_flashmla(case: Case, out: Tensor, lse: Tensor) -> Result:
    assert lse.shape == (len(case.lengths), case.heads, case.q_len)
    assert not (lse == -torch.inf).any(), "FlashMLA marks rows that see nothing with +inf"
    return out, lse.masked_fill(lse == torch.inf, -torch.inf).transpose(1, 2)


def from_rows(case: Case, out: Tensor, lse: Tensor) -> Result:
    assert lse.shape == (len(case.lengths) * case.q_len, case.heads)
    each = (len(case.lengths), case.q_len)
    return out.unflatten(0, each), lse.unflatten(0, each)


def from_flashinfer(case: Case, out: Tensor, lse: Tensor) -> Result:
    return from_rows(case, out, lse * math.log(2))


LIBRARIES: dict[str, tuple[Callable[..., Result], Callable[..., Result]]] = {
    "flashmla": (call_flashmla, from_flashmla),
    "flashinfer": (call_flashinfer, from_flashinfer),
    "aiter": (call_aiter, from_rows),
}


def judge(library: str, case: Case, result: Result) -> None:
    out, lse = LIBRARIES[library][1](case, *result)
    want, want_lse = oracle(make(case))
    check(case, out, want, lse, want_lse)


CASES = [
    *(Case(lengths=(70, 0, 1, 130), page_size=page, heads=5) for page in PAGES),
    *(Case(**{**vars(CASE), "causal": causal}) for causal in (True, False)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_right_by_the_conventions_of_the_library(library: str, case: Case) -> None:
    judge(library, case, LIBRARIES[library][0](make(case)))


MUTANTS: dict[str, tuple[str, Callable[[Result], Result]]] = {
    "flashmla: empty rows as ours": (
        "flashmla",
        lambda r: (r[0], r[1].masked_fill(r[1].isinf(), -torch.inf)),
    ),
    "flashmla: lse [B, S, H]": ("flashmla", lambda r: (r[0], r[1].transpose(1, 2))),
    "flashmla: lse to the base 2": ("flashmla", lambda r: (r[0], r[1] / math.log(2))),
    "flashinfer: natural lse": ("flashinfer", lambda r: (r[0], r[1] * math.log(2))),
    "flashinfer: empty rows +inf": ("flashinfer", lambda r: (r[0], r[1].abs())),
    "flashinfer: lse [H, T]": ("flashinfer", lambda r: (r[0], r[1].T)),
    "aiter: lse to the base 2": ("aiter", lambda r: (r[0], r[1] / math.log(2))),
    "aiter: lse [H, T]": ("aiter", lambda r: (r[0], r[1].T)),
    "aiter: o not written": ("aiter", lambda r: (torch.full_like(r[0], torch.nan), r[1])),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_another_convention_is_noticed(name: str) -> None:
    library, mutate = MUTANTS[name]
    with pytest.raises(AssertionError):
        judge(library, CASE, mutate(LIBRARIES[library][0](make(CASE))))


@pytest.mark.parametrize(
    ("library", "argument"), [("flashmla", "softmax_scale"), ("aiter", "sm_scale")]
)
def test_the_default_scale_is_theirs(library: str, argument: str) -> None:
    """1/sqrt(576), and a mutant with DeepSeek's 1/sqrt(192) is noticed."""
    call = LIBRARIES[library][0]
    problem = make(CASE)
    assert problem.softmax_scale == 576**-0.5
    judge(library, CASE, call(problem, **{argument: None}))
    with pytest.raises(AssertionError):
        judge(library, CASE, call(problem, **{argument: 192**-0.5}))


def test_flashmla_is_not_causal_unless_asked_and_the_others_are_told() -> None:
    """The mutant is the other default: the two differ for two query tokens."""
    parameters = inspect.signature(flashmla.flash_mla_with_kvcache).parameters
    assert parameters["causal"].default is False
    assert inspect.signature(aiter.mla_decode_fwd).parameters["causal"].default is True
    for library in LIBRARIES:
        result = LIBRARIES[library][0](make(Case(**{**vars(CASE), "causal": False})))
        with pytest.raises(AssertionError):
            judge(library, CASE, result)


def test_aiter_reads_whole_pages() -> None:
    """The mutant is what its kernels do with pages of 16: the first row of each page."""
    q, cache, table, _, _ = make(CASE)[:5]
    problem = make(CASE)
    first = problem._replace(
        kv_cache=cache[:, :1], seq_lens=((problem.seq_lens + 15) // 16).to(torch.int32)
    )
    with pytest.raises(AssertionError):
        judge("aiter", CASE, call_aiter(first))


def test_aiter_float8() -> None:
    case = Case(lengths=(70, 3), heads=4, page_size=16, cache_dtype=torch.float8_e4m3fn)
    problem = make(case)
    judge("aiter", case, call_aiter(problem))
    with pytest.raises(AssertionError):
        judge("aiter", case, call_aiter(problem, kv_scale=problem.options["kv_scale"] * 1.1))


def test_flashinfer_natural_lse_buffers_and_two_caches() -> None:
    problem = make(CASE)
    rows = (len(CASE.lengths) * CASE.q_len, CASE.heads)
    buffers = {
        "out": poisoned(*rows, 512, dtype=torch.bfloat16),
        "lse": poisoned(*rows, dtype=torch.float32),
    }
    ckv, kpe = problem.kv_cache.split((512, 64), -1)
    joined = flashinfer._in_place(ckv, kpe)
    assert joined is not None and joined.data_ptr() == problem.kv_cache.data_ptr()
    assert flashinfer._in_place(ckv, kpe.clone()) is None
    out, lse = call_flashinfer(problem, in_place=False, **buffers)
    assert out is buffers["out"] and lse is buffers["lse"]
    judge("flashinfer", CASE, (out, lse))
    natural = call_flashinfer(problem, return_lse_base_on_e=True)
    check(CASE, *oracle_pairs(from_rows(CASE, *natural), problem))
    alone = call_flashinfer(problem, return_lse=False)
    assert isinstance(alone, Tensor) and torch.equal(alone, natural[0])


def oracle_pairs(result: Result, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    want, want_lse = oracle(problem)
    return result[0], want, result[1], want_lse


T = torch.zeros(1)
REFUSED = [
    *(
        (call_flashmla, name, {name: T})
        for name in ("indices", "attn_sink", "extra_k_cache", "topk_length", "extra_topk_length")
    ),
    (call_flashmla, "extra_indices_in_kvcache", {"extra_indices_in_kvcache": T}),
    (call_flashmla, "is_fp8_kvcache", {"is_fp8_kvcache": True}),
    (call_aiter, "nhead_kv", {"nhead_kv": 2}),
    (call_aiter, "page_size", {"page_size": 1}),
    (call_aiter, "logit_cap", {"logit_cap": 30.0}),
    (call_aiter, "return_logits", {"return_logits": True}),
    (call_aiter, "g_kv_indptr", {"g_kv_indptr": T}),
    (call_aiter, "cp_world_size", {"cp_world_size": 2}),
    (call_aiter, "cp_rank", {"cp_rank": 1}),
    *((call_flashinfer, n, {n: T}) for n in ("profiler_buffer", "kv_len", "page_table")),
    *((call_flashinfer, n, {n: 1.0}) for n in ("o_scale", "ckv_scale", "kpe_scale")),
    (call_flashinfer, "use_profiler", {"plan": {"use_profiler": True}}),
    (call_flashinfer, "kv_data_type", {"plan": {"kv_data_type": torch.float8_e4m3fn}}),
    (call_flashinfer, "qo_indptr", {"plan": {"qo_indptr": torch.tensor([0, 1, 4, 6, 8])}}),
    (call_flashinfer, "kv_len_arr", {"plan": {"kv_len_arr": torch.tensor([70, 1, 1, 33])}}),
]


@pytest.mark.parametrize(("call", "name", "more"), REFUSED, ids=lambda x: x if x is str(x) else "")
def test_refused_by_name(call: Callable[..., Result], name: str, more: dict) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^{name} must "):
        call(make(CASE), **more)


def test_wrapper_refuses_graphs_other_backends_and_no_plan() -> None:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper
    with pytest.raises(ValueError, match="^use_cuda_graph must "):
        wrapper(T, use_cuda_graph=True)
    with pytest.raises(ValueError, match="^backend must "):
        wrapper(T, backend="cutlass")
    with pytest.raises(RuntimeError, match=r"plan\(\) must be called"):
        wrapper(T).run(T, T, T, T)


ORIGINALS = {"flashmla": "flash_mla", "flashinfer": "flashinfer.mla", "aiter": "aiter.mla"}
SERVED = {"flashmla": 64, "flashinfer": 16, "aiter": 1}  # page sizes of theirs


@pytest.mark.gpu
@pytest.mark.parametrize("library", ORIGINALS)
def test_same_results_as_the_original(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = ORIGINALS[library]
    if importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    case = Case(page_size=SERVED[library])
    problem = make(case, "cuda")
    problem = problem._replace(kv_cache=problem.kv_cache.nan_to_num())
    ours = LIBRARIES[library][0](problem)
    monkeypatch.setitem(globals(), library, importlib.import_module(name))
    for result in (ours, LIBRARIES[library][0](problem)):
        judge(library, case, (result[0].cpu(), result[1].cpu()))
