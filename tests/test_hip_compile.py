"""Every .hip file through a full HIP compile: host and device passes, both architectures in one
object. `make hip-check` gets what this needs and does the same at -O3."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from build_tools import hip_fat_check  # noqa: E402

SOURCES = sorted((ROOT / "csrc" / "hip").glob("*.hip"))
MISSING = hip_fat_check.missing()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=f"no full HIP compile here: {MISSING}"),
]


def symbols(path: Path, *options: str) -> set[str]:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is missing: apt-get install binutils")
    command = [nm, "--format=posix", *options, str(path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in out.splitlines() if line.split()}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_compiles_for_host_and_both_architectures(source: Path, tmp_path: Path) -> None:
    out = tmp_path / f"{source.stem}.o"
    # Half the time of -O3, and the same language.
    done = hip_fat_check.compile_fat(source, out, hip_fat_check.ARCHITECTURES, "-O1")
    assert done.returncode == 0, done.stderr
    defined = symbols(out, "--defined-only", "--extern-only")
    assert any(name.startswith("mla_") for name in defined), "no launcher"
    if "__global__" in source.read_text():
        code = hip_fat_check.bundles(out)
        assert sorted(code) == sorted(hip_fat_check.ARCHITECTURES)
        assert all(size > 0 for size in code.values())
        assert {"__hipRegisterFunction", "hipLaunchKernel"} <= symbols(out, "--undefined-only")


def test_a_mistake_in_the_host_part_is_seen(tmp_path: Path) -> None:
    """A compile of the device side alone would pass this."""
    source = tmp_path / "wrong.hip"
    source.write_text(
        f'#include "{ROOT}/csrc/hip/platform.h"\n'
        "__global__ void kernel(int* x) { *x = 1; }\n"
        "void launch(hipStream_t stream) {\n"
        '  hipLaunchKernelGGL(kernel, dim3(1), dim3(1), 0, stream, "not a pointer to int");\n'
        "}\n"
    )
    done = hip_fat_check.compile_fat(source, tmp_path / "wrong.o", ("gfx942",), "-O0")
    assert done.returncode != 0
    assert "kernel" in done.stderr
