"""Global, flat and scratch memory, raw buffers with their bounds, loads that go to LDS, atomics."""

from __future__ import annotations

import numpy as np
import pytest
from machine import integers, run

from build_tools.cdna.decoder import UnknownInstruction
from build_tools.cdna.state import GUARD, SHARED_APERTURE, Fault, Memory

LANE = np.arange(64)
MASK = 0xFF00FF00F0F0A5A5
ACTIVE = np.array([MASK >> k & 1 for k in range(64)], bool)
ALL = 0xFFFFFFFFFFFFFFFF
SIZE = 4096


def filled() -> tuple[Memory, int, np.ndarray]:
    memory = Memory(1 << 16)
    data = np.random.default_rng(0).integers(
        1, 256, SIZE, dtype=np.uint8
    )  # no zero: a zero means "not loaded"
    return memory, memory.put(data), data


def at(data: np.ndarray, index: np.ndarray, nbytes: int) -> np.ndarray:
    return sum(data[index + k].astype(np.int64) << 8 * k for k in range(nbytes))


def pointers(address: int, offsets: np.ndarray) -> np.ndarray:
    return (np.uint64(address) + offsets.astype(np.uint64)).astype(np.uint64)


LOADS = [
    ("ubyte", 1, False),
    ("sbyte", 1, True),
    ("ushort", 2, False),
    ("sshort", 2, True),
    ("dword", 4, False),
    ("dwordx2", 8, False),
    ("dwordx3", 12, False),
    ("dwordx4", 16, False),
]


