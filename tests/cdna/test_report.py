"""python -m build_tools.cdna report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from build_tools.cdna.__main__ import main
from build_tools.cdna.report import KernelReport, report

SOURCE = """#include <hip/hip_runtime.h>
typedef float f4 __attribute__((ext_vector_type(4)));
extern "C" __global__ __launch_bounds__(256) void matrix(const long* a, float* d, int n) {
  __shared__ float pool[4096];
  f4 acc = {0, 0, 0, 0};
  for (int i = 0; i < n; i++)
    acc = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a[i], a[i + 1], acc, 0, 0, 0);
  pool[threadIdx.x] = acc[0];
  __syncthreads();
  d[threadIdx.x] = pool[threadIdx.x ^ 1] + acc[1];
}
extern "C" __global__ __launch_bounds__(1024) void spilling(const float* x, float* y) {
  float v[160];
  for (int i = 0; i < 160; i++) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 160; i++) y[i * 1024 + threadIdx.x] = v[i] * v[159 - i];
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "k.hip"
    path.write_text(SOURCE)
    return path


def test_figures(source: Path) -> None:
    entries = {(e.name, e.arch): e for e in report(source)}
    assert set(entries) == {(n, a) for n in ("matrix", "spilling") for a in ("gfx942", "gfx950")}
    for arch in ("gfx942", "gfx950"):
        matrix, spilling = entries["matrix", arch], entries["spilling", arch]
        assert matrix.mfmas >= 1 and matrix.lds_bytes == 16384 and matrix.work_group == 256
        assert matrix.vgpr_spills == matrix.scratch_bytes == 0
        assert matrix.mix["barrier"] == 1 and matrix.mix["lds"] >= 2
        assert matrix.work_groups_by_lds == (4 if arch == "gfx942" else 10)
        assert matrix.occupancy == (4 if arch == "gfx942" else 8)
        assert spilling.vgprs <= 128 and spilling.vgpr_spills > 0 and spilling.scratch_bytes > 0
        assert spilling.mix["scratch"] > 0 and spilling.occupancy == 4


@pytest.mark.parametrize(
    "vgprs, agprs, waves",
    [
        (24, 0, 8),
        (64, 0, 8),
        (65, 0, 7),
        (128, 0, 4),
        (129, 0, 3),
        (256, 0, 2),
        (256, 256, 1),
        (126, 128, 2),
        (33, 31, 7),
    ],
)
def test_occupancy_by_registers(vgprs: int, agprs: int, waves: int) -> None:
    """512 registers a lane and SIMD in granules of 8; accumulation registers start at a
    multiple of 4.
    """
    entry = KernelReport("k", "gfx942", vgprs, agprs, 16, 0, 0, 0, 0, 64, Counter())
    assert entry.waves_by_registers == entry.occupancy == waves


def test_occupancy_counts_whole_work_groups() -> None:
    entry = KernelReport("k", "gfx942", 96, 0, 16, 0, 0, 0, 0, 1024, Counter())
    assert entry.waves_by_registers == 5 and entry.occupancy == 4
    entry = KernelReport("k", "gfx942", 24, 0, 16, 0, 0, 40000, 0, 256, Counter())
    assert entry.occupancy == 1


def test_command_line(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(source), "--arch", "gfx950"]) == 0
    text = capsys.readouterr().out
    for part in (
        "matrix on gfx950",
        "registers",
        "spills",
        "LDS        16384",
        "occupancy  8 waves a SIMD",
        "MFMA",
        "mix",
    ):
        assert part in text
    assert "gfx942" not in text
    assert main(["report", str(source.with_name("absent.hip"))]) == 1
    assert "absent.hip" in capsys.readouterr().err
