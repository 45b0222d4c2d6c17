"""The kernels that the table can choose on a device, and problems for each: what `selftest` checks
and `warmup` runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops import capability, checks, reference, workload
from mla_ops.decode import decode
from mla_ops.plan import DecodePlan

WIDTH, PAGE = 576, 64
SCALE = 192**-0.5

HEADS = (20, 128)  # no whole number of groups of 16; and all that there can be


class Subject(NamedTuple):
    """A kernel and what it is given."""

    backend: str
    kernel: str
    q_dtype: torch.dtype
    cache_dtype: torch.dtype
    q_len: int
    heads: int
    bar: float


class Problem(NamedTuple):
    """Tensors of one decode."""

    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    q_scale: Tensor | None
    kv_scale: Tensor | None

    def error(self, got: Tensor) -> float:
        """Return the worst row's; infinity for NaN and for what should be 0 and is not."""
        want, _ = reference.decode(*self[:4], SCALE, q_scale=self.q_scale, kv_scale=self.kv_scale)
        norm = want.norm(dim=-1)
        off = (got.double() - want).norm(dim=-1)
        relative = torch.where(norm > 0, off / norm, torch.where(off == 0, 0.0, torch.inf))
        return float(relative.nan_to_num(torch.inf).max())


def subjects(device: torch.device, backend: str) -> Iterator[Subject]:
    """Give what the table can choose for DeepSeek's sizes."""
    float8, bf16 = capability.float8_dtype(device), torch.bfloat16
    for q_dtype, cache_dtype in ((bf16, bf16), (bf16, float8), (float8, float8)):
        for q_len in (1, 2, 3, 4):
            seen: set[str] = set()
            for heads in HEADS:
                chosen = capability.answer(
                    arch=capability.arch_of(device),
                    q_dtype=q_dtype,
                    cache_dtype=cache_dtype,
                    heads=heads,
                    q_len=q_len,
                    backend=backend,
                )
                if chosen is not None and chosen.kernel not in seen:
                    seen.add(chosen.kernel)
                    bar = workload.bar(q_dtype, chosen.kernel)
                    kernel = chosen.kernel
                    yield Subject(chosen.backend, kernel, q_dtype, cache_dtype, q_len, heads, bar)


def make(
    subject: Subject, device: torch.device, lengths: tuple[int, ...], needles: bool = False
) -> Problem:
    """Draw a problem on shuffled pages. With `needles`, one token of each sequence must win."""
    generator = torch.Generator().manual_seed(sum(lengths) + subject.q_len)
    columns = -(-max(lengths) // PAGE)
    pool = len(lengths) * columns
    table = torch.randperm(pool, generator=generator).view(len(lengths), columns)
    rows = torch.randn(pool, PAGE, WIDTH, generator=generator)
    q = torch.randn(len(lengths), subject.q_len, subject.heads, WIDTH, generator=generator)
    for b, length in enumerate(lengths if needles else ()):
        if length >= subject.q_len:
            last = length - subject.q_len  # seen by every query token
            at = (0, last, min(PAGE, last), last // 2)[b % 4]
            q[b] = rows[table[b, at // PAGE], at % PAGE] + q[b] * 0.1
    q_codes, q_scale = _converted(q, subject.q_dtype)
    codes, kv_scale = _converted(rows, subject.cache_dtype)
    tensors = (q_codes, codes, table.int(), torch.tensor(lengths, dtype=torch.int32))
    on_device = [None if x is None else x.to(device) for x in (*tensors, q_scale, kv_scale)]
    return Problem(*on_device)  # type: ignore[arg-type]


def _converted(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if dtype not in checks.FLOAT8:
        return x.to(dtype), None
    scale = (x.abs().max() / torch.finfo(dtype).max).reshape(1)
    return (x / scale).to(dtype), scale


def run(subject: Subject, problem: Problem, with_plan: DecodePlan | None = None) -> Tensor:
    """Decode a problem on the subject's backend."""
    out = decode(
        *problem[:4],
        SCALE,
        q_scale=problem.q_scale,
        kv_scale=problem.kv_scale,
        plan=with_plan,
        backend=subject.backend,
    )
    assert isinstance(out, Tensor)
    return out


def warmup(device: torch.device | str | None = None) -> list[str]:
    """Run each kernel that the table chooses on a device once, on a few tokens.

    aiter compiles a kernel's host code when it is first called, for minutes: after this it has.
    Returns the kernels that ran. Raises what they raise.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    ran = []
    for subject in subjects(device, "auto"):
        problem = make(subject, device, (5, 4, 0))
        run(subject, problem)
        ran.append(subject.kernel)
    return list(dict.fromkeys(ran))
