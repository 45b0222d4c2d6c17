"""The demo's model writes the same with the op, and the demo fails where it does not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_ops import demo_model
from mla_ops.__main__ import main
from mla_ops.integrations.transformers.pool import LatentPool

CALL = ("demo", "--device", "cpu", "--cases", "2x64", "--model")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "CONTEXT", 256)
    monkeypatch.setattr(demo_model, "TOKENS", 12)


def test_writes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(CALL) == 0
    shown = capsys.readouterr().out
    number = r"[\d.]+"
    pattern = rf" +{number} s +{number} +{number} +\d+% +{number} MB +(\d+) of 12 agree"
    rows = re.findall(rf"^(transformers|mla_ops|mla_ops, fp8 cache){pattern}$", shown, re.M)
    assert [row[0] for row in rows] == ["transformers", "mla_ops", "mla_ops, fp8 cache"]
    assert rows[1][1] == "12"
    assert "the tokens agree" in shown


def test_fails_where_the_tokens_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = LatentPool.decode

    def wrong(self: LatentPool, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, lse = real(self, q.flip(2), *args, **kwargs)
        return out, lse

    monkeypatch.setattr(LatentPool, "decode", wrong)
    assert main(CALL) == 1
    assert "THE TOKENS DIFFER" in capsys.readouterr().out


def test_without_transformers_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = demo_model.importlib.import_module

    def without(name: str) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(demo_model.importlib, "import_module", without)
    assert main(CALL) == 0
    assert "no model writes: transformers is not installed" in capsys.readouterr().out


def test_the_prompt_is_as_long_as_is_said() -> None:
    assert len(demo_model.PROMPT.encode()) == len(demo_model.PROMPT)
    assert max(demo_model.PROMPT.encode()) < demo_model.SIZES["vocab_size"]
    assert demo_model.text(torch.tensor([72, 105])) == "Hi"
