"""merge_states joins attention over two sets of tokens to attention over both, in any type,
whatever a side that saw nothing holds; compiled and in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from cases import BF16, FP16, FP32
from running import bits, threads
from torch import Tensor

import mla_ops
from mla_ops.backends import torch as torch_backend

Result = tuple[Tensor, Tensor]
INF = torch.inf

# Half a unit in the last place of each type, and float32's few roundings.
OUT_BAR = {BF16: 2**-8, FP16: 2**-11, FP32: 4e-7}


def plain(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Result:
    out, lse = torch.empty(out_a.shape, dtype=out_a.dtype), torch.empty(lse_a.shape)
    torch_backend.KERNELS["_merge_states"](out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


KERNELS: dict[str, Callable[..., Result]] = {"compiled": mla_ops.merge_states, "plain": plain}


def in_float64(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Result:
    a, b = (lse.double().where(lse != INF, -INF) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(a, b)
    weights = [(side - lse).exp().where(side != -INF, 0.0)[..., None] for side in (a, b)]
    sides = [
        out.double().where(w != 0, 0.0) for out, w in zip((out_a, out_b), weights, strict=True)
    ]
    return weights[0] * sides[0] + weights[1] * sides[1], lse


def check(merge: Callable[..., Result], *states: Tensor) -> None:
    out, lse = merge(*states)
    want, want_lse = in_float64(*states)
    assert out.dtype == states[0].dtype and lse.dtype == FP32
    assert out.shape == want.shape and lse.shape == want_lse.shape
    assert not out.isnan().any() and not lse.isnan().any()
    # Of the terms, not of their sum, which may be near 0.
    size = states[0].double().abs().nan_to_num(0, 0, 0) + states[2].double().abs().nan_to_num(
        0, 0, 0
    )
    allowed = OUT_BAR[out.dtype] * torch.maximum(size, want.abs()) + 1e-7 * (size > 0)
    assert ((out.double() - want).abs() <= allowed).all()
    assert torch.equal(lse == -INF, want_lse == -INF)
    seen = want_lse != -INF
    torch.testing.assert_close(lse[seen].double(), want_lse[seen], rtol=2e-7, atol=2e-7)


def states(dtype: torch.dtype, *shape: int, spread: float = 3.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(8)
    a, b = torch.randn(2, *shape, generator=generator).to(dtype)
    lse_a, lse_b = torch.randn(2, *shape[:-1], generator=generator) * spread
    return a, lse_a, b, lse_b


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", OUT_BAR, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(4, 2, 16, 512), (3, 1), (5,), (0, 7), (2, 0, 3), (7, 255), (3, 256), (3, 257), (6, 0)],
)
def test_against_float64(shape: tuple, dtype: torch.dtype, kernel: str) -> None:
    for spread in (0.0, 0.5, 3.0, 60.0, 1e4):
        check(KERNELS[kernel], *states(dtype, *shape, spread=spread))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", OUT_BAR, ids=str)
@pytest.mark.parametrize("rubbish", [torch.nan, INF, -INF, 1e30, 0.0])
def test_a_side_that_saw_nothing(rubbish: float, dtype: torch.dtype, kernel: str) -> None:
    """-inf, or FlashMLA's +inf; its output may hold anything. The other side comes back exactly."""
    a, lse_a, b, lse_b = states(dtype, 6, 300)
    a[:4] = rubbish
    b[2:4] = rubbish
    lse_a[:4] = torch.tensor([-INF, INF, -INF, INF])
    lse_b[2:4] = torch.tensor([INF, -INF])
    for order in ((a, lse_a, b, lse_b), (b, lse_b, a, lse_a)):
        out, lse = KERNELS[kernel](*order)
        assert torch.equal(bits(out[:2]), bits(b[:2]))
        assert torch.equal(lse[:2], lse_b[:2])
        assert out[2:4].eq(0).all() and lse[2:4].eq(-INF).all()
    check(KERNELS[kernel], a, lse_a, b, lse_b)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_that_has_weight_is_not_hidden(kernel: str) -> None:
    a, lse_a, b, lse_b = states(FP32, 3, 4)
    a[0, 1] = torch.nan
    lse_b[1] = torch.nan
    out, lse = KERNELS[kernel](a, lse_a, b, lse_b)
    assert out[0].isnan().tolist() == [False, True, False, False]
    assert out[1].isnan().all() and lse.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", OUT_BAR, ids=str)
def test_plain_torch_agrees_with_the_compiled_kernel(dtype: torch.dtype) -> None:
    """Within one rounding of the type."""
    given = states(dtype, 50, 130)
    (out, lse), (plain_out, plain_lse) = mla_ops.merge_states(*given), plain(*given)
    apart = (out.double() - plain_out.double()).abs()
    assert (apart <= 2 * OUT_BAR[dtype] * plain_out.double().abs() + 1e-6).all()
    torch.testing.assert_close(lse, plain_lse, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_order_and_grouping_do_not_matter(kernel: str) -> None:
    """Any way to merge five parts gives the whole: as distributed ranks do."""
    merge = KERNELS[kernel]
    generator = torch.Generator().manual_seed(10)
    scores = torch.randn(4, 50, generator=generator).double()
    values = torch.randn(50, 32, generator=generator).double()
    want, want_lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    cuts = [0, 7, 7, 20, 49, 50]  # one part is empty
    parts = []
    for begin, end in itertools.pairwise(cuts):
        part = scores[:, begin:end]
        out = part.softmax(-1) @ values[begin:end]
        parts.append((out.float(), part.logsumexp(-1).float()))
    for order in itertools.permutations(range(5), 5):
        out, lse = parts[order[0]]
        for i in order[1:]:
            out, lse = merge(out, lse, *parts[i])
        torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_views_are_read_as_they_lie_and_stay(kernel: str) -> None:
    a, lse_a, b, lse_b = states(BF16, 6, 5, 40)
    want = KERNELS[kernel](a, lse_a, b, lse_b)
    wide = torch.full((5, 6, 80), torch.nan, dtype=BF16)
    view = wide.transpose(0, 1)[..., 1::2]
    view.copy_(a)
    lse_view = lse_a.T.contiguous().T
    before = bits(wide).clone()
    got = KERNELS[kernel](view, lse_view, b, lse_b)
    assert torch.equal(bits(want[0]), bits(got[0])) and torch.equal(want[1], got[1])
    assert torch.equal(before, bits(wide))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_share_the_rows(count: int) -> None:
    with threads(count):
        check(mla_ops.merge_states, *states(BF16, 700, 512))
