"""The pages behind the transformers caches: random histories against plain tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_ops import reference
from mla_ops.integrations.transformers import columns, pool
from mla_ops.integrations.transformers.pool import LatentPool

RANK, ROPE, HEADS, SCALE = 24, 8, 3, 0.2


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FIRST_CHUNK", 16)


def new_pool(batch: int = 3, page_size: int = 4, dtype: torch.dtype = torch.float32) -> LatentPool:
    return LatentPool(
        batch, RANK, ROPE, page_size=page_size, dtype=dtype, device=torch.device("cpu")
    )


def attention(q: Tensor, rows: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float64 result for rows [B, T, D] and a mask [B, S, T]."""
    outs, lses = [], []
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            seen = rows[b][allowed[b, s]]
            out, lse = reference.decode(
                q[b : b + 1, s : s + 1],
                (seen if len(seen) else rows[b][:1])[None],
                torch.zeros(1, 1, dtype=torch.int32),
                torch.tensor([len(seen)], dtype=torch.int32),
                SCALE,
                kv_lora_rank=RANK,
            )
            outs.append(out)
            lses.append(lse)
    shape = q.shape[:2]
    return torch.cat(outs).view(*shape, HEADS, RANK), torch.cat(lses).view(*shape, HEADS)


def causal(batch: int, q_len: int, length: int) -> Tensor:
    one = torch.ones(q_len, length, dtype=torch.bool).tril(length - q_len)
    return one.expand(batch, -1, -1)


def check(tested: LatentPool, rows: Tensor, q_len: int, masked: bool) -> None:
    batch, length = rows.shape[:2]
    q_len = min(q_len, length)
    q = torch.randn(batch, q_len, HEADS, RANK + ROPE)
    allowed = causal(batch, q_len, length)
    seen = None
    if masked:
        allowed = allowed & (torch.rand(batch, 1, length) < 0.7)
        seen = columns.of_mask(allowed)
    out, lse = tested.decode(q, length, SCALE, columns=seen, return_lse=True)
    want, want_lse = attention(q, rows, allowed)
    assert lse is not None
    assert torch.equal(lse.isinf(), want_lse.isinf())
    assert (out - want).abs().max() < 1e-5
    assert (lse - want_lse).nan_to_num(0).abs().max() < 1e-5


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tested = new_pool(page_size=rng.choice((1, 3, 4, 16)))
    rows = torch.empty(3, 0, RANK + ROPE)
    for _ in range(25):
        batch, length = rows.shape[:2]
        action = rng.choice(("write", "write", "write", "reorder", "crop", "select"))
        if action == "write" and length < 150:
            new = torch.randn(batch, rng.choice((1, 1, 3, 8, 30)), RANK + ROPE)
            tested.reserve(length + new.shape[1])
            tested.write(new[..., :RANK], new[..., RANK:], length)
            rows = torch.cat((rows, new), 1)
        elif action == "reorder":
            index = torch.tensor([rng.randrange(batch) for _ in range(batch)])
            tested.reorder(index, length)
            rows = rows[index]
        elif action == "crop":
            rows = rows[:, : length - rng.randrange(min(length, 12) + 1)]
            tested.crop(rows.shape[1])
        elif action == "select" and rng.random() < 0.5:
            index = torch.tensor([rng.randrange(batch) for _ in range(rng.choice((2, 3, 4)))])
            tested.select(index)
            rows = rows[index]
        if rows.shape[1]:
            check(tested, rows, rng.choice((1, 1, 2, 5, 8)), rng.random() < 0.4)
            kv_c, k_pe = tested.latents(rows.shape[1], torch.float32)
            assert torch.equal(torch.cat((kv_c, k_pe), -1), rows)


def test_growing_moves_nothing() -> None:
    tested = new_pool()
    seen: dict[int, tuple[int, Tensor]] = {}
    for length in range(200):
        tested.reserve(length + 1)
        tested.write(torch.randn(3, 1, RANK), torch.randn(3, 1, ROPE), length)
        for chunk in tested.chunks:
            address, _ = seen.setdefault(chunk.start, (chunk.kv_cache.data_ptr(), chunk.kv_cache))
            assert chunk.kv_cache.data_ptr() == address
    assert [(chunk.start, chunk.size) for chunk in tested.chunks] == [
        *((0, 16), (16, 16), (32, 32), (64, 64), (128, 128))
    ]
    assert tested.nbytes == 3 * 256 * (RANK + ROPE) * 4


def test_an_announced_length_is_one_chunk() -> None:
    tested = new_pool()
    tested.reserve(10, announced=13)
    assert tested.capacity == 16 and len(tested.chunks) == 1
    tested.reserve(17, announced=13)  # it was wrong
    assert tested.capacity >= 17


def test_reordering_copies_one_page_a_sequence() -> None:
    tested = new_pool(batch=2, page_size=4)
    rows = torch.randn(2, 14, RANK + ROPE)
    tested.reserve(14)
    tested.write(rows[..., :RANK], rows[..., RANK:], 0)
    (chunk,) = tested.chunks
    before = chunk.kv_cache.clone()
    tested.reorder(torch.tensor([1, 1]), 14)
    changed = (chunk.kv_cache != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [3]  # sequence 0's last page is now a copy of sequence 1's
    assert chunk.block_table.tolist() == [[4, 5, 6, 3], [4, 5, 6, 7]]


def test_fp8_measures_its_scale_once_and_leaves_room() -> None:
    tested = new_pool(batch=1, dtype=torch.float8_e4m3fn)
    tested.reserve(40)
    first = torch.randn(1, 20, RANK + ROPE)
    tested.write(first[..., :RANK], first[..., RANK:], 0)
    scale = tested.kv_scale
    assert scale is not None
    assert float(scale) == pytest.approx(2 * float(first.abs().max()) / 448)
    larger = first * 1.9
    tested.write(larger[..., :RANK], larger[..., RANK:], 20)
    assert tested.kv_scale is scale
    got = torch.cat(tested.latents(40, torch.float32), -1)
    error = (got - torch.cat((first, larger), 1)).abs() / torch.cat((first, larger), 1).abs()
    assert error.median() < 0.04
    assert error[torch.cat((first, larger), 1).abs() > 0.1].max() < 0.0626  # half a step of 2^-3


MISTAKES: dict[str, Any] = {
    "a page is shared that is written": lambda self, length: None,
    "a page is not copied": lambda self, length: [
        chunk.block_table.copy_(chunk.home()) for chunk in self.chunks
    ],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentPool, "_settle", MISTAKES[mistake])
    failed = 0
    for seed in range(12):
        try:
            test_random_histories(seed)
        except AssertionError:
            failed += 1
    assert failed >= 6


def test_columns_of_a_mask_and_back() -> None:
    mask = torch.rand(2, 3, 17) < 0.5
    mask[0, 0] = False
    mask[1, 2] = True
    form = columns.of_mask(mask)
    assert form.dtype == torch.int32 and form.shape == (2, 3, 18)
    for b in range(2):
        for s in range(3):
            count, *names = form[b, s].tolist()
            assert names[:count] == mask[b, s].nonzero().flatten().tolist()
    assert torch.equal(columns.as_mask(form, 17), mask)
    assert torch.equal(columns.as_mask(columns.causal(2, 3, 9, mask.device), 9), causal(2, 3, 9))
