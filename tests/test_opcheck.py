"""torch.library.opcheck on every public op, and torch.export."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from cases import BF16, FLOAT8, FN, FNUZ, Case, make
from torch import Tensor
from torch.library import opcheck

import mla_ops

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def check(op: Any, *arguments: Any, **options: Any) -> None:
    tensors = [x for x in (*arguments, *options.values()) if isinstance(x, Tensor)]
    # A known limit of torch: test_schema multiplies its inputs, and a CPU has no such kernel for
    # float8 ("mul_cpu_reduced_float" not implemented).
    float8 = any(x.dtype in FLOAT8 for x in tensors)
    opcheck(op.default, arguments, options, test_utils=CHECKS[1:] if float8 else CHECKS)


def layout(x: Tensor) -> Tensor:
    """The same numbers in wider rows, batch inside."""
    wide = torch.zeros(*x.shape[1:-1], x.shape[0], x.shape[-1] + 5, dtype=x.dtype)
    return wide[..., 5:].movedim(-2, 0).copy_(x)


DECODES = {
    "plain": Case(lengths=(5, 0, 40), heads=3, page_size=8, rank=16, rope=8),
    "S 4": Case(lengths=(5, 40), heads=3, page_size=8, rank=16, rope=8, q_len=4),
    "B 0": Case(lengths=(), heads=3, page_size=8, rank=16, rope=8),
    "float8 cache": Case(lengths=(5, 9), heads=2, page_size=8, rank=16, rope=8, cache_dtype=FN),
    "float8 both": Case(
        lengths=(5, 9), heads=2, page_size=8, rank=16, rope=8, cache_dtype=FNUZ, q_dtype=FN
    ),
}


@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES)
@pytest.mark.parametrize("strided", (False, True))
def test_decode(case: Case, strided: bool) -> None:
    problem = make(case)
    if strided:
        problem = problem._replace(q=layout(problem.q), kv_cache=layout(problem.kv_cache))
    # NaN where nothing may look is not equal to itself, as test_schema asks of inputs.
    raw = {1: torch.uint8, 2: torch.int16}[problem.kv_cache.element_size()]
    cache = torch.where(problem.kv_cache.isnan(), 0, problem.kv_cache.view(raw))
    arguments = (problem.q, cache.view(problem.kv_cache.dtype), *problem.arguments[2:])
    check(torch.ops.mla.decode, *arguments, **problem.options)
    check(torch.ops.mla.decode_lse, *arguments, **problem.options)
    sizes = {"page_size": 8, "num_heads": case.heads, "q_len": case.q_len, "workers": 2}
    plan = mla_ops.plan(problem.seq_lens, problem.block_table, **sizes)
    planned = {**problem.options, "plan": plan.tensor, "plan_spec": list(plan.spec)}
    check(torch.ops.mla.decode, *arguments, **planned)
    out = torch.zeros(*problem.q.shape[:3], case.rank, dtype=BF16)
    for lse in (None, torch.zeros(problem.q.shape[:3])):
        check(torch.ops.mla.decode_out, *arguments, **problem.options, out=out, lse=lse)


def test_plan() -> None:
    lengths = torch.tensor([3, 0, 500], dtype=torch.int32)
    table = torch.zeros(3, 8, dtype=torch.int32)
    spec = list(mla_ops.plan(lengths, table, page_size=64, num_heads=2, workers=2).spec)
    check(torch.ops.mla.plan, lengths, table, spec)
    check(torch.ops.mla.plan_, torch.zeros(4, dtype=torch.int32), lengths, table, spec)


@pytest.mark.parametrize("shape", ((4, 6), (0, 6), ()), ids=str)
def test_quantize_fp8(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    check(torch.ops.mla.quantize_fp8, x)
    check(torch.ops.mla.quantize_fp8, x, torch.ones(1), FNUZ)
    if x.dim() == 2:
        check(torch.ops.mla.quantize_fp8, layout(x), None, FN)


@pytest.mark.parametrize("cache", (BF16, FN), ids=str)
@pytest.mark.parametrize("slots", ([0, -1, 7], []), ids=str)
def test_write_kv_cache(cache: torch.dtype, slots: list[int]) -> None:
    scale = torch.full((1,), 0.1) if cache == FN else None
    rows = torch.randn(len(slots), 24).to(BF16)
    pool = torch.zeros(2, 4, 24).to(cache)
    mapping = torch.tensor(slots, dtype=torch.int64)
    check(torch.ops.mla.write_kv_cache, rows[:, :16], rows[:, 16:], pool, mapping, scale)


def test_merge_states() -> None:
    a, b = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    check(torch.ops.mla.merge_states, a, torch.randn(2, 3), layout(b), torch.randn(2, 3))
    check(torch.ops.mla.merge_states, a[:0], torch.randn(0, 3), b[:0], torch.randn(0, 3))


class Step(torch.nn.Module):
    """One layer's decode step: write, attend, convert."""

    def forward(
        self, q: Tensor, rows: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        mla_ops.write_kv_cache(rows[:, :16], rows[:, 16:], cache, slots)
        out, lse = mla_ops.decode(
            q, cache, table, lengths, 0.2, kv_lora_rank=16, return_lse=True, backend="native"
        )
        return (lse, *mla_ops.quantize_fp8(out))


def step_arguments(batch: int) -> tuple[Tensor, ...]:
    table = torch.arange(3 * batch, dtype=torch.int32).view(batch, 3)
    lengths = torch.arange(1, batch + 1, dtype=torch.int32) % 12
    return (
        torch.randn(batch, 1, 3, 24),
        torch.randn(batch, 24),
        torch.zeros(30, 4, 24),
        table,
        lengths,
        torch.arange(batch),
    )


def test_export_with_a_dynamic_batch_survives_saving() -> None:
    batch = torch.export.Dim("batch", min=2, max=10)
    dynamic = {"cache": None}
    dynamic.update({name: {0: batch} for name in ("q", "rows", "table", "lengths", "slots")})
    program = torch.export.export(Step(), step_arguments(4), dynamic_shapes=dynamic)
    memory = io.BytesIO()
    torch.export.save(program, memory)
    memory.seek(0)
    loaded = torch.export.load(memory).module()
    for size in (2, 4, 9):
        arguments = step_arguments(size)
        copy = [x.clone() for x in arguments]
        want, got = Step()(*arguments), loaded(*copy)
        for a, b in zip(got, want, strict=True):
            raw = torch.uint8 if a.dtype in FLOAT8 else a.dtype
            assert torch.equal(a.view(raw), b.view(raw))
        assert torch.equal(copy[2], arguments[2]), "the cache was written"
