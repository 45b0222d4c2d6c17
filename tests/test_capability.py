"""The table: every row serves what it says and refuses the rest with a reason."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_ops
from mla_ops import _C, capability, checks
from mla_ops.capability import TABLE, Problem, Row
from mla_ops.plan_spec import KINDS

BF16, FP32 = torch.bfloat16, torch.float32
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


PLANS = ("none", *KINDS)


def first(values: frozenset[Any] | None, otherwise: Any) -> Any:
    return otherwise if values is None else min(values, key=str)


def problem_of(row: Row) -> Problem:
    """One that the row takes."""
    return Problem(
        arch=first(row.arch, "sm_70"),
        q_dtype=first(row.q_dtype, BF16),
        cache_dtype=first(row.cache_dtype, BF16),
        heads=first(row.heads, 7),
        q_len=first(row.q_len, 3),
        page_size=64,
        kv_lora_rank=row.kv_lora_rank or 512,
        width=row.width or 576,
        causal=first(row.causal, True),
        lse=first(row.lse, False),
        cache_over_4_gib=row.cache_over_4_gib,
        even_rows=not row.uneven_rows,
        plan=first(row.plan, "none"),
    )


def there(row: Row) -> Row:
    """The row as it is where all that it needs is there."""
    nothing = lambda: None  # noqa: E731
    return replace(row, missing=nothing, prepare=nothing, distrusted=nothing)


def others(row: Row) -> list[tuple[str, str, Any]]:
    """(field, its name in the reason, a value that the row does not take)."""
    found: list[tuple[str, str, Any]] = []
    for name, short in (("arch", "arch"), ("heads", "heads"), ("q_len", "q_len")):
        if getattr(row, name) is not None:
            other = next(n for n in (77, 7) if n not in getattr(row, name))
            found.append((name, short, "sm_70" if name == "arch" else other))
    for name, short in (("q_dtype", "q"), ("cache_dtype", "cache")):
        if getattr(row, name) != capability.ANY_DTYPE:
            found.append((name, short, FP32))
    for name in ("kv_lora_rank", "width"):
        if getattr(row, name) is not None:
            found.append((name, name, 99))
    for name, values in (("causal", (True, False)), ("lse", (True, False)), ("plan", PLANS)):
        for value in values:
            if value not in getattr(row, name):
                found.append((name, name, value))
    return found


def id_of(row: Row) -> str:
    return f"{row.backend} {row.kernel} {'/'.join(sorted(row.arch or ('any',)))[:12]}"


@pytest.mark.parametrize("row", TABLE, ids=id_of)
def test_a_row_takes_what_it_says(row: Row) -> None:
    assert there(row).refuses(problem_of(row)) is None


@pytest.mark.parametrize("row", TABLE, ids=id_of)
def test_a_row_refuses_the_rest_with_expected_and_got(row: Row) -> None:
    row = there(row)
    for name, short, value in others(row):
        reason = row.refuses(problem_of(row)._replace(**{name: value}))
        assert reason is not None, name
        assert reason.startswith(f"{short} must be "), reason
        assert reason.endswith(f", got {str(value).removeprefix('torch.')}"), reason
    if not row.cache_over_4_gib:
        reason = row.refuses(problem_of(row)._replace(cache_over_4_gib=True))
        assert reason == "the cache must be at most 4 GiB, got a larger one"
    if not row.uneven_rows:
        reason = row.refuses(problem_of(row)._replace(even_rows=False))
        assert reason is not None and reason.startswith("the cache's rows must lie evenly")


@pytest.mark.parametrize("row", TABLE, ids=id_of)
def test_a_row_is_reachable(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some problem comes to it, where all is there; to rows that round q, where that is asked."""
    rounds = lambda one: "rounded" in one.reason  # noqa: E731
    present = tuple(there(one) for one in TABLE if rounds(row) or not rounds(one))
    monkeypatch.setattr(capability, "TABLE", present)
    decision = capability._first_fit(problem_of(row), row.backend)
    assert (decision.backend, decision.kernel) == (row.backend, row.kernel)


def test_what_is_not_there_says_so() -> None:
    for row in TABLE:
        reason = row.missing()
        if row.backend == "aiter":
            assert reason == "aiter is not installed"
        elif row.kernel.startswith("csrc/hip") and not hasattr(_C, "gpu_workers"):
            assert reason == "mla_ops was built without GPU kernels"
        else:
            assert reason is None, "the tests run where the kernels were compiled"


def test_a_symbolic_size_is_compared_and_not_hashed() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    heads = environment.create_unbacked_symint()
    with pytest.raises(TypeError):
        hash(heads)
    # What torch.export makes of a dynamic dimension: a size with a hint.
    mode = torch._subclasses.FakeTensorMode(shape_env=environment)
    fake = mode.from_tensor(torch.empty(16, 3), static_shapes=False)
    row = TABLE[0]
    assert row.missing() == row.refuses(problem_of(row)._replace(heads=fake.shape[0]))


