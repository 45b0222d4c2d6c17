"""A few random calls of every op, in a process of their own; `make fuzz` runs many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUZZER = Path(__file__).resolve().parent / "fuzz.py"


def fuzz(*options: str, limit: int = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(FUZZER), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)


def test_random_calls_find_nothing() -> None:
    result = fuzz("--calls", "300", "--seed", "20261130")
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "300 calls, 0 findings" in result.stdout


def test_a_crash_is_a_finding(tmp_path: Path) -> None:
    """The fuzzer's process survives one, and names the call."""
    program = (FUZZER.parent / "fuzz.py").read_text()
    crashing = program.replace("    call = fuzz_calls.draw(random_)\n", "    os.abort()\n", 1)
    assert crashing != program
    for name in ("fuzz_calls.py", "fuzz_damage.py", "cases.py", "compare.py"):
        (tmp_path / name).write_text((FUZZER.parent / name).read_text())
    (tmp_path / "fuzz.py").write_text(crashing.replace("import mmap\n", "import mmap\nimport os\n"))
    command = [sys.executable, "-P", str(tmp_path / "fuzz.py"), "--calls", "2", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1
    assert result.stdout.count("FINDING: the process died (-6)") == 2
    assert "--seed 1 --only 1" in result.stdout
