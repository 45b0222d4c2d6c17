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
from typing import Literal, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from mla_ops import _compiled, checks, tuned

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
        if not self.is_for(problem.arch):
            return f"arch must be {_text(self.arch)}, got {problem.arch}"
        if (missing := self.missing()) is not None:
            return missing
        wants: tuple[tuple[str, object, object], ...] = (
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
        return None

    def is_for(self, arch: str) -> bool:
        return self.arch is None or arch in self.arch


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
    return os.environ.get("MLA_OPS_BACKEND") or "auto"


def _forced(backend: str) -> str:
    if backend != "auto":
        return backend
    wanted = _from_environment()
    if wanted not in checks.BACKENDS:
        known = ", ".join(checks.BACKENDS)
        raise ValueError(f"MLA_OPS_BACKEND must be one of {known}, got {wanted!r}")
    return wanted


def _first_fit(problem: Problem, forced: str) -> Decision:
    # Of several rows of a backend, those for this architecture give the better reason.
    refusals: dict[tuple[str, bool], str] = {}
    passed_over: list[str] = []
    nearest: Decision | None = None
    for row in TABLE:
        refusal = row.refuses(problem)
        if refusal is not None:
            refusals.setdefault((row.backend, row.is_for(problem.arch)), refusal)
            passed_over.append(f"{row.backend} {row.kernel}: {refusal}")
        elif forced in ("auto", row.backend):
            decision = Decision(row.backend, row.kernel, row.reason)
            logger.info("%s -> %s (%s: %s)", describe(problem), *decision)
            for line in passed_over:
                logger.debug("passed over %s", line)
            return decision
        elif nearest is None:
            nearest = Decision(row.backend, row.kernel, row.reason)
    reason = refusals.get((forced, True)) or refusals.get((forced, False))
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
    over_4_gib = kv_cache.numel() * kv_cache.element_size() > 1 << 32  # nbytes: not symbolic
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


class Question(TypedDict, total=False):
    """What `supports` and `explain` are asked, by keyword; in brackets what stands if not said."""

    arch: str  # "cpu", "gfx942", "sm_90", ... (this machine's)
    q_dtype: torch.dtype  # (bfloat16)
    cache_dtype: torch.dtype  # (bfloat16)
    heads: int  # (16)
    q_len: int  # (1)
    page_size: int  # (64)
    kv_lora_rank: int  # (512)
    rope: int  # (64)
    causal: bool  # (True)
    lse: bool  # (False)
    cache_bytes: int  # (0)
    backend: str  # "auto" or the one that must serve ("auto")


def _problem(question: Question) -> tuple[Problem, str]:
    """Return the problem and the backend asked for. Raises for what is no problem at all."""
    unknown = sorted(set(question) - set(Question.__annotations__))
    if unknown:
        known = ", ".join(Question.__annotations__)
        raise TypeError(f"a question must be made of {known}, got {', '.join(unknown)}")
    arch = question.get("arch")
    if arch is None:
        arch = arch_of(
            torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        )
    backend = question.get("backend", "auto")
    q_dtype, cache_dtype = question.get("q_dtype", BF16), question.get("cache_dtype", BF16)
    heads, q_len = question.get("heads", 16), question.get("q_len", 1)
    page_size = question.get("page_size", 64)
    rank, rope = question.get("kv_lora_rank", 512), question.get("rope", 64)
    checks.question(arch, backend, q_dtype, cache_dtype, heads, q_len, page_size, rank, rope)
    problem = Problem(
        arch=arch,
        q_dtype=q_dtype,
        cache_dtype=cache_dtype,
        heads=heads,
        q_len=q_len,
        page_size=page_size,
        kv_lora_rank=rank,
        width=rank + rope,
        causal=question.get("causal", True),
        lse=question.get("lse", False),
        cache_over_4_gib=question.get("cache_bytes", 0) > 1 << 32,
    )
    return problem, _forced(backend)


def supports(**question: Unpack[Question]) -> bool:
    """Say whether decode can serve a problem (see `Question`), without running anything.

    Raises ValueError or TypeError for what no decode takes: 129 heads, an unknown backend.
    """
    problem, forced = _problem(question)
    return any(row.refuses(problem) is None and forced in ("auto", row.backend) for row in TABLE)


class Verdict(NamedTuple):
    """The table's word on one kernel: "SERVES" (it is the one), "could too" or "no"; and why."""

    backend: str
    kernel: str
    verdict: str
    reason: str


def verdicts(**question: Unpack[Question]) -> list[Verdict]:
    """Return the table's answer to a `Question`, row by row, as `explain` tells it."""
    return _verdicts(*_problem(question))


def _verdicts(problem: Problem, forced: str) -> list[Verdict]:
    chosen = False
    found = []
    has_rows = {row.backend for row in TABLE if row.is_for(problem.arch)}
    for row in TABLE:
        if not row.is_for(problem.arch):
            if row.backend in has_rows:
                continue
            has_rows.add(row.backend)
        refusal = row.refuses(problem)
        if refusal is None and forced not in ("auto", row.backend):
            refusal = f"backend {forced!r} was asked for"
        word = "no" if refusal is not None else "could too" if chosen else "SERVES"
        chosen = chosen or refusal is None
        found.append(Verdict(row.backend, row.kernel, word, refusal or row.reason))
    return found


def explain(*, form: Literal["text", "table"] = "text", **question: Unpack[Question]) -> str:
    """Return the table's answer to a `Question`: what serves, what does not, and why; as lines of
    text, or as a Markdown table.

    Of a backend's kernels for other architectures only the first is shown, and only where it has
    none for this one. What `python -m mla_ops tune` found for this machine follows. Raises as
    `supports` does.
    """
    if form not in ("text", "table"):
        raise ValueError(f"form must be text or table, got {form!r}")
    problem, forced = _problem(question)
    rows = _verdicts(problem, forced)
    notes = tuned.notes(problem.arch, problem.heads, problem.q_len)
    if form == "text":
        lines = [f"  {row.backend:7} {row.kernel}: {row.verdict}: {row.reason}" for row in rows]
        return "\n".join([describe(problem), *lines, *(f"  {note}" for note in notes)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    header = ["| backend | kernel | verdict | why |", "|---|---|---|---|"]
    return "\n".join([describe(problem), "", *header, *lines, *(f"\n{note}" for note in notes)])
