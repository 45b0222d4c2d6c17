"""write_kv_cache puts each token where its slot says, converted exactly, and changes nothing else;
compiled and in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import BF16, FLOAT8, FN, FNUZ, FP16, FP32
from running import bits, poisoned, same_bits, threads
from torch import Tensor

import mla_ops
from mla_ops import reference
from mla_ops.backends import torch as torch_backend

Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
KERNELS: dict[str, Write] = {
    "compiled": mla_ops.write_kv_cache,
    "plain": torch_backend.KERNELS["_write_kv_cache"],
}
SOURCES = (BF16, FP16, FP32)
CACHES = (BF16, FP16, FP32, FN, FNUZ)
RANK, ROPE, WIDTH = 70, 18, 88


def tokens(count: int, source: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, WIDTH, generator=generator) * 20).to(source)


def scale_for(cache: Tensor) -> Tensor | None:
    return torch.tensor([0.137]) if cache.dtype in FLOAT8 else None


def expected(rows: Tensor, cache: Tensor, slots: list[int], scale: Tensor | None) -> Tensor:
    """The cache's bits after one token after the other."""
    new = rows.to(cache.dtype) if scale is None else None
    if new is None:
        new = reference.quantize_fp8(rows, scale, cache.dtype)[0]
    raw, page_size = bits(cache).clone(), cache.shape[1]
    for t, slot in enumerate(slots):
        if slot >= 0:
            raw[slot // page_size, slot % page_size] = bits(new[t])
    return raw


def check(
    write: Write, rows: Tensor, cache: Tensor, slots: list[int], dtype: torch.dtype = torch.int64
) -> None:
    scale = scale_for(cache)
    want = expected(rows, cache, slots, scale)
    write(rows[:, :RANK], rows[:, RANK:], cache, torch.tensor(slots, dtype=dtype), scale)
    assert torch.equal(bits(cache), want)


SLOTS = [5, 19, -1, 0, 27, 12, 6, -1, 13]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("to", CACHES, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_converted_and_nothing_else_touched(
    source: torch.dtype, to: torch.dtype, kernel: str
) -> None:
    """The rows that no token is for are NaN, and keep each bit of it."""
    rows = tokens(len(SLOTS), source)
    rows[3, :6] = torch.tensor([torch.inf, -torch.inf, 1e-9, -0.0, 6e4, -3e-3])
    check(KERNELS[kernel], rows, poisoned(4, 7, WIDTH, dtype=to), SLOTS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("to", CACHES, ids=str)
@pytest.mark.parametrize("source", [BF16, FP16], ids=str)
def test_every_number_is_converted_exactly(
    source: torch.dtype, to: torch.dtype, kernel: str
) -> None:
    """NaN may become any NaN, where the cache's type has several."""
    x = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(source)
    rows = x.reshape(1024, 64)
    cache = poisoned(16, 64, 64, dtype=to)
    scale = scale_for(cache)
    slots = torch.arange(1024).flip(0)
    KERNELS[kernel](rows[:, :48], rows[:, 48:], cache, slots, scale)
    got = cache.flatten(0, 1).flip(0)
    want = rows.to(to) if scale is None else reference.quantize_fp8(rows, scale, to)[0]
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(bits(got)[~nan], bits(want)[~nan])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("to", [BF16, FN], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_of_several_tokens_for_a_slot_stays(
    count: int, to: torch.dtype, kernel: str
) -> None:
    """Enough tokens for several threads, which must not race."""
    rows = tokens(3000, FP32)
    chance = torch.Generator().manual_seed(9)
    slots = torch.randint(-1, 40, (3000,), generator=chance).tolist()
    with threads(count):
        for _ in range(3):
            check(KERNELS[kernel], rows, poisoned(10, 7, WIDTH, dtype=to), slots)
        check(KERNELS[kernel], rows, poisoned(10, 7, WIDTH, dtype=to), [33] * 3000)
        check(KERNELS[kernel], rows, poisoned(10, 7, WIDTH, dtype=to), [-1] * 3000)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("to", [FP16, FNUZ], ids=str)
def test_int32_slots_and_a_head_dimension(to: torch.dtype, kernel: str) -> None:
    rows = tokens(len(SLOTS))
    check(KERNELS[kernel], rows, poisoned(4, 7, WIDTH, dtype=to), SLOTS, torch.int32)
    plain, with_heads = poisoned(4, 7, WIDTH, dtype=to), poisoned(4, 7, 1, WIDTH, dtype=to)
    slots = torch.tensor(SLOTS)
    for cache in (plain, with_heads):
        KERNELS[kernel](rows[:, :RANK], rows[:, RANK:], cache, slots, scale_for(cache))
    assert same_bits(plain, with_heads.squeeze(2))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("to", [BF16, FP32, FN], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=str)
def test_a_cache_with_strides(order: tuple, to: torch.dtype, kernel: str) -> None:
    """Part of a larger tensor, by pages or by rows: what lies around it stays."""
    shape = [(4, 7, WIDTH)[i] + 3 for i in order]
    host = poisoned(*shape, dtype=to)
    before = bits(host).clone()
    cache = host.permute([order.index(i) for i in range(3)])[1:5, 2:9, 1 : 1 + WIDTH]
    assert not cache.is_contiguous()
    check(KERNELS[kernel], tokens(len(SLOTS)), cache, SLOTS)
    raw = cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()])
    raw.copy_(bits(poisoned(*cache.shape, dtype=to)))
    assert torch.equal(before, bits(host)), "written beside the cache"


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_with_strides(kernel: str) -> None:
    """kv_c and k_pe are usually parts of one projection's output."""
    host = tokens(2 * len(SLOTS), FP32)
    kv_c, k_pe = host[::2, :40], host[1::2, 50:60]
    cache = poisoned(4, 7, 50, dtype=BF16)
    want = expected(torch.cat((kv_c, k_pe), 1), cache, SLOTS, None)
    KERNELS[kernel](kv_c, k_pe, cache, torch.tensor(SLOTS * 2)[: len(SLOTS)], None)
    assert torch.equal(bits(cache), want)
    strided = torch.tensor([slot for slot in SLOTS for _ in range(2)])[::2]
    again = poisoned(4, 7, 50, dtype=BF16)
    KERNELS[kernel](kv_c, k_pe, again, strided, None)
    assert torch.equal(bits(again), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("to", [BF16, FN], ids=str)
def test_nothing_to_write(to: torch.dtype, kernel: str) -> None:
    for pages, count in ((4, 0), (0, 0), (0, 2)):
        check(KERNELS[kernel], tokens(count), poisoned(pages, 7, WIDTH, dtype=to), [-1] * count)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("to", CACHES, ids=str)
def test_no_rope_part(to: torch.dtype, kernel: str) -> None:
    rows, cache = tokens(len(SLOTS)), poisoned(4, 7, WIDTH, dtype=to)
    want = expected(rows, cache, SLOTS, scale_for(cache))
    KERNELS[kernel](rows, rows[:, :0], cache, torch.tensor(SLOTS), scale_for(cache))
    assert torch.equal(bits(cache), want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("slot", [28, -2, 1 << 40])
def test_a_slot_that_is_not_there_is_refused_and_nothing_written(slot: int, kernel: str) -> None:
    rows, cache = tokens(3), poisoned(4, 7, WIDTH, dtype=BF16)
    before = bits(cache).clone()
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] must be between 0 and 27"):
        KERNELS[kernel](rows[:, :RANK], rows[:, RANK:], cache, torch.tensor([0, slot, 1]), None)
    assert torch.equal(before, bits(cache))


@pytest.mark.parametrize("to", CACHES, ids=str)
def test_what_is_written_is_what_decode_reads(to: torch.dtype) -> None:
    """A sequence of one token: its latent part comes back."""
    row, cache = (
        tokens(1, FP32) * 0.3,
        mla_ops.new_kv_cache(3, 4, kv_lora_rank=RANK, rope=ROPE, dtype=to),
    )
    scale = scale_for(cache)
    mla_ops.write_kv_cache(row[:, :RANK], row[:, RANK:], cache, torch.tensor([8]), scale)
    table, length = torch.tensor([[2]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    q = torch.randn(1, 1, 2, WIDTH)
    options = {"kv_lora_rank": RANK, "kv_scale": scale}
    out = mla_ops.decode(q, cache, table, length, 0.1, **options)
    stored = cache[2, 0, :RANK].float() * (1.0 if scale is None else scale)
    torch.testing.assert_close(out, stored.expand_as(out), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(stored, row[0, :RANK], rtol=2**-4, atol=2e-3)
