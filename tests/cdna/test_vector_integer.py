"""Integer vector instructions against plain Python integers, lane by lane."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from machine import integers, run

M = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF


def s32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def s24(x: int) -> int:
    x &= 0xFFFFFF
    return x - (1 << 24) if x >> 23 else x


def s16(x: int) -> int:
    x &= 0xFFFF
    return x - (1 << 16) if x >> 15 else x


def u24(x: int) -> int:
    return x & 0xFFFFFF


def bfe(a: int, b: int, c: int) -> int:
    return a >> (b & 31) & (1 << (c & 31)) - 1


def bfe_signed(a: int, b: int, c: int) -> int:
    width = c & 31
    value = s32(a) >> (b & 31) & (1 << width) - 1
    return (value - (1 << width) if width and value >> width - 1 else value) & M


def perm(a: int, b: int, c: int) -> int:
    source = (a << 32 | b).to_bytes(8, "little")
    out = 0
    for k in range(4):
        select = c >> 8 * k & 0xFF
        if select < 8:
            byte = source[select]
        elif select < 12:
            byte = 0xFF if source[2 * (select - 8) + 1] & 0x80 else 0
        else:
            byte = 0 if select == 12 else 0xFF
        out |= byte << 8 * k
    return out


def leading(a: int) -> int:
    return 32 - a.bit_length() if a else M


def leading_sign(a: int) -> int:
    return leading(a ^ M if a >> 31 else a)


def trailing(a: int) -> int:
    return (a & -a).bit_length() - 1 if a else M


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))


BINARY: dict[str, Callable[[int, int], int]] = {
    "v_add_u32": lambda a, b: a + b & M,
    "v_sub_u32": lambda a, b: a - b & M,
    "v_subrev_u32": lambda a, b: b - a & M,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b) & M,
    "v_lshlrev_b32": lambda a, b: b << (a & 31) & M,
    "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32": lambda a, b: s32(b) >> (a & 31) & M,
    "v_mul_lo_u32": lambda a, b: a * b & M,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: s32(a) * s32(b) >> 32 & M,
    "v_mul_i32_i24": lambda a, b: s24(a) * s24(b) & M,
    "v_mul_hi_i32_i24": lambda a, b: s24(a) * s24(b) >> 32 & M,
    "v_mul_u32_u24": lambda a, b: u24(a) * u24(b) & M,
    "v_mul_hi_u32_u24": lambda a, b: u24(a) * u24(b) >> 32,
    "v_min_u32": min,
    "v_max_u32": max,
    "v_min_i32": lambda a, b: min(s32(a), s32(b)) & M,
    "v_max_i32": lambda a, b: max(s32(a), s32(b)) & M,
    "v_bfm_b32": lambda a, b: (1 << (a & 31)) - 1 << (b & 31) & M,
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b & M,
    "v_cvt_pk_u16_u32": lambda a, b: min(a, 65535) | min(b, 65535) << 16,
    "v_cvt_pk_i16_i32": lambda a, b: (
        clamp(s32(a), -32768, 32767) & 0xFFFF | (clamp(s32(b), -32768, 32767) & 0xFFFF) << 16
    ),
    "v_add_i32": lambda a, b: a + b & M,
    "v_sub_i32": lambda a, b: a - b & M,
    "v_add_u16": lambda a, b: a + b & 0xFFFF,
    "v_sub_u16": lambda a, b: a - b & 0xFFFF,
    "v_subrev_u16": lambda a, b: b - a & 0xFFFF,
    "v_mul_lo_u16": lambda a, b: a * b & 0xFFFF,
    "v_lshlrev_b16": lambda a, b: b << (a & 15) & 0xFFFF,
    "v_lshrrev_b16": lambda a, b: (b & 0xFFFF) >> (a & 15),
    "v_ashrrev_i16": lambda a, b: s16(b) >> (a & 15) & 0xFFFF,
    "v_max_u16": lambda a, b: max(a & 0xFFFF, b & 0xFFFF),
    "v_min_u16": lambda a, b: min(a & 0xFFFF, b & 0xFFFF),
    "v_max_i16": lambda a, b: max(s16(a), s16(b)) & 0xFFFF,
    "v_min_i16": lambda a, b: min(s16(a), s16(b)) & 0xFFFF,
}
TERNARY: dict[str, Callable[[int, int, int], int]] = {
    "v_add3_u32": lambda a, b, c: a + b + c & M,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c & M,
    "v_add_lshl_u32": lambda a, b, c: (a + b & M) << (c & 31) & M,
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) & M | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c & M,
    "v_bfe_u32": bfe,
    "v_bfe_i32": bfe_signed,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c & M,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31) & M,
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3) & M,
    "v_mad_u32_u24": lambda a, b, c: u24(a) * u24(b) + c & M,
    "v_mad_i32_i24": lambda a, b, c: s24(a) * s24(b) + c & M,
    "v_min3_u32": lambda a, b, c: min(a, b, c),
    "v_max3_u32": lambda a, b, c: max(a, b, c),
    "v_med3_u32": lambda a, b, c: sorted((a, b, c))[1],
    "v_min3_i32": lambda a, b, c: min(map(s32, (a, b, c))) & M,
    "v_max3_i32": lambda a, b, c: max(map(s32, (a, b, c))) & M,
    "v_med3_i32": lambda a, b, c: sorted(map(s32, (a, b, c)))[1] & M,
    "v_sad_u8": lambda a, b, c: (
        c + sum(abs((a >> k & 255) - (b >> k & 255)) for k in (0, 8, 16, 24)) & M
    ),
    "v_sad_u32": lambda a, b, c: abs(a - b) + c & M,
    "v_perm_b32": perm,
    "v_dot4_i32_i8": lambda a, b, c: (
        c
        + sum(
            int(np.int8(np.uint8(a >> k & 255))) * int(np.int8(np.uint8(b >> k & 255)))
            for k in (0, 8, 16, 24)
        )
        & M
    ),
    "v_dot4_u32_u8": lambda a, b, c: (
        c + sum((a >> k & 255) * (b >> k & 255) for k in (0, 8, 16, 24)) & M
    ),
}
UNARY: dict[str, Callable[[int], int]] = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a & M,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32": leading,
    "v_ffbh_i32": leading_sign,
    "v_ffbl_b32": trailing,
}


def lanes(function: Callable[..., int], *sources: np.ndarray) -> np.ndarray:
    flat = [source.reshape(-1).tolist() for source in sources]
    return np.array([function(*x) for x in zip(*flat, strict=True)], np.uint64).reshape(
        sources[0].shape
    )


@pytest.mark.parametrize("name", [*UNARY, *BINARY, *TERNARY])
def test_against_integers(name: str) -> None:
    function = {**UNARY, **BINARY, **TERNARY}[name]
    count = 1 if name in UNARY else 2 if name in BINARY else 3
    sources = [integers(seed) for seed in range(count)]
    if name == "v_perm_b32":  # selectors of interest, and one uniform selector in the last waves
        sources[2] = (
            np.random.default_rng(3)
            .integers(0, 16, (8, 64, 4), dtype=np.uint8)
            .view(np.uint32)[..., 0]
        )
        sources[2][4:] = np.array([0x07060302, 0x00010203, 0x0C0D0A04, 0x09080B05], np.uint32)[
            :, None
        ]
    arguments = ", ".join(f"v{k}" for k in range(count))
    expected = lanes(function, *sources)
    if name == "v_perm_b32":
        for wave in range(8):  # one wave at a time, for the path that sees a uniform selector
            after = run(f"{name} v9, {arguments}", v={k: a[wave] for k, a in enumerate(sources)})
            np.testing.assert_array_equal(after.v(9)[0], expected[wave])
    after = run(f"{name} v9, {arguments}", v=dict(enumerate(sources)), waves=8)
    np.testing.assert_array_equal(after.v(9), expected)


@pytest.mark.parametrize(
    "name, function, wide",
    [
        ("v_lshlrev_b64", lambda a, b: b << (a & 63) & M64, (0, 1)),
        ("v_lshrrev_b64", lambda a, b: b >> (a & 63), (0, 1)),
        ("v_ashrrev_i64", lambda a, b: (b - (1 << 64) if b >> 63 else b) >> (a & 63) & M64, (0, 1)),
    ],
)
def test_64_bit_shifts(name: str, function: Callable[..., int], wide: tuple[int, int]) -> None:
    a = integers(1)
    b = integers(2).astype(np.uint64) << np.uint64(32) | integers(3)
    after = run(f"{name} v[8:9], v0, v[2:3]", v={0: a, 2: b}, waves=8)
    np.testing.assert_array_equal(after.v(8, np.uint64), lanes(function, a, b))


def test_lshl_add_u64() -> None:
    a = integers(2).astype(np.uint64) << np.uint64(32) | integers(3)
    c = integers(4).astype(np.uint64) << np.uint64(32) | integers(5)
    after = run("v_lshl_add_u64 v[8:9], v[2:3], 3, v[4:5]", v={2: a, 4: c}, waves=8)
    np.testing.assert_array_equal(
        after.v(8, np.uint64), lanes(lambda x, y: (x << 3) + y & M64, a, c)
    )


def test_mad_64() -> None:
    a, b = integers(1), integers(2)
    c = integers(4).astype(np.uint64) << np.uint64(32) | integers(5)
    code = [
        "v_mad_u64_u32 v[8:9], s[10:11], v0, v1, v[2:3]",
        "v_mad_i64_i32 v[12:13], s[12:13], v0, v1, v[2:3]",
    ]
    after = run(code, v={0: a, 1: b, 2: c}, waves=8)
    product = lanes(lambda x, y: x * y, a, b)
    np.testing.assert_array_equal(
        after.v(8, np.uint64), lanes(lambda p, z: p + z & M64, product, c)
    )
    signed = lanes(lambda x, y, z: s32(x) * s32(y) + z & M64, a, b, c)
    np.testing.assert_array_equal(after.v(12, np.uint64), signed)
    carry = [
        sum((int(p) + int(z) >> 64) << k for k, (p, z) in enumerate(zip(*w, strict=True)))
        for w in zip(product, c, strict=True)
    ]
    assert [after.s64(10, wave) for wave in range(8)] == carry


@pytest.mark.parametrize(
    "name, carry_in",
    [
        ("add", False),
        ("sub", False),
        ("subrev", False),
        ("addc", True),
        ("subb", True),
        ("subbrev", True),
    ],
)
def test_carries(name: str, carry_in: bool) -> None:
    a, b = integers(1, 1), integers(2, 1)
    vcc, mask = 0x0123456789ABCDEF, 0xFFFF0000FFFFFFFF
    tail = ", vcc" if carry_in else ""
    after = run(
        f"v_{name}_co_u32 v9, vcc, v0, v1{tail}", v={0: a, 1: b, 9: 7}, s={106: vcc}, exec_mask=mask
    )
    got, carries = after.v(9)[0], after.s64(106)
    for lane in range(64):
        if not mask >> lane & 1:
            assert got[lane] == 7 and not carries >> lane & 1
            continue
        x, y, c = int(a[0, lane]), int(b[0, lane]), vcc >> lane & 1 if carry_in else 0
        if "rev" in name:
            x, y = y, x
        total = x + y + c if "add" in name else x - y - c
        assert got[lane] == total & M and carries >> lane & 1 == (total < 0 or total > M), lane


@pytest.mark.parametrize("name", ["v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32"])
def test_mbcnt(name: str) -> None:
    a, b = integers(1, 1), integers(2, 1)
    after = run(f"{name} v9, v0, v1", v={0: a, 1: b})
    for lane in range(64):
        first = 0 if "lo" in name else 32
        below = sum(int(a[0, lane]) >> k & 1 for k in range(32) if first + k < lane)
        assert after.v(9)[0, lane] == below + int(b[0, lane]) & M


@pytest.mark.parametrize("kind", ["u32", "i32", "u16", "i16", "u64", "i64"])
@pytest.mark.parametrize("test", ["lt", "eq", "le", "gt", "ne", "ge"])
def test_compare(kind: str, test: str) -> None:
    dtype = np.dtype({"u": "uint", "i": "int"}[kind[0]] + kind[1:])
    wide = kind.endswith("64")
    a, b = integers(1, 1), integers(2, 1)
    b[0, ::3] = a[0, ::3]
    if wide:
        a, b = (x.astype(np.uint64) << np.uint64(32) | x[:, ::-1] for x in (a, b))
    registers = ("v[0:1]", "v[2:3]") if wide else ("v0", "v2")
    mask = 0xFFFFFFFFFFFFFF0F
    after = run(
        f"v_cmp_{test}_{kind} s[10:11], {registers[0]}, {registers[1]}",
        v={0: a, 2: b},
        exec_mask=mask,
    )
    operator = {"lt": "<", "eq": "==", "le": "<=", "gt": ">", "ne": "!=", "ge": ">="}[test]
    x, y = (([int(np.array(k).astype(dtype)) for k in v[0]]) for v in (a, b))
    expected = sum(eval(f"p {operator} q") << k for k, (p, q) in enumerate(zip(x, y, strict=True)))
    assert after.s64(10) == expected & mask


def test_cmpx_writes_exec_and_vcc() -> None:
    a = integers(1, 1)
    after = run(["v_cmpx_lt_u32 vcc, v0, v1", "v_mov_b32 v9, 5"], v={0: a, 1: 100, 9: 1})
    less = a[0] < 100
    np.testing.assert_array_equal(after.v(9)[0], np.where(less, 5, 1))
    assert after.s64(106) == after.s64(126) == sum(int(x) << k for k, x in enumerate(less))


def test_packed_16_bit() -> None:
    a, b = integers(1), integers(2)
    halves = lambda x: (x & 0xFFFF, x >> 16)  # noqa: E731
    for name, function in {
        "v_pk_add_u16": lambda p, q: p + q,
        "v_pk_sub_i16": lambda p, q: p - q,
        "v_pk_mul_lo_u16": lambda p, q: p * q,
        "v_pk_max_i16": lambda p, q: max(s16(p), s16(q)),
        "v_pk_min_u16": min,
        "v_pk_lshlrev_b16": lambda p, q: q << (p & 15),
        "v_pk_ashrrev_i16": lambda p, q: s16(q) >> (p & 15),
    }.items():

        def both(x: int, y: int, function: Callable[[int, int], int] = function) -> int:
            low, high = (function(p, q) & 0xFFFF for p, q in zip(halves(x), halves(y), strict=True))
            return low | high << 16

        after = run(f"{name} v9, v0, v1", v={0: a, 1: b}, waves=8)
        np.testing.assert_array_equal(after.v(9), lanes(both, a, b), err_msg=name)
    crossed = run("v_pk_add_u16 v9, v0, v1 op_sel:[1,0] op_sel_hi:[0,1]", v={0: a, 1: b}, waves=8)
    expected = lanes(
        lambda x, y: (x >> 16) + y & 0xFFFF | ((x & 0xFFFF) + (y >> 16) & 0xFFFF) << 16, a, b
    )
    np.testing.assert_array_equal(crossed.v(9), expected)


def test_bitop3_is_any_function_of_three_bits() -> None:
    a, b, c = integers(1, 1), integers(2, 1), integers(3, 1)
    for table in (0x00, 0xFF, 0x96, 0xE8, 0xCA, 0x01, 0x80, 0x6A):
        after = run(
            f"v_bitop3_b32 v9, v0, v1, v2 bitop3:{table:#x}", "gfx950", v={0: a, 1: b, 2: c}
        )

        def bits(x: int, y: int, z: int, table: int = table) -> int:
            return sum(
                (table >> ((x >> k & 1) << 2 | (y >> k & 1) << 1 | z >> k & 1) & 1) << k
                for k in range(32)
            )

        np.testing.assert_array_equal(after.v(9), lanes(bits, a, b, c), err_msg=hex(table))
        code = f"v_bitop3_b16 v9, v0, v1, v2 bitop3:{table:#x} op_sel:[1,0,0,1]"
        after = run(code, "gfx950", v={0: a << np.uint32(16), 1: b, 2: c, 9: 0x5555})
        low = lanes(bits, a, b, c) & np.uint64(0xFFFF)
        np.testing.assert_array_equal(after.v(9), low << np.uint64(16) | np.uint64(0x5555))


def test_integer_clamp_saturates() -> None:
    a, b = integers(1), integers(2)
    after = run(
        [
            "v_add_u32_e64 v9, v0, v1 clamp",
            "v_sub_u32_e64 v10, v0, v1 clamp",
            "v_add_i32 v11, v0, v1 clamp",
        ],
        v={0: a, 1: b},
        waves=8,
    )
    np.testing.assert_array_equal(after.v(9), lanes(lambda x, y: min(x + y, M), a, b))
    np.testing.assert_array_equal(after.v(10), lanes(lambda x, y: max(x - y, 0), a, b))
    signed = lanes(lambda x, y: clamp(s32(x) + s32(y), -(2**31), 2**31 - 1) & M, a, b)
    np.testing.assert_array_equal(after.v(11), signed)


def test_constants_literals_and_scalars_as_sources() -> None:
    a = integers(1, 1)
    after = run(
        [
            "v_add_u32 v9, 64, v0",
            "v_add_u32 v10, -16, v0",
            "v_and_b32 v11, 0x12345678, v0",
            "v_xor_b32 v12, s5, v0",
            "v_mov_b32 v13, 0.15915494",
            "v_or_b32 v14, -4.0, v0",
        ],
        v={0: a},
        s={5: 0xDEADBEEF},
    )
    np.testing.assert_array_equal(after.v(9), a + np.uint32(64))
    np.testing.assert_array_equal(after.v(10), a - np.uint32(16))
    np.testing.assert_array_equal(after.v(11), a & np.uint32(0x12345678))
    np.testing.assert_array_equal(after.v(12), a ^ np.uint32(0xDEADBEEF))
    assert (after.v(13) == 0x3E22F983).all()
    np.testing.assert_array_equal(after.v(14), a | np.uint32(0xC0800000))


def test_accumulating_byte_dot_product() -> None:
    a, b, c = (integers(k) for k in range(3))
    after = run("v_dot4c_i32_i8 v2, v0, v1", v={0: a, 1: b, 2: c}, waves=8)
    np.testing.assert_array_equal(after.v(2), lanes(TERNARY["v_dot4_i32_i8"], a, b, c))
