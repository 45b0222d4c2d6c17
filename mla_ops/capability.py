"""What can run where: one table, and the only place with a condition on hardware.

A row says which problems a kernel takes; `decide` returns the first row that fits and is there.
`supports` and `explain` answer for users without running anything. `backend=` or the environment's
MLA_OPS_BACKEND restricts the choice; a forced backend that cannot serve raises with the reason and
the nearest thing that can.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops import _compiled, checks

logger = logging.getLogger("mla_ops")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ = checks.FLOAT8
ANY_DTYPE = frozenset((*checks.WIDE, *checks.FLOAT8))


class Problem(NamedTuple):
    """What a choice depends on."""

    arch: str  # cpu, gfx942, sm_90, ...
    q_dtype: torch.dtype
    cache_dtype: torch.dtype
    heads: int
    q_len: int
    page_size: int
    kv_lora_rank: int
    width: int
    causal: bool
    lse: bool
    cache_over_4_gib: bool


@dataclass(frozen=True)
class Row:
    """One kernel and the problems it takes."""

    backend: str
    kernel: str
    reason: str
    arch: frozenset[str] | None = None  # None: any
    q_dtype: frozenset[torch.dtype] = ANY_DTYPE
    cache_dtype: frozenset[torch.dtype] = ANY_DTYPE
    heads: frozenset[int] | None = None
    q_len: frozenset[int] | None = None
    kv_lora_rank: int | None = None
    width: int | None = None
    causal: frozenset[bool] = frozenset((True, False))
    lse: frozenset[bool] = frozenset((True, False))
    cache_over_4_gib: bool = True
    # Why the kernel is not there at all, or None where it is.
    missing: Callable[[], str | None] = field(default=lambda: None)

    def refuses(self, problem: Problem) -> str | None:
        """Return why this row does not take the problem, or None where it does."""
        wants: tuple[tuple[str, object, object], ...] = (
            ("arch", self.arch, problem.arch),
            ("q", self.q_dtype, problem.q_dtype),
            ("cache", self.cache_dtype, problem.cache_dtype),
            ("heads", self.heads, problem.heads),
            ("q_len", self.q_len, problem.q_len),
            ("kv_lora_rank", self.kv_lora_rank, problem.kv_lora_rank),
            ("width", self.width, problem.width),
            ("causal", self.causal, problem.causal),
            ("lse", self.lse, problem.lse),
        )
        for name, want, got in wants:
            # Not `got in want`: a symbolic size has no hash.
            wanted = want if isinstance(want, frozenset) else (want,)
            if want is None or any(got == one for one in wanted):
                continue
            return f"{name} must be {_text(want)}, got {_text(got)}"
        if problem.cache_over_4_gib and not self.cache_over_4_gib:
            return "the cache must be at most 4 GiB, got a larger one"
        return self.missing()


class Decision(NamedTuple):
    """The backend and kernel for a problem, and why."""

    backend: str
    kernel: str
    reason: str


def _text(value: object) -> str:
    if isinstance(value, frozenset):
        return " or ".join(sorted(_text(item) for item in value))
    return str(value).removeprefix("torch.")


def _planned(what: str) -> Callable[[], str | None]:
    return lambda: f"{what} is not part of this release yet"


def _aiter(
    arch: str, kernel: str, q: torch.dtype, cache: torch.dtype, heads: int, q_len: int, lse: bool
) -> Row:
    return Row(
        backend="aiter",
        kernel=kernel,
        reason="aiter's assembly kernel (mla_asm.csv, 2026-08)",
        arch=frozenset((arch,)),
        q_dtype=frozenset((q,)),
        cache_dtype=frozenset((cache,)),
        heads=frozenset((heads,)),
        q_len=frozenset((q_len,)),
        kv_lora_rank=512,
        width=576,
        causal=frozenset((True,)),
        lse=frozenset((False, lse)),
        cache_over_4_gib=False,
        missing=_planned("the aiter backend"),
    )


NATIVE_GPUS = frozenset(
    ("gfx942", "gfx950", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
)

TABLE: tuple[Row, ...] = (
    _aiter("gfx942", "mla_a8w8_qh16_qseqlen1_gqaratio16_ps", FNUZ, FNUZ, 16, 1, False),
    _aiter("gfx942", "mla_a8w8_qh16_qseqlen2_gqaratio16_ps", FNUZ, FNUZ, 16, 2, False),
    _aiter("gfx942", "mla_a8w8_qh16_qseqlen4_gqaratio16_ps", FNUZ, FNUZ, 16, 4, False),
    _aiter("gfx942", "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps", BF16, FNUZ, 16, 4, False),
    _aiter("gfx942", "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps", BF16, BF16, 16, 4, False),
    _aiter("gfx950", "mla_a8w8_qh16_qseqlen1_gqaratio16_ps", FN, FN, 16, 1, True),
    _aiter("gfx950", "mla_a8w8_qh16_qseqlen2_gqaratio16_ps", FN, FN, 16, 2, False),
    _aiter("gfx950", "mla_a8w8_qh16_qseqlen4_gqaratio16_ps", FN, FN, 16, 4, True),
    _aiter("gfx950", "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps", BF16, FN, 16, 4, False),
    _aiter("gfx950", "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps", BF16, BF16, 16, 4, True),
    Row(
        backend="native",
        kernel="csrc/hip/decode",
        reason="our kernel for GPUs",
        arch=NATIVE_GPUS,
        missing=_planned("the native GPU kernel"),
    ),
    Row(
        backend="native",
        kernel="csrc/cpu/decode",
        reason="our kernel for CPUs",
        arch=frozenset(("cpu",)),
        missing=lambda: _compiled.missing,
    ),
    Row(
        backend="torch",
        kernel="mla_ops/backends/torch",
        reason="plain torch: any device, correct, not fast",
    ),
)


@functools.cache
def arch_of(device: torch.device) -> str:
    """Return the architecture's name: cpu, gfx942, sm_90, ... or the device type where there is no
    finer one."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def float8_dtype(device: torch.device) -> torch.dtype:
    """Return the float8 type that the device's matrix units take: e4m3fnuz on gfx942, e4m3fn
    elsewhere."""
    return FNUZ if arch_of(device) == "gfx942" else FN


