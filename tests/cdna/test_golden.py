"""aiter's own kernels, from the pinned wheel, give what the golden vectors say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from aiter_wheel import WheelUnavailable
from replay import VECTORS, differences, replay

from build_tools.cdna.schedule import Lockstep, RoundRobin, Schedule

PATHS = sorted(VECTORS.glob("*.npz"))
KERNELS = {path.name.split("__")[0] for path in PATHS}


def run(path: Path, schedule: Schedule | None = None) -> None:
    if path.name.startswith("aug26") and "MLA_OPS_AITER_CHECKOUT" not in os.environ:
        pytest.skip("needs MLA_OPS_AITER_CHECKOUT, a ROCm/aiter checkout of August 2026")
    try:
        replayed = replay(path, schedule=schedule or Lockstep())
    except WheelUnavailable as error:
        pytest.skip(str(error))
    assert differences(replayed) == []
    assert replayed.statistics.instructions == replayed.info["emulated_wave_instructions"]


def test_every_kernel_of_the_wheel_set_has_a_vector() -> None:
    if VECTORS.name == "cdna":
        assert len(KERNELS) == 14


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_replay(path: Path) -> None:
    run(path)


# The a8w8 kernels have a race (test_races.py) that turns of up to 40 instructions do not bring out.
@pytest.mark.parametrize(
    "schedule", [RoundRobin(1), RoundRobin(40), RoundRobin(33, seed=1)], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        "wheel_gfx942_mla_a8w8_qh16_qseqlen1_gqaratio16_ps__ragged37_130_split2",
        "wheel_gfx942_mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps__page8x8",
    ],
)
def test_result_does_not_depend_on_the_order_of_waves(name: str, schedule: Schedule) -> None:
    run(VECTORS / f"{name}.npz", schedule)


@pytest.mark.parametrize("schedule", [RoundRobin(1000), RoundRobin(300, seed=7)], ids=str)
def test_kernels_without_a_race_bear_any_order(schedule: Schedule) -> None:
    run(VECTORS / "wheel_gfx942_mla_dec_stage1_bf16_a16w16_subQ16_mqa16__page8x8.npz", schedule)
