"""What README.md says is so: its code runs, its table is the capability table, its names exist."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_ops
from mla_ops import capability, reference, variables

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "BENCHMARKS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
# Of the tests, not of users.
INTERNAL = {"MLA_OPS_EXPECT_SANITIZERS"}


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    return found


def matrix() -> list[list[str]]:
    rows = re.findall(r"^\|(.*)\|$", section("What runs where"), re.M)[2:]
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """From top to bottom, as a reader would: later blocks use what earlier ones made."""
    torch.manual_seed(0)
    namespace: dict[str, Any] = {}
    blocks = python_blocks()
    assert len(blocks) == 4
    exec(blocks[0], namespace)
    assert len([line for line in blocks[0].splitlines() if line]) <= 10
    shown = capsys.readouterr().out.strip()
    assert blocks[0].rstrip().endswith(f"# {shown}")
    problem = [namespace[name] for name in ("q", "kv_cache", "block_table", "seq_lens")]
    want, _ = reference.decode(*problem, 192**-0.5)
    assert (namespace["out"].double() - want).norm() / want.norm() < 3e-3

    for block in blocks[1:]:
        exec(block, namespace)
    assert "SERVES" in capsys.readouterr().out
    assert namespace["lse"].shape == (2, 1, 16)
    assert namespace["seq_lens"].tolist() == [203, 80]


BUILT = ("now", "with a GPU")  # the latter where a GPU's compiler was there


@pytest.mark.parametrize("row", [row for row in matrix() if row[-1] in BUILT], ids=lambda r: r[0])
def test_what_is_called_available_is(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu = tuple(
        replace(one, missing=lambda: None) if one.kernel.startswith("csrc/hip") else one
        for one in capability.TABLE
    )
    monkeypatch.setattr(capability, "TABLE", with_gpu)
    backend, arch, q, cache, heads, q_len, page, lse, _ = row
    assert page == "any" and lse == "yes"
    low, high = (tuple(map(int, cell.split(" to "))) for cell in (heads, q_len))
    archs = ("cpu", "gfx942", "sm_90") if arch == "any" else arch.split(", ")
    problems = itertools.product(archs, q.split(", "), cache.split(", "), low, high, (1, 7, 4096))
    for one, q_dtype, cache_dtype, count, length, page_size in problems:
        assert mla_ops.supports(
            backend=backend.split()[0],
            arch=one,
            q_dtype=DTYPES[q_dtype],
            cache_dtype=DTYPES[cache_dtype],
            heads=count,
            q_len=length,
            page_size=page_size,
            lse=True,
        )


@pytest.mark.parametrize(
    "row", [row for row in matrix() if row[-1] not in BUILT], ids=lambda r: r[0]
)
def test_what_is_called_missing_is(row: list[str]) -> None:
    assert row[-1] == "with aiter"
    for arch in row[1].split(", "):
        mine = [
            one
            for one in capability.TABLE
            if one.backend == row[0].split()[0] and one.arch is not None and arch in one.arch
        ]
        assert mine and all(one.missing() is not None for one in mine)


def test_every_backend_and_architecture_is_in_the_matrix() -> None:
    told = {(row[0].split()[0], arch) for row in matrix() for arch in row[1].split(", ")}
    rows = capability.TABLE
    assert told == {(row.backend, arch) for row in rows for arch in row.arch or ("any",)}


def test_every_environment_variable_is_told_and_no_other() -> None:
    told = set(re.findall(r"MLA_OPS_[A-Z_]+", section("Environment variables")))
    used: set[str] = set()
    for folder, pattern in itertools.product(
        ("mla_ops", "csrc", "build_tools"), ("*.py", "*.cpp", "*.h", "*.hip")
    ):
        for path in (ROOT / folder).rglob(pattern):
            used |= set(re.findall(r"[\"'](MLA_OPS_[A-Z_]+)[\"']", path.read_text()))
    assert told == used - INTERNAL


def test_variables_are_told_as_the_package_knows_them() -> None:
    rows = re.findall(r"^\| `(MLA_OPS_\w+)` \|(.*)\|(.*)\|(.*)\|$", README, re.M)
    told = {name: [cell.strip() for cell in cells] for name, *cells in rows}
    for name, values, default, meaning in variables.VARIABLES:
        if values:
            assert told[name][0] == ", ".join(f"`{value}`" for value in values)
        assert told[name][1] == meaning
        assert told[name][2].strip("`") == default.strip("`") or told[name][2] == default
    assert set(variables.OF_THE_BUILD) <= set(told)


def test_every_public_name_is_told() -> None:
    functions = section("Functions")
    for name in mla_ops.__all__:
        if name != "DecodePlan":
            assert re.search(rf"`(mla_ops\.)?{name}`", functions), name
    for op in re.findall(r"mla::(\w+)", functions):
        assert hasattr(torch.ops.mla, op)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.M) or target == "lists", target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_exist(path: Path) -> None:
    """Paths in backticks, but for folders that are named as not there yet."""
    text = path.read_text()
    for name in set(re.findall(r"`((?:mla_ops|csrc|build_tools|tests|docs)/[\w./-]+)`", text)):
        assert name == "csrc/hip" or (ROOT / name).exists(), name
