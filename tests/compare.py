"""How a result is judged, in one place: relative L2 error, cosine and the largest error, against
the float64 oracle."""

from __future__ import annotations

import torch
from cases import FLOAT8, Case
from torch import Tensor

# Relative L2 error of out, per row. What is left of the arithmetic: bfloat16 rounds the output
# (2^-8 at most, 1.7e-3 on average) and, where the CPU multiplies bfloat16, the weights (the same).
# float16 rounds by 2^-11 at most; float32 sums are good to about 1e-6.
#
# A row of few numbers, or one whose norm is in few of them, does not average its roundings: of 16
# normally distributed numbers, rounding the exact answer alone costs up to 3.4e-3. Cases with rank
# below 256 and bfloat16 output have "shifted" data (2.6e-3 at worst in 30 seeds, weights included);
# other data is for float32. A row of fewer than 16 numbers may cancel to nearly 0 as a whole, where
# float32 has no relative precision left: random ones are "flat".
OUT_BAR = {torch.bfloat16: 3e-3, torch.float16: 6e-4, torch.float32: 1e-5}
LSE_BAR = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-4}


def out_dtype(case: Case) -> torch.dtype:
    return torch.bfloat16 if case.q_dtype in FLOAT8 else case.q_dtype


def errors(got: Tensor, want: Tensor) -> tuple[float, float, float]:
    """Return (relative L2, 1 - cosine, largest error over the largest value), each the worst of all
    rows."""
    got, want = got.double().flatten(0, -2), want.double().flatten(0, -2)
    if got.numel() == 0:
        return 0.0, 0.0, 0.0
    norm = want.norm(dim=-1)
    dead = norm == 0
    assert torch.equal(got[dead], want[dead]), "a row that sees nothing must be exactly 0"
    got, want, norm = got[~dead], want[~dead], norm[~dead]
    if got.numel() == 0:
        return 0.0, 0.0, 0.0
    relative = (got - want).norm(dim=-1) / norm
    cosine = 1 - (got * want).sum(-1) / (got.norm(dim=-1).clamp(min=1e-300) * norm)
    largest = (got - want).abs().amax(-1) / want.abs().amax(-1)
    return float(relative.max()), float(cosine.max()), float(largest.max())


def check(
    case: Case,
    out: Tensor,
    want: Tensor,
    lse: Tensor | None = None,
    want_lse: Tensor | None = None,
    bar: float | None = None,
) -> None:
    """Assert that a result is right; `bar` is for kernels that compute otherwise than ours."""
    dtype = out_dtype(case)
    assert out.dtype == dtype and out.shape == want.shape
    assert not out.isnan().any(), "NaN: memory was read that holds nothing"
    relative, cosine, largest = errors(out, want)
    bar = OUT_BAR[dtype] if bar is None else bar
    assert relative < bar, f"relative L2 error {relative:.2e}, bar {bar:.0e}"
    assert cosine < bar * bar, f"1 - cosine {cosine:.2e}, bar {bar * bar:.0e}"
    assert largest < 4 * bar, f"largest error {largest:.2e}, bar {4 * bar:.0e}"
    if lse is not None and want_lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == want_lse.shape
        empty = want_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, empty), (
            "-inf, for the rows that see nothing and no others"
        )
        worst = float((lse.double() - want_lse)[~empty].abs().max()) if (~empty).any() else 0.0
        assert worst < LSE_BAR[dtype], f"lse error {worst:.2e}, bar {LSE_BAR[dtype]:.0e}"
