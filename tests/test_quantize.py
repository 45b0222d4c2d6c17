"""quantize_fp8 is exact: every bfloat16 and float16 number, float32 on every tie, whatever the
scale and the processor's mode; bit for bit the oracle's, compiled and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cases import BF16, FLOAT8, FN, FNUZ, FP16, FP32
from running import bits, same_bits, threads
from torch import Tensor

import mla_ops
from mla_ops import reference
from mla_ops.backends import torch as torch_backend

Quantize = Callable[[Tensor, Tensor | None, torch.dtype], tuple[Tensor, Tensor]]


def plain(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The kernel of backends/torch.py, which a build with compiled kernels never reaches."""
    out, scale_out = torch.empty(x.shape, dtype=dtype), torch.empty(1)
    torch_backend.KERNELS["_quantize_fp8"](x, scale, False, out, scale_out)
    return out, scale_out


KERNELS: dict[str, Quantize] = {"compiled": mla_ops.quantize_fp8, "plain": plain}

SCALES = {
    "none": None,
    "1": torch.ones(1),
    "odd": torch.tensor([0.0372]),
    "large": torch.tensor([1234.5]),
    "scalar": torch.tensor(3e-3),
}


def all_of(dtype: torch.dtype) -> Tensor:
    return torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(dtype)


def edges(dtype: torch.dtype) -> Tensor:
    """Every number of a float8 type, every tie between two, the float32 beside each, and what lies
    beyond the largest."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[~numbers.isnan()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    largest = numbers.max()
    step = numbers[-1] - numbers[-2]
    beyond = largest + step * torch.tensor([0.25, 0.5, 0.75, 1.0, 1.5, 1e30])
    exact = torch.cat((numbers, ties, beyond, -beyond))
    infinity = torch.tensor(torch.inf)
    return torch.cat((exact, exact.nextafter(infinity), exact.nextafter(-infinity)))


def assert_as_reference(kernel: Quantize, x: Tensor, scale: Tensor | None, to: torch.dtype) -> None:
    got, got_scale = kernel(x, scale, to)
    want, want_scale = reference.quantize_fp8(x, scale, to)
    assert same_bits(got_scale, want_scale.reshape(1))
    wrong = (bits(got) != bits(want)).nonzero().flatten()
    assert got.shape == x.shape and got.is_contiguous() and not len(wrong), (
        f"{len(wrong)} codes, the first for {x.flatten()[wrong[0]].item()!r}: "
        f"{got.flatten()[wrong[0]].item()} for {want.flatten()[wrong[0]].item()}"
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("source", [BF16, FP16], ids=str)
def test_all_patterns(source: torch.dtype, dtype: torch.dtype, scale: str, kernel: str) -> None:
    assert_as_reference(KERNELS[kernel], all_of(source), SCALES[scale], dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float32(dtype: torch.dtype, scale: str, kernel: str) -> None:
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=generator)
    x = torch.cat((edges(dtype), patterns.to(torch.int32).view(FP32)))
    assert_as_reference(KERNELS[kernel], x, SCALES[scale], dtype)
    near = torch.randn(100_000, generator=generator) * 30
    assert_as_reference(KERNELS[kernel], near, SCALES[scale], dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_the_special_values(dtype: torch.dtype, kernel: str) -> None:
    """Saturated, never an infinity; NaN kept; the sign of zero where there is one."""
    largest = torch.finfo(dtype).max
    tiny = 2.0**-9 if dtype == FN else 2.0**-10  # the smallest number
    x = torch.tensor(
        [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, tiny, -tiny, tiny / 2, tiny * 0.51, -tiny / 4]
    )
    got = KERNELS[kernel](x, torch.ones(1), dtype)[0].float()
    want = [largest, -largest, torch.nan, 0.0, -0.0, tiny, -tiny, 0.0, tiny, -0.0]
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=0, equal_nan=True)
    zeros = torch.signbit(got[[3, 4, 9]]).tolist()
    assert zeros == ([False, True, True] if dtype == FN else [False] * 3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("source", [BF16, FP16, FP32], ids=str)
def test_the_scale(source: torch.dtype, dtype: torch.dtype, kernel: str) -> None:
    """amax / largest, over the finite values; 1 where that is 0; a given one is handed back."""
    largest = torch.finfo(dtype).max
    quantize = KERNELS[kernel]
    x = torch.tensor([0.5, -6.0, torch.inf, -torch.inf, torch.nan, -0.0]).to(source)
    got, scale = quantize(x, None, dtype)
    assert scale.shape == (1,) and scale.dtype == FP32
    assert float(scale) == float(torch.tensor(6.0) / largest)
    assert got.float()[1:4].tolist() == [-largest, largest, -largest]
    nothing = [torch.zeros(5), torch.full((3,), torch.nan), torch.full((2,), -torch.inf)]
    for values in (*nothing, torch.empty(0), torch.empty(3, 0, 2)):
        assert float(quantize(values.to(source), None, dtype)[1]) == 1.0
    assert float(quantize(x, torch.tensor([0.25]), dtype)[1]) == 0.25


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_any_shape_and_layout(dtype: torch.dtype, kernel: str) -> None:
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(7, 33, 19, generator=generator) * 50
    views = [
        base.permute(2, 0, 1),
        base[::2, 1:, ::3],
        base[:, :, 3],
        base[0, 0, 0],
        base[:0],
        base[:1, :1].expand(4, 5, 19),
        *(base.flatten()[: size + 1][1:] for size in (1, 15, 16, 17, 255, 256, 257, 4000)),
    ]
    for x in views:
        for scale in (None, torch.tensor([0.3])):
            assert_as_reference(KERNELS[kernel], x, scale, dtype)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_threads_share_the_work(dtype: torch.dtype) -> None:
    """Large enough to be cut; the largest value may be anybody's."""
    x = torch.randn(200_001, generator=torch.Generator().manual_seed(3))
    for place in (0, 100_000, 200_000):
        x[place] = -1000.0 - place
        for count in (1, 2, 3):
            with threads(count):
                assert_as_reference(mla_ops.quantize_fp8, x, None, dtype)


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", ["none", "1", "odd", "large"])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.usefixtures("flush_denormal")
def test_flushing_denormals_changes_nothing(dtype: torch.dtype, scale: str, kernel: str) -> None:
    for x in (all_of(BF16), all_of(FP16), edges(dtype)):
        got = KERNELS[kernel](x, SCALES[scale], dtype)[0]
        torch.set_flush_denormal(False)
        want = reference.quantize_fp8(x, SCALES[scale], dtype)[0]
        torch.set_flush_denormal(True)
        assert same_bits(got, want)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_the_error_is_at_most_half_a_unit_of_the_last_place(dtype: torch.dtype) -> None:
    """Without the oracle: what comes back differs by 2^-4 of itself, or half the least number."""
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(4)) * 8
    codes, scale = mla_ops.quantize_fp8(x, None, dtype)
    back = codes.double() * scale.double()
    smallest = (2.0**-9 if dtype == FN else 2.0**-10) * float(scale)
    allowed = torch.maximum(x.double().abs() * 2**-4, torch.tensor(smallest / 2)) * (1 + 1e-6)
    assert ((back - x).abs() <= allowed).all()
    assert abs(float(back.abs().sum() / x.double().abs().sum()) - 1) < 1e-3, "biased"


