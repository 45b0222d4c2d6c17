"""The LDS race finder: kernels with a race and without, and aiter's kernels."""

from __future__ import annotations

import numpy as np
import pytest
from aiter_wheel import WheelUnavailable
from machine import run
from replay import VECTORS, replay

from build_tools.cdna.compiler import compile_cached
from build_tools.cdna.launch import launch
from build_tools.cdna.schedule import Lockstep, RoundRobin, Schedule

LANE = np.arange(64)
SCHEDULES = [Lockstep(), RoundRobin(1), RoundRobin(1000)]
OWN = (LANE * 4).astype(np.uint32) + np.array([[0], [256]], np.uint32)


def kinds(code: list[str], schedule: Schedule, **state: object) -> set[str]:
    after = run(
        code,
        v={0: OWN, 3: OWN[::-1]},
        lds_bytes=512,
        waves=2,
        schedule=schedule,
        find_races=True,
        **state,
    )
    assert after.batch.races is not None
    return {race.kind for race in after.batch.races.races}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_kinds_of_races(schedule: Schedule) -> None:
    write, other, read = "ds_write_b32 v0, v1", "ds_write_b32 v3, v1", "ds_read_b32 v2, v3"
    ordered = isinstance(schedule, RoundRobin) and schedule.quantum > 1
    assert kinds([write, "s_barrier", read], schedule) == set()
    # In turns of 1000 the first wave reads before the second writes: the same race, seen from the
    # other side.
    assert kinds([write, read], schedule) == (
        {"read-after-write", "write-after-read"} if ordered else {"read-after-write"}
    )
    assert kinds([write, other], schedule) == {"write-after-write"}
    assert kinds([write, "s_barrier", read, "s_barrier", write], schedule) == set()
    assert "write-after-read" in kinds([write, "s_barrier", read, write], schedule)


def test_waves_that_keep_to_themselves_do_not_race() -> None:
    for schedule in SCHEDULES:
        assert (
            kinds(["ds_write_b32 v0, v1", "ds_read_b32 v2, v0", "ds_write_b32 v0, v2"], schedule)
            == set()
        )


def test_bytes_not_dwords() -> None:
    """Neighbouring bytes of one dword may belong to different waves."""
    bytes_of = (LANE * 2).astype(np.uint32) + np.array([[0], [1]], np.uint32)
    after = run("ds_write_b8 v0, v1", v={0: bytes_of}, lds_bytes=128, waves=2, find_races=True)
    assert after.batch.races is not None and not after.batch.races.races


def test_inactive_lanes_do_not_race() -> None:
    assert kinds(["ds_write_b32 v0, v1", "ds_read_b32 v2, v3"], Lockstep(), exec_mask=0) == set()


def test_work_groups_do_not_race_with_each_other() -> None:
    after = run(
        "ds_write_b32 v0, v1", v={0: 0}, lds_bytes=64, waves=1, work_groups=4, find_races=True
    )
    assert after.batch.races is not None and not after.batch.races.races


SUM = """#include <hip/hip_runtime.h>
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float pool[256];
  for (int round = 0; round < 3; round++) {
    pool[threadIdx.x] = x[round * 256 + threadIdx.x];
    __syncthreads();
    y[round * 256 + threadIdx.x] = pool[255 - threadIdx.x];
    %s
  }
}"""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_kernel_that_forgets_the_second_barrier(schedule: Schedule) -> None:
    x, y = np.arange(768, dtype=np.float32), np.zeros(768, np.float32)
    good, bad = (compile_cached(SUM % barrier, "gfx950") for barrier in ("__syncthreads();", ""))
    assert not launch(good, "k", 1, 256, x, y, schedule=schedule, find_races=True).races
    np.testing.assert_array_equal(y.reshape(3, 256), x.reshape(3, 256)[:, ::-1])
    found = {
        race.kind
        for race in launch(bad, "k", 1, 256, x, y, schedule=schedule, find_races=True).races
    }
    assert found and found <= {"write-after-read", "read-after-write"}


@pytest.mark.parametrize(
    "name, racy",
    [
        ("wheel_gfx942_mla_a8w8_qh16_qseqlen1_gqaratio16_ps__ragged37_130_split2", True),
        ("wheel_gfx950_mla_a8w8_qh16_qseqlen1_gqaratio16__ragged37_130_split2", True),
        ("wheel_gfx942_mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps__page8x8", False),
        ("wheel_gfx942_mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps__page8x8", False),
        ("wheel_gfx942_mla_dec_stage1_bf16_a16w16_subQ16_mqa16__page8x8", False),
    ],
)
def test_aiter_kernels(name: str, racy: bool) -> None:
    """The a8w8 kernels overwrite what other waves read without a barrier between; nothing else,
    nowhere else.
    """
    try:
        races = replay(VECTORS / f"{name}.npz", find_races=True).statistics.races
    except WheelUnavailable as error:
        pytest.skip(str(error))
    assert {race.kind for race in races} == ({"write-after-read"} if racy else set())
