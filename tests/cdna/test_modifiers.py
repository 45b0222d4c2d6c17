"""EXEC, abs, neg, omod, clamp, DPP and SDWA: what stands around an operation."""

from __future__ import annotations

import numpy as np
import pytest
from machine import AITER_MODE, HIP_MODE, assembled, floats, integers, run, same_floats

from build_tools.cdna.compiler import CompileError, assemble
from build_tools.cdna.decoder import UnknownInstruction
from build_tools.cdna.state import Fault

MASK = 0xF0F0_1234_8000_0001
ACTIVE = np.array([MASK >> k & 1 for k in range(64)], bool)
LANE = np.arange(64)
NO_IEEE_FLUSH = 0xC0 | 1 << 8  # DX10_CLAMP on


@pytest.mark.parametrize(
    "code, registers",
    [
        ("v_add_u32 v9, v0, v1", 1),
        ("v_mov_b32 v9, v0", 1),
        ("v_add3_u32 v9, v0, v1, v1", 1),
        ("v_mul_f32 v9, v0, v1", 1),
        ("v_max3_f32 v9, v0, v1, v1", 1),
        ("v_pk_mul_f32 v[8:9], v[0:1], v[2:3]", 2),
        ("v_lshlrev_b64 v[8:9], v0, v[2:3]", 2),
        ("v_cndmask_b32 v9, v0, v1, vcc", 1),
        ("v_cvt_f32_u32 v9, v0", 1),
        ("v_cvt_pk_fp8_f32 v9, v0, v1", 1),
        ("v_add_f16 v9, v0, v1", 1),
        ("v_perm_b32 v9, v0, v1, v2", 1),
        ("v_accvgpr_write_b32 a9, v0", 1),
        ("v_fmac_f32 v9, v0, v1", 1),
        ("v_mad_u64_u32 v[8:9], s[4:5], v0, v1, v[2:3]", 2),
    ],
)
def test_inactive_lanes_keep_their_value(code: str, registers: int) -> None:
    sources = {k: integers(k, 1) for k in range(4)}
    first = (10 - registers) + (64 if " a9" in code else 0)
    before = {first + k: integers(20 + k, 1) for k in range(registers)}
    full = run(code, v={**sources, **before}, s={106: 0x5555AAAA12345678})
    masked = run(code, v={**sources, **before}, s={106: 0x5555AAAA12345678}, exec_mask=MASK)
    for register, old in before.items():
        expected = np.where(ACTIVE, full.v(register), old)
        np.testing.assert_array_equal(masked.v(register), expected)
        assert (full.v(register) != old).any()


def test_exec_from_scalar_instructions() -> None:
    code = [
        "v_cmp_gt_u32 vcc, 10, v0",
        "s_and_saveexec_b64 s[4:5], vcc",
        "v_mov_b32 v9, 1",
        "s_xor_b64 exec, exec, s[4:5]",
        "v_mov_b32 v9, 2",
        "s_mov_b64 exec, s[4:5]",
        "v_add_u32 v9, 10, v9",
    ]
    after = run(code, v={0: LANE.astype(np.uint32)})
    np.testing.assert_array_equal(after.v(9)[0], np.where(LANE < 10, 11, 12))


def test_abs_and_neg() -> None:
    a, b = floats(1), floats(2)
    after = run(
        ["v_add_f32 v8, |v0|, -v1", "v_mul_f32 v9, -|v0|, v1", "v_max_f32 v11, -v0, -v0"],
        v={0: a, 1: b},
        waves=8,
    )
    with np.errstate(all="ignore"):
        assert same_floats(after.v(8, np.float32), np.abs(a) - b)
        assert same_floats(after.v(9, np.float32), -np.abs(a) * b)
        assert same_floats(after.v(11, np.float32), -a)


def test_abs_and_neg_of_a_selection() -> None:
    a, b = integers(1), integers(2)
    code = "v_cndmask_b32_e64 v9, -v0, |v1|, s[4:5]"
    after = run(code, v={0: a, 1: b}, s={4: 0xFFFF0000FFFF0000}, mode=AITER_MODE, waves=8)
    chosen = LANE % 32 >= 16
    expected = np.where(chosen, b & np.uint32(0x7FFFFFFF), a ^ np.uint32(0x80000000))
    np.testing.assert_array_equal(after.v(9), expected)


def test_clamp() -> None:
    """To [0, 1]; a NaN becomes 0 with DX10_CLAMP and stays without."""
    a = floats(1)
    with np.errstate(all="ignore"):
        clamped = np.clip(a + a, 0, 1)
    code = "v_add_f32 v9, v0, v0 clamp"
    dx10 = run(code, v={0: a}, waves=8, mode=HIP_MODE).v(9, np.float32)
    np.testing.assert_array_equal(dx10, np.where(np.isnan(a), 0, clamped))
    plain = run(code, v={0: a}, waves=8, mode=HIP_MODE & ~0x100).v(9, np.float32)
    np.testing.assert_array_equal(np.isnan(plain), np.isnan(a))


