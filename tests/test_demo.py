"""`python -m mla_ops demo` shows what is right, and fails where something is wrong."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_ops import demo, problems, reference
from mla_ops.__main__ import main
from mla_ops.problems import BAR, Case, Problem

TINY = ("demo", "--device", "cpu", "--cases", "3x200,2x64")


def pool_of(pages: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(5)
    size = pages * problems.PAGE * problems.WIDTH
    return problems.draw_pool(size, torch.device("cpu"), generator, lambda: None), generator


def test_shows_every_case_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    shown = capsys.readouterr().out
    for batch, context in ((3, 200), (2, 64)):
        (row,) = re.findall(rf"^ +{batch} +{context} .*$", shown, re.M)
        assert row.endswith("right")
        number = r"[\d.]+"
        assert re.search(rf" {number} MB +{number} [mu]s +{number} GB/s +[\d.e-]+ ", row), row
    assert "needles: a token that must win, at 0, 1, 63, 64, 99, 198, 199 of 200" in shown
    assert "7 of 7 found" in shown
    assert "times the bar  caught" in shown
    assert shown.rstrip().endswith("all right")
    assert "backend native" in shown and "instruction set" in shown


def test_as_a_command() -> None:
    command = [sys.executable, "-P", "-m", "mla_ops", *TINY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") >= 4
    assert "%|" not in done.stderr  # no bar where stderr is not a terminal


def test_works_without_tqdm_and_on_the_torch_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.import_module

    def without_tqdm(name: str) -> object:
        if name == "tqdm":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without_tqdm)
    monkeypatch.setenv("MLA_OPS_BACKEND", "torch")
    assert main(TINY) == 0
    assert "backend torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        lambda problem, out: out * 1.01,
        lambda problem, out: out.zero_(),
        lambda problem, out: out.index_fill_(1, torch.tensor(0), torch.nan),
        lambda problem, out: torch.cat((out[1:], out[:1])),
        lambda problem, out: problem.q[..., : problems.RANK] / 24,
    ],
    ids=["1 % off", "zeros", "NaN", "other sequence", "q / 24"],
)
def test_a_wrong_result_fails(
    wrong: Callable[[Problem, Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = Problem.decode
    monkeypatch.setattr(Problem, "decode", lambda self: wrong(self, right(self)))
    assert main(TINY) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^ +3 +200 .* WRONG$", shown, re.M)
    assert shown.rstrip().endswith("NOT MET")


def test_the_shortcut_as_the_op_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Problem.decode
    monkeypatch.setattr(Problem, "decode", lambda self: right(self.skipping()))
    assert main(TINY) == 1
    shown = capsys.readouterr().out
    assert "2 of 7 found" in shown  # tokens 0 and 64, alone of the places, are multiples of 8


def test_a_check_that_cannot_tell_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shortcut must be seen to fail: else the other verdicts are worth nothing."""
    monkeypatch.setattr(Problem, "skipping", lambda self: self)
    assert main(TINY) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out


def test_short_memory_sizes_a_case_down_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = demo.RESERVE + 5 * Case(1, 200).pool_bytes
    monkeypatch.setattr(demo, "memory_free", lambda device: free)
    assert main(("demo", "--device", "cpu", "--cases", "16x200,2x64,1x4096")) == 0
    shown = capsys.readouterr().out
    assert re.search(r"16 +200 +sized down to batch 4: the cache needs 2.4 MB, 0.7 MB", shown)
    assert re.search(r"^ +4 +200 .* right$", shown, re.M)
    assert re.search(r"1 +4096 +skipped: the cache needs", shown)

    monkeypatch.setattr(demo, "memory_free", lambda device: 0)
    assert main(TINY) == 1
    assert "nothing was checked" in capsys.readouterr().out


def test_memory_is_read_here() -> None:
    assert 1 << 20 < demo.memory_free(torch.device("cpu")) < 1 << 50


@pytest.mark.parametrize(
    "options", [("--cases", "4"), ("--cases", "0x64"), ("--cases", "1x1"), ("--device", "tape")]
)
def test_a_mistaken_option_is_named(
    options: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(("demo", *options))
    assert stop.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_the_cases_are_those_of_the_contest() -> None:
    assert demo.CASES == (
        *((4, 1024), (4, 8192), (32, 1024), (32, 8192)),
        *((64, 1024), (64, 8192), (256, 1024), (256, 8192)),
    )
    assert set(demo.QUICK) < set(demo.CASES)


def test_the_pool_has_no_nan_and_a_variance_of_one() -> None:
    pool, _ = pool_of(40)
    numbers = pool.float() * problems.KV_SCALE
    assert numbers.isfinite().all()
    assert numbers.square().mean().item() == pytest.approx(1.0, abs=0.03)
    assert pool.view(torch.uint8).unique().numel() == 128


def test_a_sample_is_the_same_problem() -> None:
    pool, generator = pool_of(16)
    problem = problems.make(Case(4, 250), pool, generator)
    assert not torch.equal(problem.block_table.flatten(), torch.arange(16))
    whole = problem.oracle()
    assert torch.equal(problem.only([2, 0]).oracle(), whole[[2, 0]])


def test_skipping_reads_the_first_of_every_eight_tokens() -> None:
    pool, generator = pool_of(4)
    problem = problems.make(Case(1, 250), pool, generator)
    token = torch.arange(0, 250, 8)
    rows = problem.kv_cache.view(torch.uint8)[problem.block_table[0, token // 64], token % 64]
    want, _ = reference.decode(
        problem.q,
        rows.view(torch.float8_e4m3fn)[None],
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([len(token)], dtype=torch.int32),
        problems.SOFTMAX_SCALE,
        kv_scale=problem.kv_scale,
    )
    assert torch.equal(problem.skipping().oracle(), want)


def test_worst_error_is_that_of_the_worst_row() -> None:
    want = torch.ones(2, 1, 3, 8, dtype=torch.float64)
    got = want.clone()
    got[1, 0, 2] *= 1 + 2 * BAR
    assert problems.worst_error(got, want) == pytest.approx(2 * BAR)
    got[0, 0, 0, 0] = torch.nan
    assert problems.worst_error(got, want) == torch.inf


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("demo", "--device", "cuda", "--cases", "3x200,2x64")) == 0
    assert torch.cuda.get_device_name() in capsys.readouterr().out
