"""The seed's way of calling aiter, on the same machine code: with pages of 8 it reads one token of
each page, 1/8 of the context. And that ours cannot produce that call."""

from __future__ import annotations

from typing import Any

import pytest
import stand_in
import torch
from cases import BF16, Case
from machines import Install, decode, judge, make, of_kind
from stand_in import FLOAT8, StandIn
from torch import Tensor

LENGTH, PAGE, SCALE = 128, 8, 576**-0.5


def seeds_call(there: StandIn, page_size: int, rows: Tensor, q: Tensor, works: list) -> Tensor:
    """What the seed passes: the contiguous cache seen as pages, one index for each page, the work
    items counted in pages."""
    out = torch.full((len(q), 16, 512), torch.nan, dtype=BF16)
    one = torch.ones(1)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    info = torch.tensor(works, dtype=torch.int32)
    indptr = torch.tensor([0, len(works)], dtype=torch.int32)
    pages = len(rows) // page_size
    stand_in.launch(
        there.arch,
        stand_in.KERNELS["a8w8", 1],
        {
            "Q": q,
            "KV": rows.view(pages, page_size, 1, 576),
            "qo_indptr": ints(0, 1),
            "kv_indptr": ints(0, pages),
            "kv_page_indices": torch.arange(pages, dtype=torch.int32),
            "kv_last_page_lens": ints(page_size),
            "work_meta_data": torch.tensor([indptr.data_ptr(), info.data_ptr()]),
            "work_indptr": indptr,
            "work_info_set": info,
            "max_seqlen_q": 1,
            "page_size": page_size,
            "softmax_scale": SCALE,
            "splitData": torch.full((1, 1, 16, 512), torch.nan),
            "splitLse": torch.full((1, 1, 16, 1), torch.nan),
            "output": out,
            "q_scale": one,
            "kv_scale": one,
        },
    )
    return out


def problem(arch: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(LENGTH, 576, generator=generator).to(FLOAT8[arch])
    return torch.randn(1, 16, 576, generator=generator).to(FLOAT8[arch]), rows


def attention(q: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    keys = rows.double()[tokens]
    weights = (SCALE * q[0].double() @ keys.T).softmax(-1)
    return weights @ keys[:, :512]


def tokens_read(arch: str, there: StandIn, page_size: int) -> list[int]:
    """Those whose rows change the output."""
    q, rows = problem(arch)
    pages = LENGTH // page_size
    works = [(0, -1, 0, 1, 0, pages, 0, 0)]
    before = seeds_call(there, page_size, rows, q, works)
    found = []
    for token in range(LENGTH):
        changed = rows.clone()
        changed[token] = (rows[token].float() * -1).to(rows.dtype)
        if not torch.equal(seeds_call(there, page_size, changed, q, works), before):
            found.append(token)
    return found


@pytest.mark.parametrize("arch", FLOAT8)
def test_pages_of_8_are_read_at_their_first_row_alone(arch: str, install: Install) -> None:
    there = install(arch)
    assert tokens_read(arch, there, PAGE) == list(range(0, LENGTH, PAGE))
    q, rows = problem(arch)
    out = seeds_call(there, PAGE, rows, q, [(0, -1, 0, 1, 0, LENGTH // PAGE, 0, 0)]).double()[0]
    eighth = attention(q, rows, torch.arange(0, LENGTH, PAGE))
    whole = attention(q, rows, torch.arange(LENGTH))
    error = lambda want: float((out - want).norm() / want.norm())  # noqa: E731
    assert error(eighth) < 5e-2 < 1 < error(whole)


@pytest.mark.parametrize("arch", FLOAT8)
def test_the_same_kernel_with_pages_of_1_reads_all(arch: str, install: Install) -> None:
    there = install(arch)
    q, rows = problem(arch)
    out = seeds_call(there, 1, rows, q, [(0, -1, 0, 1, 0, LENGTH, 0, 0)]).double()[0]
    want = attention(q, rows, torch.arange(LENGTH))
    assert float((out - want).norm() / want.norm()) < 5e-2


@pytest.mark.parametrize("page_size", [1, 2, 7, 8, 16, 64, 256])
def test_ours_cannot_produce_that_call(page_size: int, install: Install) -> None:
    """Whatever page size comes in, aiter sees pages of one token and an index for every token."""
    there = install("gfx950")
    lengths = (LENGTH, 0, 77)
    case = of_kind(Case(lengths=lengths, page_size=page_size), "a8w8", "gfx950")
    given = make(case)
    judge("a8w8", case, given, decode(given))
    call: dict[str, Any] = there.last["mla_decode_stage1_asm_fwd"]
    assert call["page_size"] == 1 and call["nhead_kv"] == 1
    assert call["KV"].shape[1:] == (1, 1, 576) and call["KV"].stride(0) == 576
    assert torch.equal(call["kv_last_page_lens"], torch.ones(3, dtype=torch.int32))
    info = call["work_info_set"][: int(call["work_indptr"][-1])]
    pieces = {0: 0, 1: 0, 2: 0}
    for batch, *_, start, stop, _, _ in info.tolist():
        pieces[batch] += stop - start
    assert pieces == {0: LENGTH, 1: 1, 2: 77}, "in tokens"
    metadata = there.last["get_mla_metadata_v1"]
    assert metadata["page_size"] == 1
    assert metadata["seqlens_kv_indptr"].tolist() == [0, LENGTH, LENGTH + 1, LENGTH + 78]


def test_what_the_seeds_tolerance_would_have_let_through(install: Install) -> None:
    """At 8192 tokens, 5 % of numbers off by 0.1 passes an eighth of the context. Ours does not."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(8192, 576, generator=generator).double()
    q = torch.randn(1, 16, 576, generator=generator).double()
    whole, eighth = (attention(q, rows, torch.arange(0, 8192, step)) for step in (1, PAGE))
    off = ((eighth - whole).abs() > 0.1 + 0.1 * whole.abs()).double().mean()
    assert 0 < float(off) < 0.05
    assert float((eighth - whole).norm() / whole.norm()) > 0.5
