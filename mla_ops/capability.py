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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from mla_ops import _compiled, checks, tuned
from mla_ops.backends import aiter_choice, aiter_release
from mla_ops.plan_spec import KINDS

logger = logging.getLogger("mla_ops")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ = checks.FLOAT8
ANY_DTYPE = frozenset((*checks.WIDE, *checks.FLOAT8))


NO_PLAN = "none"


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
    even_rows: bool = True  # of the cache: one distance from each to the next, in whole 16 bytes
    plan: str = NO_PLAN  # or the kind of the plan that the call comes with


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
    uneven_rows: bool = True
    most_kv_lora_rank: int | None = None
    most_width: int | None = None
    plan: frozenset[str] = frozenset((NO_PLAN, "native"))
    # Why the kernel is not there at all, or None where it is.
    missing: Callable[[], str | None] = field(default=lambda: None)
    # What has to be done before the first call, and why it cannot be; None where it can.
    prepare: Callable[[], str | None] = field(default=lambda: None)
    # Why it is not used for what it takes, or None where it is.
    distrusted: Callable[[], str | None] = field(default=lambda: None)

    def refuses(self, problem: Problem) -> str | None:
        """Return why this row does not take the problem, or None where it does."""
        if not self.is_for(problem.arch):
            return f"arch must be {_text(self.arch)}, got {problem.arch}"
        if (missing := self.missing()) is not None:
            return missing
        if misfits := self.misfits(problem):
            return misfits[0]
        return self.distrusted()

    def misfits(self, problem: Problem) -> list[str]:
        """Return every way in which the problem is not one for this kernel."""
        wants: tuple[tuple[str, object, object], ...] = (
            ("q", self.q_dtype, problem.q_dtype),
            ("cache", self.cache_dtype, problem.cache_dtype),
            ("heads", self.heads, problem.heads),
            ("q_len", self.q_len, problem.q_len),
            ("kv_lora_rank", self.kv_lora_rank, problem.kv_lora_rank),
            ("width", self.width, problem.width),
            ("causal", self.causal, problem.causal),
            ("lse", self.lse, problem.lse),
            ("plan", self.plan, problem.plan),
        )
        found = []
        for name, want, got in wants:
            # Not `got in want`: a symbolic size has no hash.
            wanted = want if isinstance(want, frozenset) else (want,)
            if want is not None and not any(got == one for one in wanted):
                found.append(f"{name} must be {_text(want)}, got {_text(got)}")
        for name, most, size in (
            ("kv_lora_rank", self.most_kv_lora_rank, problem.kv_lora_rank),
            ("width", self.most_width, problem.width),
        ):
            if most is not None and size > most:
                found.append(f"{name} must be at most {most}, got {size}")
        if problem.cache_over_4_gib and not self.cache_over_4_gib:
            found.append("the cache must be at most 4 GiB, got a larger one")
        if not problem.even_rows and not self.uneven_rows:
            found.append(
                "the cache's rows must lie evenly and at multiples of 16 bytes, got others "
                f"(pages of {problem.page_size})"
            )
        return found

    def is_for(self, arch: str) -> bool:
        return self.arch is None or arch in self.arch


class Decision(NamedTuple):
    """The backend and kernel for a problem, and why."""

    backend: str
    kernel: str
    reason: str


def _text(value: object) -> str:
    if isinstance(value, frozenset):
        if len(value) > 8 and value == frozenset(range(min(value), max(value) + 1)):
            return f"{min(value)} to {max(value)}"
        return " or ".join(sorted(_text(item) for item in value))
    return str(value).removeprefix("torch.")


def _aiter(
    arch: str, kernel: str, q: torch.dtype, cache: torch.dtype, q_lens: tuple[int, ...]
) -> Row:
    return Row(
        backend="aiter",
        kernel=kernel,
        reason="aiter's assembly kernel",
        arch=frozenset((arch,)),
        q_dtype=frozenset((q,)),
        cache_dtype=frozenset((cache,)),
        q_len=frozenset(q_lens),
        kv_lora_rank=512,
        width=576,
        # One query token sees everything either way.
        causal=frozenset((True, False) if q_lens == (1,) else (True,)),
        cache_over_4_gib=False,
        uneven_rows=False,
        plan=frozenset((NO_PLAN, "aiter")),
        missing=aiter_release.missing
        if q_lens == (1,)
        else aiter_release.missing_for_several_tokens,
        prepare=aiter_release.importing,
    )


