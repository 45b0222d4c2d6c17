"""The pages of docs/ are so: their code runs, what is made from the code is up to date, pictures
are there, commands and variables exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_ops import __main__ as command_line
from mla_ops import variables
from mla_ops.bench import grammar, table

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md")) + [ROOT / "BENCHMARKS.md"]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text() and page.name != "api.md"]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, as a reader would, on a CPU: later blocks use what earlier ones made."""
    namespace: dict[str, Any] = {}
    if page.name == "transformers.md":
        pytest.importorskip("transformers")
        import tiny_models

        inputs = {"input_ids": torch.tensor([[5, 3, 8]]), "max_new_tokens": 2}
        namespace = {"model": tiny_models.make("deepseek_v3"), "inputs": inputs}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


def test_there_is_code_to_run() -> None:
    assert {page.name for page in WITH_CODE} >= {
        *("quickstart.md", "plans.md", "serving.md", "cache-formats.md")
    }


@pytest.mark.parametrize("name", ("api.md", "backends.md"))
def test_pages_made_from_the_code_are_up_to_date(name: str) -> None:
    made = runpy.run_path(str(ROOT / "build_tools/reference_pages.py"))["PAGES"][name]()
    assert (ROOT / "docs" / name).read_text() == made, "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_variables_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"python -m mla_ops (\w+)", text):
        assert name in command_line.COMMANDS, name
    known = {variable.name for variable in variables.VARIABLES} | set(variables.OF_THE_BUILD)
    assert set(re.findall(r"MLA_OPS_[A-Z_]+", text)) <= known
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


def test_every_page_is_in_the_list() -> None:
    text = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        if page.name != "README.md":
            assert re.search(rf"\]\((\.\./)?{page.name}\)", text), page.name


def test_every_picture_is_shown_and_every_one_shown_is_there() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }
    there = {path.resolve() for path in (ROOT / "docs/pictures").rglob("*.png")}
    assert shown == there


@pytest.mark.parametrize("name", ("cpu_bench", "h200_peers"))
def test_results_are_of_the_format_that_is_drawn(name: str) -> None:
    rows = table.read_csv(ROOT / f"benchmarks/results/{name}.csv")
    for row in rows:
        case = grammar.parse(row["case"], torch.device("cpu"))[0]
        assert (str(case), str(case.useful_bytes)) == (row["case"], row["useful_bytes"])
        by = float(row["median_us"]) * 1e3 * float(row["gb_per_s"])
        assert by == pytest.approx(case.useful_bytes, rel=2e-3)
    assert table.summary(rows)


def test_measured_numbers_of_the_readme_are_in_the_results() -> None:
    rows = table.read_csv(ROOT / "benchmarks/results/cpu_bench.csv")
    text = (ROOT / "README.md").read_text()
    lines = re.findall(
        r"^\| \((\d+), (\d+)\) \| (\d+) \| (\d) \| ([\d.]+) \| ([\d.]+) \|", text, re.M
    )
    assert len(lines) == 7
    for batch, context, heads, threads, *medians in lines:
        for cache, told in zip(("bf16", "e4m3fn"), medians, strict=True):
            (row,) = [
                row
                for row in rows
                if row["provider"] == "mla_ops native"
                and row["isa"] == "avx512_bf16"
                and (row["batch"], row["context"], row["heads"]) == (batch, context, heads)
                and (row["threads"], row["cache"]) == (threads, cache)
            ]
            assert float(row["median_us"]) / 1e3 == pytest.approx(float(told), rel=5e-3)
