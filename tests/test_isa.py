"""Every instruction set that was compiled and that this processor runs gives right results on the
whole list of cases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_ops import _C

CORE = Path(__file__).resolve().parent / "qemu_core.py"


def core(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the core on one instruction set."""
    command = [sys.executable, "-P", str(CORE), *options]
    environment = {**os.environ, "MLA_OPS_ISA": name}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("name", _C.build_info()["cpu_isas"])
def test_all_cases_on(name: str) -> None:
    done = core(name, "--expect", name, "--cases", "all")
    if "MLA_OPS_ISA must be one of" in done.stderr:
        pytest.skip(f"this processor has no {name}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"passed on {name}" in done.stderr


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    done = core("avx9000")
    assert done.returncode != 0
    assert "MLA_OPS_ISA must be one of baseline" in done.stderr
    assert "got avx9000" in done.stderr
