"""Float8, bf16 and f16 conversions: every code and every pattern, in both families, against
ml_dtypes and numpy.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from machine import HIP_MODE, run, same_floats

FP16_OVFL = 1 << 23
TYPES = {
    ("gfx942", "fp8"): ml_dtypes.float8_e4m3fnuz,
    ("gfx942", "bf8"): ml_dtypes.float8_e5m2fnuz,
    ("gfx950", "fp8"): ml_dtypes.float8_e4m3fn,
    ("gfx950", "bf8"): ml_dtypes.float8_e5m2,
}
PARAMETERS = [(*key, dtype) for key, dtype in TYPES.items()]
ALL_BF16 = (
    (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).reshape(-1, 64)
)  # 1024 waves


def sampled() -> np.ndarray:
    """All bf16 patterns, and float32 values with low bits around every float8 rounding boundary."""
    random = np.random.default_rng(0)
    low = random.choice(np.array([1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), (1 << 16))
    return np.concatenate(
        [ALL_BF16, (ALL_BF16.view(np.uint32) | low.reshape(-1, 64)).view(np.float32)]
    )


@pytest.mark.parametrize("arch, name, dtype", PARAMETERS)
def test_decode_all_codes(arch: str, name: str, dtype: type) -> None:
    code = np.arange(256, dtype=np.uint8)
    low, high = code.reshape(4, 64), code[::-1].reshape(4, 64)
    word = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(8)
    expected = [x.view(dtype).astype(np.float32) for x in (low, np.ascontiguousarray(high))]
    lines = [
        f"v_cvt_pk_f32_{name} v[2:3], v0",
        f"v_cvt_pk_f32_{name}_sdwa v[4:5], v1 src0_sel:WORD_1",
        f"v_cvt_f32_{name} v6, v0",
        f"v_cvt_f32_{name}_sdwa v7, v0 src0_sel:BYTE_1",
        f"v_cvt_f32_{name}_sdwa v8, v1 src0_sel:BYTE_2",
        f"v_cvt_f32_{name}_sdwa v9, v1 src0_sel:BYTE_3",
    ]
    after = run(lines, arch, v={0: word, 1: word << np.uint32(16)}, waves=4)
    for register, which in ((2, 0), (3, 1), (4, 0), (5, 1), (6, 0), (7, 1), (8, 0), (9, 1)):
        assert same_floats(after.v(register, np.float32), expected[which]), register


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("arch, name, dtype", PARAMETERS)
def test_encode(arch: str, name: str, dtype: type, saturate: bool) -> None:
    """Nearest even with denormals; overflow gives NaN (inf in OCP e5m2), or the maximum under
    FP16_OVFL.
    """
    value = sampled()
    waves = len(value)
    lines = [f"v_cvt_pk_{name}_f32 v2, v0, v1", f"v_cvt_pk_{name}_f32 v3, v0, v1 op_sel:[0,0,1]"]
    mode = HIP_MODE | (FP16_OVFL if saturate else 0)
    after = run(
        lines,
        arch,
        v={0: value, 1: -value[::-1], 2: 0xAAAA5555, 3: 0xAAAA5555},
        waves=waves,
        mode=mode,
    )
    packed, upper = after.v(2), after.v(3)
    assert (packed >> 16 == 0xAAAA).all() and (upper & 0xFFFF == 0x5555).all(), (
        "the other half is kept"
    )
    np.testing.assert_array_equal(packed & 0xFFFF, upper >> 16)
    with np.errstate(all="ignore"):
        for got, source in ((packed & 0xFF, value), (packed >> 8 & 0xFF, -value[::-1])):
            got = got.astype(np.uint8).view(dtype).astype(np.float32)
            expected = source.astype(dtype).astype(np.float32)
            if saturate:
                largest = np.float32(ml_dtypes.finfo(dtype).max)
                infinite = np.isinf(source) & (dtype is ml_dtypes.float8_e5m2)
                over = ~np.isfinite(expected) & ~np.isnan(source) & ~infinite
                expected = np.where(over, np.copysign(largest, source), expected)
            assert same_floats(got, expected)


def test_bf16_of_all_patterns() -> None:
    value = sampled()
    after = run(
        "v_cvt_pk_bf16_f32 v2, v0, v1", "gfx950", v={0: value, 1: value[::-1]}, waves=len(value)
    )
    with np.errstate(all="ignore"):
        for got, source in ((after.v(2) & 0xFFFF, value), (after.v(2) >> 16, value[::-1])):
            got = got.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
            assert same_floats(got, source.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_f16_of_all_patterns() -> None:
    """f16 -> f32 for all 65536 patterns, and f32 -> f16 to nearest even and toward zero."""
    pattern = np.arange(1 << 16, dtype=np.uint32).reshape(-1, 64)
    after = run("v_cvt_f32_f16 v1, v0", v={0: pattern}, waves=1024)
    assert same_floats(
        after.v(1, np.float32), pattern.astype(np.uint16).view(np.float16).astype(np.float32)
    )
    value = sampled()
    after = run(
        ["v_cvt_f16_f32 v1, v0", "v_cvt_pkrtz_f16_f32 v2, v0, 0"], v={0: value}, waves=len(value)
    )
    with np.errstate(all="ignore"):
        half = value.astype(np.float16)
        assert same_floats(after.v(1).astype(np.uint16).view(np.float16), half)
        # toward zero: the neighbour below if the nearest is above
        toward = (after.v(2) & 0xFFFF).astype(np.uint16).view(np.float16)
        keep = np.isfinite(value)
        wide = toward.astype(np.float64)[keep]
        assert (np.abs(wide) <= np.abs(value[keep].astype(np.float64))).all()
        above = np.nextafter(np.abs(toward[keep]), np.float16(np.inf)).astype(np.float64)
        assert (above > np.abs(value[keep].astype(np.float64))).all()
        np.testing.assert_array_equal(np.isnan(toward), np.isnan(value))


@pytest.mark.parametrize(
    "name, dtype", [("fp8", ml_dtypes.float8_e4m3fn), ("bf8", ml_dtypes.float8_e5m2)]
)
def test_scaled_conversions(name: str, dtype: type) -> None:
    """gfx950 v_cvt_scalef32: the exponent field of the scale register is a power of two."""
    code = np.arange(256, dtype=np.uint8).reshape(4, 64)
    word = code.astype(np.uint32) | code[::-1].astype(np.uint32) << np.uint32(8)
    scale = np.float32(2.0**-5 * 1.75)  # the fraction does not count
    lines = [
        f"v_cvt_scalef32_pk_f32_{name} v[2:3], v0, v1",
        f"v_cvt_scalef32_pk_bf16_{name} v4, v0, v1",
        f"v_cvt_scalef32_pk_{name}_f32 v5, v2, v3, v1",
    ]
    after = run(lines, "gfx950", v={0: word, 1: scale, 5: 0xAAAA5555}, waves=4)
    low = code.view(dtype).astype(np.float32) * np.float32(2.0**-5)
    assert same_floats(after.v(2, np.float32), low)
    bf16 = (after.v(4) & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    assert same_floats(bf16, low.astype(ml_dtypes.bfloat16).astype(np.float32))
    back = (after.v(5) & 0xFF).astype(np.uint8).view(dtype).astype(np.float32)
    assert same_floats(back, code.view(dtype).astype(np.float32))
    assert (after.v(5) >> 16 == 0xAAAA).all()
