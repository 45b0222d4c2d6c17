"""A wheel built here is right on older processors, as far as an emulator can tell."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "build_tools" / "qemu_check.sh"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the processors emulated are x86-64")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="ASan's shadow memory does not fit in qemu")
@pytest.mark.skipif(
    not (shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")),
    reason="qemu-x86_64 is missing: apt-get install qemu-user",
)
def test_core_on_older_processors() -> None:
    done = subprocess.run(
        [str(SCRIPT), sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed on baseline" in done.stderr
    assert "passed on avx2" in done.stderr
