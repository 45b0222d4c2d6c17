"""MFMA against numpy, with operands laid out lane by lane from the definition."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from machine import run

FP8 = {"gfx942": ml_dtypes.float8_e4m3fnuz, "gfx950": ml_dtypes.float8_e4m3fn}
BF8 = {"gfx942": ml_dtypes.float8_e5m2fnuz, "gfx950": ml_dtypes.float8_e5m2}


def pack(matrix: np.ndarray) -> np.ndarray:
    """[registers, 64]: lane l holds row l % M of an [M, K] operand, k-block l // M, from the
    low end up.
    """
    m, k = matrix.shape
    per_lane = k * m // 64
    out = []
    for lane in range(64):
        start = lane // m * per_lane
        out.append(np.ascontiguousarray(matrix[lane % m, start : start + per_lane]).view(np.uint32))
    return np.array(out).T


def unpack(registers: np.ndarray, m: int) -> np.ndarray:
    """[M, M] result from [registers, 64]."""
    out = np.zeros((m, m), registers.dtype)
    for r in range(len(registers)):
        for lane in range(64):
            row = 4 * (lane // 16) + r if m == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            out[row, lane % m] = registers[r, lane]
    return out


def spread(matrix: np.ndarray) -> np.ndarray:
    """The inverse of unpack: [registers, 64] of an [M, M] addend."""
    m = len(matrix)
    out = np.zeros((m * m // 64, 64), matrix.dtype)
    for r in range(len(out)):
        for lane in range(64):
            row = 4 * (lane // 16) + r if m == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            out[r, lane] = matrix[row, lane % m]
    return out


def registers(first: int, values: np.ndarray) -> dict[int, np.ndarray]:
    return {first + k: np.ascontiguousarray(row).view(np.uint32) for k, row in enumerate(values)}


def span(kind: str, first: int, count: int) -> str:
    return f"{kind}[{first}:{first + count - 1}]" if count > 1 else f"{kind}{first}"


CASES = [
    (arch, name, m, k, *types)
    for arch in ("gfx942", "gfx950")
    for name, m, k, types in (
        ("f32_16x16x16_bf16", 16, 16, (ml_dtypes.bfloat16,) * 2),
        ("f32_32x32x8_bf16", 32, 8, (ml_dtypes.bfloat16,) * 2),
        ("f32_16x16x16_f16", 16, 16, (np.float16,) * 2),
        ("f32_32x32x8_f16", 32, 8, (np.float16,) * 2),
        ("f32_16x16x32_fp8_fp8", 16, 32, (FP8[arch], FP8[arch])),
        ("f32_32x32x16_fp8_fp8", 32, 16, (FP8[arch], FP8[arch])),
        ("f32_16x16x32_fp8_bf8", 16, 32, (FP8[arch], BF8[arch])),
        ("f32_16x16x32_bf8_fp8", 16, 32, (BF8[arch], FP8[arch])),
        ("f32_32x32x16_bf8_bf8", 32, 16, (BF8[arch], BF8[arch])),
        ("f32_16x16x4_f32", 16, 4, (np.float32,) * 2),
        ("f32_32x32x2_f32", 32, 2, (np.float32,) * 2),
        ("i32_16x16x32_i8", 16, 32, (np.int8,) * 2),
        ("i32_32x32x16_i8", 32, 16, (np.int8,) * 2),
    )
] + [
    ("gfx950", "f32_16x16x32_bf16", 16, 32, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ("gfx950", "f32_32x32x16_bf16", 32, 16, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ("gfx950", "f32_16x16x32_f16", 16, 32, np.float16, np.float16),
    ("gfx950", "f32_16x16x128_f8f6f4", 16, 128, FP8["gfx950"], FP8["gfx950"]),
    ("gfx950", "f32_32x32x64_f8f6f4", 32, 64, FP8["gfx950"], FP8["gfx950"]),
]


def operands(m: int, k: int, a_type: type, b_type: type, seed: int = 0) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    if a_type is np.int8:
        a, b = (random.integers(-128, 128, (m, k)).astype(np.int8) for _ in range(2))
        return a, b, random.integers(-1000, 1000, (m, m)).astype(np.int32)
    a, b = ((random.standard_normal((m, k)) * 2).astype(t) for t in (a_type, b_type))
    return a, b, random.standard_normal((m, m)).astype(np.float32)


@pytest.mark.parametrize("files", ["vv", "aa", "av"])
@pytest.mark.parametrize(
    "arch, name, m, k, a_type, b_type", CASES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_mfma(arch: str, name: str, m: int, k: int, a_type: type, b_type: type, files: str) -> None:
    """D = A B^T + C with operands in either register file."""
    a, b, c = operands(m, k, a_type, b_type)
    pa, pb, pc = pack(a), pack(b), spread(c)
    base = {"v": 0, "a": 64}
    state = {
        **registers(base[files[0]], pa),
        **registers(base[files[1]] + 16, pb),
        **registers(32, pc),
    }
    n, count = len(pa), len(pc)
    code = (
        f"v_mfma_{name} {span('v', 32, count)}, {span(files[0], 0, n)}, "
        f"{span(files[1], 16, len(pb))}, {span('v', 32, count)}"
    )
    after = run(code, arch, v=state, exec_mask=1)  # EXEC does not matter
    result = np.array([after.v(32 + r)[0] for r in range(count)])
    if a_type is np.int8:
        np.testing.assert_array_equal(
            unpack(result.view(np.int32), m), a.astype(np.int32) @ b.T.astype(np.int32) + c
        )
        return
    exact = a.astype(np.float64) @ b.astype(np.float64).T + c
    np.testing.assert_allclose(unpack(result.view(np.float32), m), exact, rtol=1e-6, atol=1e-5)


def test_result_and_addend_in_accumulation_registers() -> None:
    a, b, c = operands(16, 16, ml_dtypes.bfloat16, ml_dtypes.bfloat16)
    state = {**registers(0, pack(a)), **registers(16, pack(b)), **registers(64 + 32, spread(c))}
    after = run("v_mfma_f32_16x16x16_bf16 a[40:43], v[0:1], v[16:17], a[32:35]", v=state)
    result = np.array([after.v(64 + 40 + r, np.float32)[0] for r in range(4)])
    exact = a.astype(np.float64) @ b.astype(np.float64).T + c
    np.testing.assert_allclose(unpack(result, 16), exact, rtol=1e-6, atol=1e-5)


def test_constant_addend_and_several_waves() -> None:
    pairs = [operands(16, 32, FP8["gfx942"], FP8["gfx942"], seed) for seed in range(3)]
    state = {}
    for r in range(2):
        state[r] = np.array([pack(a)[r] for a, _, _ in pairs])
        state[16 + r] = np.array([pack(b)[r] for _, b, _ in pairs])
    after = run("v_mfma_f32_16x16x32_fp8_fp8 v[32:35], v[0:1], v[16:17], 1.0", v=state, waves=3)
    for wave, (a, b, _) in enumerate(pairs):
        result = np.array([after.v(32 + r, np.float32)[wave] for r in range(4)])
        exact = a.astype(np.float64) @ b.astype(np.float64).T + 1
        np.testing.assert_allclose(unpack(result, 16), exact, rtol=1e-6, atol=1e-5)


def test_float8_families_differ() -> None:
    """The same bits mean half as much on gfx942."""
    bits = np.random.default_rng(0).integers(1, 0x70, (16, 32)).astype(np.uint8)
    code = "v_mfma_f32_16x16x32_fp8_fp8 v[32:35], v[0:1], v[16:17], 0"
    state = {**registers(0, pack(bits)), **registers(16, pack(bits))}
    one, other = (run(code, arch, v=state).v(33, np.float32) for arch in ("gfx942", "gfx950"))
    np.testing.assert_allclose(one * 4, other, rtol=1e-6)


@pytest.mark.parametrize("m, k", [(16, 128), (32, 64)])
@pytest.mark.parametrize("byte_a, byte_b", [(0, 0), (1, 3), (2, 1)])
def test_block_scales(m: int, k: int, byte_a: int, byte_b: int) -> None:
    """One E8M0 byte for each lane's row and block of 32; op_sel and op_sel_hi choose the byte."""
    random = np.random.default_rng(1)
    a, b, c = operands(m, k, FP8["gfx950"], FP8["gfx950"])
    scales = random.integers(120, 135, (2, m, k // 32))
    state = {**registers(0, pack(a)), **registers(16, pack(b)), **registers(32, spread(c))}
    for register, which, byte in ((60, 0, byte_a), (61, 1, byte_b)):
        word = [
            int(scales[which, lane % m, lane // m]) << 8 * byte | 0x11 << 8 * ((byte + 1) % 4)
            for lane in range(64)
        ]
        state[register] = np.array(word, np.uint32)
    count = m * m // 64
    after = run(
        f"v_mfma_scale_f32_{m}x{m}x{k}_f8f6f4 v[32:{31 + count}], v[0:7], v[16:23], "
        f"v[32:{31 + count}], v60, v61 "
        f"op_sel:[{byte_a & 1},{byte_b & 1},0] op_sel_hi:[{byte_a >> 1},{byte_b >> 1},0]",
        "gfx950",
        v=state,
    )
    wide = [
        x.astype(np.float64) * np.repeat(2.0 ** (scales[i] - 127), 32, axis=1)
        for i, x in enumerate((a, b))
    ]
    result = np.array([after.v(32 + r, np.float32)[0] for r in range(count)])
    np.testing.assert_allclose(unpack(result, m), wide[0] @ wide[1].T + c, rtol=1e-6, atol=1e-3)


def test_mixed_formats_and_float4() -> None:
    random = np.random.default_rng(2)
    codes = random.integers(0, 16, (16, 128)).astype(np.uint8)
    fp4 = codes.view(np.uint8)[:, 0::2] | codes[:, 1::2] << 4
    values = codes.astype(np.uint8).view(np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    a = np.where(values & 8, -table[values & 7], table[values & 7])
    b = (random.standard_normal((16, 128)) * 2).astype(BF8["gfx950"])
    state = {**registers(0, pack(fp4)), **registers(16, pack(b))}
    after = run(
        "v_mfma_f32_16x16x128_f8f6f4 v[32:35], v[0:3], v[16:23], 0 cbsz:4 blgp:1", "gfx950", v=state
    )
    result = np.array([after.v(32 + r, np.float32)[0] for r in range(4)])
    np.testing.assert_allclose(unpack(result, 16), a @ b.astype(np.float64).T, rtol=1e-6, atol=1e-5)
