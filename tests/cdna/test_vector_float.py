"""Floating-point vector instructions against exact rational arithmetic or the standard library,
lane by lane.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from machine import AITER_MODE, float_bits, floats, run, same_floats

Number = float


def round32(exact: Fraction, zero: float = 0.0) -> float:
    """The float32 nearest to a rational, ties to even; `zero` gives the sign of an exact zero."""
    if exact == 0:
        return zero
    sign, exact = (-1.0, -exact) if exact < 0 else (1.0, exact)
    exponent = max(exact.numerator.bit_length() - exact.denominator.bit_length() - 1, -126)
    while exact >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    value = round(exact / unit) * unit  # round() of a Fraction rounds halves to even
    if value >= Fraction(2) ** 128:
        return sign * math.inf
    return sign * float(value)


def finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def add(a: Number, b: Number) -> Number:
    if not finite(a, b):
        return a + b
    return round32(Fraction(a) + Fraction(b), a + b)


def mul(a: Number, b: Number) -> Number:
    if not finite(a, b):
        return a * b
    return round32(Fraction(a) * Fraction(b), math.copysign(0.0, a) * math.copysign(1.0, b))


def fma(a: Number, b: Number, c: Number) -> Number:
    if not finite(a, b, c):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return mul(a, b) + c if a == 0 or b == 0 else 0.0 if Fraction(a) * Fraction(b) != 0 else c
    return round32(exact)


def maximum(a: Number, b: Number) -> Number:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    if a == b == 0:
        return 0.0 if math.copysign(1, a) > 0 or math.copysign(1, b) > 0 else -0.0
    return max(a, b)


def minimum(a: Number, b: Number) -> Number:
    return -maximum(-a, -b)


def med3(a: Number, b: Number, c: Number) -> Number:
    if any(map(math.isnan, (a, b, c))):
        return minimum(minimum(a, b), c)
    most = maximum(maximum(a, b), c)
    if most == a:
        return maximum(b, c)
    return maximum(a, c) if most == b else maximum(a, b)


def ldexp(a: Number, exponent: Number) -> Number:
    if not finite(a) or a == 0:
        return a
    n = max(min(int.from_bytes(struct.pack("<f", exponent), "little", signed=True), 600), -600)
    return round32(Fraction(a) * Fraction(2) ** n, math.copysign(0.0, a))


def to_unsigned(a: Number) -> int:
    return 0 if math.isnan(a) else int(max(0, min(a, 2**32 - 1)))


def to_signed(a: Number) -> int:
    return 0 if math.isnan(a) else int(max(-(2**31), min(a, 2**31 - 1)))


EXACT: dict[str, Callable[..., Number]] = {
    "v_add_f32": add,
    "v_sub_f32": lambda a, b: add(a, -b),
    "v_subrev_f32": lambda a, b: add(b, -a),
    "v_mul_f32": mul,
    "v_max_f32": maximum,
    "v_min_f32": minimum,
    "v_fma_f32": fma,
    "v_max3_f32": lambda a, b, c: maximum(maximum(a, b), c),
    "v_min3_f32": lambda a, b, c: minimum(minimum(a, b), c),
    "v_med3_f32": med3,
    "v_ldexp_f32": ldexp,
    "v_trunc_f32": lambda a: float(np.trunc(a)),
    "v_ceil_f32": lambda a: float(np.ceil(a)),
    "v_floor_f32": lambda a: float(np.floor(a)),
    "v_rndne_f32": lambda a: math.copysign(round(a), a) if finite(a) else a,
}
CLOSE: dict[
    str, Callable[[Number], Number]
] = {  # the ISA allows an ulp or so; denormals are left out
    "v_exp_f32": lambda a: math.inf if a >= 128 else 2.0**a if a > -150 else 0.0,
    "v_log_f32": lambda a: (
        math.nan if a < 0 else -math.inf if a == 0 else math.log2(a) if a < math.inf else a
    ),
    "v_rcp_f32": lambda a: math.copysign(math.inf, a) if a == 0 else 1 / a,
    "v_rcp_iflag_f32": lambda a: math.copysign(math.inf, a) if a == 0 else 1 / a,
    "v_rsq_f32": lambda a: (
        math.nan if a < 0 else math.copysign(math.inf, a) if a == 0 else 1 / math.sqrt(a)
    ),
    "v_sqrt_f32": lambda a: math.nan if a < 0 else math.sqrt(a),
    "v_sin_f32": lambda a: math.sin(2 * math.pi * a) if abs(a) <= 256 else math.nan,
    "v_cos_f32": lambda a: math.cos(2 * math.pi * a) if abs(a) <= 256 else math.nan,
}


def arity(function: Callable[..., Number]) -> int:
    return function.__code__.co_argcount


def lanes(function: Callable[..., Number], *sources: np.ndarray) -> np.ndarray:
    flat = [source.astype(np.float64).reshape(-1).tolist() for source in sources]
    with np.errstate(all="ignore"):
        out = np.array([function(*x) for x in zip(*flat, strict=True)], np.float64)
        return out.astype(np.float32).reshape(sources[0].shape)


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    function = EXACT[name]
    sources = [floats(seed) for seed in range(arity(function))]
    if name == "v_ldexp_f32":
        exponents = np.random.default_rng(5).integers(-300, 300, (8, 64), dtype=np.int32)
        sources[1] = exponents.view(np.float32)
        expected = np.array(
            [
                ldexp(float(a), struct.unpack("<f", struct.pack("<i", e))[0])
                for a, e in zip(sources[0].reshape(-1), exponents.reshape(-1).tolist(), strict=True)
            ],
            np.float32,
        ).reshape(8, 64)
    else:
        expected = lanes(function, *sources)
    arguments = ", ".join(f"v{k}" for k in range(len(sources)))
    after = run(f"{name} v9, {arguments}", v=dict(enumerate(sources)), waves=8)
    assert same_floats(after.v(9, np.float32), expected)


@pytest.mark.parametrize("name", CLOSE)
def test_close(name: str) -> None:
    a = floats(1)
    if name in ("v_sin_f32", "v_cos_f32"):
        a = np.clip(np.nan_to_num(a), -200, 200)
    else:
        a = np.where(np.abs(a) < 1.2e-38, a * np.float32(0), a)
    expected = lanes(CLOSE[name], a)
    got = run(f"{name} v9, v0", v={0: a}, waves=8).v(9, np.float32)
    keep = ~(np.abs(expected) < 1.2e-38) & (np.abs(got) >= 1.2e-38) | (expected == got)
    tolerance = {"rtol": 0, "atol": 1e-6} if name in ("v_sin_f32", "v_cos_f32") else {"rtol": 3e-7}
    if name == "v_log_f32":
        tolerance["atol"] = 1e-7
    assert (keep | np.isnan(expected) | (np.abs(expected) < 1.3e-38)).all()
    np.testing.assert_allclose(got[keep], expected[keep], **tolerance)


def test_fma_rounds_once() -> None:
    """Cases in which rounding the float64 sum again would go wrong, and denormal results."""
    a = np.array([1 + 2**-23, 1 + 2**-12, 2**-100, 3.0, 2**-75, -(2**-75)], np.float32)
    b = np.array([1 + 2**-23, 1 + 2**-12, 2**-49, 1 / 3, 2**-75, 2**-75], np.float32)
    c = np.array([2**-60, 2**-80, 2**-126, -1.0, 2**-149, 1.5 * 2**-148], np.float32)
    random = np.random.default_rng(0)
    x = (1 + random.integers(0, 1 << 12, 58) * 2.0**-12).astype(np.float32)
    y = (1 + random.integers(0, 1 << 12, 58) * 2.0**-12).astype(np.float32)
    z = (random.choice([-1, 1], 58) * 2.0 ** random.integers(-90, -40, 58)).astype(np.float32)
    sources = [np.concatenate(p) for p in ((a, x), (b, y), (c, z))]
    after = run("v_fma_f32 v9, v0, v1, v2", v=dict(enumerate(sources)))
    assert same_floats(after.v(9, np.float32)[0], lanes(fma, *sources))


@pytest.mark.parametrize("code", ["v_fmac_f32 v2, v0, v1", "v_fmac_f32_e64 v2, v0, v1"])
def test_fmac(code: str) -> None:
    sources = [floats(seed) for seed in range(3)]
    after = run(code, v=dict(enumerate(sources)), waves=8)
    assert same_floats(after.v(2, np.float32), lanes(fma, *sources))


def test_fmamk_and_fmaak() -> None:
    a, b = floats(0), floats(1)
    k = np.full_like(a, np.float32(1.2345))
    literal = hex(int(k.view(np.uint32)[0, 0]))
    after = run(
        [f"v_fmamk_f32 v8, v0, {literal}, v1", f"v_fmaak_f32 v9, v0, v1, {literal}"],
        v={0: a, 1: b},
        waves=8,
    )
    assert same_floats(after.v(8, np.float32), lanes(fma, a, k, b))
    assert same_floats(after.v(9, np.float32), lanes(fma, a, b, k))


@pytest.mark.parametrize(
    "test",
    [
        "lt",
        "eq",
        "le",
        "gt",
        "lg",
        "ge",
        "o",
        "u",
        "nge",
        "nlg",
        "ngt",
        "nle",
        "neq",
        "nlt",
        "f",
        "tru",
    ],
)
def test_compare(test: str) -> None:
    a, b = floats(1, 1), floats(2, 1)
    b[0, ::3] = a[0, ::3]
    after = run(f"v_cmp_{test}_f32 s[10:11], v0, v1", v={0: a, 1: b})

    def holds(x: float, y: float) -> bool:
        unordered = math.isnan(x) or math.isnan(y)
        plain = {
            "lt": x < y,
            "eq": x == y,
            "le": x <= y,
            "gt": x > y,
            "lg": x < y or x > y,
            "ge": x >= y,
        }
        if test in ("o", "u"):
            return unordered == (test == "u")
        if test in ("f", "tru"):
            return test == "tru"
        if test in plain:
            return plain[test]
        return not plain[test[1:].replace("eq", "eq")]

    pairs = zip(a[0].tolist(), b[0].tolist(), strict=True)
    assert after.s64(10) == sum(holds(x, y) << k for k, (x, y) in enumerate(pairs))


def test_class() -> None:
    patterns = [
        0x7F800001,
        0x7FC00000,
        0xFF800000,
        0xBF800000,
        0x80000001,
        0x80000000,
        0,
        1,
        0x3F800000,
        0x7F800000,
    ]
    value = np.resize(np.array(patterns, np.uint32), 64)
    for bit in range(10):
        after = run("v_cmp_class_f32 s[10:11], v0, v1", v={0: value, 1: 1 << bit})
        expected = sum(1 << k for k in range(64) if k % 10 == bit)
        assert after.s64(10) == expected, bit


def test_conversions_to_and_from_integers() -> None:
    a = floats(1)
    code = [
        "v_cvt_u32_f32 v1, v0",
        "v_cvt_i32_f32 v2, v0",
        "v_cvt_f32_u32 v3, v0",
        "v_cvt_f32_i32 v4, v0",
        "v_cvt_f32_ubyte0 v5, v0",
        "v_cvt_f32_ubyte3 v6, v0",
        "v_cvt_flr_i32_f32 v7, v0",
    ]
    after = run(code, v={0: a}, waves=8)
    values, bits = a.astype(np.float64).reshape(-1).tolist(), a.view(np.uint32).reshape(-1).tolist()

    def check(register: int, expected: list[int]) -> None:
        assert after.v(register).reshape(-1).tolist() == expected, register

    def as_float(register: int, expected: list[Fraction]) -> None:
        want = np.array([round32(x) for x in expected], np.float32)
        assert same_floats(after.v(register, np.float32).reshape(-1), want), register

    check(1, [to_unsigned(x) for x in values])
    check(2, [to_signed(x) & 0xFFFFFFFF for x in values])
    as_float(3, [Fraction(x) for x in bits])
    as_float(4, [Fraction(x - (1 << 32) if x >> 31 else x) for x in bits])
    as_float(5, [Fraction(x & 255) for x in bits])
    as_float(6, [Fraction(x >> 24) for x in bits])
    check(7, [to_signed(math.floor(x) if finite(x) else x) & 0xFFFFFFFF for x in values])


def test_frexp() -> None:
    a = floats(3)
    after = run(["v_frexp_mant_f32 v1, v0", "v_frexp_exp_i32_f32 v2, v0"], v={0: a}, waves=8)
    values = a.astype(np.float64).reshape(-1).tolist()
    mantissas = np.array([math.frexp(x)[0] if finite(x) else x for x in values], np.float32)
    assert same_floats(after.v(1, np.float32).reshape(-1), mantissas)
    assert after.v(2, np.int32).reshape(-1).tolist() == [
        math.frexp(x)[1] if finite(x) else 0 for x in values
    ]


def test_division_sequence_is_correctly_rounded() -> None:
    """What clang emits for a / b: div_scale, rcp, fma steps, div_fmas, div_fixup."""
    a, b = floats(1, 64), floats(2, 64)
    code = [
        "v_div_scale_f32 v2, s[4:5], v1, v1, v0",
        "v_div_scale_f32 v3, vcc, v0, v1, v0",
        "v_rcp_f32 v4, v2",
        "v_fma_f32 v5, -v2, v4, 1.0",
        "v_fmac_f32 v4, v5, v4",
        "v_mul_f32 v5, v3, v4",
        "v_fma_f32 v6, -v2, v5, v3",
        "v_fmac_f32 v5, v6, v4",
        "v_fma_f32 v2, -v2, v5, v3",
        "v_div_fmas_f32 v2, v2, v4, v5",
        "v_div_fixup_f32 v9, v2, v1, v0",
    ]
    after = run(code, v={0: a, 1: b}, waves=64)
    with np.errstate(all="ignore"):
        expected = a / b
    assert same_floats(after.v(9, np.float32), expected)


def test_float64_division_is_correctly_rounded() -> None:
    random = np.random.default_rng(0)
    a, b = (random.integers(0, 1 << 64, (16, 64), dtype=np.uint64).view(np.float64) for _ in "ab")
    special = np.array(
        [0.0, -0.0, 1.0, 3.0, np.inf, -np.inf, np.nan, 5e-324, 1e-310, 1.7e308, 2.3e-308]
    )
    a[0], b[0] = random.choice(special, 64), random.choice(special, 64)
    a[1:4] = random.standard_normal((3, 64))
    b[1:4] = random.standard_normal((3, 64))
    code = [
        "v_div_scale_f64 v[10:11], s[4:5], v[2:3], v[2:3], v[0:1]",
        "v_rcp_f64 v[12:13], v[10:11]",
        "v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0",
        "v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]",
        "v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0",
        "v_div_scale_f64 v[16:17], vcc, v[0:1], v[2:3], v[0:1]",
        "v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]",
        "v_mul_f64 v[14:15], v[16:17], v[12:13]",
        "v_fma_f64 v[10:11], -v[10:11], v[14:15], v[16:17]",
        "v_div_fmas_f64 v[10:11], v[10:11], v[12:13], v[14:15]",
        "v_div_fixup_f64 v[20:21], v[10:11], v[2:3], v[0:1]",
    ]
    after = run(code, v={0: a, 2: b}, waves=16)
    assert same_floats(after.v(20, np.float64), a / b)


def test_float16_division() -> None:
    """What clang emits: a float32 quotient, rounded, and the special cases mended."""
    random = np.random.default_rng(0)
    a, b = (random.integers(0, 1 << 16, (64, 64), dtype=np.uint32) for _ in range(2))
    code = [
        "v_cvt_f32_f16 v2, v0",
        "v_cvt_f32_f16 v3, v1",
        "v_rcp_f32 v4, v3",
        "v_mul_f32 v4, v2, v4",
        "v_cvt_f16_f32 v4, v4",
        "v_div_fixup_f16 v9, v4, v1, v0",
    ]
    x, y = (v.astype(np.uint16).view(np.float16) for v in (a, b))
    got = run(code, v={0: a, 1: b}, waves=64).v(9).astype(np.uint16).view(np.float16)
    expected = (x.astype(np.float64) / y).astype(np.float16)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(
        np.signbit(got[~np.isnan(got)]), np.signbit(expected[~np.isnan(got)])
    )
    finite = np.isfinite(expected)
    ulps = np.abs(got.view(np.int16).astype(int) - expected.view(np.int16))[
        finite & np.isfinite(got)
    ]
    assert ulps.max() <= 1 and (ulps == 0).mean() > 0.99


def test_float16() -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.integers(0, 1 << 16, (8, 64), dtype=np.uint32) for _ in range(3))
    x, y, z = (v.astype(np.uint16).view(np.float16) for v in (a, b, c))
    code = [
        "v_add_f16 v4, v0, v1",
        "v_mul_f16 v5, v0, v1",
        "v_fma_f16 v6, v0, v1, v2",
        "v_max_f16 v7, v0, v1",
        "v_sub_f16 v8, v0, v1",
    ]
    after = run(code, v={0: a, 1: b, 2: c, 6: 0xABCD0000}, waves=8)

    def half(register: int) -> np.ndarray:
        return after.v(register).astype(np.uint16).view(np.float16)

    with np.errstate(all="ignore"):
        wide = [v.astype(np.float64) for v in (x, y, z)]
        assert same_floats(half(4), (wide[0] + wide[1]).astype(np.float16))
        assert same_floats(half(5), (wide[0] * wide[1]).astype(np.float16))
        assert same_floats(half(8), (wide[0] - wide[1]).astype(np.float16))
        exact = np.array(
            [
                Fraction(p) * Fraction(q) + Fraction(r) if finite(p, q, r) else 0
                for p, q, r in zip(*(w.reshape(-1).tolist() for w in wide), strict=True)
            ]
        )
        usable = np.array(
            [
                finite(p, q, r)
                for p, q, r in zip(*(w.reshape(-1).tolist() for w in wide), strict=True)
            ]
        )
        got = half(6).reshape(-1)
        for k in np.flatnonzero(usable):
            # the nearest float16 is at least as near as its neighbours
            if not np.isfinite(got[k]):
                assert abs(exact[k]) >= 65520
                continue
            error = abs(Fraction(float(got[k])) - exact[k])
            for other in (
                np.nextafter(got[k], np.float16(np.inf)),
                np.nextafter(got[k], np.float16(-np.inf)),
            ):
                assert not np.isfinite(other) or error <= abs(Fraction(float(other)) - exact[k])
    assert (after.v(4) >> 16 == 0).all(), "16-bit results of the older opcodes clear the upper half"
    assert (after.v(6) >> 16 == 0xABCD).all(), "v_fma_f16 keeps it"


def test_packed_float() -> None:
    a, b, c = (np.stack([floats(seed), floats(seed + 10)]) for seed in (0, 1, 2))
    v = {0: a[0], 1: a[1], 2: b[0], 3: b[1], 4: c[0], 5: c[1]}
    code = [
        "v_pk_mul_f32 v[8:9], v[0:1], v[2:3]",
        "v_pk_add_f32 v[10:11], v[0:1], v[2:3]",
        "v_pk_fma_f32 v[12:13], v[0:1], v[2:3], v[4:5]",
        "v_pk_mul_f32 v[14:15], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1] "
        "neg_lo:[1,0] neg_hi:[0,1]",
        "v_pk_mul_f32 v[16:17], v[0:1], s[4:5] op_sel_hi:[1,0]",
        "v_pk_mov_b32 v[18:19], v[0:1], v[2:3] op_sel:[1,0]",
    ]
    after = run(code, v=v, s={4: int(float_bits(2.0))}, waves=8)
    for half in (0, 1):
        assert same_floats(after.v(8 + half, np.float32), lanes(mul, a[half], b[half]))
        assert same_floats(after.v(10 + half, np.float32), lanes(add, a[half], b[half]))
        assert same_floats(after.v(12 + half, np.float32), lanes(fma, a[half], b[half], c[half]))
        assert same_floats(after.v(16 + half, np.float32), lanes(lambda x: mul(x, 2.0), a[half]))
    assert same_floats(after.v(14, np.float32), lanes(mul, -a[1], b[0]))
    assert same_floats(after.v(15, np.float32), lanes(mul, a[0], -b[1]))
    assert same_floats(after.v(18, np.float32), a[1]) and same_floats(after.v(19, np.float32), b[0])


def test_packed_result_may_overlap_its_sources() -> None:
    a = [floats(seed, 1) for seed in range(4)]
    after = run(
        "v_pk_mul_f32 v[0:1], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]", v=dict(enumerate(a))
    )
    assert same_floats(after.v(0, np.float32), lanes(mul, a[1], a[2]))
    assert same_floats(after.v(1, np.float32), lanes(mul, a[0], a[3]))


def test_float64() -> None:
    random = np.random.default_rng(0)
    a, b, c = (
        random.standard_normal((8, 64)) * 10.0 ** random.integers(-20, 20, (8, 64))
        for _ in range(3)
    )
    code = [
        "v_add_f64 v[8:9], v[0:1], v[2:3]",
        "v_mul_f64 v[10:11], v[0:1], v[2:3]",
        "v_fma_f64 v[12:13], v[0:1], v[2:3], v[4:5]",
        "v_cvt_f32_f64 v14, v[0:1]",
        "v_cvt_f64_i32 v[16:17], v0",
        "v_max_f64 v[18:19], v[0:1], v[2:3]",
    ]
    after = run(code, v={0: a, 2: b, 4: c}, waves=8)
    np.testing.assert_array_equal(after.v(8, np.float64), a + b)
    np.testing.assert_array_equal(after.v(10, np.float64), a * b)
    flat = zip(a.reshape(-1), b.reshape(-1), c.reshape(-1), strict=True)
    exact = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in flat]
    np.testing.assert_array_equal(after.v(12, np.float64).reshape(-1), exact)
    assert same_floats(after.v(14, np.float32), a.astype(np.float32))
    np.testing.assert_array_equal(
        after.v(16, np.float64), a.view(np.int32)[:, ::2].astype(np.float64)
    )
    np.testing.assert_array_equal(after.v(18, np.float64), np.maximum(a, b))


@pytest.mark.parametrize(
    "code",
    [
        "v_mul_f32 v9, v0, v1",
        "v_add_f32 v9, v0, v1",
        "v_pk_mul_f32 v[8:9], v[0:1], v[0:1]",
        "v_fma_f32 v9, v0, v1, v1",
        "v_max_f32 v9, v0, v1",
    ],
)
def test_flushed_denormals(code: str) -> None:
    """MODE says flush: denormal sources count as zero and denormal results become zero, with
    their signs.
    """
    a, b = floats(1), floats(2)
    flushed = [np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x) for x in (a, b)]
    function: Callable[..., Number] = {
        "mul": mul,
        "add": add,
        "fma": lambda x, y: fma(x, y, y),
        "max": maximum,
        "pk": lambda x, y: mul(y, y),
    }[code.split("_")[1]]
    expected = lanes(function, *flushed)
    expected = np.where(
        np.abs(expected) < 2.0**-126, np.copysign(np.float32(0), expected), expected
    )
    got = run(code, v={0: a, 1: b}, mode=AITER_MODE, waves=8).v(9, np.float32)
    assert same_floats(got, expected)