@pytest.mark.parametrize("text, factor", [("mul:2", 2), ("mul:4", 4), ("div:2", 0.5)])
def test_omod(text: str, factor: float) -> None:
    """Scales the result, unless denormal results or IEEE mode are on: then the ISA says it is
    ignored.
    """
    a = floats(1)
    a = np.where(np.abs(a) < 1e-30, np.float32(0), a)
    with np.errstate(all="ignore"):
        plain, scaled = a * a, a * a * np.float32(factor)
    flush = lambda x: np.where(np.abs(x) < 2.0**-126, np.float32(0), x).astype(np.float32)  # noqa: E731
    code = f"v_mul_f32 v9, v0, v0 {text}"
    assert same_floats(
        run(code, v={0: a}, waves=8, mode=AITER_MODE).v(9, np.float32), flush(scaled)
    )
    for ignored in (HIP_MODE, 0xF0, 0x2C0):  # both, denormal results only, IEEE mode only
        plain_result = flush(plain) if ignored == 0x2C0 else plain
        assert same_floats(
            run(code, v={0: a}, waves=8, mode=ignored).v(9, np.float32), plain_result
        )


def test_omod_comes_before_clamp() -> None:
    a = np.linspace(0, 1, 64).astype(np.float32)
    after = run("v_add_f32 v9, v0, v0 clamp mul:4", v={0: a}, mode=NO_IEEE_FLUSH)
    np.testing.assert_array_equal(after.v(9, np.float32)[0], np.clip(a * 8, 0, 1))


# ---- DPP

ROW, COLUMN = LANE & ~15, LANE & 15
DPP = {
    "quad_perm:[3,0,2,1]": ((LANE & ~3) + np.array([3, 0, 2, 1])[LANE & 3], LANE >= 0),
    "row_shl:3": (LANE + 3, COLUMN + 3 < 16),
    "row_shr:5": (LANE - 5, COLUMN >= 5),
    "row_ror:4": (ROW + (COLUMN - 4) % 16, LANE >= 0),
    "row_newbcast:7": (ROW + 7, LANE >= 0),
    "row_mirror": (ROW + 15 - COLUMN, LANE >= 0),
    "row_half_mirror": ((LANE & ~7) + 7 - (LANE & 7), LANE >= 0),
    "row_bcast:15": (ROW - 1, LANE >= 16),
    "row_bcast:31": (np.full(64, 31), LANE >= 32),
    "wave_shr:1": (LANE - 1, LANE >= 1),
    "wave_shl:1": (LANE + 1, LANE < 63),
    "wave_ror:1": ((LANE - 1) % 64, LANE >= 0),
    "wave_rol:1": ((LANE + 1) % 64, LANE >= 0),
}


@pytest.mark.parametrize("control", DPP)
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("mask", [0xFFFFFFFFFFFFFFFF, MASK])
def test_dpp(control: str, bound: bool, mask: int) -> None:
    """Lanes without a source read 0 under bound_ctrl, else keep what they had; inactive lanes
    are no source.
    """
    source, exists = DPP[control]
    active = np.array([mask >> k & 1 for k in range(64)], bool)
    a, b, old = integers(1, 1)[0], integers(2, 1)[0], integers(3, 1)[0]
    suffix = " bound_ctrl:0" if bound else ""
    after = run(
        f"v_add_u32_dpp v9, v0, v1 {control} row_mask:0xf bank_mask:0xf{suffix}",
        v={0: a, 1: b, 9: old},
        exec_mask=mask,
    )
    index = np.where(exists, source, 0)
    valid = exists & active[index]
    moved = np.where(valid, a[index], 0).astype(np.uint32)
    written = active & (valid | bound)
    np.testing.assert_array_equal(after.v(9)[0], np.where(written, moved + b, old))


def test_dpp_masks_overlap_and_modifiers() -> None:
    a = integers(1, 1)[0]
    after = run("v_mov_b32_dpp v0, v0 row_shr:1 row_mask:0xa bank_mask:0x5", v={0: a})
    enabled = ((LANE >> 4) % 2 == 1) & ((LANE >> 2 & 3) % 2 == 0) & (COLUMN >= 1)
    np.testing.assert_array_equal(after.v(0)[0], np.where(enabled, np.roll(a, 1), a))
    x, y = floats(1, 1)[0], floats(2, 1)[0]
    after = run(
        "v_add_f32_dpp v9, -v0, |v1| quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", v={0: x, 1: y}
    )
    with np.errstate(all="ignore"):
        assert same_floats(after.v(9, np.float32)[0], -x[LANE ^ 1] + np.abs(y))
    after = run("v_add_u32_dpp v0, v0, v0 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", v={0: a})
    np.testing.assert_array_equal(after.v(0)[0], a[LANE ^ 1] + a)


# ---- SDWA


