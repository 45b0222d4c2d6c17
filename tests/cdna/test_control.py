"""Branches, barriers, the order of waves, s_set_gpr_idx, MODE, calls, moves between lanes."""

from __future__ import annotations

import numpy as np
import pytest
from machine import HIP_MODE, floats, integers, run, same_floats

from build_tools.cdna.schedule import Lockstep, RoundRobin, Schedule
from build_tools.cdna.state import Fault

LANE = np.arange(64)
SCHEDULES = [Lockstep(), Lockstep(0), RoundRobin(1), RoundRobin(7), RoundRobin(50, seed=3)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_loops_of_different_lengths_meet_again(schedule: Schedule) -> None:
    """Wave w runs its loop w + 1 times; then all of them go on together."""
    code = [
        "s_mov_b32 s5, 0",
        "loop:",
        "s_add_u32 s5, s5, s4",
        "s_sub_u32 s4, s4, 1",
        "s_cmp_lg_u32 s4, 0",
        "s_cbranch_scc1 loop",
        "s_barrier",
        "s_lshl_b32 s6, s5, 1",
    ]
    counts = list(range(1, 7))
    after = run(code, s={4: counts}, waves=6, schedule=schedule)
    assert [after.s(6, wave) for wave in range(6)] == [n * (n + 1) for n in counts]


@pytest.mark.parametrize(
    "condition, state, taken",
    [
        ("scc0", {"scc": False}, True),
        ("scc0", {"scc": True}, False),
        ("scc1", {"scc": True}, True),
        ("vccz", {"s": {106: 0, 107: 0}}, True),
        ("vccz", {"s": {106: 0, 107: 1}}, False),
        ("vccnz", {"s": {106: 0, 107: 1}}, True),
        ("execz", {"exec_mask": 0}, True),
        ("execz", {"exec_mask": 1 << 63}, False),
        ("execnz", {"exec_mask": 1 << 63}, True),
    ],
)
def test_conditions(condition: str, state: dict, taken: bool) -> None:
    state = {**state, "s": {4: 1, **state.get("s", {})}}
    after = run([f"s_cbranch_{condition} there", "s_mov_b32 s4, 2", "there:", "s_nop 0"], **state)
    assert after.s(4) == (1 if taken else 2)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_barriers_are_counted_per_wave(schedule: Schedule) -> None:
    """Waves meet at different s_barrier instructions, and what one wrote before it the other
    reads after it.
    """
    code = [
        "s_cmp_eq_u32 s4, 0",
        "s_cbranch_scc1 first",
        "ds_write_b32 v0, v1",
        "s_nop 0",
        "s_nop 0",
        "s_barrier",
        "ds_read_b32 v2, v3",
        "s_branch done",
        "first:",
        "ds_write_b32 v0, v1",
        "s_barrier",
        "ds_read_b32 v2, v3",
        "done:",
        "s_nop 0",
    ]
    address = (LANE * 4).astype(np.uint32) + np.array([[0], [256]], np.uint32)
    value = integers(0, 2)
    after = run(
        code,
        v={0: address, 1: value, 3: address[::-1]},
        s={4: [0, 1]},
        lds_bytes=512,
        waves=2,
        schedule=schedule,
        find_races=True,
    )
    np.testing.assert_array_equal(after.v(2), value[::-1])
    assert after.batch.races is not None and not after.batch.races.races


def test_a_wave_that_ended_does_not_hold_up_a_barrier() -> None:
    code = [
        "s_cmp_eq_u32 s4, 0",
        "s_cbranch_scc1 go",
        "s_endpgm",
        "go:",
        "s_barrier",
        "s_mov_b32 s5, 9",
    ]
    after = run(code, s={4: [1, 0, 1]}, waves=3)
    assert after.s(5, 1) == 9


@pytest.mark.parametrize("schedule", [Lockstep(), RoundRobin(9)], ids=str)
def test_code_that_does_not_end_is_stopped(schedule: Schedule) -> None:
    with pytest.raises(Fault, match="still running after 1000 instructions, at 0x0"):
        run(["loop:", "s_branch loop"], waves=3, schedule=schedule, limit=1000)
    with pytest.raises(Fault, match="no instruction starts"):
        run("s_branch 100")


def test_indexed_registers() -> None:
    """s_set_gpr_idx_on adds M0[7:0] to VGPR numbers of the chosen operands, for each wave its
    own.
    """
    v = {k: 100 + k for k in range(40)}
    code = [
        "s_set_gpr_idx_on s4, 1",
        "v_mov_b32 v50, v10",
        "s_set_gpr_idx_off",
        "v_mov_b32 v51, v10",
        "s_set_gpr_idx_on s4, 8",
        "v_mov_b32 v40, v11",
        "v_mov_b32 v44, 7",
        "s_set_gpr_idx_off",
        "s_set_gpr_idx_on s4, 3",
        "v_add_u32 v52, v1, v2",
        "v_add_u32 v53, s5, v2",
        "s_set_gpr_idx_off",
    ]
    after = run(code, v=v, s={4: [0, 2, 5], 5: 1000, 124: 0xABCD0000}, waves=3)
    for wave, index in enumerate((0, 2, 5)):
        assert (after.v(50)[wave] == 110 + index).all()
        assert (after.v(51)[wave] == 110).all()
        assert (after.v(40 + index)[wave] == 111).all() and (after.v(44 + index)[wave] == 7).all()
        assert (after.v(52)[wave] == 203 + 2 * index).all()
        assert (after.v(53)[wave] == 1102 + index).all(), "scalar operands do not move"
        assert after.s(124, wave) == 0xABCD3000 | index, "M0[7:0] and M0[15:12] change"


def test_mode_changes() -> None:
    """s_setreg on MODE: denormals off, then FP16_OVFL on; waves may differ."""
    a = floats(1, 2)
    code = [
        "v_mul_f32 v8, v0, 1.0",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0",
        "v_mul_f32 v9, v0, 1.0",
        "s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), s4",
        "v_cvt_pk_fp8_f32 v10, v1, v1",
    ]
    after = run(code, v={0: a, 1: np.float32(1e6), 10: 0}, s={4: [0, 1]}, waves=2, mode=HIP_MODE)
    assert same_floats(after.v(8, np.float32), a)
    flushed = np.where(np.abs(a) < 2.0**-126, np.copysign(np.float32(0), a), a)
    assert same_floats(after.v(9, np.float32), flushed)
    assert after.v(10)[:, 0].tolist() == [0x8080, 0x7F7F]
    with pytest.raises(Fault, match="rounding"):
        run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1")
    with pytest.raises(Fault, match="float16"):
        run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 6, 2), 0")


