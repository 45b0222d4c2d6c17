"""Run a Python command on a build of mla_ops with AddressSanitizer and UBSan.

    python build_tools/sanitized.py -- -P -m pytest tests -m "not slow"

The build has folders of its own (objects and installed package), found through PYTHONPATH: the
environment's editable install stays as it is. Any report ends the process with an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "sanitized"
SANITIZERS = "address,undefined"

# Python and torch never free some of what they allocate: leaks are not asked for. torch's own
# allocations may be freed by another library's delete, which is no business of ours.
ASAN_OPTIONS = "detect_leaks=0:alloc_dealloc_mismatch=0:detect_stack_use_after_return=1"
UBSAN_OPTIONS = "halt_on_error=1:print_stacktrace=1"


def build() -> None:
    """Compile and install into SITE."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    where = ["--target", str(SITE), "--upgrade", "--no-deps", "--no-cache-dir"]
    command = [*pip, *where, "--no-build-isolation", str(ROOT)]
    environment = {**os.environ, "MLA_OPS_SANITIZE": SANITIZERS}
    environment.pop("MLA_OPS_SKIP_BUILD", None)
    if subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode:
        sys.exit("mla_ops: the build with sanitizers failed")


def _runtime(library: str) -> str:
    """Return the path of one of the compiler's libraries."""
    compiler = (os.environ.get("CXX") or "c++").split()
    asked = [*compiler, f"-print-file-name={library}"]
    path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"mla_ops: {compiler[0]} has no {library}; the sanitized build is made for GCC")
    return str(Path(path).resolve())


def environment() -> dict[str, str]:
    """Return the environment in which the sanitized module can be imported."""
    return {
        **os.environ,
        "PYTHONPATH": str(SITE),
        # libstdc++ too: ASan looks for __cxa_throw once, at the start, when Python has not loaded
        # it yet, and would abort at the first C++ exception.
        "LD_PRELOAD": f"{_runtime('libasan.so')} {_runtime('libstdc++.so')}",
        "ASAN_OPTIONS": ASAN_OPTIONS,
        "UBSAN_OPTIONS": UBSAN_OPTIONS,
        "MLA_OPS_EXPECT_SANITIZERS": SANITIZERS,
    }


def main() -> None:
    """Build, then become the command."""
    if len(sys.argv) < 3 or sys.argv[1] != "--":
        sys.exit("usage: python build_tools/sanitized.py -- ARGUMENTS OF PYTHON")
    build()
    os.chdir(ROOT)
    os.execve(sys.executable, [sys.executable, *sys.argv[2:]], environment())


if __name__ == "__main__":
    main()
