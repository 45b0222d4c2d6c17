"""A plan for aiter is offsets: it may be copied, moved and refreshed, serves all layers, and serves
no other problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import BF16, FNUZ, Case, Problem
from machines import Install, decode, judge, make, of_kind
from running import same_bits

import mla_ops
from mla_ops.backends import aiter_plan
from mla_ops.plan_spec import AITER, AiterPlanSpec

CASE = of_kind(Case(lengths=(900, 0, 300, 65), heads=20, page_size=16), "a16w8", "gfx942")


def plan_for(problem: Problem, **more: Any) -> mla_ops.DecodePlan:
    _, q_len, heads, _ = problem.q.shape
    options = {"q_len": q_len, "q_dtype": problem.q.dtype, **more}
    return mla_ops.plan(
        problem.seq_lens,
        problem.block_table,
        page_size=problem.kv_cache.shape[1],
        num_heads=heads,
        kv_cache=problem.kv_cache,
        **options,
    )


@pytest.mark.parametrize("return_lse", [False, True])
def test_one_plan_for_all_layers(return_lse: bool, install: Install) -> None:
    there = install("gfx942")
    problem = make(CASE)
    plan = plan_for(problem, return_lse=return_lse)
    assert plan.spec.kind == AITER and there.calls["get_mla_metadata_v1"] == 1
    alone = decode(problem, return_lse=True)
    there.calls.clear()
    for _ in range(2):
        out = decode(problem, plan=plan, backend="auto")
        judge("a16w8", CASE, problem, out)
        assert same_bits(out, decode(problem))
    if return_lse:
        with_lse = decode(problem, plan=plan, return_lse=True)
        assert same_bits(with_lse[0], alone[0]) and same_bits(with_lse[1], alone[1])


def test_it_may_move(install: Install) -> None:
    """The addresses that the kernel follows are written in each decode."""
    install("gfx942")
    problem = make(CASE)
    plan = plan_for(problem)
    first = decode(problem, plan=plan)
    wide = torch.full((plan.tensor.numel() + 99,), -1, dtype=torch.int32)
    wide[33:-66] = plan.tensor
    moved = (plan.tensor.clone(), wide[33:-66])
    plan.tensor.fill_(-1)
    for tensor in moved:
        again = decode(problem, plan=mla_ops.DecodePlan(tensor, plan.spec))
        assert same_bits(first, again)
    assert int(wide[:33].max()) == int(wide[-66:].max()) == -1


def test_addresses_of_another_place_are_followed_to_a_fault(install: Install) -> None:
    """Or the test above would show nothing."""
    there = install("gfx942")
    problem = make(CASE)
    plan = plan_for(problem)

    def stale(call: dict[str, Any]) -> None:
        call["work_meta_data"] = call["work_meta_data"] + 64

    there.spoil["mla_decode_stage1_asm_fwd"] = stale
    with pytest.raises(AssertionError, match="memory fault"):
        decode(problem, plan=plan)


def test_refreshed_in_place(install: Install) -> None:
    install("gfx942")
    problem = make(CASE)
    plan = plan_for(problem)
    where = plan.tensor.data_ptr()
    for lengths in ((300, 7, 0, 65), (1, 0, 0, 0), (900, 0, 300, 65)):
        fewer = problem._replace(seq_lens=torch.tensor(lengths, dtype=torch.int32))
        fewer.block_table[1] = problem.block_table[0]
        plan.update_(fewer.seq_lens, fewer.block_table)
        assert plan.tensor.data_ptr() == where
        judge("a16w8", CASE, fewer, decode(fewer, plan=plan))


def test_lengths_change_under_a_compiled_step(install: Install) -> None:
    """Plan and decode in one compiled function: what a graph would capture."""
    there = install("gfx942")
    problem = make(CASE)
    plan = plan_for(problem)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        plan.update_(lengths, problem.block_table)
        return decode(problem._replace(q=q, seq_lens=lengths), plan=plan, backend="auto")

    for lengths in ((900, 0, 300, 65), (64, 0, 1, 65)):
        now = problem._replace(seq_lens=torch.tensor(lengths, dtype=torch.int32))
        judge("a16w8", CASE, now, step(now.q, now.seq_lens))
    assert there.calls["mla_decode_stage1_asm_fwd"] == 2


def test_bytes(install: Install) -> None:
    there = install("gfx942", workers=6)
    problem = make(CASE)
    plan = plan_for(problem)
    spec = plan.spec
    assert isinstance(spec, AiterPlanSpec)
    assert plan.nbytes == 4 * plan.tensor.numel()
    # 8 sequences of 16 heads and 6 workers: at most 2 * 5 pieces of cut sequences.
    assert (spec.works, spec.partials) == (13, 10)
    assert plan.partial_nbytes == 10 * 16 * 513 * 4
    decode(problem, plan=plan)
    call = there.last["mla_decode_stage1_asm_fwd"]
    held = [call[name] for name in ("splitData", "splitLse")]
    assert sum(x.numel() * x.element_size() for x in held) == plan.partial_nbytes
    with pytest.raises(TypeError, match="must be asked of a plan for aiter"):
        _ = plan_for(problem, backend="torch").partial_nbytes


OTHERS = {
    "batch": (replace(CASE, lengths=(900, 0, 300)), r"\[3, 1, 20\], got \[4, 1, 20\]"),
    "S": (replace(CASE, q_len=2), r"\[4, 2, 20\], got \[4, 1, 20\]"),
    "H": (replace(CASE, heads=40), r"\[4, 1, 40\], got \[4, 1, 20\]"),
    "q": (replace(CASE, q_dtype=FNUZ), "of float8_e4m3fnuz, float8_e4m3fnuz, got bfloat16"),
    "cache": (replace(CASE, cache_dtype=BF16), "of bfloat16, bfloat16, got bfloat16, float8"),
    "page": (replace(CASE, page_size=32), r"= \[32, 32\], got \[16, 16\]"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_it_serves_no_other_problem(name: str, install: Install) -> None:
    install("gfx942")
    case, message = OTHERS[name]
    plan = plan_for(make(CASE))
    with pytest.raises(ValueError, match=message):
        decode(make(case), plan=plan)


def test_it_serves_no_other_backend_and_no_wider_table(install: Install) -> None:
    install("gfx942")
    problem = make(CASE)
    plan = plan_for(problem)
    with pytest.raises(ValueError, match="plan must be aiter or none, got native"):
        decode(problem, plan=plan_for(problem, backend="torch"))
    with pytest.raises(ValueError, match="plan must be native or none, got aiter"):
        decode(problem, plan=plan, backend="torch")
    with pytest.raises(ValueError, match="plan must be made with return_lse=True"):
        decode(problem, plan=plan, return_lse=True)
    wide = problem.block_table.repeat(1, 2)
    with pytest.raises(ValueError, match="for sequences of at most"):
        plan.update_(problem.seq_lens, wide)
    with pytest.raises(ValueError, match="plan must be .*integers that its sections need"):
        decode(problem, plan=mla_ops.DecodePlan(plan.tensor[:-1], plan.spec))
    with pytest.raises(ValueError, match="made with kv_cache and without batch_invariant"):
        plan_for(problem, backend="aiter", batch_invariant=True)
    # A batch-invariant plan is a native one, and then the decode is native too.
    invariant = plan_for(problem, batch_invariant=True)
    assert invariant.spec.kind != AITER
    judge("a16w8", CASE, problem, decode(problem, plan=invariant, backend="torch"))


def test_without_a_cache_the_plan_is_native(install: Install) -> None:
    install("gfx942")
    problem = make(CASE)
    sizes = {"page_size": 16, "num_heads": 20}
    plan = mla_ops.plan(problem.seq_lens, problem.block_table, **sizes)
    assert plan.tensor.shape == (5,)
    with pytest.raises(ValueError, match="made with kv_cache"):
        mla_ops.plan(problem.seq_lens, problem.block_table, **sizes, backend="aiter")


def test_limits_of_indices(install: Install) -> None:
    install("gfx942")
    cache = torch.empty(4, 64, 576, dtype=FNUZ)
    table = torch.zeros(1, 1, dtype=torch.int32).expand(64, (1 << 23) // 64 + 1)
    with pytest.raises(ValueError, match="batch . pages . page_size must be at most 536870912"):
        mla_ops.plan(
            torch.zeros(64, dtype=torch.int32), table, page_size=64, num_heads=16, kv_cache=cache
        )


def test_a_release_that_wants_more_room_is_refused(install: Install) -> None:
    there = install("gfx942")
    info = there.get_mla_metadata_info_v1
    there.get_mla_metadata_info_v1 = (
        lambda **kw: [  # type: ignore[method-assign]
            (shape if not isinstance(shape, tuple) else (shape[0] + 1, *shape[1:]), dtype)
            for shape, dtype in info(**kw)
        ]
    )
    with pytest.raises(RuntimeError, match="must need at most .* integers of work_info"):
        plan_for(make(CASE))


def test_opcheck(install: Install) -> None:
    """Schema, fake kernels and what is written, as torch checks them; on the ops with a plan."""
    install("gfx942")
    torch.use_deterministic_algorithms(False)  # or what is uninitialised is not equal to itself
    case = of_kind(Case(lengths=(70, 0), page_size=16), "a16w16", "gfx942")
    problem = make(case)
    plan = plan_for(problem, return_lse=True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    tables = (problem.seq_lens, problem.block_table, list(plan.spec))
    torch.library.opcheck(torch.ops.mla.plan_.default, (plan.tensor, *tables), test_utils=tests)
    options = {"plan": plan.tensor, "plan_spec": list(plan.spec), "backend": "aiter"}
    torch.library.opcheck(
        torch.ops.mla.decode_lse.default, problem.arguments, options, test_utils=tests
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_everything_but_aiter_is_captured(install: Install) -> None:
    """On any GPU, with aiter's functions doing nothing: a plan and a decode in one graph, which
    follows lengths and tables. The indices are checked; the output is that of empty sequences."""
    there = install("gfx942")
    there.skip = {"get_mla_metadata_v1", "mla_decode_stage1_asm_fwd", "mla_reduce_v1"}
    torch.use_deterministic_algorithms(False)
    problem = make(CASE)
    moved = [x.cuda() for x in problem.arguments[:4]]
    options = {name: x.cuda() if torch.is_tensor(x) else x for name, x in problem.options.items()}
    on_gpu = problem._replace(
        q=moved[0], kv_cache=moved[1], block_table=moved[2], seq_lens=moved[3], options=options
    )
    for return_lse in (False, True):
        plan = plan_for(on_gpu, return_lse=return_lse)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # warm up, as torch's graphs want it
            decode(on_gpu, plan=plan, return_lse=return_lse)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.update_(on_gpu.seq_lens, on_gpu.block_table)
            result = decode(on_gpu, plan=plan, return_lse=return_lse)
        for lengths in ((900, 0, 300, 65), (1, 0, 0, 64)):
            on_gpu.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
            graph.replay()
            torch.cuda.synchronize()
            out = result[0] if return_lse else result
            assert not out[[b for b, n in enumerate(lengths) if n == 0]].any()
            spec = plan.spec
            assert isinstance(spec, AiterPlanSpec)
            parts = aiter_plan.Parts(plan.tensor, spec)
            indices = parts.token_indices.view(spec.batch, spec.pitch).cpu()
            token = torch.arange(spec.pitch)
            column = (token // 16).clamp(max=problem.block_table.shape[1] - 1)
            rows = problem.block_table[:, column] * 16 + token % 16
            seen = token < torch.tensor(lengths)[:, None]
            assert torch.equal(indices, torch.where(seen, rows, 0))
            first = parts.addresses().cpu().tolist()
            assert first == [parts.work_indptr.data_ptr(), parts.work_info.data_ptr()]
