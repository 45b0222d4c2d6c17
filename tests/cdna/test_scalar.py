"""Scalar instructions against Python integers, with SCC."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from machine import SPECIAL_INTEGERS, run

from build_tools.cdna.decoder import UnknownInstruction
from build_tools.cdna.state import Fault, Memory

M = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF


def s32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def s64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def overflow(x: int) -> bool:
    return not -(2**31) <= x < 2**31


def field(x: int, control: int, signed: bool, bits: int) -> int:
    offset, width = control & bits - 1, min(control >> 16 & 127, bits)
    value = x >> offset & (1 << width) - 1
    if signed and width + offset > bits:  # the sign comes from the top of what was shifted
        value = (x - (1 << bits) if x >> bits - 1 else x) >> offset & (1 << width) - 1
    return value - (1 << width) if signed and width and value >> width - 1 else value


Outcome = tuple[int, bool | None]
BINARY: dict[str, Callable[[int, int, bool], Outcome]] = {
    "s_add_u32": lambda a, b, c: (a + b, a + b > M),
    "s_sub_u32": lambda a, b, c: (a - b, b > a),
    "s_addc_u32": lambda a, b, c: (a + b + c, a + b + c > M),
    "s_subb_u32": lambda a, b, c: (a - b - c, b + c > a),
    "s_add_i32": lambda a, b, c: (a + b, overflow(s32(a) + s32(b))),
    "s_sub_i32": lambda a, b, c: (a - b, overflow(s32(a) - s32(b))),
    "s_absdiff_i32": lambda a, b, c: (abs(s32(a) - s32(b)), (abs(s32(a) - s32(b)) & M) != 0),
    "s_mul_i32": lambda a, b, c: (a * b, None),
    "s_mul_hi_u32": lambda a, b, c: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b, c: (s32(a) * s32(b) >> 32, None),
    "s_min_u32": lambda a, b, c: (min(a, b), a < b),
    "s_max_u32": lambda a, b, c: (max(a, b), a > b),
    "s_min_i32": lambda a, b, c: (min(s32(a), s32(b)), s32(a) < s32(b)),
    "s_max_i32": lambda a, b, c: (max(s32(a), s32(b)), s32(a) > s32(b)),
    "s_cselect_b32": lambda a, b, c: (a if c else b, None),
    "s_and_b32": lambda a, b, c: (a & b, a & b != 0),
    "s_or_b32": lambda a, b, c: (a | b, a | b != 0),
    "s_xor_b32": lambda a, b, c: (a ^ b, a ^ b != 0),
    "s_andn2_b32": lambda a, b, c: (a & ~b, a & ~b != 0),
    "s_orn2_b32": lambda a, b, c: (a | ~b, (a | ~b) & M != 0),
    "s_nand_b32": lambda a, b, c: (~(a & b), ~(a & b) & M != 0),
    "s_nor_b32": lambda a, b, c: (~(a | b), ~(a | b) & M != 0),
    "s_xnor_b32": lambda a, b, c: (~(a ^ b), ~(a ^ b) & M != 0),
    "s_lshl_b32": lambda a, b, c: (a << (b & 31), a << (b & 31) & M != 0),
    "s_lshr_b32": lambda a, b, c: (a >> (b & 31), a >> (b & 31) != 0),
    "s_ashr_i32": lambda a, b, c: (s32(a) >> (b & 31), s32(a) >> (b & 31) != 0),
    "s_bfm_b32": lambda a, b, c: ((1 << (a & 31)) - 1 << (b & 31), None),
    "s_bfe_u32": lambda a, b, c: (field(a, b, False, 32), field(a, b, False, 32) != 0),
    "s_bfe_i32": lambda a, b, c: (field(a, b, True, 32), field(a, b, True, 32) != 0),
    "s_pack_ll_b32_b16": lambda a, b, c: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b, c: (a & 0xFFFF | b & 0xFFFF0000, None),
    "s_pack_hh_b32_b16": lambda a, b, c: (a >> 16 | b & 0xFFFF0000, None),
    **{
        f"s_lshl{k}_add_u32": lambda a, b, c, k=k: ((a << k) + b, (a << k) + b > M)
        for k in (1, 2, 3, 4)
    },
}
BINARY64: dict[str, Callable[[int, int, bool], Outcome]] = {
    "s_and_b64": lambda a, b, c: (a & b, a & b != 0),
    "s_or_b64": lambda a, b, c: (a | b, a | b != 0),
    "s_xor_b64": lambda a, b, c: (a ^ b, a ^ b != 0),
    "s_andn2_b64": lambda a, b, c: (a & ~b, a & ~b != 0),
    "s_orn2_b64": lambda a, b, c: (a | ~b, (a | ~b) & M64 != 0),
    "s_nand_b64": lambda a, b, c: (~(a & b), ~(a & b) & M64 != 0),
    "s_nor_b64": lambda a, b, c: (~(a | b), ~(a | b) & M64 != 0),
    "s_xnor_b64": lambda a, b, c: (~(a ^ b), ~(a ^ b) & M64 != 0),
    "s_cselect_b64": lambda a, b, c: (a if c else b, None),
    "s_lshl_b64": lambda a, b, c: (a << (b & 63), a << (b & 63) & M64 != 0),
    "s_lshr_b64": lambda a, b, c: (a >> (b & 63), a >> (b & 63) != 0),
    "s_ashr_i64": lambda a, b, c: (s64(a) >> (b & 63), s64(a) >> (b & 63) != 0),
    "s_bfm_b64": lambda a, b, c: ((1 << (a & 63)) - 1 << (b & 63), None),
    "s_bfe_u64": lambda a, b, c: (field(a, b, False, 64), field(a, b, False, 64) != 0),
    "s_bfe_i64": lambda a, b, c: (field(a, b, True, 64), field(a, b, True, 64) != 0),
}


def first_one(a: int) -> int:
    return (a & -a).bit_length() - 1 if a else -1


def leading(a: int, bits: int) -> int:
    return bits - a.bit_length() if a else -1


def flip(a: int, bits: int) -> int:
    return int(f"{a:0{bits}b}"[::-1], 2)


UNARY: dict[str, tuple[int, int, Callable[[int], Outcome]]] = {  # bits of source and destination
    "s_mov_b32": (32, 32, lambda a: (a, None)),
    "s_mov_b64": (64, 64, lambda a: (a, None)),
    "s_not_b32": (32, 32, lambda a: (~a, ~a & M != 0)),
    "s_not_b64": (64, 64, lambda a: (~a, ~a & M64 != 0)),
    "s_abs_i32": (32, 32, lambda a: (abs(s32(a)), a != 0)),
    "s_brev_b32": (32, 32, lambda a: (flip(a, 32), None)),
    "s_brev_b64": (64, 64, lambda a: (flip(a, 64), None)),
    "s_bcnt0_i32_b32": (32, 32, lambda a: (32 - a.bit_count(), a != M)),
    "s_bcnt1_i32_b32": (32, 32, lambda a: (a.bit_count(), a != 0)),
    "s_bcnt0_i32_b64": (64, 32, lambda a: (64 - a.bit_count(), a != M64)),
    "s_bcnt1_i32_b64": (64, 32, lambda a: (a.bit_count(), a != 0)),
    "s_ff0_i32_b32": (32, 32, lambda a: (first_one(~a & M), None)),
    "s_ff1_i32_b32": (32, 32, lambda a: (first_one(a), None)),
    "s_ff0_i32_b64": (64, 32, lambda a: (first_one(~a & M64), None)),
    "s_ff1_i32_b64": (64, 32, lambda a: (first_one(a), None)),
    "s_flbit_i32_b32": (32, 32, lambda a: (leading(a, 32), None)),
    "s_flbit_i32_b64": (64, 32, lambda a: (leading(a, 64), None)),
    "s_flbit_i32": (32, 32, lambda a: (leading(~a & M if a >> 31 else a, 32), None)),
    "s_sext_i32_i8": (32, 32, lambda a: ((a & 255) - ((a & 128) << 1), None)),
    "s_sext_i32_i16": (32, 32, lambda a: ((a & 0xFFFF) - ((a & 0x8000) << 1), None)),
}
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
FIELDS = [
    0x00080004,
    0x00200000,
    0x00200008,
    0x00000003,
    0x0010001F,
    0x00400010,
    0x00280030,
    0x0001001F,
]


def sample(seed: int, count: int, name: str) -> np.ndarray:
    random = np.random.default_rng(seed)
    out = random.integers(0, 1 << 32, count, dtype=np.uint64)
    out[::2] = random.choice(np.array(SPECIAL_INTEGERS, np.uint64), (count + 1) // 2)
    if "bfe" in name and seed == 2:
        out[:] = np.resize(np.array(FIELDS, np.uint64), count)
    return out


def check(
    after_value: Callable[[int], int],
    scc: np.ndarray,
    before: bool,
    outcomes: list[Outcome],
    mask: int,
) -> None:
    for wave, (value, flag) in enumerate(outcomes):
        assert after_value(wave) == value & mask, wave
        assert bool(scc[wave, 0]) == (before if flag is None else flag), wave


@pytest.mark.parametrize("scc", [False, True])
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, scc: bool) -> None:
    a, b = sample(1, 48, name), sample(2, 48, name)
    after = run(f"{name} s6, s4, s5", s={4: a, 5: b}, scc=scc, waves=48)
    outcomes = [BINARY[name](int(x), int(y), scc) for x, y in zip(a, b, strict=True)]
    check(lambda wave: after.s(6, wave), after.batch.scc, scc, outcomes, M)


@pytest.mark.parametrize("name", BINARY64)
def test_binary_64(name: str) -> None:
    a, c = (sample(k, 48, "") << np.uint64(32) | sample(k + 5, 48, "") for k in (1, 3))
    shift = sample(2, 48, name)
    narrow = "sh" in name.split("_")[1] or "bfe" in name
    wide_a = "bfm" not in name
    x = [int(v) for v in (a if wide_a else sample(1, 48, ""))]
    y = [int(v) for v in (c if not narrow and wide_a else shift)]
    operands = f"s[{4}:{5}]" if wide_a else "s4", "s[8:9]" if not narrow and wide_a else "s8"
    state = {
        k + h: [v >> 32 * h & M for v in values] for k, values in ((4, x), (8, y)) for h in (0, 1)
    }
    after = run(f"{name} s[12:13], {operands[0]}, {operands[1]}", s=state, scc=True, waves=48)
    outcomes = [BINARY64[name](p, q, True) for p, q in zip(x, y, strict=True)]
    check(lambda wave: after.s64(12, wave), after.batch.scc, True, outcomes, M64)


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    source, destination, function = UNARY[name]
    values = [int(v) for v in sample(1, 48, "")]
    if source == 64:
        values = [
            v << 32 * (k % 2) | int(w) * (k % 3 == 0)
            for k, (v, w) in enumerate(zip(values, sample(2, 48, ""), strict=True))
        ]
    state = {4 + h: [v >> 32 * h & M for v in values] for h in (0, 1)}
    registers = ["s4", "s[4:5]"][source == 64], ["s6", "s[6:7]"][destination == 64]
    after = run(f"{name} {registers[1]}, {registers[0]}", s=state, waves=48)
    outcomes = [function(v) for v in values]
    value = after.s if destination == 32 else after.s64
    check(
        lambda wave: value(6, wave),
        after.batch.scc,
        False,
        outcomes,
        M if destination == 32 else M64,
    )


@pytest.mark.parametrize("kind", ["i32", "u32"])
@pytest.mark.parametrize("test", COMPARE)
def test_compare(test: str, kind: str) -> None:
    a, b = sample(1, 48, ""), sample(2, 48, "")
    b[::3] = a[::3]
    after = run(f"s_cmp_{test}_{kind} s4, s5", s={4: a, 5: b}, waves=48)
    view = s32 if kind == "i32" else int
    expected = [COMPARE[test](view(int(x)), view(int(y))) for x, y in zip(a, b, strict=True)]
    assert after.batch.scc[:, 0].tolist() == expected
    after = run(f"s_cmpk_{test}_{kind} s4, 0x8001", s={4: a}, waves=48)
    constant = 0x8001 - 0x10000 if kind == "i32" else 0x8001
    assert after.batch.scc[:, 0].tolist() == [COMPARE[test](view(int(x)), constant) for x in a]


def test_compare_64_and_bits() -> None:
    equal = {4: 0x1_0000_0001, 6: 0x1_0000_0001}
    assert run("s_cmp_eq_u64 s[4:5], s[6:7]", s=equal).scc
    assert not run("s_cmp_lg_u64 s[4:5], s[6:7]", s=equal).scc
    assert run("s_cmp_lg_u64 s[4:5], s[6:7]", s={**equal, 7: 2}).scc
    assert run("s_bitcmp1_b32 s4, s5", s={4: 0x100, 5: 40}).scc  # bit 40 & 31 = 8
    assert not run("s_bitcmp0_b32 s4, s5", s={4: 0x100, 5: 8}).scc
    assert run("s_bitset1_b32 s4, 5", s={4: 1}).s(4) == 33
    assert run("s_bitset0_b32 s4, 5", s={4: 33}).s(4) == 1


def test_constants_in_the_instruction() -> None:
    after = run(
        ["s_movk_i32 s4, 0x8000", "s_mulk_i32 s5, -3", "s_addk_i32 s6, -1", "s_cmovk_i32 s7, 9"],
        s={5: 7, 6: 0x80000000, 7: 1},
    )
    assert after.s(4) == 0xFFFF8000 and after.s(5) == -21 & M
    assert after.s(6) == 0x7FFFFFFF and after.scc, "overflow sets SCC, which s_cmovk then sees"
    assert after.s(7) == 9
    after = run(
        ["s_cmov_b32 s4, s5", "s_cmov_b64 s[6:7], s[8:9]"], s={4: 1, 5: 2, 6: 3, 8: 4}, scc=False
    )
    assert (after.s(4), after.s64(6)) == (1, 3 | 0xFFFFFFFF << 32)


@pytest.mark.parametrize(
    "name, function",
    [
        ("and", lambda s, e: s & e),
        ("or", lambda s, e: s | e),
        ("xor", lambda s, e: s ^ e),
        ("andn1", lambda s, e: ~s & e),
        ("andn2", lambda s, e: s & ~e),
        ("orn1", lambda s, e: ~s | e),
        ("orn2", lambda s, e: s | ~e),
        ("nand", lambda s, e: ~(s & e)),
        ("nor", lambda s, e: ~(s | e)),
        ("xnor", lambda s, e: ~(s ^ e)),
    ],
)
def test_saveexec(name: str, function: Callable[[int, int], int]) -> None:
    source, before = 0x00FF00FF12345678, 0xFFFF0000F0F0F0F0
    after = run(
        [f"s_{name}_saveexec_b64 s[6:7], s[4:5]", "v_mov_b32 v9, 1"],
        s={4: source},
        v={9: 0},
        exec_mask=before,
    )
    expected = function(source, before) & M64
    assert after.s64(6) == before and after.s64(126) == expected and after.scc == (expected != 0)
    assert [int(x) for x in after.v(9)[0]] == [expected >> k & 1 for k in range(64)]


def test_scalar_loads() -> None:
    memory = Memory(1 << 16)
    data = np.arange(100, 164, dtype=np.uint32)
    address = memory.put(data)
    code = [
        "s_load_dword s8, s[4:5], 0x4",
        "s_load_dwordx2 s[10:11], s[4:5], 0x8",
        "s_load_dwordx4 s[12:15], s[4:5], s6",
        "s_load_dwordx8 s[16:23], s[4:5], 0x20",
        "s_load_dwordx16 s[24:39], s[4:5], 0x40",
        "s_waitcnt lgkmcnt(0)",
    ]
    after = run(
        code, s={4: address, 6: 18}, memory=memory
    )  # 18: addresses are rounded down to dwords
    assert [after.s(k) for k in range(8, 40)] == [
        101,
        after.s(9),
        102,
        103,
        *range(104, 108),
        *range(108, 116),
        *range(116, 132),
    ]
    with pytest.raises(Fault, match="s_load_dwordx4.*out of bounds"):
        run("s_load_dwordx4 s[8:11], s[4:5], 0xf8", s={4: address}, memory=memory)


def test_ambiguous_literals_are_refused() -> None:
    assert run("s_mov_b64 s[4:5], 0x12345678").s64(4) == 0x12345678
    with pytest.raises(UnknownInstruction, match="ambiguous"):
        run("s_and_b64 s[4:5], s[4:5], 0x87654321")


def test_instructions_that_do_nothing_here() -> None:
    after = run(["s_nop 5", "s_waitcnt vmcnt(0)", "s_sleep 1", "s_setprio 2", "s_mov_b32 s4, 7"])
    assert after.s(4) == 7