@pytest.mark.parametrize("mask", [ALL, MASK])
@pytest.mark.parametrize("form", ["global", "saddr", "flat", "buffer", "scratch"])
@pytest.mark.parametrize("name, nbytes, signed", LOADS)
def test_load(form: str, name: str, nbytes: int, signed: bool, mask: int) -> None:
    memory, address, data = filled()
    active = np.array([mask >> k & 1 for k in range(64)], bool)
    offsets = np.random.default_rng(1).permutation(SIZE // 16 - 4)[:64] * 16
    words = max(nbytes // 4, 1)
    target = f"v[4:{3 + words}]" if words > 1 else "v4"
    v = {k: 9 for k in range(4, 8)}
    s = {4: address}
    if form in ("global", "flat"):
        v[0] = np.where(active, pointers(address, offsets), 0xDEAD).astype(np.uint64)
    else:
        v[0] = np.where(active, offsets, 0x7FFFFFF0).astype(np.uint32)
    if form == "scratch":
        stores = [f"scratch_store_dword off, v{8 + k}, off offset:{4 * k}" for k in range(4)]
        values = {8 + k: integers(k, 1)[0] for k in range(4)}
        v.update(values)
        v[0] = 0
        after = run(
            [*stores, f"scratch_load_{name} {target}, off, off"],
            v=v,
            exec_mask=mask,
            scratch_bytes=16,
        )
        raw = np.stack([values[8 + k] for k in range(4)], 1).view(np.uint8).reshape(64, 16)
        fetched = raw
        start = 0
    else:
        code = {
            "global": f"global_load_{name} {target}, v[0:1], off offset:20",
            "saddr": f"global_load_{name} {target}, v0, s[4:5] offset:20",
            "flat": f"flat_load_{name} {target}, v[0:1] offset:20",
            "buffer": f"buffer_load_{name} {target}, v0, s[4:7], 0 offen offset:20",
        }[form]
        s |= {6: SIZE, 7: 0} if form == "buffer" else {}
        after = run(code, v=v, s=s, memory=memory, exec_mask=mask)
        fetched = np.stack([data[o : o + 64] for o in offsets])
        start = 20
    for k in range(words):
        size = min(nbytes, 4)
        value = sum(fetched[:, start + 4 * k + b].astype(np.int64) << 8 * b for b in range(size))
        if signed:
            value = value - ((value >> 8 * size - 1) << 8 * size)
        np.testing.assert_array_equal(after.v(4 + k)[0], np.where(active, value & 0xFFFFFFFF, 9))


@pytest.mark.parametrize("mask", [ALL, MASK])
@pytest.mark.parametrize("form", ["global", "saddr", "flat", "buffer"])
@pytest.mark.parametrize(
    "name, nbytes",
    [("byte", 1), ("short", 2), ("dword", 4), ("dwordx2", 8), ("dwordx3", 12), ("dwordx4", 16)],
)
def test_store(form: str, name: str, nbytes: int, mask: int) -> None:
    memory, address, data = filled()
    offsets = np.random.default_rng(1).permutation(SIZE // 16 - 4)[:64] * 16
    values = {4 + k: integers(k, 1)[0] for k in range(4)}
    words = max(nbytes // 4, 1)
    source = f"v[4:{3 + words}]" if words > 1 else "v4"
    v = dict(values)
    v[0] = pointers(address, offsets) if form in ("global", "flat") else offsets.astype(np.uint32)
    code = {
        "global": f"global_store_{name} v[0:1], {source}, off offset:32",
        "saddr": f"global_store_{name} v0, {source}, s[4:5] offset:32",
        "flat": f"flat_store_{name} v[0:1], {source} offset:32",
        "buffer": f"buffer_store_{name} {source}, v0, s[4:7], s9 offen offset:16",
    }[form]
    run(
        code,
        v=v,
        s={4: address, **({6: SIZE, 7: 0, 9: 16} if form == "buffer" else {})},
        memory=memory,
        exec_mask=mask,
    )
    expected = data.copy()
    for lane in range(64):
        if mask >> lane & 1:
            raw = b"".join(int(values[4 + k][lane]).to_bytes(4, "little") for k in range(4))[
                :nbytes
            ]
            expected[offsets[lane] + 32 : offsets[lane] + 32 + nbytes] = np.frombuffer(
                raw, np.uint8
            )
    np.testing.assert_array_equal(memory.get(address, data), expected)


def test_negative_offsets_and_unaligned_addresses() -> None:
    memory, address, data = filled()
    offsets = LANE * 8 + 17
    code = [
        "global_load_dword v4, v[0:1], off offset:-16",
        "global_load_dwordx2 v[6:7], v[0:1], off",
        "global_load_short_d16_hi v8, v[0:1], off offset:1",
        "global_load_sbyte_d16 v9, v[0:1], off",
    ]
    after = run(
        code, v={0: pointers(address, offsets), 8: 0xAAAABBBB, 9: 0xAAAABBBB}, memory=memory
    )
    np.testing.assert_array_equal(after.v(4)[0], at(data, offsets - 16, 4))
    np.testing.assert_array_equal(after.v(6)[0], at(data, offsets, 4))
    np.testing.assert_array_equal(after.v(7)[0], at(data, offsets + 4, 4))
    np.testing.assert_array_equal(after.v(8)[0], at(data, offsets + 1, 2) << 16 | 0xBBBB)
    byte = data[offsets].astype(np.int64)
    np.testing.assert_array_equal(
        after.v(9)[0], 0xAAAA0000 | np.where(byte > 127, byte - 256, byte) & 0xFFFF
    )


@pytest.mark.parametrize("offset", [-4, SIZE, SIZE - 3, SIZE + GUARD - 4, -(1 << 40)])
@pytest.mark.parametrize(
    "code",
    [
        "global_load_dword v4, v[0:1], off",
        "global_store_dword v[0:1], v4, off",
        "flat_load_dword v4, v[0:1]",
        "global_atomic_add v[0:1], v4, off",
    ],
)
def test_accesses_outside_allocations_are_faults(code: str, offset: int) -> None:
    memory, address, _ = filled()
    memory.put(np.zeros(64))
    where = np.full(64, address, np.uint64)
    where[5] = np.uint64(address + offset)
    with pytest.raises(Fault, match=f"{code.split()[0]}.*(out of bounds|unaligned)"):
        run(code, v={0: where}, memory=memory)
    run(code, v={0: where, 4: 0}, memory=memory, exec_mask=~(1 << 5) & ALL)  # an inactive lane may


# ---- raw buffers


def buffer_case(
    num_records: int, **registers: int
) -> tuple[Memory, int, np.ndarray, dict[int, int]]:
    memory, address, data = filled()
    s = {4: address, 6: num_records, 7: 0}
    s.update({int(k[1:]): v for k, v in registers.items()})
    return memory, address, data, s


@pytest.mark.parametrize("nbytes", [4, 8, 12, 16])
def test_out_of_range_loads_give_zero_dword_by_dword(nbytes: int) -> None:
    """In range: offset + inst_offset + 4 <= num_records - soffset, for each dword. The memory
    holds no zeros.
    """
    memory, _, data, s = buffer_case(1000, s9=100)
    offsets = (LANE * 4 + 760).astype(np.uint32)
    words = nbytes // 4
    target = f"v[4:{3 + words}]" if words > 1 else "v4"
    name = "dword" if words == 1 else f"dwordx{words}"
    after = run(
        f"buffer_load_{name} {target}, v0, s[4:7], s9 offen offset:8",
        v={0: offsets},
        s=s,
        memory=memory,
    )
    for k in range(words):
        inside = offsets.astype(np.int64) + 8 + 4 * k + 4 <= 900
        index = np.where(inside, offsets.astype(np.int64) + 108 + 4 * k, 0)
        np.testing.assert_array_equal(after.v(4 + k)[0], np.where(inside, at(data, index, 4), 0))
        assert inside.any() and not inside.all()


@pytest.mark.parametrize("name", ["dword", "dwordx2", "dwordx4", "short", "byte"])
def test_out_of_range_stores_are_dropped(name: str) -> None:
    memory, address, data, s = buffer_case(1000)
    offsets = (LANE * 16).astype(np.uint32)
    size = {"byte": 1, "short": 2}.get(name, 4)
    words = int(name[-1]) if name[-1].isdigit() else 1
    values = {4 + k: integers(k, 1)[0] for k in range(4)}
    source = f"v[4:{3 + words}]" if words > 1 else "v4"
    run(
        f"buffer_store_{name} {source}, v0, s[4:7], 0 offen",
        v={0: offsets, **values},
        s=s,
        memory=memory,
    )
    expected = data.copy()
    for lane in range(64):
        for k in range(words):
            start = int(offsets[lane]) + 4 * k
            if start + size <= 1000:
                raw = int(values[4 + k][lane]).to_bytes(4, "little")[:size]
                expected[start : start + size] = np.frombuffer(raw, np.uint8)
    np.testing.assert_array_equal(memory.get(address, data), expected)


def test_huge_offsets_and_records() -> None:
    """Offsets are unsigned 32-bit; num_records may exceed the allocation as long as nothing is
    touched there.
    """
    memory, _, data, s = buffer_case(0xFFFFFFF0)
    offsets = (LANE * 4).astype(np.uint32)
    offsets[3] = 0xFFFFFFF4
    after = run("buffer_load_dword v4, v0, s[4:7], 0 offen", v={0: offsets}, s=s, memory=memory)
    expected = at(data, LANE * 4, 4)
    expected[3] = 0
    np.testing.assert_array_equal(after.v(4)[0], expected)
    offsets[3] = 0x10000
    with pytest.raises(Fault, match="out of bounds"):
        run("buffer_load_dword v4, v0, s[4:7], 0 offen", v={0: offsets}, s=s, memory=memory)


def test_address_of_a_buffer_has_48_bits_and_stride_is_ignored() -> None:
    memory, address, data, s = buffer_case(SIZE)
    s[5] = address >> 32 | 4 << 16  # aiter sets a stride of 4
    s[4] = address & 0xFFFFFFFF
    after = run("buffer_load_dword v4, off, s[4:7], 0 offset:64", s=s, memory=memory)
    assert (after.v(4) == at(data, np.array([64]), 4)).all()
    s[5] |= 1 << 31
    with pytest.raises(Fault, match="swizzled"):
        run("buffer_load_dword v4, off, s[4:7], 0", s=s, memory=memory)


@pytest.mark.parametrize("arch, words", [("gfx942", 1), ("gfx950", 4)])
def test_loads_to_lds(arch: str, words: int) -> None:
    """LDS address: M0 + inst_offset + lane * size; out-of-range lanes write 0, vdata stays,
    EXEC counts.
    """
    memory, _, data, s = buffer_case(2000)
    name = "dword" if words == 1 else f"dwordx{words}"
    size = 4 * words
    offsets = (np.random.default_rng(3).permutation(64) * 40).astype(np.uint32)
    m0 = 0x100 if arch == "gfx942" else 0x12000  # gfx950 reaches beyond 64 KiB
    code = f"buffer_load_{name} v0, s[4:7], 0 offen offset:32 lds"
    after = run(
        code,
        arch,
        v={0: offsets},
        s={**s, 124: m0},
        memory=memory,
        lds_bytes=0x14000,
        exec_mask=MASK,
    )
    for lane in range(64):
        got = after.batch.lds[m0 + 32 + lane * size :][:size].copy().view(np.uint32)
        for k in range(words):
            start = int(offsets[lane]) + 32 + 4 * k
            inside = at(data, np.array([start]), 4)[0] if start + 4 <= 2000 else 0
            assert got[k] == (inside if ACTIVE[lane] else 0xFFFFFFFF)
    np.testing.assert_array_equal(after.v(0)[0], offsets)


@pytest.mark.parametrize("arch, words", [("gfx942", 1), ("gfx950", 4)])
def test_global_loads_to_lds(arch: str, words: int) -> None:
    memory, address, data = filled()
    name = "dword" if words == 1 else f"dwordx{words}"
    offsets = np.random.default_rng(3).permutation(64) * 16
    after = run(
        f"global_load_lds_{name} v[0:1], off",
        arch,
        v={0: pointers(address, offsets)},
        s={124: 64},
        memory=memory,
        lds_bytes=2048,
    )
    for lane in range(64):
        got = after.batch.lds[64 + lane * 4 * words :][: 4 * words]
        np.testing.assert_array_equal(got, data[offsets[lane] :][: 4 * words])


# ---- scratch, flat, atomics


def test_scratch_is_private_and_bounded() -> None:
    a = integers(1, 2)
    code = [
        "scratch_store_dword v0, v1, off offset:4",
        "scratch_load_dword v4, v2, off offset:8",
        "scratch_store_byte off, v1, s4",
        "scratch_load_ubyte v5, off, s4",
    ]
    after = run(
        code,
        v={0: (LANE % 4 * 4).astype(np.uint32), 1: a, 2: (LANE % 4 * 4 - 4).astype(np.int32)},
        s={4: 20},
        waves=2,
        scratch_bytes=32,
    )
    np.testing.assert_array_equal(after.v(4), a)
    np.testing.assert_array_equal(after.v(5), a & 255)
    with pytest.raises(Fault, match="scratch access at 32 of 32"):
        run("scratch_load_dword v4, off, s4", s={4: 32}, scratch_bytes=32)


def test_flat_reaches_lds_through_the_aperture() -> None:
    data = np.arange(64, dtype=np.uint32)
    where = (np.uint64(SHARED_APERTURE) << np.uint64(32)) + (LANE[::-1] * 4).astype(np.uint64)
    code = ["flat_load_dword v4, v[0:1]", "s_mov_b64 s[4:5], src_shared_base"]
    after = run(code, v={0: where}, lds=data)
    np.testing.assert_array_equal(after.v(4)[0], data[::-1])
    assert after.s64(4) == SHARED_APERTURE << 32
    where[0] = 0x7F0000001000
    with pytest.raises(Fault, match="mix LDS and global"):
        run("flat_load_dword v4, v[0:1]", v={0: where}, lds=data)


@pytest.mark.parametrize("form", ["global", "flat", "buffer"])
@pytest.mark.parametrize(
    "name, dtype, function",
    [
        ("add", np.uint32, lambda o, d: o + d & 0xFFFFFFFF),
        ("umax", np.uint32, max),
        ("smin", np.int32, min),
        ("xor", np.uint32, lambda o, d: o ^ d),
        ("swap", np.uint32, lambda o, d: d),
        ("add_x2", np.uint64, lambda o, d: o + d & ALL),
        ("add_f32", np.float32, lambda o, d: float(np.float32(o) + np.float32(d))),
    ],
)
def test_atomics(form: str, name: str, dtype: type, function: object) -> None:
    random = np.random.default_rng(0)
    cells = random.integers(0, 1 << 31, 8).astype(dtype)
    data = random.integers(0, 1 << 31, 64).astype(dtype)
    slot = random.integers(0, 8, 64)
    memory = Memory(1 << 16)
    address = memory.put(cells)
    expected, found = cells.copy(), np.zeros(64, dtype)
    for lane in LANE[ACTIVE]:
        found[lane] = expected[slot[lane]]
        expected[slot[lane]] = function(expected[slot[lane]].item(), data[lane].item())  # type: ignore[operator]
    source, target = ("v[2:3]", "v[4:5]") if name.endswith("x2") else ("v2", "v4")
    offsets = slot * cells.itemsize
    v = {0: offsets.astype(np.uint32) if form == "buffer" else pointers(address, offsets), 2: data}
    code = {
        "global": f"global_atomic_{name} {target}, v[0:1], {source}, off sc0",
        "flat": f"flat_atomic_{name} {target}, v[0:1], {source} sc0",
        "buffer": f"buffer_atomic_{name} {source}, v0, s[4:7], 0 offen",
    }[form]
    s = {4: address, **({6: cells.nbytes, 7: 0} if form == "buffer" else {})}
    after = run(code, v=v, s=s, memory=memory, exec_mask=MASK)
    np.testing.assert_array_equal(memory.get(address, cells), expected)
    if form != "buffer":
        np.testing.assert_array_equal(after.v(4, dtype)[0][ACTIVE], found[ACTIVE])


def test_compare_and_swap_and_packed_atomics() -> None:
    """global_atomic_cmpswap: the new value comes first, the comparand second."""
    memory = Memory(1 << 16)
    address = memory.put(np.array([5, 0], np.uint32))
    code = [
        "global_atomic_cmpswap v6, v[0:1], v[2:3], off sc0",
        "global_atomic_pk_add_f16 v[0:1], v4, off offset:4",
    ]
    one = int(np.array([1.0, 0.5], np.float16).view(np.uint32)[0])
    after = run(
        code,
        v={0: address, 2: LANE.astype(np.uint32) + np.uint32(100), 3: 5, 4: one},
        memory=memory,
    )
    assert after.v(6)[0].tolist() == [5] + [100] * 63
    got = memory.get(address, np.zeros(2, np.uint32))
    assert got[0] == 100
    assert got[1:].view(np.float16).tolist() == [64, 32]


def test_unsupported_forms_are_refused() -> None:
    with pytest.raises(UnknownInstruction, match="buffer_load_format_x"):
        run("buffer_load_format_x v4, off, s[4:7], 0")
    with pytest.raises(UnknownInstruction, match="buffer_load_dword .*idxen"):
        run("buffer_load_dword v4, v0, s[4:7], 0 idxen")