def _from_environment() -> str:
    return os.environ.get("MLA_OPS_BACKEND", "auto")


def _forced(backend: str) -> str:
    if backend != "auto":
        return backend
    wanted = _from_environment()
    if wanted not in checks.BACKENDS:
        known = ", ".join(checks.BACKENDS)
        raise ValueError(f"MLA_OPS_BACKEND must be one of {known}, got {wanted!r}")
    return wanted


def _first_fit(problem: Problem, forced: str) -> Decision:
    refusals: dict[str, str] = {}
    nearest: Decision | None = None
    for row in TABLE:
        refusal = row.refuses(problem)
        if refusal is not None:
            refusals.setdefault(row.backend, refusal)
        elif forced in ("auto", row.backend):
            decision = Decision(row.backend, row.kernel, row.reason)
            logger.info("%s -> %s (%s: %s)", describe(problem), *decision)
            return decision
        elif nearest is None:
            nearest = Decision(row.backend, row.kernel, row.reason)
    reason = refusals.get(forced, "it has no row in the table")
    instead = "nothing can" if nearest is None else f"the nearest that can is {nearest.backend!r}"
    raise ValueError(f"backend {forced!r} cannot serve {describe(problem)}: {reason}; {instead}")


def describe(problem: Problem) -> str:
    """Return the problem in one line."""
    return (
        f"{problem.arch}, q {_text(problem.q_dtype)} [S={problem.q_len}, H={problem.heads}], "
        f"cache {_text(problem.cache_dtype)} [page {problem.page_size}, D={problem.width}, "
        f"R={problem.kv_lora_rank}], "
        f"causal={problem.causal}, lse={problem.lse}"
    )


_decisions: dict[tuple[object, ...], Decision] = {}


def decide(
    q: Tensor, kv_cache: Tensor, kv_lora_rank: int, causal: bool, lse: bool, backend: str
) -> Decision:
    """Choose for a checked call. One lookup from the second call of a kind on."""
    _, q_len, heads, width = q.shape
    sizes = (heads, q_len, kv_cache.shape[1], kv_lora_rank, width, causal, lse)
    over_4_gib = kv_cache.nbytes > 1 << 32
    key = (q.device, q.dtype, kv_cache.dtype, sizes, over_4_gib, backend, _from_environment())
    try:
        return _decisions[key]
    except KeyError:
        known = True
    except TypeError:  # symbolic sizes have no hash
        known = False
    problem = Problem(arch_of(q.device), q.dtype, kv_cache.dtype, *sizes, over_4_gib)
    decision = _first_fit(problem, _forced(backend))
    if known:
        _decisions[key] = decision
    return decision


def _problem(
    *,
    arch: str | None = None,
    q_dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype = BF16,
    heads: int = 16,
    q_len: int = 1,
    page_size: int = 64,
    kv_lora_rank: int = 512,
    rope: int = 64,
    causal: bool = True,
    lse: bool = False,
    cache_bytes: int = 0,
) -> Problem:
    if arch is None:
        arch = arch_of(
            torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        )
    width = kv_lora_rank + rope
    over = cache_bytes > 1 << 32
    return Problem(
        arch, q_dtype, cache_dtype, heads, q_len, page_size, kv_lora_rank, width, causal, lse, over
    )


def supports(*, backend: str = "auto", **problem: Any) -> bool:
    """Say whether decode can serve a problem, without running anything.

    arch: "cpu", "gfx942", "sm_90", ...; by default this machine's. q_dtype, cache_dtype: torch
        dtypes (bfloat16).
    heads (16), q_len (1), page_size (64), kv_lora_rank (512), rope (64), cache_bytes (0): int.
    causal (True), lse (False): bool. backend: "auto" or the one that must serve.
    """
    wanted = _problem(**problem)
    return any(
        row.refuses(wanted) is None and _forced(backend) in ("auto", row.backend) for row in TABLE
    )


def explain(*, backend: str = "auto", **problem: Any) -> str:
    """Return the table's answer, row by row: what serves, what does not, and why."""
    wanted, forced, chosen = _problem(**problem), _forced(backend), False
    lines = [describe(wanted)]
    for row in TABLE:
        refusal = row.refuses(wanted)
        if refusal is None and forced not in ("auto", row.backend):
            refusal = f"backend {forced!r} was asked for"
        if refusal is not None:
            verdict = f"no: {refusal}"
        else:
            verdict = f"could too: {row.reason}" if chosen else f"SERVES: {row.reason}"
            chosen = True
        lines.append(f"  {row.backend:7} {row.kernel}: {verdict}")
    return "\n".join(lines)
