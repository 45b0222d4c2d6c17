"""`python -m mla_ops tune`: what it finds is right, kept, used by plans, and told by explain()."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops import tune, tuned, workload
from mla_ops.__main__ import main
from mla_ops.backends import aiter_choice
from mla_ops.bench.timing import Times
from mla_ops.plan import default_workers
from mla_ops.workload import Case, Workload

CPU = torch.device("cpu")
DEFAULT = default_workers(CPU, 2, 16)
FEW = ("2q1s200", "--device", "cpu", "--turns", "2", "--budget", "0")


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "folder" / "tuned.json"
    monkeypatch.setenv("MLA_OPS_TUNED", str(path))
    tuned.forget()
    yield path
    tuned.forget()


def entry(workers: int | None = 12, **changes: object) -> dict[str, object]:
    return {
        "machine": tuned.machine(CPU),
        "arch": "cpu",
        "batch": 2,
        "tokens": 256,
        "heads": 16,
        "q_len": 1,
        "backend": "native",
        "choice": {} if workers is None else {"workers": workers},
        "speedup": 1.25,
        "date": "2026-12-01",
        "mla_ops": "x",
    } | changes


def planned(batch: int = 2, tokens: int = 256, heads: int = 16, q_len: int = 1, **more) -> int:
    table = torch.zeros(batch, tokens // 64, dtype=torch.int32)
    lengths = torch.full((batch,), tokens, dtype=torch.int32)
    options = {"page_size": 64, "num_heads": heads, "q_len": q_len}
    return mla_ops.plan(lengths, table, **options, **more).spec.workers


def test_tune_keeps_what_it_found_and_goes_on_where_it_stopped(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("tune", *FEW)) == 0
    (kept,) = json.loads(file.read_text())["entries"]
    assert (kept["batch"], kept["tokens"], kept["backend"]) == (2, 256, "native")
    assert kept["choice"] in tune.candidates("native", Case(2, 200), CPU)
    assert kept["choice"] == {} or kept["speedup"] > tune.GAIN
    names = [tune._text(choice) for choice in tune.candidates("native", Case(2, 200), CPU)]
    assert list(kept["medians"]) == names
    capsys.readouterr()
    # A second run has one class left to do.
    before = file.stat().st_mtime_ns
    assert main(("tune", *FEW)) == 0
    assert "1 of 1 are tuned already" in capsys.readouterr().out
    assert file.stat().st_mtime_ns == before
    assert main(("tune", "2q1s200", "2q1s129", "4q1s200", "--dry-run", "--device", "cpu")) == 0
    shown = capsys.readouterr().out
    assert "native 4q1s200-h16-bf16: default, workers" in shown and "2q1s" not in shown
    assert main(("tune", "--show")) == 0
    shown = capsys.readouterr().out
    assert str(file) in shown and "native  batch 2 tokens 256 heads 16 q_len 1: " in shown
    assert main(("tune", "--reset")) == 0
    assert not file.exists() and tuned.entries() == ()


def test_plans_take_what_was_tuned_for_their_class_alone(file: Path) -> None:
    default = default_workers(CPU, 2, 16)
    assert planned() == default
    tuned.write([entry(default + 7)])
    assert planned() == planned(tokens=192) == default + 7
    others = [planned(batch=4), planned(batch=1), planned(tokens=320), planned(tokens=128)]
    others += [planned(heads=8), planned(q_len=2), planned(batch_invariant=True)]
    assert others == [default] * 7
    assert planned(workers=3) == 3
    tuned.write([entry(default + 7, machine="another")])
    assert planned() == default
    tuned.write([entry(None)])
    assert planned() == default


def test_0_keeps_and_uses_nothing(file: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    tuned.write([entry(99)])
    monkeypatch.setenv("MLA_OPS_TUNED", "0")
    tuned.forget()
    assert planned() == DEFAULT
    assert main(("tune", *FEW)) == 2
    assert "MLA_OPS_TUNED must name a file for tune, got '0'" in capsys.readouterr().out


def test_without_the_variable_the_file_is_in_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLA_OPS_TUNED", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert tuned.path() == Path("/x/mla_ops/tuned.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuned.path() == Path.home() / ".cache/mla_ops/tuned.json"


@pytest.mark.parametrize("content", ("{", '{"version": 9, "entries": []}', "[]", ""))
def test_a_broken_file_is_a_warning_and_counts_as_empty(
    file: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_text(content)
    assert planned() == planned() == DEFAULT
    (record,) = caplog.records
    assert str(file) in record.getMessage() and "tune --reset" in record.getMessage()


def test_explain_tells_what_is_tuned_for_the_problem(file: Path) -> None:
    tuned.write([entry(12), entry(5, heads=128), entry(6, arch="gfx942")])
    for text in (mla_ops.explain(arch="cpu"), mla_ops.explain(arch="cpu", form="table")):
        told = [line for line in text.splitlines() if "tuned " in line]
        assert len(told) == 1 and "batch 2, room for 256 tokens: workers 12 (1.25x" in told[0]
    assert "workers 6" in mla_ops.explain(arch="gfx942")


def test_what_is_wrong_is_not_chosen(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend that is wrong where there are many workers."""
    right = Workload.decode
    several = DEFAULT  # as many as the default at most are right

    def wrong(self: Workload, *args, **kwargs) -> Tensor:
        out = right(self, *args, **kwargs)
        return out * 1.01 if kwargs["with_plan"].spec.workers > several else out

    monkeypatch.setattr(Workload, "decode", wrong)
    assert main(("tune", *FEW)) == 1
    numbers = [one["workers"] for one in tune.candidates("native", Case(2, 200), CPU)[1:]]
    larger = [number for number in numbers if number > several]
    assert capsys.readouterr().out.count("WRONG: native 2q1s200") == len(larger) > 2
    (kept,) = json.loads(file.read_text())["entries"]
    assert list(kept["medians"]) == ["default", *(f"workers {n}" for n in numbers if n <= several)]

    monkeypatch.setattr(Workload, "decode", lambda self, *a, **k: right(self, *a, **k) * 1.01)
    assert main(("tune", *FEW, "--again")) == 1
    assert json.loads(file.read_text())["entries"] == [kept]


