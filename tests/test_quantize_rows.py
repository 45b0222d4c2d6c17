"""quantize_fp8 with a scale per row: against the oracle, the torch backend, and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops import reference
from mla_ops.backends import torch as torch_backend

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
WIDE = [torch.bfloat16, torch.float16, torch.float32]


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(shape, generator=generator)
    return (x * torch.logspace(-3, 3, x[..., :1].numel()).reshape(*shape[:-1], 1)).to(dtype)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        raw = torch.uint8 if a.element_size() == 1 else torch.int32
        nan = a.float().isnan()
        assert torch.equal(nan, b.float().isnan())
        assert torch.equal(a.view(raw)[~nan], b.view(raw)[~nan])


@pytest.mark.parametrize("to", FLOAT8)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("shape", [(1,), (7,), (4, 6), (3, 5, 257), (2, 1, 3, 64), (9, 1)])
def test_scales_are_found_row_by_row(
    shape: tuple[int, ...], dtype: torch.dtype, to: torch.dtype
) -> None:
    x = rows(*shape, dtype=dtype)
    got = mla_ops.quantize_fp8(x, dtype=to, per_row=True)
    assert got[1].shape == (*shape[:-1], 1)
    assert_same(got, reference.quantize_fp8(x, None, to, per_row=True))


@pytest.mark.parametrize("to", FLOAT8)
def test_scales_are_given_row_by_row(to: torch.dtype) -> None:
    x = rows(3, 5, 40)
    scale = torch.logspace(-4, 2, 15).reshape(3, 5, 1)
    got = mla_ops.quantize_fp8(x, scale, to, per_row=True)
    assert_same(got, reference.quantize_fp8(x, scale, to, per_row=True))
    assert torch.equal(got[1], scale)
    strided = scale.expand(3, 5, 2)[..., :1].transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert_same(mla_ops.quantize_fp8(x, strided, to, per_row=True), got)


def test_a_row_alone_is_a_tensor_alone() -> None:
    """Every row is as quantized without the others."""
    x = rows(6, 33)
    codes, scales = mla_ops.quantize_fp8(x, per_row=True)
    for row in range(6):
        alone, scale = mla_ops.quantize_fp8(x[row])
        assert torch.equal(codes[row].view(torch.uint8), alone.view(torch.uint8))
        assert torch.equal(scales[row], scale)


def test_rows_without_finite_numbers_get_the_scale_one() -> None:
    x = torch.zeros(4, 5)
    x[1] = torch.nan
    x[2] = torch.inf
    x[3, 2] = 3.5
    codes, scales = mla_ops.quantize_fp8(x, dtype=torch.float8_e4m3fn, per_row=True)
    assert scales.flatten().tolist() == [1.0, 1.0, 1.0, 3.5 / 448]
    assert codes[1].float().isnan().all()
    assert (codes[2].float() == 448).all()


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0, 0), (0,), (2, 0, 4)])
def test_nothing_to_convert(shape: tuple[int, ...]) -> None:
    codes, scales = mla_ops.quantize_fp8(torch.empty(shape), per_row=True)
    assert codes.shape == shape
    assert torch.equal(scales, torch.ones(*shape[:-1], 1))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x.transpose(1, 2),
        lambda x: x[:, ::2, 3:],
        lambda x: x[..., ::3],
        lambda x: x[:, :1].expand(-1, 4, -1),
        lambda x: x.flip(0)[1:],
    ],
)
def test_strides_do_not_matter(view) -> None:
    x = view(rows(4, 6, 50))
    assert_same(
        mla_ops.quantize_fp8(x, per_row=True), mla_ops.quantize_fp8(x.contiguous(), per_row=True)
    )


@pytest.mark.parametrize("given", [False, True])
def test_torch_backend_agrees(given: bool) -> None:
    x = rows(3, 5, 40)
    scale = torch.logspace(-2, 2, 15).reshape(3, 5, 1) if given else None
    want = mla_ops.quantize_fp8(x, scale, torch.float8_e4m3fn, per_row=True)
    got = torch.empty_like(want[0]), torch.empty_like(want[1])
    torch_backend.KERNELS["_quantize_fp8"](x, scale, True, *got)
    assert_same(got, want)


@pytest.mark.parametrize(
    ("scale", "error", "says"),
    [
        (torch.ones(4), ValueError, r"scale must be .* = \[4, 1\], got shape \[4\]"),
        (torch.ones(1), ValueError, r"\[4, 1\], got shape \[1\]"),
        (torch.ones(4, 6), ValueError, r"\[4, 1\], got shape \[4, 6\]"),
        (torch.ones(4, 1, dtype=torch.float64), TypeError, "scale must be float32"),
    ],
)
def test_wrong_scales_are_named(scale: Tensor, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        mla_ops.quantize_fp8(rows(4, 6), scale, per_row=True)


def test_a_scalar_has_no_rows() -> None:
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., columns\]"):
        mla_ops.quantize_fp8(torch.tensor(3.0), per_row=True)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_opcheck(per_row: bool, given: bool) -> None:
    x = rows(4, 6)
    scale = (torch.ones(4, 1) if per_row else torch.ones(1)) if given else None
    torch.library.opcheck(
        torch.ops.mla.quantize_fp8.default, (x, scale, torch.float8_e4m3fn, per_row)
    )


def test_compiles_whole_with_any_number_of_rows() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        return mla_ops.quantize_fp8(x * 2, per_row=True)

    for count in (3, 5, 1):
        x = rows(count, 24)
        assert_same(quantize(x), mla_ops.quantize_fp8(x * 2, per_row=True))


def test_float_of_scale_times_codes_is_near() -> None:
    x = rows(8, 128, dtype=torch.float32)
    codes, scales = mla_ops.quantize_fp8(x, per_row=True)
    error = (codes.float() * scales - x).abs().amax(-1) / x.abs().amax(-1)
    assert error.max() <= 2**-4