def test_the_default_type_is_the_one_of_the_device() -> None:
    assert mla_ops.quantize_fp8(torch.ones(3))[0].dtype == FN


# What the test of all patterns has to catch: the mistakes of the program this project began with,
# and a few others. Each takes x / scale.


def _toward_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    return ((x.view(torch.int32) >> 20 << 20).view(FP32)).to(dtype)


def _ties_away(x: Tensor, dtype: torch.dtype) -> Tensor:
    return ((x.view(torch.int32) + (1 << 19) >> 20 << 20).view(FP32)).to(dtype)


MUTANTS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "truncates toward zero": _toward_zero,
    "rounds ties away from zero": _ties_away,
    "loses subnormal numbers": lambda x, d: torch.where(x.abs() < torch.finfo(d).tiny, 0, x).to(d),
    "256 becomes 448": lambda x, d: torch.where(
        x.abs() >= 256 / 448 * torch.finfo(d).max, x.sign() * torch.finfo(d).max, x
    ).to(d),
    "NaN becomes the largest": lambda x, d: x.nan_to_num(torch.finfo(d).max).to(d),
    "the largest becomes NaN": lambda x, d: torch.where(
        x.abs() >= torch.finfo(d).max, torch.nan, x
    ).to(d),
    "the sign of NaN and 0 goes": lambda x, d: torch.where((x == 0) | x.isnan(), x.abs(), x).to(d),
    "reciprocal of the scale": lambda x, d: (x * torch.tensor(1.0).nextafter(torch.tensor(2.0))).to(
        d
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_mistakes_are_caught(dtype: torch.dtype, name: str) -> None:
    if dtype == FNUZ and name.startswith("the sign"):
        pytest.skip("e4m3fnuz has no sign of zero and one NaN")
    largest = torch.finfo(dtype).max

    def mutant(x: Tensor, scale: Tensor | None, to: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = (x.float() / scale).clamp(-largest, largest)
        return MUTANTS[name](wide, to), scale

    with pytest.raises(AssertionError, match="codes, the first for"):
        for x in (all_of(BF16), all_of(FP16), edges(dtype)):
            assert_as_reference(mutant, x, torch.ones(1), dtype)
