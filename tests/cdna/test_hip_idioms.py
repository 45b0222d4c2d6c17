"""Kernels of the kinds this project writes (idioms.hip): 64-bit indices, integer division, scans,
reductions, state merging.

Everything clang makes of them, at two optimisation levels, has an implementation; and the
results are right.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from machine import same_floats

from build_tools.cdna.compiler import ARCHES, compile_cached
from build_tools.cdna.launch import launch
from build_tools.cdna.program import Program

SOURCE = Path(__file__).with_name("idioms.hip")
both = pytest.mark.parametrize("arch", ARCHES)


@pytest.mark.parametrize("level", ["-O1", "-O3"])
@both
def test_every_instruction_is_implemented(arch: str, level: str) -> None:
    code = compile_cached(SOURCE, arch, (level,))
    assert len(code.kernels) == 11
    most = max(code.kernels.values(), key=lambda kernel: kernel.registers)
    assert Program(code, 256, 256).untranslatable(most.mode) == []


def wide(seed: int, count: int, bits: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    dtype = np.int64 if bits == 64 else np.int32
    value = random.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), count, dtype=dtype)
    return value >> random.integers(0, bits - 1, count).astype(dtype)


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@both
def test_integer_division(arch: str) -> None:
    code, n = compile_cached(SOURCE, arch), 1000
    a, b = wide(1, n, 64), wide(2, n, 64)
    b[b == 0] = 1
    q, r, u = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.uint64)
    launch(code, "divide64", 4, 256, a, b, q, r, u, n)
    assert q.tolist() == [truncated(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    np.testing.assert_array_equal(r, a - q * b)
    np.testing.assert_array_equal(u, a.view(np.uint64) // b.view(np.uint64))
    a, b = wide(3, n, 32), wide(4, n, 32)
    b[b == 0] = 3
    q, r = np.zeros(n, np.int32), np.zeros(n, np.uint32)
    launch(code, "divide32", 4, 256, a, b, q, r, n)
    assert q.tolist() == [truncated(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    np.testing.assert_array_equal(r, a.view(np.uint32) % b.view(np.uint32))


@both
def test_reduction_and_scan(arch: str) -> None:
    code = compile_cached(SOURCE, arch)
    x = np.random.default_rng(0).standard_normal(5001).astype(ml_dtypes.bfloat16)
    out = np.zeros(1, np.float32)
    launch(code, "largest", 3, 256, x.view(np.uint16), out.view(np.uint32), 5001)
    assert out[0] == np.abs(x.astype(np.float32)).max()
    numbers = np.random.default_rng(0).integers(0, 100, 900).astype(np.int32)
    sums = np.zeros(900, np.int32)
    stats = launch(code, "scan", 1, 1024, numbers, sums, 900, find_races=True)
    np.testing.assert_array_equal(sums, np.cumsum(numbers))
    assert not stats.races


@both
def test_merge_of_states_with_empty_ones(arch: str) -> None:
    code, rows = compile_cached(SOURCE, arch), 50
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((rows, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
    la, lb = (random.standard_normal(rows).astype(np.float32) * 20 for _ in range(2))
    la[::3] = -np.inf
    lb[::4] = -np.inf
    out, lse = np.zeros((rows, 64), np.uint16), np.zeros(rows, np.float32)
    launch(code, "merge", 2, 256, a.view(np.uint16), la, b.view(np.uint16), lb, out, lse, rows * 8)
    both_empty = np.isneginf(la) & np.isneginf(lb)
    total = np.logaddexp(la.astype(np.float64), lb)
    weights = [np.where(both_empty, 0, np.exp(x - total))[:, None] for x in (la, lb)]
    exact = a.astype(np.float64) * weights[0] + b.astype(np.float64) * weights[1]
    got = out.view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_allclose(got, exact, rtol=2**-8, atol=1e-30)
    np.testing.assert_allclose(lse[~both_empty], total[~both_empty], rtol=1e-6, atol=1e-6)
    assert np.isneginf(lse[both_empty]).all() and (got[both_empty] == 0).all() and both_empty.any()


@both
def test_cache_write_skips_negative_slots(arch: str) -> None:
    code, tokens = compile_cached(SOURCE, arch), 7
    name = next(k for k in code.kernels if "write_cache" in k)
    random = np.random.default_rng(0)
    c, pe = (random.integers(0, 1 << 16, (tokens, k)).astype(np.uint16) for k in (512, 64))
    slots = np.array([3, -1, 0, 9, -1, 5, 1], np.int64)
    cache = np.full((10, 576), 0xABCD, np.uint16)
    launch(code, name, tokens, 256, c, pe, cache, slots, tokens)
    expected = np.full((10, 576), 0xABCD, np.uint16)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = np.concatenate([c[token], pe[token]])
    np.testing.assert_array_equal(cache, expected)


@both
def test_functions_doubles_halves_and_bits(arch: str) -> None:
    code, n = compile_cached(SOURCE, arch), 1000
    random = np.random.default_rng(0)
    x, y = random.standard_normal(n).astype(np.float32) * 4, np.zeros(n, np.float32)
    launch(code, "functions", 4, 256, x, y, n)
    v = x.astype(np.float64)
    exact = np.sqrt(np.abs(v)) + np.exp2(v) * np.log2(np.abs(v)) + np.rint(x * 3) + np.floor(v)
    np.testing.assert_allclose(y, exact, rtol=2e-6, atol=2e-5)
    d, out = random.standard_normal(n), np.zeros(n)
    launch(code, "doubles", 4, 256, d, out, n)
    np.testing.assert_array_equal(out, d / (d + 3.0) + np.trunc(d))
    h, half = x.astype(np.float16), np.zeros(n, np.float16)
    launch(code, "halves", 4, 256, h, half, n)
    assert same_floats(half, np.float16(0.5) / (h + np.float16(3)))
    words, found = random.integers(-9, 9, 64).astype(np.int32), np.zeros(64, np.uint64)
    launch(code, "bits", 1, 64, words, found, 64)
    ballot = sum(1 << k for k in range(64) if words[k] > 3)
    expected = []
    for word in words.tolist():
        bits = word & 0xFFFFFFFF
        first = (word & -word).bit_length() if word else 0
        expected.append((ballot + bits.bit_count() + 32 - bits.bit_length() + first) % 2**64)
    assert found.tolist() == expected


@both
def test_atomics_go_lane_after_lane(arch: str) -> None:
    code = compile_cached(SOURCE, arch)
    p, f = np.array([0, 7, 100], np.uint32), np.zeros(1, np.float32)
    launch(code, "atomics", 1, 128, p, f, 128)
    assert p.tolist() == [128, 127, 0] and f[0] == 127 * 128 / 2