def test_every_problem_on_every_device_is_served_or_explained() -> None:
    """There is always an answer, and the three ways to ask for it agree."""
    for arch, q, cache, heads, q_len, lse in itertools.product(
        ("cpu", "gfx942", "gfx950", "sm_90", "mps"),
        (BF16, FP32, FN),
        (BF16, FNUZ),
        (1, 16, 128),
        (1, 2, 8),
        (True, False),
    ):
        dtypes = {"q_dtype": q, "cache_dtype": cache}
        problem = {"arch": arch, **dtypes, "heads": heads, "q_len": q_len, "lse": lse}
        for backend in checks.BACKENDS:
            text = mla_ops.explain(backend=backend, **problem)
            serves = [line for line in text.splitlines() if "SERVES" in line]
            assert len(serves) == mla_ops.supports(backend=backend, **problem)
            if serves and backend != "auto":
                assert serves[0].split()[0] == backend
        assert mla_ops.supports(**problem)


def test_explain_has_a_line_per_row_that_matters() -> None:
    text = mla_ops.explain(arch="cpu")
    lines = text.splitlines()
    # aiter's first row alone, for it has none for a CPU, and no native row for GPUs.
    assert [line.split()[0] for line in lines[1:]] == ["aiter", "native", "torch"]
    on_gfx942 = mla_ops.explain(arch="gfx942").splitlines()[1:]
    assert len(on_gfx942) == sum(row.is_for("gfx942") for row in TABLE)
    assert all(": no: aiter is not installed" in line for line in on_gfx942[:-3])
    assert all("csrc/hip/decode_mfma" in line for line in on_gfx942[-3:-1])
    assert lines[0].startswith("cpu, q bfloat16 [S=1, H=16], cache bfloat16")
    assert "SERVES: our kernel for CPUs" in text
    assert "could too: plain torch" in text
    assert "no: arch must be gfx942, got cpu" in text
    forced = mla_ops.explain(arch="cpu", backend="torch")
    assert "no: backend 'torch' was asked for" in forced
    assert "SERVES: plain torch" in forced


@pytest.mark.parametrize(
    ("question", "error", "message"),
    [
        ({"heads": 129}, ValueError, "heads must be between 1 and 128, got 129"),
        ({"q_len": 9}, ValueError, "q_len must be between 1 and 8, got 9"),
        ({"page_size": 0}, ValueError, "page_size must be between 1 and .*, got 0"),
        ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank must be between 1 and .*, got 0"),
        ({"rope": -1}, ValueError, "rope must be between 0 and .*, got -1"),
        ({"backend": "xyz"}, ValueError, "backend must be one of .*, got 'xyz'"),
        ({"cache_dtype": "fp8"}, TypeError, "cache_dtype must be one of .*, got 'fp8'"),
        ({"arch": 5}, TypeError, "arch must be a string .*, got 5"),
        ({"head": 16}, TypeError, "must be made of arch, .*, got head"),
    ],
)
def test_a_question_that_is_none_is_refused(
    question: dict, error: type[Exception], message: str
) -> None:
    for ask in (mla_ops.supports, mla_ops.explain):
        with pytest.raises(error, match=message):
            ask(**question)


def decide(backend: str = "auto", heads: int = 3) -> capability.Decision:
    q, cache = torch.empty(1, 1, heads, 24), torch.empty(2, 4, 24)
    return capability.decide(q, cache, 16, True, False, backend)


def test_decide_goes_by_argument_then_environment_then_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLA_OPS_BACKEND", raising=False)
    assert decide().backend == "native"
    assert decide("torch").backend == "torch"
    monkeypatch.setenv("MLA_OPS_BACKEND", "torch")
    assert decide().backend == "torch"
    assert decide("native").backend == "native"
    monkeypatch.setenv("MLA_OPS_BACKEND", "aiter")
    with pytest.raises(ValueError, match="backend 'aiter' cannot serve cpu"):
        decide()
    monkeypatch.setenv("MLA_OPS_BACKEND", "fast")
    with pytest.raises(ValueError, match="MLA_OPS_BACKEND must be one of .*, got 'fast'"):
        decide()


def test_a_forced_choice_that_cannot_serve_names_reason_and_nearest() -> None:
    with pytest.raises(ValueError) as caught:
        decide("aiter")
    text = str(caught.value)
    assert "backend 'aiter' cannot serve cpu, q float32 [S=1, H=3]" in text
    assert "arch must be gfx942, got cpu" in text
    assert text.endswith("the nearest that can is 'native'")


def test_a_missing_kernel_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_ops._compiled, "missing", "nothing was compiled")
    problem, _ = capability._problem({"arch": "cpu", "heads": 77})
    with pytest.raises(ValueError, match="nothing was compiled; the nearest that can is 'torch'"):
        capability._first_fit(problem, "native")
    assert capability._first_fit(problem, "auto").backend == "torch"


def test_a_decision_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    capability._decisions.clear()
    with caplog.at_level(logging.INFO, logger="mla_ops"):
        for _ in range(3):
            decide(heads=11)
        assert len(caplog.records) == 1
        decide(heads=12)
    assert len(caplog.records) == 2
    text = caplog.records[0].getMessage()
    assert caplog.records[0].levelno == logging.INFO
    assert "H=11" in text and "native" in text and "our kernel for CPUs" in text


def test_float8_of_a_device() -> None:
    assert capability.float8_dtype(torch.device("cpu")) == FN
    assert capability.float8_dtype(torch.device("meta")) == FN