@pytest.mark.parametrize(
    "select", ["BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"]
)
def test_sdwa_sources(select: str) -> None:
    a, b = integers(1), integers(2)
    shift, width = {
        "B": (8 * int(select[-1]), 8) if select[0] == "B" else (0, 0),
        "W": (16 * int(select[-1]), 16) if select[0] == "W" else (0, 0),
        "D": (0, 32),
    }[select[0]]
    field = (a.astype(np.int64) >> shift) & (1 << width) - 1
    signed = field - ((field >> width - 1) << width)
    after = run(
        [
            f"v_add_u32_sdwa v8, v0, v1 src0_sel:{select} src1_sel:DWORD",
            f"v_add_u32_sdwa v9, v1, sext(v0) src0_sel:DWORD src1_sel:{select}",
        ],
        v={0: a, 1: b},
        waves=8,
    )
    np.testing.assert_array_equal(after.v(8), (field + b).astype(np.uint32))
    np.testing.assert_array_equal(after.v(9), (signed + b).astype(np.uint32))


@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
@pytest.mark.parametrize("select", ["BYTE_0", "BYTE_2", "WORD_1", "WORD_0"])
def test_sdwa_destination(select: str, unused: str) -> None:
    a, b, old = integers(1), integers(2), integers(3)
    shift, width = (8 * int(select[-1]), 8) if select[0] == "B" else (16 * int(select[-1]), 16)
    after = run(
        f"v_xor_b32_sdwa v9, v0, v1 dst_sel:{select} dst_unused:{unused} "
        "src0_sel:DWORD src1_sel:DWORD",
        v={0: a, 1: b, 9: old},
        waves=8,
    )
    field = (a ^ b).astype(np.int64) & (1 << width) - 1
    expected = field << shift
    if unused == "UNUSED_PRESERVE":
        expected |= old.astype(np.int64) & ~(((1 << width) - 1) << shift)
    elif unused == "UNUSED_SEXT":
        expected |= np.where(field >> width - 1, ~0 << shift + width, 0)
    np.testing.assert_array_equal(after.v(9), (expected & 0xFFFFFFFF).astype(np.uint32))


def test_sdwa_half_floats_and_compare() -> None:
    a, b = integers(1, 1)[0], integers(2, 1)[0]
    high = (a >> 16).astype(np.uint16).view(np.float16)
    low = (b & 0xFFFF).astype(np.uint16).view(np.float16)
    after = run(
        [
            "v_add_f16_sdwa v9, v0, v1 dst_sel:DWORD src0_sel:WORD_1 src1_sel:WORD_0",
            "v_cmp_lt_u32_sdwa s[4:5], v0, v1 src0_sel:BYTE_1 src1_sel:BYTE_2",
        ],
        v={0: a, 1: b},
    )
    with np.errstate(all="ignore"):
        assert same_floats(after.v(9)[0].astype(np.uint16).view(np.float16), high + low)
    less = (a >> 8 & 255) < (b >> 16 & 255)
    assert after.s64(4) == sum(int(x) << k for k, x in enumerate(less))


# ---- what is not known is refused


@pytest.mark.parametrize(
    "code, arch",
    [
        ("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], v[0:3]", "gfx942"),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] cbsz:1", "gfx942"),
        ("buffer_load_dword v0, v1, s[4:7], 0 idxen", "gfx942"),
        ("v_trig_preop_f64 v[0:1], v[2:3], v4", "gfx942"),
        ("s_sendmsghalt sendmsg(MSG_INTERRUPT)", "gfx942"),
        ("v_mul_lo_u16 v0, v1, v2 clamp", "gfx942"),
    ],
)
def test_unknown_is_an_error_that_names_it(code: str, arch: str) -> None:
    with pytest.raises((UnknownInstruction, Fault), match=code.split()[0].replace("_e64", "")[:14]):
        run(code, arch)


def test_registers_beyond_the_allocation_are_refused() -> None:
    with pytest.raises(Fault, match="v64 is beyond the 64"):
        run("v_mov_b32 v64, 0")


@pytest.mark.parametrize(
    "code",
    [
        "v_permlane32_swap_b32 v0, v1",
        "v_permlane16_swap_b32 v0, v1",
        "v_bitop3_b32 v0, v1, v2, v3 bitop3:0x12",
        "v_cvt_pk_bf16_f32 v0, v1, v2",
        "v_cvt_pk_f16_f32 v0, v1, v2",
        "v_cvt_f32_bf16 v0, v1",
        "v_cvt_scalef32_pk_f32_fp8 v[0:1], v2, v3",
        "v_dot2_f32_bf16 v0, v1, v2, v3",
        "v_dot2c_f32_bf16 v0, v1, v2",
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0",
        "v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0",
        "v_mfma_f32_32x32x16_f16 v[0:15], v[16:19], v[20:23], 0",
        "v_mfma_i32_16x16x64_i8 v[0:3], v[4:7], v[8:11], 0",
        "ds_read_b64_tr_b8 v[0:1], v2",
        "global_load_lds_dwordx4 v[0:1], off",
        "buffer_load_dwordx4 v0, s[4:7], 0 offen lds",
    ],
)
def test_gfx950_instructions_are_refused_on_gfx942(code: str) -> None:
    """As LLVM refuses to assemble them."""
    with pytest.raises(UnknownInstruction, match="not an instruction of gfx942"):
        run(assembled([code, "s_endpgm"], "gfx950"), "gfx942")
    with pytest.raises(CompileError):
        assemble(code, "gfx942")
