"""What must hold where nothing was compiled. test_without_kernels.py runs it in such a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import good_calls
import pytest
import torch
from cases import FN, FNUZ, Case, make
from compare import check
from torch import Tensor

import mla_ops
from mla_ops import _compiled, capability, reference

CASES = (
    Case(lengths=(70, 3, 0)),
    Case(lengths=(70, 3), cache_dtype=FN, page_size=7),
    Case(lengths=(9, 40), q_len=4, heads=5, cache_dtype=FNUZ, q_dtype=FN),
    Case(lengths=(9, 40), q_len=2, causal=False, q_dtype=torch.float32, cache_dtype=torch.float32),
    Case(lengths=()),
)


def test_there_are_none() -> None:
    assert "without-kernels" in Path(mla_ops.__file__).parts
    assert _compiled.missing is not None
    assert "pip install --no-build-isolation ." in _compiled.missing


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ("auto", "torch"))
def test_decode_is_right(case: Case, backend: str) -> None:
    problem = make(case)
    out, lse = mla_ops.decode(
        *problem.arguments, **problem.options, return_lse=True, backend=backend
    )
    check(case, out, *_oracle(problem)[:1], lse, _oracle(problem)[1])
    sizes = {"page_size": case.page_size, "num_heads": case.heads, "q_len": case.q_len}
    plan = mla_ops.plan(problem.seq_lens, problem.block_table, **sizes)
    again = mla_ops.decode(*problem.arguments, **problem.options, plan=plan, backend=backend)
    assert torch.equal(again, out)
    into = torch.full_like(out, -7.0)
    mla_ops.decode(*problem.arguments, **problem.options, out=into, backend=backend)
    assert torch.equal(into, out)


def _oracle(problem: Any) -> tuple[Tensor, Tensor]:
    return reference.decode(*problem.arguments, **problem.options)


@pytest.mark.parametrize("op", good_calls.GOOD)
@pytest.mark.parametrize("compiled", (False, True))
def test_all_ops_work(op: str, compiled: bool) -> None:
    function, arguments = good_calls.GOOD[op]()

    def call(arguments: dict[str, Any]) -> Any:
        return function(**arguments)

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    call(arguments)


def test_plan_quantize_write_and_merge_are_right() -> None:
    lengths = torch.tensor([5, 200, 0], dtype=torch.int32)
    table = torch.zeros(3, 4, dtype=torch.int32)
    plan = mla_ops.plan(lengths, table, page_size=64, num_heads=2)
    assert plan.tensor.tolist() == [0, 1, 5, 6]
    for shape in ((4, 33), (0, 3), ()):
        x = torch.randn(shape) * 100
        for dtype in (FN, FNUZ):
            got, want = mla_ops.quantize_fp8(x, None, dtype), reference.quantize_fp8(x, None, dtype)
            assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
            assert torch.equal(got[1], want[1].reshape(1))
    cache = torch.zeros(2, 4, 12)
    rows = torch.randn(4, 12)
    slots = torch.tensor([7, -1, 2, 7])
    mla_ops.write_kv_cache(rows[:, :8], rows[:, 8:], cache, slots)
    want = torch.zeros(8, 12)
    want[2], want[7] = rows[2], rows[3]
    assert torch.equal(cache.view(8, 12), want)
    out, lse = mla_ops.merge_states(rows, slots.float(), rows, slots.float())
    torch.testing.assert_close(out, rows)
    torch.testing.assert_close(lse, slots + torch.tensor(2.0).log())


def test_native_says_how_to_build_it() -> None:
    problem = make(CASES[0])
    with pytest.raises(ValueError) as caught:
        mla_ops.decode(*problem.arguments, **problem.options, backend="native")
    assert "pip install --no-build-isolation ." in str(caught.value)
    assert "the nearest that can is 'torch'" in str(caught.value)
    assert not mla_ops.supports(arch="cpu", backend="native")
    assert mla_ops.supports(arch="cpu")
    assert "no: mla_ops was installed without" in mla_ops.explain(arch="cpu")
    q, cache = problem.q, problem.kv_cache
    assert capability.decide(q, cache, 512, True, False, "auto").backend == "torch"


def calls_with_gradients() -> dict[str, Any]:
    a = good_calls.GOOD["decode"]()[1]
    q = a.pop("q").requires_grad_()
    merge = good_calls.GOOD["merge_states"]()[1]
    merge["out_a"].requires_grad_()
    x = torch.randn(3, 4, requires_grad=True)
    return {
        "decode": lambda: mla_ops.decode(q, **a),
        "decode_lse": lambda: mla_ops.decode(q, **a, return_lse=True)[0],
        "merge_states": lambda: mla_ops.merge_states(**merge)[0],
        "quantize_fp8": lambda: mla_ops.quantize_fp8(x)[1],
    }


@pytest.mark.parametrize("op", calls_with_gradients())
def test_backward_raises(op: str) -> None:
    out = calls_with_gradients()[op]()
    assert out.requires_grad
    with pytest.raises(RuntimeError, match=f"derivative for mla::{op} is not implemented"):
        out.sum().backward()
    with torch.no_grad():
        assert not calls_with_gradients()[op]().requires_grad


def test_backward_raises_under_compile() -> None:
    a = good_calls.GOOD["decode"]()[1]
    a["q"].requires_grad_()
    compiled = torch.compile(lambda a: mla_ops.decode(**a), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="mla::decode is not implemented"):
        compiled(a).sum().backward()


def test_what_is_written_in_place_takes_no_gradients() -> None:
    _, a = good_calls.GOOD["decode_out"]()
    a["q"].requires_grad_()
    with pytest.raises(ValueError, match="q must be without requires_grad"):
        torch.ops.mla.decode_out(**a)
    _, a = good_calls.GOOD["write_kv_cache"]()
    a["kv_c"].requires_grad_()
    with pytest.raises(ValueError, match="kv_c must be without requires_grad"):
        mla_ops.write_kv_cache(**a)
    with torch.no_grad():
        mla_ops.write_kv_cache(**a)
