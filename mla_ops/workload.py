"""Decode problems of any kind for `bench`, `tune` and `doctor`: their tensors, what they must read
and compute, and the judgement of results by the float64 oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_ops import capability, checks, draw, reference
from mla_ops.decode import decode
from mla_ops.plan import DecodePlan, plan

SOFTMAX_SCALE = 192**-0.5  # DeepSeek's: qk_nope_head_dim 128 + rope 64

# Relative L2 error of a row, by the dtype of the output: what rounding it leaves.
BARS = {torch.bfloat16: 3e-3, torch.float16: 6e-4, torch.float32: 1e-5}
FLOAT8_BAR = 5e-2  # of kernels that round the weights to float8: 3 bits of mantissa

SHORT = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
SHORT_OF = {dtype: name for name, dtype in SHORT.items()}


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `context` tokens, the `q_len` query tokens included; of that mean, and
    of up to twice as many, where they are ragged."""

    batch: int
    context: int
    q_len: int = 1
    heads: int = 16
    q_dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    page_size: int = 64
    ragged: bool = False
    rank: int = 512
    rope: int = 64

    def __str__(self) -> str:
        """The case in the grammar of `bench/grammar.py`."""
        default = Case(1, 1)
        words = [f"{self.batch}q{self.q_len}s{_count(self.context)}", f"h{self.heads}"]
        words.append(SHORT_OF[self.cache_dtype])
        if self.q_dtype != default.q_dtype:
            words.append("q" + SHORT_OF[self.q_dtype])
        for word, name in (("page", "page_size"), ("rank", "rank"), ("rope", "rope")):
            if getattr(self, name) != getattr(default, name):
                words.append(f"{word}{getattr(self, name)}")
        return "-".join([*words, "ragged"] if self.ragged else words)

    @property
    def width(self) -> int:
        return self.rank + self.rope

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        if not self.ragged:
            return [self.context] * self.batch
        rng = random.Random(f"{self.batch} {self.context}")
        low = min(self.q_len, self.context)
        return [rng.randint(low, 2 * self.context - low) for _ in range(self.batch)]

    @property
    def pages(self) -> int:
        """Pages in use."""
        return sum(-(-length // self.page_size) for length in self.lengths)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self.pages * self.page_size * self.width * self.cache_dtype.itemsize

    @property
    def useful_bytes(self) -> int:
        """Bytes that no decode can do without: the tokens' rows, q and the output, once each."""
        queries = self.batch * self.q_len * self.heads
        out = (torch.bfloat16 if self.q_dtype in checks.FLOAT8 else self.q_dtype).itemsize
        rows = sum(self.lengths) * self.width * self.cache_dtype.itemsize
        return rows + queries * (self.width * self.q_dtype.itemsize + self.rank * out)

    def question(self, device: torch.device, backend: str = "auto") -> capability.Question:
        """Return what `supports` and `explain` are asked about it."""
        return {
            "arch": capability.arch_of(device),
            "q_dtype": self.q_dtype,
            "cache_dtype": self.cache_dtype,
            "heads": self.heads,
            "q_len": self.q_len,
            "page_size": self.page_size,
            "kv_lora_rank": self.rank,
            "rope": self.rope,
            "cache_bytes": self.cache_bytes,
            "backend": backend,
        }

    @property
    def flop(self) -> int:
        """2 (D + R) for each head of each query token and each token that it sees."""
        seen = sum(
            max(0, length - self.q_len + 1 + s)
            for length in self.lengths
            for s in range(self.q_len)
        )
        return 2 * seen * self.heads * (self.width + self.rank)


def _count(number: int) -> str:
    return f"{number >> 10}k" if number % 1024 == 0 else str(number)


@dataclass(frozen=True)
class Workload:
    """A case's tensors. `caches` are equal in shape and differ in what they hold: whoever takes
    them in turn finds nothing of one in a processor's cache when it comes to it again."""

    case: Case
    q: Tensor
    caches: tuple[Tensor, ...]
    block_table: Tensor
    seq_lens: Tensor
    q_scale: Tensor | None
    kv_scale: Tensor | None

    def plan(self, workers: int | None = None, backend: str = "native") -> DecodePlan:
        """Make a plan for it, for the native and torch backends or for aiter."""
        more: dict[str, Any] = {}
        if backend == "aiter":
            more = {"kv_cache": self.caches[0], "q_dtype": self.q.dtype, "backend": backend}
        return plan(
            self.seq_lens,
            self.block_table,
            page_size=self.case.page_size,
            num_heads=self.case.heads,
            q_len=self.case.q_len,
            workers=workers,
            **more,
        )

    def decode(
        self, turn: int = 0, *, backend: str = "auto", with_plan: DecodePlan | None = None
    ) -> Tensor:
        """Run the op on one of the caches."""
        out = decode(
            self.q,
            self.caches[turn % len(self.caches)],
            self.block_table,
            self.seq_lens,
            SOFTMAX_SCALE,
            kv_lora_rank=self.case.rank,
            q_scale=self.q_scale,
            kv_scale=self.kv_scale,
            plan=with_plan,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out


def make(
    case: Case, device: torch.device, sets: int = 1, generator: torch.Generator | None = None
) -> Workload:
    """Draw a case's tensors, on pages in shuffled order, with `sets` caches."""
    generator = generator or torch.Generator(device).manual_seed(0)
    lengths = case.lengths
    columns = -(-max(lengths) // case.page_size)
    order = torch.randperm(case.pages, generator=generator, device=device).to(torch.int32)
    table = torch.zeros(case.batch, columns, dtype=torch.int32, device=device)
    for b, pages in enumerate(order.split([-(-length // case.page_size) for length in lengths])):
        table[b, : len(pages)] = pages
    # An even number of pages, for draw.cache() draws eight bytes at a time.
    shape = (-(-case.pages // 8) * 8, case.page_size, case.width)
    q = torch.randn(
        case.batch, case.q_len, case.heads, case.width, generator=generator, device=device
    )
    q_scale = None
    if case.q_dtype in checks.FLOAT8:
        q_scale = torch.full((1,), 1 / 32, device=device)
        q = q * 32
    return Workload(
        case,
        q.to(case.q_dtype),
        tuple(draw.cache(shape, case.cache_dtype, device, generator) for _ in range(sets)),
        table,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        q_scale,
        draw.scale(case.cache_dtype, device),
    )


def bar(q_dtype: torch.dtype, kernel: str = "") -> float:
    """Return what the relative error of a right result is at most, for queries of a dtype on a
    kernel of the table."""
    if "a8w8" in kernel:
        return FLOAT8_BAR
    return BARS[torch.bfloat16 if q_dtype in checks.FLOAT8 else q_dtype]


def bar_of(case: Case, device: torch.device, backend: str) -> float:
    """The same for a case on a backend that serves it."""
    chosen = capability.answer(**case.question(device, backend))
    return bar(case.q_dtype, "" if chosen is None else chosen.kernel)


def error(made: Workload, out: Tensor, turn: int = 0) -> float:
    """Return the relative L2 error of the worst row in a sample of sequences: the first, the last,
    the longest and a random one; infinity where one has a NaN or the shape is another."""
    case = made.case
    if out.shape != (case.batch, case.q_len, case.heads, case.rank):
        return torch.inf
    longest = case.lengths.index(max(case.lengths))
    some = sorted({0, case.batch - 1, longest, random.Random(case.batch).randrange(case.batch)})
    sample = _only(made, some, turn)
    want, _ = reference.decode(
        sample.q,
        sample.caches[0],
        sample.block_table,
        sample.seq_lens,
        SOFTMAX_SCALE,
        kv_lora_rank=case.rank,
        q_scale=sample.q_scale,
        kv_scale=sample.kv_scale,
    )
    norm = want.norm(dim=-1)
    off = (out[some].cpu().double() - want).norm(dim=-1)
    relative = torch.where(norm > 0, off / norm, torch.where(off == 0, 0.0, torch.inf))
    return float(relative.nan_to_num(torch.inf).max())


def _only(made: Workload, sequences: list[int], turn: int) -> Workload:
    """Return these sequences and their pages alone, on the CPU."""
    table = made.block_table[sequences].long()
    cache = made.caches[turn % len(made.caches)]
    # float8 has no gather on every device; its bytes have.
    pages = cache.view(torch.uint8)[table.flatten()].cpu().view(cache.dtype)
    return replace(
        made,
        q=made.q[sequences].cpu(),
        caches=(pages,),
        block_table=torch.arange(table.numel(), dtype=torch.int32).view(table.shape),
        seq_lens=made.seq_lens[sequences].cpu(),
        q_scale=None if made.q_scale is None else made.q_scale.cpu(),
        kv_scale=None if made.kv_scale is None else made.kv_scale.cpu(),
    )