def _rounding(row: Row) -> Row:
    """The same for bfloat16 queries that are rounded to float8 first."""
    return replace(
        row,
        q_dtype=frozenset((BF16,)),
        reason="aiter's assembly kernel, q rounded to float8",
        distrusted=lambda: (
            row.distrusted() if aiter_choice.rounding_allowed() else _ROUNDING_UNASKED
        ),
    )


_ROUNDING_UNASKED = "MLA_OPS_AITER_Q must be fp8 for queries to be rounded to float8, got bf16"


def _aiter_rows(arch: str, float8: torch.dtype) -> list[Row]:
    """Kernels for groups of 16 heads, and one for 128, which any number of heads is padded to;
    named after aiter's (hsa/*/mla/mla_asm.csv, 2026-08): bits of q and of the cache, query tokens.
    Three tokens are padded to four."""
    rows = [
        _aiter(arch, f"mla_{kernel}_ps", q, cache, q_lens)
        for kernel, q, cache, q_lens in (
            ("a8w8_qh128", float8, float8, (1,)),
            ("a8w8_qh16_qseqlen1", float8, float8, (1,)),
            ("a8w8_qh16_qseqlen2", float8, float8, (2,)),
            ("a8w8_qh16_qseqlen4", float8, float8, (3, 4)),
            ("a16w8_qh16", BF16, float8, (1,)),
            ("a16w8_qh16", BF16, float8, (2, 3, 4)),
            ("a16w16_qh16", BF16, BF16, (1,)),
            ("a16w16_qh16", BF16, BF16, (2,)),
            ("a16w16_qh16", BF16, BF16, (3, 4)),
        )
    ]
    for i, row in enumerate(rows):
        if "qh128" in row.kernel:
            rows[i] = replace(row, heads=frozenset(range(65, 129)))
    if arch == "gfx950":
        for i, row in enumerate(rows):
            if "a16w8" not in row.kernel and row.q_len == frozenset((3, 4)):
                rows[i] = replace(row, distrusted=lambda: _WRONG_FROM_THE_THIRD)
    return [*map(_rounding, (row for row in rows if "a8w8" in row.kernel)), *rows]


_WRONG_FROM_THE_THIRD = (
    "aiter's kernels of 2026-08 for it, executed in build_tools/cdna, got the third and fourth "
    "query token wrong for some lengths (docs/amd.md)"
)


def _no_gpu_kernels() -> str | None:
    compiled = _compiled.load()
    if compiled is None:
        return _compiled.missing
    return None if hasattr(compiled, "gpu_workers") else "mla_ops was built without GPU kernels"


NVIDIA = frozenset(("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"))


def _native_gpu(
    arch: frozenset[str], kernel: str, cache: frozenset[torch.dtype], q: frozenset[torch.dtype]
) -> Row:
    return Row(
        backend="native",
        kernel=f"csrc/hip/{kernel}",
        reason="our kernel for GPUs",
        arch=arch,
        q_dtype=q,
        cache_dtype=cache,
        most_kv_lora_rank=512,
        most_width=576,
        missing=_no_gpu_kernels,
    )