def test_calls() -> None:
    code = [
        "s_getpc_b64 s[4:5]",
        "s_add_u32 s4, s4, 24",
        "s_addc_u32 s5, s5, 0",
        "s_swappc_b64 s[6:7], s[4:5]",
        "s_mov_b32 s9, 5",
        "s_branch end",
        "s_nop 0",
        "s_mov_b32 s8, 4",
        "s_setpc_b64 s[6:7]",
        "end:",
        "s_nop 0",
    ]
    after = run(code, s={8: 0, 9: 0})
    assert (after.s(8), after.s(9)) == (4, 5)


def test_lanes_to_scalars_and_back() -> None:
    a = integers(1, 1)[0]
    code = [
        "v_readfirstlane_b32 s4, v0",
        "v_readlane_b32 s5, v0, 17",
        "v_readlane_b32 s6, v0, s7",
        "v_writelane_b32 v1, s8, 3",
        "v_writelane_b32 v1, 9, s7",
    ]
    after = run(code, v={0: a, 1: 1}, s={7: 64 + 40, 8: 77}, exec_mask=0xFFFFFFFFFFFFFF00)
    assert after.s(4) == a[8] and after.s(5) == a[17] and after.s(6) == a[40]
    expected = np.ones(64, np.uint32)
    expected[3], expected[40] = 77, 9
    np.testing.assert_array_equal(after.v(1)[0], expected)
    assert run("v_readfirstlane_b32 s4, v0", v={0: a}, exec_mask=0).s(4) == a[0]


def test_swaps() -> None:
    a, b = integers(1, 1)[0], integers(2, 1)[0]
    after = run("v_swap_b32 v0, v1", v={0: a, 1: b}, exec_mask=0xFF)
    np.testing.assert_array_equal(after.v(0)[0], np.where(LANE < 8, b, a))
    np.testing.assert_array_equal(after.v(1)[0], np.where(LANE < 8, a, b))
    after = run("v_permlane32_swap_b32 v0, v1", "gfx950", v={0: a, 1: b})
    np.testing.assert_array_equal(after.v(0)[0], np.concatenate([a[:32], b[:32]]))
    np.testing.assert_array_equal(after.v(1)[0], np.concatenate([a[32:], b[32:]]))
    after = run("v_permlane16_swap_b32 v0, v1", "gfx950", v={0: a, 1: b})
    np.testing.assert_array_equal(
        after.v(0)[0], np.concatenate([a[:16], b[:16], a[32:48], b[32:48]])
    )
    np.testing.assert_array_equal(
        after.v(1)[0], np.concatenate([a[16:32], b[16:32], a[48:], b[48:]])
    )


def test_accumulation_register_moves() -> None:
    a = integers(1, 1)[0]
    code = [
        "v_accvgpr_write_b32 a3, v0",
        "v_accvgpr_mov_b32 a4, a3",
        "v_accvgpr_read_b32 v5, a4",
        "v_accvgpr_write_b32 a6, s4",
        "v_accvgpr_write_b32 a7, 1.0",
        "v_accvgpr_read_b32 v6, a6",
        "v_accvgpr_read_b32 v7, a7",
    ]
    after = run(code, v={0: a}, s={4: 123})
    np.testing.assert_array_equal(after.v(5)[0], a)
    assert (after.v(6) == 123).all() and (after.v(7) == 0x3F800000).all()
