"""decode takes its tensors as they lie: strides, offsets, views and the forms of q and of the
outputs give the same bits as plain contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import BF16, FN, FP32, HUGE, Case, Problem, make
from running import BACKENDS, poisoned, run, same_bits
from torch import Tensor

import mla_ops

CASES = [
    Case(lengths=(130, 64, 1, 0), q_len=2, heads=5),
    Case(lengths=(130, 64, 1, 0), q_len=2, heads=20, cache_dtype=FN, page_size=7),
    Case(lengths=(70, 5), q_dtype=FP32, cache_dtype=FP32, rank=33, rope=7, page_size=16),
]


def _inside(tensor: Tensor, *grow: int, at: int = 3) -> Tensor:
    """The tensor as a view of one that is larger by `grow`, poisoned around it."""
    shape = [size + more for size, more in zip(tensor.shape, grow, strict=True)]
    if tensor.dtype == torch.int32:
        host = torch.full(shape, HUGE, dtype=torch.int32)
    else:
        host = poisoned(*shape, dtype=tensor.dtype)
    for dim, (size, more) in enumerate(zip(tensor.shape, grow, strict=True)):
        host = host.narrow(dim, min(at, more), size)
    bits_of = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    host.view(bits_of).copy_(tensor.view(bits_of))
    return host


def _stored_as(tensor: Tensor, *order: int) -> Tensor:
    """The same values with dimensions stored in another order."""
    inverse = [order.index(i) for i in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)


LAYOUTS: dict[str, Callable[[Problem], Problem]] = {
    "q in wider rows": lambda p: p._replace(q=_inside(p.q, 0, 0, 0, 21)),
    "q in more heads": lambda p: p._replace(q=_inside(p.q, 0, 0, 9, 0)),
    "q inside in all dimensions": lambda p: p._replace(q=_inside(p.q, 2, 1, 4, 5)),
    "q stored by heads": lambda p: p._replace(q=_stored_as(p.q, 2, 0, 1, 3)),
    "q stored by tokens": lambda p: p._replace(q=_stored_as(p.q, 1, 2, 0, 3)),
    "pages apart": lambda p: p._replace(kv_cache=_inside(p.kv_cache, 0, 2, 0)),
    "rows apart": lambda p: p._replace(kv_cache=_inside(p.kv_cache, 0, 0, 19)),
    "rows and pages apart": lambda p: p._replace(kv_cache=_inside(p.kv_cache, 1, 5, 3, at=1)),
    "pages interleaved": lambda p: p._replace(kv_cache=_stored_as(p.kv_cache, 1, 0, 2)),
    "a head dimension": lambda p: p._replace(kv_cache=p.kv_cache.unsqueeze(2)),
    "a head dimension, apart": lambda p: p._replace(
        kv_cache=_inside(p.kv_cache, 1, 2, 4).unsqueeze(2)
    ),
    "columns of a wider table": lambda p: p._replace(block_table=_inside(p.block_table, 0, 6)),
    "rows of a taller table": lambda p: p._replace(block_table=_inside(p.block_table, 4, 3)),
    "lengths out of a longer list": lambda p: p._replace(seq_lens=_inside(p.seq_lens, 5)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_does_not_matter(case: Case, layout: str, backend: str) -> None:
    plain = make(case)
    laid_out = LAYOUTS[layout](plain)
    want, got = run(plain, backend), run(laid_out, backend)
    assert same_bits(want[0], got[0]) and same_bits(want[1], got[1])


def test_one_query_for_all_sequences() -> None:
    """A batch of stride 0."""
    problem = make(CASES[0])
    spread = problem.q[:1].expand_as(problem.q)
    want = run(problem._replace(q=spread.contiguous()))
    got = run(problem._replace(q=spread))
    assert same_bits(want[0], got[0]) and same_bits(want[1], got[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_q_as_a_pair(case: Case, backend: str) -> None:
    problem = make(case)
    want = run(problem, backend)
    pair = (problem.q[..., : case.rank].contiguous(), problem.q[..., case.rank :])
    for q in (pair, list(pair)):
        got = run(problem._replace(q=q), backend)
        assert same_bits(want[0], got[0]) and same_bits(want[1], got[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_q_without_a_token_dimension(backend: str) -> None:
    """[B, H, D] gives [B, H, R] and [B, H], with buffers of these shapes too."""
    problem = make(Case())
    want = run(problem, backend)
    flat = problem.q.squeeze(1)
    pair = (flat[..., :512], flat[..., 512:])
    for q in (flat, _stored_as(flat, 1, 0, 2), pair):
        out, lse = run(problem._replace(q=q), backend)
        assert out.shape == (4, 16, 512) and lse.shape == (4, 16)
        assert same_bits(want[0].squeeze(1), out) and same_bits(want[1].squeeze(1), lse)
    out, lse = poisoned(4, 16, 512, dtype=BF16), poisoned(4, 16, dtype=FP32)
    run(problem._replace(q=flat), backend, out=out, lse=lse)
    assert same_bits(want[0].squeeze(1), out) and same_bits(want[1].squeeze(1), lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lse_or_not_the_output_is_the_same(case: Case, backend: str) -> None:
    problem = make(case)
    want, _ = run(problem, backend)
    arguments = {**problem.options, "backend": backend}
    got = mla_ops.decode(*problem.arguments, **arguments)
    assert isinstance(got, Tensor) and same_bits(want, got)
    into = torch.empty_like(want)
    assert mla_ops.decode(*problem.arguments, **arguments, out=into) is into
    assert same_bits(want, into)
    both = mla_ops.decode(*problem.arguments, **arguments, out=into, return_lse=True)
    assert len(both) == 2 and both[0] is into


OUT_ORDERS = {
    "plain": (0, 1, 2, 3),
    "by heads": (2, 0, 1, 3),
    "by tokens": (1, 0, 2, 3),
    "heads before tokens": (0, 2, 1, 3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", OUT_ORDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_buffers_with_strides(case: Case, order: str, backend: str) -> None:
    """Values go where the strides say, and what lies between them stays."""
    problem = make(case)
    want, want_lse = run(problem, backend)
    out_order = OUT_ORDERS[order]
    lse_order = [i for i in out_order if i != 3]
    out_host = poisoned(*[want.shape[i] + 2 for i in out_order], dtype=want.dtype)
    lse_host = poisoned(*[want_lse.shape[i] * 2 for i in lse_order], dtype=FP32)
    out = out_host.permute([out_order.index(i) for i in range(4)])
    out = out[tuple(slice(1, 1 + size) for size in want.shape)]
    lse = lse_host.permute([lse_order.index(i) for i in range(3)])[::2, ::2, 1::2]
    run(problem, backend, out=out, lse=lse)
    assert same_bits(want, out) and same_bits(want_lse, lse)
    for host, written in ((out_host, out), (lse_host, lse)):
        written.fill_(float("nan"))
        assert host.isnan().all(), "written beside the buffer"
