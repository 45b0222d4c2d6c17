"""What is decoded in the tests: a `Case` says a problem, `make` builds its tensors, with poison
where none may look.

Every unused row of the cache is NaN, every unused table entry a huge number, so that a read outside
of what a case says fails loudly. Named groups: CORRECTNESS (each dtype, head count, width, page
size), CORNER (lengths and tables that break things), LARGE.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FLOAT8 = (FN, FNUZ)

HUGE = 0x7FFFFFFF


@dataclass(frozen=True)
class Case:
    """One decode problem; the defaults are the common one."""

    lengths: tuple[int, ...] = (200, 64, 1, 130)
    heads: int = 16
    q_len: int = 1
    page_size: int = 64
    rank: int = 512
    rope: int = 64
    q_dtype: torch.dtype = BF16
    cache_dtype: torch.dtype = BF16
    causal: bool = True
    # How values are drawn: "normal"; "shifted" (mean 2), "heavy" (Student's t, 2 degrees),
    # "needles" (one row per sequence that must win), "flat" (all scores nearly equal).
    data: str = "normal"
    extra_pages: int = 2  # columns of the table beyond what the longest sequence needs
    share_pages: bool = False  # every sequence reads the same pages
    seed: int = 0

    @property
    def width(self) -> int:
        return self.rank + self.rope

    def __str__(self) -> str:
        default = Case()
        changed = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(default, name)
        }
        return (
            "-".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items())
            or "default"
        )


class Problem(NamedTuple):
    """A case's tensors, in the order of `mla_ops.decode`; `needles` are the winning rows, by
    sequence."""

    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    softmax_scale: float
    options: dict
    needles: list[int | None]

    @property
    def arguments(self) -> tuple:
        return self.q, self.kv_cache, self.block_table, self.seq_lens, self.softmax_scale


def _draw(shape: tuple[int, ...], data: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    if data == "shifted":
        return x + 2.0
    if data == "heavy":
        chi = torch.randn((2, *shape), generator=generator).square().sum(0)
        return (x / (chi / 2).sqrt()).clamp(-50, 50)
    if data == "flat":
        return x * 0.01 + 1.0
    return x


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """To dtype, with a scale where it is float8 (one that is no power of two)."""
    if dtype not in FLOAT8:
        return x.to(dtype), None
    largest = torch.finfo(dtype).max
    scale = (x.abs().max().clamp(min=1e-6) / largest * 1.1).reshape(1)
    return (x / scale).clamp(-largest, largest).to(dtype), scale


def make(case: Case, device: str = "cpu") -> Problem:
    """Build a case's tensors."""
    generator = torch.Generator().manual_seed(1234 + case.seed)
    batch, page = len(case.lengths), case.page_size
    pages_of = [-(-length // page) for length in case.lengths]
    columns = max(pages_of, default=0) + case.extra_pages
    owned = max(pages_of, default=0) if case.share_pages else sum(pages_of)
    pool = owned + 3
    order = torch.randperm(pool, generator=generator).to(torch.int32)

    table = torch.full((batch, columns), HUGE, dtype=torch.int32)
    used = torch.zeros(pool, page, dtype=torch.bool)
    taken = 0
    for b, (count, length) in enumerate(zip(pages_of, case.lengths, strict=True)):
        first = 0 if case.share_pages else taken
        table[b, :count] = order[first : first + count]
        taken += count
        token = torch.arange(length)
        used[table[b, token // page].long(), token % page] = True

    softmax_scale = 1.0 / (case.width**0.5) if case.data != "heavy" else 0.02
    rows = _draw((pool, page, case.width), case.data, generator)
    q = _draw((batch, case.q_len, case.heads, case.width), "normal", generator)
    needles: list[int | None] = [None] * batch
    if case.data == "needles":
        for b, length in enumerate(case.lengths):
            if length == 0:
                continue
            # Position classes: first, last (of what all query tokens see), page edges, the middle.
            last_seen = max(0, length - case.q_len) if case.causal else length - 1
            places = [0, last_seen, min(page - 1, last_seen), min(page, last_seen), last_seen // 2]
            needle = places[b % len(places)]
            needles[b] = needle
            row = rows[table[b, needle // page].long(), needle % page]
            row.copy_(row.sign() * 3.0)
            q[b] = row.sign() * 2.0 + q[b] * 0.1
            softmax_scale = 0.05

    q, q_scale = quantise(q, case.q_dtype)
    cache, kv_scale = quantise(rows, case.cache_dtype)
    nan = torch.full((), float("nan")).to(case.cache_dtype)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
    cache.view(raw)[~used] = nan.view(raw)
    move = lambda x: None if x is None else x.to(device)  # noqa: E731
    options = {
        "kv_lora_rank": case.rank,
        "causal": case.causal,
        "q_scale": move(q_scale),
        "kv_scale": move(kv_scale),
    }
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return Problem(
        move(q), move(cache), move(table), move(lengths), softmax_scale, options, needles
    )


RANKS = ((512, 64), (256, 64), (256, 32), (128, 32), (512, 0), (96, 40), (33, 7))
HEADS = (1, 3, 5, 8, 12, 16, 20, 40, 64, 96, 128)
PAGES = (1, 7, 16, 64, 128, 1024)
CACHES = (BF16, FP16, FP32, FN, FNUZ)

CORRECTNESS: list[Case] = [
    Case(),
    *(
        Case(q_dtype=q, cache_dtype=c)
        for q, c in itertools.product((BF16, FP16, FP32, FN, FNUZ), CACHES)
    ),
    *(Case(heads=h, cache_dtype=c, lengths=(70, 3)) for h in HEADS for c in (BF16, FN)),
    *(
        Case(q_len=s, causal=causal, heads=h)
        for s in range(1, 9)
        for causal in (True, False)
        for h in (5, 16)
    ),
    *(Case(page_size=p, cache_dtype=c) for p in PAGES for c in (BF16, FN, FP32)),
    *(
        # Narrow rows of bfloat16 are "shifted": see compare.py.
        Case(rank=r, rope=e, cache_dtype=c, q_dtype=q, data=d if r < 256 else "normal")
        for r, e in RANKS
        for c in (BF16, FNUZ, FP32)
        for q, d in ((BF16, "shifted"), (FP32, "normal"))
    ),
    *(Case(rank=r, rope=0, q_dtype=FP32, cache_dtype=FP32) for r in (1, 9)),
    *(
        Case(data=d, cache_dtype=c, q_dtype=q)
        for d in ("shifted", "heavy", "flat")
        for c in (BF16, FN)
        for q in (BF16, FP32)
    ),
    *(
        Case(data="needles", lengths=(300, 301, 257, 255, 128), page_size=p, q_len=s, cache_dtype=c)
        for p in (1, 7, 64)
        for s in (1, 3)
        for c in (BF16, FN, FNUZ)
    ),
]

CORNER: list[Case] = [
    Case(lengths=()),
    Case(lengths=(0,)),
    Case(lengths=(0, 0, 0), q_len=3),
    Case(lengths=(1,)),
    Case(lengths=(0, 1, 63, 64, 65, 127, 128, 129, 0)),
    Case(lengths=(0, 1, 15, 16, 17, 31, 32, 33), page_size=16, cache_dtype=FN),
    Case(lengths=(5, 2, 1, 0, 8), q_len=8),  # shorter than the query
    Case(lengths=(5, 2, 1, 0, 8), q_len=8, causal=False),
    Case(lengths=(5, 2, 1, 0, 8), q_len=8, heads=128, page_size=1),
    Case(lengths=(2000, 1, 0, 77, 999), page_size=7, cache_dtype=FN),
    Case(lengths=(500, 300, 500), share_pages=True),
    Case(lengths=(100, 90), extra_pages=40),
    Case(lengths=(64, 128), extra_pages=0),
    Case(lengths=tuple(range(1, 70)), heads=2, page_size=5, rank=64, rope=16, data="shifted"),
    Case(lengths=tuple(range(70)), heads=3, page_size=5, rank=64, rope=16, q_dtype=FP32),
]

LARGE: list[Case] = [
    Case(lengths=(4096, 5000, 123), cache_dtype=FN, heads=16),
    Case(lengths=(3000, 2500), heads=128, q_len=2),
    Case(lengths=(9000,), q_dtype=FP32, cache_dtype=FP32, heads=20, page_size=16),
]


def with_seed(case: Case, seed: int) -> Case:
    """The same case with other numbers."""
    return replace(case, seed=seed)
