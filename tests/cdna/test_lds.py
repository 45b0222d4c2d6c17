"""LDS: reads and writes of every width, permutations, transposing reads, atomics, bounds."""

from __future__ import annotations

import numpy as np
import pytest
from machine import integers, run

from build_tools.cdna.state import Fault

LANE = np.arange(64)
MASK = 0xFF00FF00F0F0A5A5
ACTIVE = np.array([MASK >> k & 1 for k in range(64)], bool)
SIZE = 4096


def contents(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


def at(data: np.ndarray, address: np.ndarray, nbytes: int) -> np.ndarray:
    return sum(data[address + k].astype(np.int64) << 8 * k for k in range(nbytes))


def addresses(align: int) -> np.ndarray:
    return (
        np.random.default_rng(7).permutation(SIZE // 16 - 4)[:64].astype(np.uint32)
        * 16
        // align
        * align
    )


@pytest.mark.parametrize(
    "name, nbytes",
    [
        ("u8", 1),
        ("i8", 1),
        ("u16", 2),
        ("i16", 2),
        ("b32", 4),
        ("b64", 8),
        ("b96", 12),
        ("b128", 16),
    ],
)
@pytest.mark.parametrize("mask", [0xFFFFFFFFFFFFFFFF, MASK])
def test_read(name: str, nbytes: int, mask: int) -> None:
    data, address = contents(), addresses(4)
    address = address + np.uint32(3 if nbytes < 4 else 4 if nbytes == 4 else 0)
    active = np.array([mask >> k & 1 for k in range(64)], bool)
    words = max(nbytes // 4, 1)
    target = f"v[4:{3 + words}]" if words > 1 else "v4"
    wild = np.where(active, address, 0x7FFFFFF0).astype(
        np.uint32
    )  # inactive lanes may point anywhere
    after = run(
        f"ds_read_{name} {target}, v0 offset:32",
        v={0: wild, **{4 + k: 9 for k in range(4)}},
        lds=data,
        exec_mask=mask,
    )
    for k in range(words):
        value = at(data, address.astype(np.int64) + 32 + 4 * k, min(nbytes, 4))
        if name[0] == "i":
            value = value - ((value >> 8 * nbytes - 1) << 8 * nbytes)
        np.testing.assert_array_equal(after.v(4 + k)[0], np.where(active, value & 0xFFFFFFFF, 9))


@pytest.mark.parametrize(
    "name, nbytes", [("b8", 1), ("b16", 2), ("b32", 4), ("b64", 8), ("b96", 12), ("b128", 16)]
)
@pytest.mark.parametrize("mask", [0xFFFFFFFFFFFFFFFF, MASK])
def test_write(name: str, nbytes: int, mask: int) -> None:
    data, address = contents(), addresses(4) + np.uint32(1 if nbytes < 4 else 0)
    values = {4 + k: integers(k, 1)[0] for k in range(4)}
    words = max(nbytes // 4, 1)
    source = f"v[4:{3 + words}]" if words > 1 else "v4"
    after = run(
        f"ds_write_{name} v0, {source} offset:16",
        v={0: address, **values},
        lds=data,
        exec_mask=mask,
    )
    expected = data.copy()
    for lane in range(64):
        if mask >> lane & 1:
            raw = b"".join(int(values[4 + k][lane]).to_bytes(4, "little") for k in range(4))
            start = int(address[lane]) + 16
            expected[start : start + nbytes] = np.frombuffer(raw[:nbytes], np.uint8)
    np.testing.assert_array_equal(after.batch.lds[:SIZE], expected)


def test_halves_of_registers() -> None:
    data, address = contents(), addresses(4)
    code = [
        "ds_read_u8_d16 v4, v0",
        "ds_read_i8_d16_hi v5, v0",
        "ds_read_u16_d16_hi v6, v0 offset:2",
        "ds_write_b16_d16_hi v0, v1 offset:2",
        "ds_write_b8_d16_hi v0, v1 offset:5",
    ]
    value = integers(1, 1)[0]
    after = run(
        code, v={0: address, 1: value, 4: 0xAAAABBBB, 5: 0xAAAABBBB, 6: 0xAAAABBBB}, lds=data
    )
    index = address.astype(np.int64)
    byte = data[index].astype(np.int64)
    np.testing.assert_array_equal(after.v(4)[0], 0xAAAA0000 | byte)
    np.testing.assert_array_equal(
        after.v(5)[0], (np.where(byte > 127, byte - 256, byte) & 0xFFFF) << 16 | 0xBBBB
    )
    np.testing.assert_array_equal(after.v(6)[0], at(data, index + 2, 2) << 16 | 0xBBBB)
    np.testing.assert_array_equal(at(after.batch.lds, index + 2, 2), value >> 16)
    np.testing.assert_array_equal(after.batch.lds[index + 5], value >> 16 & 255)


@pytest.mark.parametrize("stride64", [False, True])
@pytest.mark.parametrize("bits", [32, 64])
def test_two_at_once(bits: int, stride64: bool) -> None:
    """read2/write2: two offsets in elements (or 64 elements); only active lanes' addresses
    count.
    """
    data = contents()
    nbytes, infix = bits // 8, "st64" if stride64 else ""
    unit = nbytes * (64 if stride64 else 1)
    address = (np.random.default_rng(1).permutation(64) * 16).astype(np.uint32)
    wild = np.where(ACTIVE, address, 0xFFFFFFF0).astype(np.uint32)
    target = "v[4:5]" if bits == 32 else "v[4:7]"
    offsets = (0, 3) if not stride64 else (1, 2)
    read = f"ds_read2{infix}_b{bits} {target}, v0 offset0:{offsets[0]} offset1:{offsets[1]}"
    after = run(read, v={0: wild, **{4 + k: 5 for k in range(4)}}, lds=data, exec_mask=MASK)
    words = nbytes // 4
    for k, offset in enumerate(offsets):
        for w in range(words):
            value = at(data, address.astype(np.int64) + offset * unit + 4 * w, 4)
            np.testing.assert_array_equal(after.v(4 + k * words + w)[0], np.where(ACTIVE, value, 5))
    sources = ("v4", "v6") if bits == 32 else ("v[4:5]", "v[6:7]")
    values = {4 + k: integers(k, 1)[0] for k in range(4)}
    spread = (LANE * 16).astype(np.uint32)
    offsets = (0, 1)
    unit = nbytes
    write = f"ds_write2_b{bits} v0, {sources[0]}, {sources[1]} offset0:0 offset1:1"
    after = run(
        write,
        v={0: np.where(ACTIVE, spread, 0xFFFFFFF0).astype(np.uint32), **values},
        lds=data,
        exec_mask=MASK,
    )
    expected = data.copy()
    for lane in LANE[ACTIVE]:
        for k in (0, 1):
            raw = b"".join(
                int(values[4 + 2 * k + w][lane]).to_bytes(4, "little") for w in range(words)
            )
            start = int(spread[lane]) + k * unit
            expected[start : start + nbytes] = np.frombuffer(raw, np.uint8)
    np.testing.assert_array_equal(after.batch.lds[:SIZE], expected)


def test_read2_may_overwrite_its_address() -> None:
    data = contents()
    after = run("ds_read2_b32 v[0:1], v0 offset1:1", v={0: (LANE * 8).astype(np.uint32)}, lds=data)
    np.testing.assert_array_equal(after.v(0)[0], at(data, LANE * 8, 4))
    np.testing.assert_array_equal(after.v(1)[0], at(data, LANE * 8 + 4, 4))


def test_accumulation_registers_as_data() -> None:
    data = contents()
    code = ["ds_read_b64 a[4:5], v0", "ds_write_b32 v0, a5 offset:2048"]
    after = run(code, v={0: (LANE * 8).astype(np.uint32)}, lds=data)
    np.testing.assert_array_equal(after.v(64 + 5)[0], at(data, LANE * 8 + 4, 4))
    np.testing.assert_array_equal(at(after.batch.lds, 2048 + LANE * 8, 4), after.v(64 + 5)[0])


def test_out_of_bounds_is_a_fault_that_names_the_instruction() -> None:
    with pytest.raises(Fault, match="ds_read_b64.*LDS access up to byte 4100 of 4096"):
        run("ds_read_b64 v[4:5], v0", v={0: SIZE - 4}, lds=contents())
    with pytest.raises(Fault, match="ds_write_b32"):
        run("ds_write_b32 v0, v1 offset:65535", v={0: 0}, lds=contents())


def test_a_negative_base_wraps_with_the_offset() -> None:
    """clang emits this for pool[255 - threadIdx.x]."""
    data, base = contents(), (-4 * LANE).astype(np.int32)
    code = ["ds_read_b32 v4, v0 offset:1020", "ds_read2_b32 v[6:7], v0 offset0:64 offset1:255"]
    after = run(code, v={0: base}, lds=data)
    np.testing.assert_array_equal(after.v(4)[0], at(data, 1020 - 4 * LANE, 4))
    np.testing.assert_array_equal(after.v(6)[0], at(data, 256 - 4 * LANE, 4))
    np.testing.assert_array_equal(after.v(7)[0], at(data, 1020 - 4 * LANE, 4))


def test_work_groups_have_their_own_lds() -> None:
    code = ["ds_write_b32 v0, v1", "s_barrier", "ds_read_b32 v2, v3"]
    address = (LANE * 4).astype(np.uint32)
    value = np.arange(4 * 64, dtype=np.uint32).reshape(4, 64)
    both = address + np.array([[0], [256], [0], [256]], np.uint32)
    swapped = address + np.array([[256], [0], [256], [0]], np.uint32)
    after = run(code, v={0: both, 1: value, 3: swapped}, lds_bytes=512, waves=2, work_groups=2)
    np.testing.assert_array_equal(after.v(2), value[[1, 0, 3, 2]])


def test_bpermute_and_permute() -> None:
    a = integers(1, 1)[0]
    lane = np.random.default_rng(0).permutation(64)
    address = (lane * 4 + 256 * 3 + 2).astype(np.uint32)  # low and high bits do not count
    after = run("ds_bpermute_b32 v4, v0, v1", v={0: address, 1: a, 4: 7}, exec_mask=MASK)
    np.testing.assert_array_equal(
        after.v(4)[0], np.where(ACTIVE, np.where(ACTIVE[lane], a[lane], 0), 7)
    )
    after = run("ds_bpermute_b32 v4, v0, v1 offset:8", v={0: address, 1: a})
    np.testing.assert_array_equal(after.v(4)[0], a[(lane + 2) % 64])
    after = run("ds_permute_b32 v4, v0, v1", v={0: address, 1: a})
    expected = np.zeros(64, np.uint32)
    expected[lane] = a
    np.testing.assert_array_equal(after.v(4)[0], expected)
    after = run("ds_permute_b32 v4, v0, v1", v={0: 20, 1: a, 4: 7}, exec_mask=MASK)
    last = int(np.flatnonzero(ACTIVE)[-1])  # the highest lane wins
    np.testing.assert_array_equal(
        after.v(4)[0], np.where(ACTIVE, np.where(LANE == 5, a[last], 0), 7)
    )


def test_swizzle() -> None:
    a = integers(1, 1)[0]
    for text, lanes in {
        "swizzle(QUAD_PERM, 2,3,1,0)": (LANE & ~3) + np.array([2, 3, 1, 0])[LANE & 3],
        "swizzle(SWAP, 16)": LANE ^ 16,
        "swizzle(REVERSE, 8)": LANE ^ 7,
        "swizzle(BROADCAST, 4, 1)": (LANE & ~3) + 1,
    }.items():
        after = run(f"ds_swizzle_b32 v4, v1 offset:{text}", v={1: a})
        np.testing.assert_array_equal(after.v(4)[0], a[lanes], err_msg=text)


def test_transposing_reads() -> None:
    """Per 16 lanes: lane i reads 8 bytes of a tile and gets column i of it."""
    data = contents()
    address = (LANE * 8).astype(np.uint32)
    after = run("ds_read_b64_tr_b8 v[4:5], v0", "gfx950", v={0: address}, lds=data)
    got = after.v(4, np.uint64)[0]
    for lane in range(64):
        tile = data[lane // 16 * 128 :][:128].reshape(8, 16)
        assert int(got[lane]).to_bytes(8, "little") == tile[:, lane % 16].tobytes()
    after = run("ds_read_b64_tr_b16 v[4:5], v0", "gfx950", v={0: address}, lds=data)
    got = after.v(4, np.uint64)[0]
    for lane in range(64):
        tile = data.view(np.uint16)[lane // 16 * 64 :][:64].reshape(4, 16)
        assert int(got[lane]).to_bytes(8, "little") == tile[:, lane % 16].tobytes()
    with pytest.raises(Fault, match="inactive lanes"):
        run("ds_read_b64_tr_b8 v[4:5], v0", "gfx950", v={0: address}, lds=data, exec_mask=1)


ATOMICS = {
    "add_u32": (np.uint32, lambda o, d: o + d & 0xFFFFFFFF),
    "sub_u32": (np.uint32, lambda o, d: o - d & 0xFFFFFFFF),
    "min_u32": (np.uint32, min),
    "max_u32": (np.uint32, max),
    "min_i32": (np.int32, min),
    "max_i32": (np.int32, max),
    "and_b32": (np.uint32, lambda o, d: o & d),
    "or_b32": (np.uint32, lambda o, d: o | d),
    "xor_b32": (np.uint32, lambda o, d: o ^ d),
    "inc_u32": (np.uint32, lambda o, d: 0 if o >= d else o + 1),
    "dec_u32": (np.uint32, lambda o, d: d if o == 0 or o > d else o - 1),
    "add_f32": (np.float32, lambda o, d: float(np.float32(o) + np.float32(d))),
    "add_u64": (np.uint64, lambda o, d: o + d & 0xFFFFFFFFFFFFFFFF),
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name: str) -> None:
    """Lane after lane; the _rtn form gives what each lane found."""
    dtype, function = ATOMICS[name]
    random = np.random.default_rng(0)
    wide = np.dtype(dtype).itemsize == 8
    cells = random.integers(0, 1 << 31, 8).astype(dtype)
    data = random.integers(0, 1 << 31, 64).astype(dtype)
    slot = random.integers(0, 8, 64)
    expected, found = cells.copy(), np.zeros(64, dtype)
    for lane in LANE[ACTIVE]:
        found[lane] = expected[slot[lane]]
        expected[slot[lane]] = function(expected[slot[lane]].item(), data[lane].item())
    address = (slot * cells.itemsize).astype(np.uint32)
    operation, kind = name.rsplit("_", 1)
    registers = ("v[4:5]", "v[2:3]") if wide else ("v4", "v2")
    for code in (
        f"ds_{name} v0, {registers[1]}",
        f"ds_{operation}_rtn_{kind} {registers[0]}, v0, {registers[1]}",
    ):
        after = run(code, v={0: address, 2: data}, lds=cells, exec_mask=MASK)
        np.testing.assert_array_equal(after.batch.lds[: cells.nbytes].view(dtype), expected)
    np.testing.assert_array_equal(after.v(4, dtype)[0][ACTIVE], found[ACTIVE])


def test_compare_and_swap_and_exchange() -> None:
    """ds_cmpst: the first data operand is the comparand."""
    cells = np.array([5, 6], np.uint32)
    after = run(
        "ds_cmpst_rtn_b32 v4, v0, v1, v2",
        v={0: [0] * 32 + [4] * 32, 1: 5, 2: LANE.astype(np.uint32)},
        lds=cells,
    )
    assert after.batch.lds[:8].view(np.uint32).tolist() == [0, 6]
    assert after.v(4)[0].tolist() == [5] + [0] * 31 + [6] * 32
    after = run("ds_wrxchg_rtn_b32 v4, v0, v1", v={0: 0, 1: LANE.astype(np.uint32)}, lds=cells)
    assert after.batch.lds[:4].view(np.uint32)[0] == 63 and after.v(4)[0].tolist() == [
        5,
        *range(63),
    ]
