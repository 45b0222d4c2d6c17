"""What a hostile tester found, each pinned by a test of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import FP32, Case, Problem, make
from compare import errors

import mla_ops
from mla_ops import reference


def solve(problem: Problem, backend: str) -> torch.Tensor:
    return mla_ops.decode(*problem.arguments, **problem.options, backend=backend)


def test_a_cache_that_backward_needs_cannot_be_written_unnoticed() -> None:
    cache = torch.ones(2, 4, 24)
    weight = torch.ones_like(cache, requires_grad=True)
    total = (weight * cache).sum()
    before = cache._version
    mla_ops.write_kv_cache(torch.ones(1, 16), torch.ones(1, 8), cache, torch.tensor([0]))
    assert cache._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_versions_of_buffers_and_plans_go_up() -> None:
    problem = make(Case())
    out = torch.empty(4, 1, 16, 512, dtype=torch.bfloat16)
    lse = torch.empty(4, 1, 16)
    mla_ops.decode(*problem.arguments, **problem.options, out=out, lse=lse, return_lse=True)
    assert (out._version, lse._version) == (1, 1)
    plan = mla_ops.plan(problem.seq_lens, problem.block_table, page_size=64, num_heads=16)
    before = plan.tensor._version
    plan.update_(problem.seq_lens, problem.block_table)
    assert plan.tensor._version == before + 1


@pytest.mark.parametrize("payload", (-1, 0x7FC00001, 0x7FFFFFFF, 0x7F800001))
@pytest.mark.parametrize("backend", ("native", "torch"))
@pytest.mark.parametrize("where", ("q", "cache"))
def test_every_nan_stays_nan(payload: int, backend: str, where: str) -> None:
    problem = make(Case(lengths=(70,), heads=2, q_dtype=FP32, cache_dtype=FP32))
    nan = torch.tensor(payload, dtype=torch.int32).view(torch.float32)
    if where == "q":
        problem.q[0, 0, 1, 575] = nan
    else:
        problem.kv_cache[problem.block_table[0, 0].long(), 3, 575] = nan
    out = solve(problem, backend)
    assert out[0, 0, 1].isnan().all()
    assert out[0, 0, 0].isnan().all() == (where == "cache")


@pytest.mark.parametrize("backend", ("native", "torch"))
def test_autocast_changes_nothing(backend: str) -> None:
    problem = make(Case(q_dtype=FP32, cache_dtype=FP32))
    want, _ = reference.decode(*problem.arguments, **problem.options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = solve(problem, backend)
    assert out.dtype == FP32
    assert errors(out, want)[0] < 1e-5


@pytest.mark.parametrize("which", ("q", "kv_cache"))
def test_a_tensor_without_its_storage_is_refused(which: str) -> None:
    problem = make(Case())
    getattr(problem, which).untyped_storage().resize_(64)
    with pytest.raises(ValueError, match="must be backed by its storage, got 64 bytes"):
        solve(problem, "native")


def test_plans_can_be_compared_and_copied() -> None:
    problem = make(Case())
    plan = mla_ops.plan(problem.seq_lens, problem.block_table, page_size=64, num_heads=16)
    assert plan == plan
    assert plan != copy.deepcopy(plan)


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_OPS_BACKEND", "")
    assert mla_ops.supports(arch="cpu")
