"""float16, 16-bit integers and float64: scalar forms against Fractions and math, packed forms
against scalar numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from machine import floats, integers, run, same_floats

ALL = np.arange(1 << 16, dtype=np.uint32).reshape(-1, 64)  # every half, 1024 waves
HALVES = ALL.astype(np.uint16).view(np.float16)


def nearest_half(exact: Fraction | float) -> float:
    """The float16 nearest to a value, ties to even."""
    if isinstance(exact, float) and not math.isfinite(exact):
        return exact
    exact = Fraction(exact)
    if exact == 0:
        return 0.0
    sign, exact = (-1, -exact) if exact < 0 else (1, exact)
    exponent = max(exact.numerator.bit_length() - exact.denominator.bit_length() - 1, -14)
    while exact >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 10)
    value = round(exact / unit) * unit
    return sign * (math.inf if value >= 65536 else float(value))


def guarded(function: Callable[[float], float]) -> Callable[[float], float]:
    def call(x: float) -> float:
        try:
            return function(x)
        except (ValueError, ZeroDivisionError, OverflowError):
            return math.nan

    return call


UNARY: dict[str, Callable[[float], float]] = {
    "v_trunc_f16": lambda x: math.copysign(math.trunc(x), x) if math.isfinite(x) else x,
    "v_ceil_f16": lambda x: math.copysign(math.ceil(x), x) if math.isfinite(x) else x,
    "v_floor_f16": lambda x: math.copysign(math.floor(x), x) if math.isfinite(x) else x,
    "v_rndne_f16": lambda x: math.copysign(round(x), x) if math.isfinite(x) else x,
}
CLOSE: dict[str, Callable[[float], float]] = {
    "v_rcp_f16": lambda x: math.copysign(math.inf, x) if x == 0 else 1 / x,
    "v_rsq_f16": lambda x: math.copysign(math.inf, x) if x == 0 else 1 / math.sqrt(x),
    "v_sqrt_f16": math.sqrt,
    "v_exp_f16": lambda x: math.inf if x > 20 else 0.0 if x < -30 else 2.0**x,
    "v_log_f16": lambda x: -math.inf if x == 0 else math.log2(x) if x < math.inf else x,
}


def half_result(after_bits: np.ndarray) -> np.ndarray:
    return after_bits.astype(np.uint16).view(np.float16)


@pytest.mark.parametrize("name", UNARY)
def test_rounding_of_every_half(name: str) -> None:
    got = half_result(run(f"{name} v1, v0", v={0: ALL}, waves=1024).v(1))
    expected = [UNARY[name](x) for x in HALVES.astype(float).reshape(-1).tolist()]
    assert same_floats(got.reshape(-1), np.array(expected, np.float16))


@pytest.mark.parametrize("name", CLOSE)
def test_functions_of_every_half(name: str) -> None:
    """Within an ulp of the exact value; the ISA does not promise more."""
    got = half_result(run(f"{name} v1, v0", v={0: ALL}, waves=1024).v(1)).reshape(-1)
    function = guarded(CLOSE[name])
    exact = np.array([function(x) for x in HALVES.astype(float).reshape(-1).tolist()])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    keep = ~np.isnan(exact) & (np.abs(exact) < 65000)
    wide = got.astype(np.float64)
    assert (
        np.abs(wide - exact)[keep] <= np.maximum(np.abs(exact[keep]) * 2.0**-10, 2.0**-24)
    ).all()
    assert (np.abs(wide[np.isinf(exact)]) == np.inf).all()


def pairs() -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    special = np.array(
        [0, 0x8000, 1, 0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x03FF, 0x0400], np.uint32
    )
    out = []
    for _ in range(3):
        plain = random.integers(0, 1 << 16, (8, 64), dtype=np.uint32)
        out.append(
            np.where(random.integers(0, 3, (8, 64)) == 0, random.choice(special, (8, 64)), plain)
        )
    return tuple(out)


def number_wins(pick: Callable[..., float]) -> Callable[..., float]:
    def call(*values: float) -> float:
        numbers = [v for v in values if not math.isnan(v)]
        return pick(numbers) if numbers else math.nan

    return call


def fma(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return nearest_half(exact) if exact else a * b + c


def product(a: float, b: float) -> float:
    if not all(map(math.isfinite, (a, b))):
        return a * b
    return math.copysign(
        abs(nearest_half(Fraction(a) * Fraction(b))), math.copysign(1, a) * math.copysign(1, b)
    )


def total(a: float, b: float) -> float:
    exact = a + b  # exact in float64
    return nearest_half(exact) if exact and math.isfinite(exact) else exact


def median(a: float, b: float, c: float) -> float:
    if any(map(math.isnan, (a, b, c))):
        return number_wins(min)(a, b, c)
    return sorted((a, b, c))[1]


SCALAR: dict[str, Callable[..., float]] = {
    "v_subrev_f16": lambda a, b: total(b, -a),
    "v_min_f16": lambda a, b: number_wins(min)(a, b),
    "v_max3_f16": lambda a, b, c: number_wins(max)(a, b, c),
    "v_min3_f16": lambda a, b, c: number_wins(min)(a, b, c),
    "v_med3_f16": median,
}
PACKED: dict[str, Callable[..., float]] = {
    "v_pk_add_f16": total,
    "v_pk_mul_f16": product,
    "v_pk_fma_f16": fma,
    "v_pk_max_f16": lambda a, b: number_wins(max)(a, b),
    "v_pk_min_f16": lambda a, b: number_wins(min)(a, b),
}


def over(function: Callable[..., float], *sources: np.ndarray) -> np.ndarray:
    values = [
        s.astype(np.uint16).view(np.float16).astype(float).reshape(-1).tolist() for s in sources
    ]
    out = [function(*x) for x in zip(*values, strict=True)]
    with np.errstate(all="ignore"):
        return np.array(out).astype(np.float16).reshape(sources[0].shape)


def equal_up_to_zero_sign(got: np.ndarray, expected: np.ndarray) -> bool:
    return same_floats(
        np.where(got == 0, np.float16(0), got), np.where(expected == 0, np.float16(0), expected)
    )


@pytest.mark.parametrize("name", SCALAR)
def test_float16(name: str) -> None:
    function = SCALAR[name]
    sources = pairs()[: function.__code__.co_argcount]
    arguments = ", ".join(f"v{k}" for k in range(len(sources)))
    got = half_result(run(f"{name} v9, {arguments}", v=dict(enumerate(sources)), waves=8).v(9))
    assert equal_up_to_zero_sign(got, over(function, *sources))


@pytest.mark.parametrize("name", PACKED)
def test_packed_float16(name: str) -> None:
    """Both halves; op_sel crosses them, neg_lo and neg_hi negate one each."""
    function = PACKED[name]
    low = pairs()[: function.__code__.co_argcount]
    high = [x[::-1, ::-1] for x in low]
    v = {k: a | b << np.uint32(16) for k, (a, b) in enumerate(zip(low, high, strict=True))}
    arguments = ", ".join(f"v{k}" for k in v)
    zeros = ",0" * (len(v) - 2)
    after = run(
        [
            f"{name} v8, {arguments}",
            f"{name} v9, {arguments} op_sel:[1,0{zeros}] op_sel_hi:[0,1{zeros.replace('0', '1')}] "
            f"neg_lo:[1,0{zeros}] neg_hi:[0,1{zeros}]",
        ],
        v=v,
        waves=8,
    )
    flip = np.uint32(0x8000)
    for register, a, b in (
        (8, low, high),
        (9, [high[0] ^ flip, *low[1:]], [low[0], high[1] ^ flip, *high[2:]]),
    ):
        assert equal_up_to_zero_sign(half_result(after.v(register) & 0xFFFF), over(function, *a))
        assert equal_up_to_zero_sign(half_result(after.v(register) >> 16), over(function, *b))


def s16(x: int) -> int:
    x &= 0xFFFF
    return x - (1 << 16) if x >> 15 else x


PACKED_INTEGERS: dict[str, Callable[..., int]] = {
    "v_pk_add_i16": lambda a, b: a + b,
    "v_pk_sub_u16": lambda a, b: a - b,
    "v_pk_max_u16": max,
    "v_pk_min_i16": lambda a, b: min(s16(a), s16(b)),
    "v_pk_lshrrev_b16": lambda a, b: b >> (a & 15),
    "v_pk_mad_i16": lambda a, b, c: a * b + c,
    "v_pk_mad_u16": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("name", PACKED_INTEGERS)
def test_packed_integers(name: str) -> None:
    function = PACKED_INTEGERS[name]
    count = 3 if "mad" in name else 2
    sources = [integers(k) for k in range(count)]
    arguments = ", ".join(f"v{k}" for k in range(count))
    got = run(f"{name} v9, {arguments}", v=dict(enumerate(sources)), waves=8).v(9)
    for shift in (0, 16):
        halves = [(s >> np.uint32(shift) & np.uint32(0xFFFF)).reshape(-1).tolist() for s in sources]
        expected = [function(*x) & 0xFFFF for x in zip(*halves, strict=True)]
        assert (got >> np.uint32(shift) & np.uint32(0xFFFF)).reshape(-1).tolist() == expected


def test_16_bit_multiply_add_and_its_other_half() -> None:
    a, b, c = (integers(k) for k in range(3))
    code = ["v_mad_u16 v8, v0, v1, v2", "v_mad_i16 v9, v0, v1, v2 op_sel:[1,0,0,1]"]
    after = run(code, v={0: a, 1: b, 2: c, 8: 0xAAAA5555, 9: 0xAAAA5555}, waves=8)
    low = (a.astype(np.int64) & 0xFFFF) * (b & 0xFFFF) + (c & 0xFFFF) & 0xFFFF
    np.testing.assert_array_equal(after.v(8), low | 0xAAAA0000)
    high = (a.astype(np.int64) >> 16) * (b & 0xFFFF) + (c & 0xFFFF) & 0xFFFF
    np.testing.assert_array_equal(after.v(9), high << 16 | 0x5555)


def test_conversions_of_halves() -> None:
    code = [
        "v_cvt_f16_u16 v1, v0",
        "v_cvt_f16_i16 v2, v0",
        "v_cvt_u16_f16 v3, v0",
        "v_cvt_i16_f16 v4, v0",
        "v_pack_b32_f16 v5, v0, v0 op_sel:[0,1,0]",
        "v_ldexp_f16 v6, v0, -3",
    ]
    after = run(code, v={0: ALL | ALL[::-1] << np.uint32(16)}, waves=1024)
    bits = ALL.reshape(-1).tolist()
    values = HALVES.astype(float).reshape(-1).tolist()
    assert same_floats(
        half_result(after.v(1)).reshape(-1), np.array([nearest_half(x) for x in bits], np.float16)
    )
    assert same_floats(
        half_result(after.v(2)).reshape(-1),
        np.array([nearest_half(s16(x)) for x in bits], np.float16),
    )

    def clamped(x: float, low: int, high: int) -> int:
        return 0 if math.isnan(x) else int(max(low, min(x, high))) & 0xFFFF

    assert after.v(3).reshape(-1).tolist() == [clamped(x, 0, 65535) for x in values]
    assert after.v(4).reshape(-1).tolist() == [clamped(x, -32768, 32767) for x in values]
    np.testing.assert_array_equal(after.v(5), ALL | ALL[::-1] << np.uint32(16))
    scaled = np.array(
        [math.copysign(nearest_half(x / 8), x) if x == x else x for x in values], np.float16
    )
    assert same_floats(half_result(after.v(6)).reshape(-1), scaled)


def test_gfx950_half_and_bf16_conversions() -> None:
    a, b = floats(1), floats(2)
    with np.errstate(all="ignore"):
        after = run(
            ["v_cvt_pk_f16_f32 v2, v0, v1", "v_cvt_f32_bf16 v3, v0"],
            "gfx950",
            v={0: a, 1: b},
            waves=8,
        )
        assert same_floats(half_result(after.v(2) & 0xFFFF), a.astype(np.float16))
        assert same_floats(half_result(after.v(2) >> 16), b.astype(np.float16))
        low = (a.view(np.uint32) & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16)
        assert same_floats(after.v(3, np.float32), low.astype(np.float32))


def test_dot_products() -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((2, 8, 64)).astype(np.float32) for _ in range(2))
    c = random.standard_normal((8, 64)).astype(np.float32)

    def packed(x: np.ndarray, dtype: type) -> np.ndarray:
        return x[0].astype(dtype).view(np.uint16).astype(np.uint32) | (
            x[1].astype(dtype).view(np.uint16).astype(np.uint32) << np.uint32(16)
        )

    for arch, name, dtype in (
        ("gfx942", "v_dot2_f32_f16", np.float16),
        ("gfx950", "v_dot2_f32_bf16", ml_dtypes.bfloat16),
        ("gfx942", "v_dot2c_f32_f16", np.float16),
        ("gfx950", "v_dot2c_f32_bf16", ml_dtypes.bfloat16),
    ):
        exact = (
            sum(
                x.astype(dtype).astype(np.float64) * y.astype(dtype).astype(np.float64)
                for x, y in zip(a, b, strict=True)
            )
            + c
        )
        code = f"{name} v9, v0, v1" + ("" if "2c" in name else ", v9")
        after = run(code, arch, v={0: packed(a, dtype), 1: packed(b, dtype), 9: c}, waves=8)
        np.testing.assert_allclose(
            after.v(9, np.float32), exact, rtol=1e-6, atol=1e-6, err_msg=name
        )


def test_remaining_float32() -> None:
    a, b = floats(1), floats(2)
    code = [
        "v_mul_legacy_f32 v2, v0, v1",
        "v_fract_f32 v3, v0",
        "v_cvt_rpi_i32_f32 v4, v0",
        "v_cvt_f32_ubyte1 v5, v0",
        "v_cvt_f32_ubyte2 v6, v0",
        "v_mov_b64 v[8:9], v[0:1]",
    ]
    after = run(code, v={0: a, 1: b}, waves=8)
    with np.errstate(all="ignore"):
        assert same_floats(
            after.v(2, np.float32), np.where((a == 0) | (b == 0), np.float32(0), a * b)
        )
    for x, got in zip(
        a.astype(float).reshape(-1).tolist(),
        after.v(3, np.float32).reshape(-1).tolist(),
        strict=True,
    ):
        if math.isfinite(x):
            assert got == min(np.float32(Fraction(x) - math.floor(x)), np.float32(1 - 2.0**-24))
    expected = [
        0
        if math.isnan(x)
        else int(max(-(2**31), min(math.floor(x + 0.5) if math.isfinite(x) else x, 2**31 - 1)))
        for x in a.astype(float).reshape(-1).tolist()
    ]
    assert after.v(4, np.int32).reshape(-1).tolist() == expected
    bits = a.view(np.uint32)
    np.testing.assert_array_equal(after.v(5, np.float32), bits >> 8 & 255)
    np.testing.assert_array_equal(after.v(6, np.float32), bits >> 16 & 255)
    np.testing.assert_array_equal(
        after.v(8, np.uint64), bits | b.view(np.uint32).astype(np.uint64) << np.uint64(32)
    )


def test_remaining_float64() -> None:
    random = np.random.default_rng(0)
    a = random.standard_normal((8, 64)) * 10.0 ** random.integers(-12, 12, (8, 64))
    a[0, :8] = [0.0, -0.0, np.inf, -np.inf, 0.5, 1.5, 2.5, 1e300]
    f, u = floats(3), integers(4)
    code = [
        f"v_{name}_f64 v[{10 + 2 * k}:{11 + 2 * k}], v[0:1]"
        for k, name in enumerate(
            ("trunc", "ceil", "floor", "rndne", "fract", "rcp", "sqrt", "rsq", "frexp_mant")
        )
    ]
    code += [
        "v_frexp_exp_i32_f64 v30, v[0:1]",
        "v_ldexp_f64 v[32:33], v[0:1], 5",
        "v_cvt_f64_f32 v[34:35], v4",
        "v_cvt_f64_u32 v[36:37], v5",
        "v_cvt_i32_f64 v38, v[0:1]",
        "v_cvt_u32_f64 v39, v[0:1]",
        "v_min_f64 v[40:41], v[0:1], v[2:3]",
        "v_fmac_f64 v[42:43], v[0:1], 2.0",
    ]
    after = run(code, v={0: a, 2: -a[::-1], 4: f, 5: u, 42: np.ones((8, 64))}, waves=8)
    finite = np.isfinite(a)
    with np.errstate(all="ignore"):
        for register, expected in (
            (10, np.trunc(a)),
            (12, np.ceil(a)),
            (14, np.floor(a)),
            (16, np.rint(a)),
            (20, 1 / a),
            (22, np.sqrt(a)),
            (24, 1 / np.sqrt(a)),
            (32, a * 32),
            (34, f.astype(np.float64)),
            (36, u.astype(np.float64)),
            (40, np.minimum(a, -a[::-1])),
            (42, a * 2 + 1),
        ):
            got = after.v(register, np.float64)
            assert same_floats(np.where(got == 0, 0, got), np.where(expected == 0, 0, expected)), (
                register
            )
    fraction = np.minimum(a - np.floor(a), np.nextafter(1, 0))
    np.testing.assert_array_equal(after.v(18, np.float64)[finite], fraction[finite])
    split = [math.frexp(x) if math.isfinite(x) else (x, 0) for x in a.reshape(-1).tolist()]
    np.testing.assert_array_equal(after.v(26, np.float64).reshape(-1), [m for m, _ in split])
    assert after.v(30, np.int32).reshape(-1).tolist() == [e for _, e in split]
    clipped = np.nan_to_num(a, posinf=1e300, neginf=-1e300)
    np.testing.assert_array_equal(
        after.v(38, np.int32), np.trunc(np.clip(clipped, -(2**31), 2**31 - 1))
    )
    np.testing.assert_array_equal(after.v(39), np.trunc(np.clip(clipped, 0, 2**32 - 1)))


def test_mixed_precision_fma() -> None:
    a, b = pairs()[:2]
    c = floats(5)
    code = [
        "v_fma_mix_f32 v8, v0, v1, v2 op_sel_hi:[1,1,0]",
        "v_fma_mixlo_f16 v9, v0, -v1, |v2| op_sel_hi:[1,1,0]",
        "v_fma_mixhi_f16 v10, v0, v1, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]",
    ]
    high = b[::-1] << np.uint32(16)
    after = run(code, v={0: a | high, 1: b, 2: c, 9: 0xAAAA5555, 10: 0xAAAA5555}, waves=8)
    with np.errstate(all="ignore"):
        x, y, h = (v.astype(np.uint16).view(np.float16).astype(np.float64) for v in (a, b, b[::-1]))
        exact = (x * y + c.astype(np.float64)).astype(np.float32)
        close = np.isclose(after.v(8, np.float32), exact, rtol=2e-7, equal_nan=True)
        assert close.all()
        low = half_result(after.v(9) & 0xFFFF)
        np.testing.assert_allclose(
            low.astype(float), (-x * y + np.abs(c)).astype(np.float32).astype(np.float16), rtol=2e-3
        )
        assert (after.v(9) >> 16 == 0xAAAA).all() and (after.v(10) & 0xFFFF == 0x5555).all()
        top = half_result(after.v(10) >> 16)
        np.testing.assert_allclose(
            top.astype(float), (h * y + c).astype(np.float32).astype(np.float16), rtol=2e-3
        )
