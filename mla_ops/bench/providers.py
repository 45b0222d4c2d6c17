"""Who is timed: our op by backend, what torch offers, and other libraries' kernels (`peers.py`).

torch's read a contiguous copy of the same numbers in q's dtype, [batch, tokens, D], for they know
neither pages nor float8; the copy is not timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ops import __version__, capability, checks
from mla_ops.workload import SOFTMAX_SCALE, Workload, bar_of

Run = Callable[[int], Tensor]


class Refused(Exception):
    """Why a provider does not take a case."""


PEER_BAR = 5e-2  # theirs may round q and the weights to float8


@dataclass(frozen=True)
class Provider:
    """`prepare` does what is done once for a step or longer, and returns what is timed: it takes
    the number of the call and returns [B, S, H, R]. It raises Refused for what it does not take.
    `missing` says why it cannot be had here, or None; `bar` what the relative error of a right
    result is at most."""

    name: str
    ours: bool
    prepare: Callable[[Workload], Run]
    missing: Callable[[torch.device], str | None] = lambda device: None
    version: Callable[[], str] = lambda: torch.__version__
    bar: Callable[[Workload], float] = lambda made: PEER_BAR


def ours(backend: str) -> Provider:
    """The op on one backend, with a plan, as a serving step has it."""

    def prepare(made: Workload) -> Run:
        verdicts = capability.verdicts(**made.case.question(made.q.device, backend))
        mine = [row for row in verdicts if row.backend == backend]
        if all(row.verdict == "no" for row in mine):
            raise Refused(mine[0].reason)
        plan = made.plan(backend=backend)
        return lambda turn: made.decode(turn, backend=backend, with_plan=plan)

    def missing(device: torch.device) -> str | None:
        rows = capability.verdicts(arch=capability.arch_of(device))
        mine = [row for row in rows if row.backend == backend]
        # A row that only wants another dtype or head count is none that is missing.
        reasons = [
            row.missing() or f"arch must be {', '.join(sorted(row.arch or ()))}"
            for row in capability.TABLE
            if row.backend == backend
            and (row.missing() is not None or not row.is_for(capability.arch_of(device)))
        ]
        every = sum(row.backend == backend for row in capability.TABLE)
        return (mine[0].reason if mine else reasons[0]) if len(reasons) == every else None

    def bar(made: Workload) -> float:
        return bar_of(made.case, made.q.device, backend)

    return Provider(f"mla_ops {backend}", True, prepare, missing, lambda: __version__, bar)


@functools.lru_cache(maxsize=1)
def _contiguous(made: Workload) -> list[Tensor]:
    """Return each cache as [B, tokens, D] in q's dtype, or bfloat16; 0 behind a sequence's end."""
    dtype = torch.bfloat16 if made.q.dtype in checks.FLOAT8 else made.q.dtype
    length = int(made.seq_lens.max())
    token = torch.arange(length, device=made.q.device)
    page_size = made.case.page_size
    result = []
    for cache in made.caches:
        out = cache.new_zeros((made.case.batch, length, made.case.width), dtype=dtype)
        for b, rows in enumerate(made.case.lengths):
            page = made.block_table[b, token[:rows] // page_size].long()
            codes = cache.view(torch.uint8)[page, token[:rows] % page_size].view(cache.dtype)
            wide = codes.float()
            out[b, :rows] = wide if made.kv_scale is None else wide * made.kv_scale
        result.append(out)
    return result


def forget() -> None:
    """Let go of the contiguous copies."""
    _contiguous.cache_clear()


def _queries(made: Workload) -> Tensor:
    """Return q as [B, S * H, D], in bfloat16 where it is float8."""
    q = made.q if made.q_scale is None else (made.q.float() * made.q_scale).bfloat16()
    return q.reshape(made.case.batch, -1, made.case.width)


def _seen(made: Workload) -> Tensor | None:
    """Return which tokens each query row sees, [B, S * H, tokens]; None where all see all."""
    case = made.case
    if not case.ragged and case.q_len == 1:
        return None
    token = torch.arange(int(made.seq_lens.max()), device=made.q.device)
    offset = torch.arange(case.q_len, device=made.q.device) - (case.q_len - 1)
    visible = (made.seq_lens[:, None] + offset).repeat_interleave(case.heads, 1)
    return token < visible[..., None]


def _shape(made: Workload, out: Tensor) -> Tensor:
    case = made.case
    return out.reshape(case.batch, case.q_len, case.heads, case.rank)


def _bmm(made: Workload) -> Run:
    q, caches, seen, rank = _queries(made), _contiguous(made), _seen(made), made.case.rank

    def run(turn: int) -> Tensor:
        kv = caches[turn % len(caches)]
        scores = torch.bmm(q, kv.mT) * SOFTMAX_SCALE
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        return _shape(made, torch.bmm(torch.softmax(scores, -1), kv[..., :rank]))

    return run


def _per_sequence(made: Workload) -> Run:
    q, caches, seen, rank = _queries(made), _contiguous(made), _seen(made), made.case.rank
    lengths = made.case.lengths

    def run(turn: int) -> Tensor:
        results = []
        for b, kv in enumerate(caches[turn % len(caches)]):
            rows = kv[: lengths[b]]
            scores = q[b] @ rows.T * SOFTMAX_SCALE
            if seen is not None:
                scores = scores.masked_fill(~seen[b, :, : lengths[b]], -torch.inf)
            results.append(torch.softmax(scores, -1) @ rows[:, :rank])
        return _shape(made, torch.stack(results))

    return run


def _sdpa(made: Workload) -> Run:
    q, caches, seen, rank = _queries(made), _contiguous(made), _seen(made), made.case.rank
    mask = None if seen is None else seen[:, None]
    attention = torch.nn.functional.scaled_dot_product_attention

    def run(turn: int) -> Tensor:
        kv = caches[turn % len(caches)][:, None]
        out = attention(q[:, None], kv, kv[..., :rank], attn_mask=mask, scale=SOFTMAX_SCALE)
        return _shape(made, out)

    return run


def _flex(made: Workload) -> Run:
    from torch.nn.attention.flex_attention import flex_attention

    q, caches, rank = _queries(made), _contiguous(made), made.case.rank
    case, lengths = made.case, made.seq_lens
    compiled = torch.compile(flex_attention, dynamic=False)

    def score(value: Tensor, b: Tensor, h: Tensor, row: Tensor, token: Tensor) -> Tensor:
        visible = lengths[b] - (case.q_len - 1) + row // case.heads
        return torch.where(token < visible, value, -torch.inf)

    modified = score if case.ragged or case.q_len > 1 else None

    def run(turn: int) -> Tensor:
        kv = caches[turn % len(caches)][:, None]
        out = compiled(q[:, None], kv, kv[..., :rank], score_mod=modified, scale=SOFTMAX_SCALE)
        return _shape(made, out)

    return run


def _only_on_gpus(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "it compiles for minutes on a CPU"


TORCH = (
    Provider("torch bmm", False, _bmm),
    Provider("torch per_sequence", False, _per_sequence),
    Provider("torch sdpa", False, _sdpa),
    Provider("torch flex", False, _flex, _only_on_gpus),
)
