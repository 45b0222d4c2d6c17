"""`python -m mla_ops selftest` says what is right and what is not, and by its exit code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla_ops
from mla_ops import capability, selftest, subjects
from mla_ops.__main__ import main

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "RAGGED", (0, 1, 65, 130))
    monkeypatch.setattr(selftest, "LATER", (64, 0, 5, 130))


def test_all_is_right_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = subjects.subjects
    some = lambda *asked: [one for one in every(*asked) if one.q_len in (1, 4)]  # noqa: E731
    monkeypatch.setattr(selftest, "subjects", some)
    assert main(["selftest", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "aiter" in text and "no: arch must be gfx942, got cpu" in text
    assert text.splitlines()[-1] == "12 of 12 right"
    assert text.count("csrc/cpu/decode") == 6 and "WRONG" not in text


@pytest.mark.parametrize("check", list(selftest.CHECKS))
def test_what_is_wrong_is_said(
    check: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decode that is 1 % off, in one of the checks."""
    real = selftest.CHECKS[check]

    def spoilt(subject: subjects.Subject, device: torch.device) -> float:
        run = subjects.run
        with monkeypatch.context() as patch:
            patch.setattr(selftest, "run", lambda *args: run(*args) * 1.01)
            return real(subject, device)

    monkeypatch.setitem(selftest.CHECKS, check, spoilt)
    some = list(subjects.subjects(CPU, "torch"))[:2]
    monkeypatch.setattr(selftest, "subjects", lambda device, backend: some)
    assert main(["selftest", "--device", "cpu", "--backend", "torch"]) == 1
    text = capsys.readouterr().out
    assert text.count("WRONG (bar 3e-03)") == 2 and "0 of 2 right" in text


def test_a_backend_that_raises_is_one_wrong_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(selftest, "run", fails)
    assert main(["selftest", "--device", "cpu", "--backend", "torch"]) == 1
    text = capsys.readouterr().out
    assert "no kernel image" in text and "0 of 12 right" in text


def test_nothing_to_check_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu", "--backend", "aiter"]) == 1
    assert "0 of 0 right" in capsys.readouterr().out


def test_subjects_are_every_kernel_of_the_table() -> None:
    found = {one.kernel for b in ("native", "torch") for one in subjects.subjects(CPU, b)}
    rows = [row for row in capability.TABLE if row.is_for("cpu")]
    assert found == {row.kernel for row in rows}


def test_warmup_runs_what_auto_chooses() -> None:
    assert mla_ops.warmup("cpu") == ["csrc/cpu/decode"]
