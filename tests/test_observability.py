"""A user sees which backend was chosen and why: in the log, in a profile, as a table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import mla_ops
from mla_ops import capability, validate

DECODE_TWICE = """
import torch, mla_ops
q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 8)
table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
for heads in (1, 1, 2):
    mla_ops.decode(q[:, :, :heads], cache, table, lengths, 1.0, kv_lora_rank=8)
"""


def logged(level: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MLA_OPS_LOG"}
    if level is not None:
        environment["MLA_OPS_LOG"] = level
    command = [sys.executable, "-P", "-c", DECODE_TWICE]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_debug_logs_each_new_decision_and_what_was_passed_over() -> None:
    lines = logged("debug").stderr.splitlines()
    decisions = [line for line in lines if line.startswith("mla_ops INFO cpu, q float32")]
    assert len(decisions) == 2 and "H=1]" in decisions[0] and "H=2]" in decisions[1]
    assert all("-> native (csrc/cpu/decode: our kernel for CPUs)" in line for line in decisions)
    over = [line for line in lines if line.startswith("mla_ops DEBUG passed over ")]
    assert any(" csrc/hip/" in line and ": arch must be " in line for line in over)
    assert len(lines) == len(decisions) + len(over)


def test_info_logs_the_decisions_alone_and_nothing_is_the_default() -> None:
    lines = logged("info").stderr.splitlines()
    assert len(lines) == 2 and all(" INFO " in line for line in lines)
    assert logged(None).stderr == ""


def test_a_level_that_is_none_is_refused() -> None:
    result = logged("loud")
    assert result.returncode == 1
    assert "MLA_OPS_LOG must be one of debug, info, got 'loud'" in result.stderr


@pytest.mark.parametrize("backend", ("native", "torch"))
def test_a_profile_names_the_backend(backend: str) -> None:
    q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 8)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    options = {"kv_lora_rank": 8, "backend": backend}
    with torch.profiler.profile() as profile:
        mla_ops.decode(q, cache, table, lengths, 1.0, **options)
    kernel = {"native": "csrc/cpu/decode", "torch": "mla_ops/backends/torch"}[backend]
    found = [event.name for event in profile.events() if event.name.startswith("mla::decode[")]
    assert found == [f"mla::decode[{backend} {kernel}]"]


def test_explain_as_a_table_says_what_the_text_says() -> None:
    for question in ({"arch": "cpu"}, {"arch": "gfx942"}, {"arch": "cpu", "backend": "torch"}):
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in mla_ops.explain(form="table", **question).splitlines()[2:]
        ]
        assert rows[0] == ["backend", "kernel", "verdict", "why"]
        assert rows[1] == ["---"] * 4
        lines = mla_ops.explain(**question).splitlines()[1:]
        assert [
            f"  {backend:7} {kernel}: {verdict}: {why}"
            for backend, kernel, verdict, why in rows[2:]
        ] == lines
        assert len(lines) == len(capability.verdicts(**question))
    with pytest.raises(ValueError, match="form must be text or table, got 'html'"):
        mla_ops.explain(form="html")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ("native", "torch"))
def test_on_a_gpu_tables_are_checked_whatever_the_backend(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decode but the CPU's own kernel goes through validate.tables, which asks the
    environment on a GPU (test_validate.py)."""
    asked = []
    monkeypatch.setattr(validate, "tables", lambda *args: asked.append(args[2:]))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert not validate.checked_by_kernel(backend, gpu)
    assert validate.checked_by_kernel(backend, cpu) == (backend == "native")
    monkeypatch.setattr(validate, "checked_by_kernel", lambda backend, device: False)
    q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(5, 4, 1, 8)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    mla_ops.decode(q, cache, table, lengths, 1.0, kv_lora_rank=8, backend=backend)
    assert asked == [(5, 4)]
