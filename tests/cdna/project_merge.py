"""Checks of csrc/hip/merge.hip in the executor, against float64."""

from __future__ import annotations

import torch
from project import Device, Kernels
from torch import Tensor

INF, NAN = torch.inf, torch.nan
# Log-sum-exps of the two sides. Large ones overflow where nothing is subtracted first.
PAIRS = [
    (0.0, 0.0),
    (1.5, -2.0),
    (-3.0, 4.0),
    (300.0, 301.0),
    (-300.0, -299.0),
    (1000.0, -1000.0),
    (-1000.0, 1000.0),
    (-INF, 2.5),
    (2.5, -INF),
    (-INF, -INF),
    (INF, 2.5),
    (2.5, INF),
    (INF, INF),
    (INF, -INF),
    (-INF, 300.0),
]


def expected(a: Tensor, b: Tensor, lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """In float64; +inf, which FlashMLA writes for a row that sees nothing, is -inf."""
    lse = torch.stack([lse_a, lse_b]).double()
    lse[lse == INF] = -INF
    total = torch.logsumexp(lse, 0)
    weight = torch.exp(lse - torch.where(total == -INF, 0.0, total))[..., None]
    values = torch.stack([a, b]).double()
    return torch.where(weight == 0, 0.0, weight * values).sum(0), total


def inputs(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A row for each pair, twice; a side without weight is NaN."""
    generator = torch.Generator().manual_seed(width)
    lse_a, lse_b = torch.tensor(PAIRS * 2, dtype=torch.float32).t().contiguous()
    sides = []
    for lse in (lse_a, lse_b):
        x = torch.randn(len(lse), width, generator=generator).to(dtype)
        x[lse.isinf()] = NAN
        sides.append(x)
    return sides[0], sides[1], lse_a, lse_b


def check_one(kernels: Kernels, dtype: torch.dtype, width: int, offset: int = 0) -> float:
    """The largest error of a launch in units of what is allowed."""
    a, b, lse_a, lse_b = inputs(dtype, width)
    device = Device(kernels, "merge")
    rows = len(a)
    out = device.full(a.numel(), dtype, offset)
    lse = device.full(rows, torch.float32)
    device.call(
        "merge_states",
        (dtype,),
        3,
        *(device.put(a, offset), device.put(lse_a), device.put(b, offset), device.put(lse_b)),
        *(out, lse, rows, width),
    )
    got = device.get(out, a.numel(), dtype).reshape(a.shape).double()
    got_lse = device.get(lse, rows, torch.float32).double()
    want, want_lse = expected(a, b, lse_a, lse_b)
    assert not got.isnan().any(), "a side without weight got into the result"
    dead = want_lse == -INF
    assert (got[dead] == 0).all() and (got_lse[dead] == -INF).all()
    # Rounding to the type, and a few roundings of float32 in the factors and products. exp of a
    # difference d is off by some d * 2^-24.
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    terms = 4.0 * 2**-21
    allowed = want.abs() * eps * 0.51 + terms + tiny
    error = float(((got - want).abs() / allowed).max())
    live = (got_lse - want_lse)[~dead].abs() / (want_lse[~dead].abs() * 2**-23 + 2**-21)
    return max(error, float(live.max()))


def check_merge(kernels: Kernels, dtype: torch.dtype) -> None:
    """Widths of whole runs, of runs and a rest, of less than a run, of more than a wave's; memory
    that is not aligned.
    """
    per_run = 16 // dtype.itemsize
    for width in (per_run, 512, 576 + 3, 1, per_run - 1, 64 * per_run + per_run):
        error = check_one(kernels, dtype, width)
        assert error <= 1, (width, error)
    assert check_one(kernels, dtype, 512, offset=1) <= 1