def test_the_default_stays_where_nothing_beats_it_beyond_the_noise() -> None:
    def times(*seconds: float) -> Times:
        return Times(list(seconds), "burst")

    steady = {"default": times(10, 10, 10), "workers 4": times(8, 8, 8), "workers 8": times(9, 9)}
    assert tune.best_of(steady) == "workers 4"
    assert tune.best_of(steady | {"workers 4": times(9.9, 9.9, 9.9)}) == "workers 8"
    assert tune.best_of({"default": times(10, 10), "workers 4": times(9.9, 9.9)}) == "default"
    noisy = {"default": times(7, 10, 13), "workers 4": times(6, 8, 12)}
    assert tune.best_of(noisy) == "default"


@pytest.mark.parametrize("workers", (1, 3, 64))
def test_any_number_of_workers_is_right(workers: int) -> None:
    made = workload.make(Case(3, 300, ragged=True), CPU)
    assert workload.error(made, made.decode(with_plan=made.plan(workers))) < 3e-3


def test_plans_of_aiter_take_what_was_tuned(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = aiter_choice.Shape(2, 1, 16, 200, torch.bfloat16, torch.bfloat16)
    assert aiter_choice.choose(shape) == aiter_choice.DEFAULT
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuned, "machine", lambda device: f"a machine with {device}")
    tuned.write([entry(None, backend="aiter", machine="a machine with cuda:0")])
    assert aiter_choice.choose(shape) == aiter_choice.DEFAULT
    more = {"backend": "aiter", "machine": "a machine with cuda:0", "choice": {"granularity": 64}}
    tuned.write([entry(**more)])
    assert aiter_choice.choose(shape) == aiter_choice.DEFAULT._replace(granularity=64)
    assert aiter_choice.choose(shape._replace(batch=3)) == aiter_choice.DEFAULT


def test_candidates_of_aiter_reach_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = workload.make(Case(2, 64), CPU)
    shape = aiter_choice.Shape(2, 1, 16, 64, torch.bfloat16, torch.bfloat16)
    monkeypatch.setattr(
        Workload, "plan", lambda self, backend: (backend, aiter_choice.choose(shape))
    )
    chosen = [
        tune.KNOBS["aiter"].plan(made, one) for one in tune.candidates("aiter", made.case, CPU)
    ]
    assert [choice.granularity for _, choice in chosen] == [32, 16, 64, 128]
    assert {backend for backend, _ in chosen} == {"aiter"}
    assert aiter_choice.choose(shape) == aiter_choice.DEFAULT
