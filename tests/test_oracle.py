"""The oracle is right: float64 decode against other formulations of the same attention, and
quantisation against a search through all codes."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BF16, CORNER, CORRECTNESS, FLOAT8, FN, FP16, FP32, Case, make
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mla_ops import reference

FP64 = torch.float64


def test_a_sum_made_by_hand() -> None:
    """Two rows, the second with three times the weight of the first."""
    q = torch.tensor([[[[2.0, 0.0, 1.0]]]], dtype=FP64)
    cache = torch.tensor([[[0.0, 5.0, 0.0]], [[0.0, -3.0, 2 * math.log(3.0)]]], dtype=FP64)
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    out, lse = reference.decode(q, cache, table, lengths, 0.5, kv_lora_rank=2)
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([0.0, (5 - 3 * 3) / 4], dtype=FP64))
    assert abs(float(lse) - math.log(4.0)) < 1e-14


def test_one_number_at_a_time() -> None:
    """The formula in Python's own floats, with pages, a scale and a causal mask."""
    case = Case(lengths=(7, 3), heads=2, q_len=2, page_size=2, rank=3, rope=2, cache_dtype=FN)
    problem = make(case)
    q, cache, table, lengths, scale = problem.arguments
    out, lse = reference.decode(*problem.arguments, **problem.options)
    kv_scale = float(problem.options["kv_scale"])
    for b, length in enumerate(lengths.tolist()):
        rows = [
            [float(x) * kv_scale for x in cache[int(table[b, t // 2]), t % 2].float()]
            for t in range(length)
        ]
        for s in range(2):
            seen = rows[: length - 1 + s]
            for h in range(2):
                query = q[b, s, h].tolist()
                weights = [
                    math.exp(scale * math.fsum(x * y for x, y in zip(query, row, strict=True)))
                    for row in seen
                ]
                total = math.fsum(weights)
                assert abs(float(lse[b, s, h]) - math.log(total)) < 1e-12
                for i in range(3):
                    want = math.fsum(w * row[i] for w, row in zip(weights, seen, strict=True))
                    assert abs(float(out[b, s, h, i]) - want / total) < 1e-12


@pytest.mark.parametrize("case", CORRECTNESS[::4] + CORNER, ids=str)
def test_agrees_with_torchs_attention(case: Case) -> None:
    """scaled_dot_product_attention in float64, with the mask written out."""
    problem = make(case)
    q, cache, table, lengths, scale = problem.arguments
    out, lse = reference.decode(*problem.arguments, **problem.options)
    q_scale, kv_scale = problem.options["q_scale"], problem.options["kv_scale"]
    pool = cache.double().flatten(0, 1) * (1.0 if kv_scale is None else kv_scale.double())
    queries = q.double() * (1.0 if q_scale is None else q_scale.double())
    for b, length in enumerate(lengths.tolist()):
        slot = [
            int(table[b, t // case.page_size]) * case.page_size + t % case.page_size
            for t in range(length)
        ]
        rows = pool[slot]
        mask = torch.ones(case.q_len, length, dtype=torch.bool)
        if case.causal:
            mask = mask.tril(length - case.q_len)
        live = mask.any(-1)
        assert out[b, ~live].eq(0).all() and lse[b, ~live].eq(-torch.inf).all()
        if not live.any():
            continue
        heads_first = queries[b].transpose(0, 1)[:, live]
        keys = rows.expand(case.heads, -1, -1)
        got = scaled_dot_product_attention(
            heads_first, keys, keys[..., : case.rank], attn_mask=mask[live], scale=scale
        )
        torch.testing.assert_close(out[b, live], got.transpose(0, 1), rtol=1e-9, atol=1e-12)
        scores = (heads_first @ keys.mT * scale).masked_fill(~mask[live], -torch.inf)
        total = scores.exp().sum(-1).log()
        torch.testing.assert_close(lse[b, live], total.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q_len", [1, 3])
def test_absorbed_equals_expanded(q_len: int) -> None:
    """Attention over keys and values of every head, as the model is trained, against the absorbed
    form over latents: W_UK goes into the query, W_UV behind the output."""
    generator = torch.Generator().manual_seed(3)
    heads, nope, rope, rank, value, length = 6, 24, 8, 32, 20, 50

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=FP64)

    latent, k_pe = draw(length, rank), draw(length, rope)
    w_uk, w_uv = draw(heads, nope, rank) / rank**0.5, draw(heads, value, rank) / rank**0.5
    q_nope, q_pe = draw(q_len, heads, nope), draw(q_len, heads, rope)
    scale = (nope + rope) ** -0.5

    keys = torch.cat((latent @ w_uk.mT, k_pe.expand(heads, -1, -1)), -1)
    queries = torch.cat((q_nope, q_pe), -1).transpose(0, 1)
    mask = torch.ones(q_len, length, dtype=torch.bool).tril(length - q_len)
    want = scaled_dot_product_attention(
        queries, keys, latent @ w_uv.mT, attn_mask=mask, scale=scale
    ).transpose(0, 1)

    absorbed = torch.cat((torch.einsum("shn,hnr->shr", q_nope, w_uk), q_pe), -1)[None]
    cache = torch.cat((latent, k_pe), -1).reshape(5, 10, rank + rope)
    table = torch.arange(5, dtype=torch.int32)[None]
    lengths = torch.tensor([length], dtype=torch.int32)
    out, _ = reference.decode(absorbed, cache, table, lengths, scale, kv_lora_rank=rank)
    got = torch.einsum("shr,hvr->shv", out[0], w_uv)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def numbers_of(dtype: torch.dtype) -> list[float]:
    """What each of the 256 codes means, from the formats' definitions."""
    bias, numbers = (7 if dtype == FN else 8), []
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        size = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
        is_nan = code & 0x7F == 0x7F if dtype == FN else code == 0x80
        numbers.append(math.nan if is_nan else math.copysign(size, -sign or 1))
    return numbers


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_codes_mean_what_torch_says(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    want = torch.tensor(numbers_of(dtype))
    torch.testing.assert_close(codes.float(), want, rtol=0.0, atol=0.0, equal_nan=True)
    assert want[~want.isnan()].max() == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("source", [BF16, FP16, FP32], ids=str)
def test_quantisation_is_the_nearest_code(dtype: torch.dtype, source: torch.dtype) -> None:
    """Every finite bfloat16 and float16 number, and float32 ones on and beside every tie: no code
    is nearer, and of two as near the even one was taken."""
    numbers = torch.tensor(numbers_of(dtype), dtype=FP64)
    if source == FP32:
        sorted_numbers = numbers[~numbers.isnan()].unique()
        ties = ((sorted_numbers[1:] + sorted_numbers[:-1]) / 2).float()
        beside = [ties.nextafter(torch.tensor(x)) for x in (torch.inf, -torch.inf)]
        x = torch.cat((ties, *beside, sorted_numbers.float()))
    else:
        x = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(source)
        x = x[x.isfinite()]
    got, _ = reference.quantize_fp8(x, torch.ones(1), dtype)
    code = got.view(torch.uint8).long()
    magnitude = numbers[:128].nan_to_num(torch.inf)
    exact = x.double().abs().clamp(max=torch.finfo(dtype).max)
    chosen = magnitude[code % 128]
    ties_seen = 0
    for part in torch.arange(len(x)).split(8192):
        distance = (magnitude - exact[part, None]).abs()
        nearest = distance.amin(-1)
        assert torch.equal((chosen[part] - exact[part]).abs(), nearest)
        tied = (distance == nearest[:, None]).sum(-1) == 2
        ties_seen += int(tied.sum())
        assert (code[part][tied] % 2 == 0).all()
    assert ties_seen >= 250
    negative = torch.signbit(x) & ((code % 128 != 0) | (dtype == FN))
    assert torch.equal(code >= 128, negative)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_quantisation_agrees_with_torch_in_range(dtype: torch.dtype) -> None:
    """torch's conversion is right where nothing saturates."""
    x = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(BF16)
    x = x[x.abs() <= torch.finfo(dtype).max]
    got, scale = reference.quantize_fp8(x, torch.tensor([1.0]), dtype)
    assert torch.equal(got.view(torch.uint8), x.to(dtype).view(torch.uint8))
    assert float(scale) == 1.0


def test_the_scale_is_that_of_the_largest_finite_number() -> None:
    x = torch.tensor([1.0, -8.0, torch.inf, -torch.inf, torch.nan, 0.0])
    for dtype in FLOAT8:
        got, scale = reference.quantize_fp8(x, None, dtype)
        assert float(scale) == torch.tensor(8.0).div(torch.finfo(dtype).max).item()
        largest = torch.finfo(dtype).max
        assert got.float()[[1, 2, 3]].tolist() == [-largest, largest, -largest]
        assert got.float().isnan().tolist() == [False] * 4 + [True, False]
        assert float(reference.quantize_fp8(torch.zeros(3), None, dtype)[1]) == 1.0