TABLE: tuple[Row, ...] = (
    *(
        row
        for arch, float8 in (("gfx942", FNUZ), ("gfx950", FN))
        for row in _aiter_rows(arch, float8)
    ),
    *(
        row
        for arch, kernel, float8 in (
            (frozenset(("gfx942",)), "decode_mfma", (FNUZ,)),
            (frozenset(("gfx950",)), "decode_mfma", (FN,)),
            (NVIDIA, "decode_mma", (FN, FNUZ)),
        )
        for row in (
            _native_gpu(
                arch, kernel, frozenset((*float8, FP16)), frozenset((BF16, FP16, FN, FNUZ))
            ),
            # float16 has more bits than bfloat16 multiplies.
            _native_gpu(arch, kernel, frozenset((BF16,)), frozenset((BF16, FN, FNUZ))),
        )
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
    """Choose for a call that will follow: what a row has to prepare is done here."""
    # Of several rows of a backend the reason is that of the one that would have to change least.
    refusals: list[tuple[int, str]] = []
    passed_over: list[str] = []
    nearest: Decision | None = None
    for row in TABLE:
        refusal = row.refuses(problem)
        if refusal is None and forced in ("auto", row.backend):
            refusal = row.prepare()
        if refusal is not None:
            passed_over.append(f"{row.backend} {row.kernel}: {refusal}")
            if forced in ("auto", row.backend):
                far = 0 if row.is_for(problem.arch) else 1 << 10
                refusals.append((len(row.misfits(problem)) + far, refusal))
        elif forced in ("auto", row.backend):
            decision = Decision(row.backend, row.kernel, row.reason)
            logger.info("%s -> %s (%s: %s)", describe(problem), *decision)
            for line in passed_over:
                logger.debug("passed over %s", line)
            return decision
        elif nearest is None:
            nearest = Decision(row.backend, row.kernel, row.reason)
    _, reason = min(refusals, key=lambda refusal: refusal[0])
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
    q: Tensor,
    kv_cache: Tensor,
    kv_lora_rank: int,
    causal: bool,
    lse: bool,
    backend: str,
    plan_spec: Sequence[int] | None = None,
) -> Decision:
    """Choose for a checked call. One lookup from the second call of a kind on.

    A plan decides for the backend it was made for.
    """
    plan = NO_PLAN if plan_spec is None else KINDS[plan_spec[0]]
    return decide_for(q.device, q, kv_cache, kv_lora_rank, causal, lse, backend, plan)


def _rows_are_even(kv_cache: Tensor) -> bool:
    page, row, itemsize = kv_cache.stride(0), kv_cache.stride(1), kv_cache.element_size()
    if row <= 0 or page % row != 0:
        return False
    return bool(row * itemsize % 16 == 0 and kv_cache.storage_offset() * itemsize % 16 == 0)


def decide_for(
    device: torch.device,
    q: Tensor,
    kv_cache: Tensor,
    kv_lora_rank: int,
    causal: bool,
    lse: bool,
    backend: str,
    plan: str = NO_PLAN,
) -> Decision:
    """Choose for a problem on a device; of q only shape and dtype count."""
    _, q_len, heads, width = q.shape
    sizes = (heads, q_len, kv_cache.shape[1], kv_lora_rank, width, causal, lse)
    # Not nbytes: that is not symbolic. What lies between the first byte and the last counts.
    span = kv_cache.shape[0] * kv_cache.stride(0) * kv_cache.element_size()
    layout = (span > 1 << 32, _rows_are_even(kv_cache), plan)
    asked = (backend, _from_environment(), os.environ.get("MLA_OPS_AITER_Q"))
    key = (device, q.dtype, kv_cache.dtype, sizes, layout, asked)
    try:
        return _decisions[key]
    except KeyError:
        known = True
    except TypeError:  # symbolic sizes have no hash
        known = False
    problem = Problem(arch_of(device), q.dtype, kv_cache.dtype, *sizes, *layout)
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
    return answer(**question) is not None


def answer(**question: Unpack[Question]) -> Decision | None:
    """Return what the table chooses for a `Question`, or None where nothing can serve it; without
    running anything. Raises as `supports` does."""
    problem, forced = _problem(question)
    for row in TABLE:
        if forced in ("auto", row.backend) and row.refuses(problem) is None:
            return Decision(row.backend, row.kernel, row.reason)
    return None


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
    none for this one. What was found of aiter follows, for AMD's, and what `python -m mla_ops tune`
    found for such problems. Raises as `supports` does.
    """
    if form not in ("text", "table"):
        raise ValueError(f"form must be text or table, got {form!r}")
    problem, forced = _problem(question)
    rows = _verdicts(problem, forced)
    notes = tuned.notes(problem.arch, problem.heads, problem.q_len)
    if any(row.backend == "aiter" and row.is_for(problem.arch) for row in TABLE):
        notes = [*(f"note: {note}" for note in aiter_release.notes()), *notes]
    if form == "text":
        lines = [f"  {row.backend:7} {row.kernel}: {row.verdict}: {row.reason}" for row in rows]
        return "\n".join([describe(problem), *lines, *(f"  {note}" for note in notes)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    header = ["| backend | kernel | verdict | why |", "|---|---|---|---|"]
    return "\n".join([describe(problem), "", *header, *lines, *(f"\n{note}" for note in notes)])
