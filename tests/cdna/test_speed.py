"""The executor stays fast enough to be used in CI."""

from __future__ import annotations

import time

import pytest
from aiter_wheel import WheelUnavailable
from replay import VECTORS, replay


def test_wave_instructions_per_second() -> None:
    """290,000 on a quiet core for this kernel, the slowest of the set; half of it on a busy one."""
    path = (
        VECTORS / "wheel_gfx942_mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps__ragged37_130_split2.npz"
    )
    best = 0.0
    try:
        replay(path)  # compiles
        for _ in range(5):
            start = time.process_time()
            count = replay(path).statistics.instructions
            best = max(best, count / (time.process_time() - start))
            if best > 200_000:
                break
    except WheelUnavailable as error:
        pytest.skip(str(error))
    assert best > 120_000
