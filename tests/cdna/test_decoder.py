"""Decoding and code objects: sizes against the assembler, the VOP3PX2 trap, every kernel of the
wheel.
"""

from __future__ import annotations

import pytest
from aiter_wheel import WheelUnavailable, code_object_path
from machine import assembled

from build_tools.cdna.code_object import CodeObject, load, parse, unpack_msgpack
from build_tools.cdna.compiler import compile_cached
from build_tools.cdna.decoder import Instruction, UnknownInstruction, decode, sweep
from build_tools.cdna.program import Program


def names(code: bytes) -> list[str]:
    return [item.name if isinstance(item, Instruction) else "?" for item in sweep(code)]


def test_an_instruction_before_an_mfma_is_not_swallowed() -> None:
    """VOP3PX2 is recognised by its first dword, not by the MFMA that stands eight bytes further
    on.
    """
    lines = [
        "v_add_f32_e64 v0, v1, v2",
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0",
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0, v20, v21",
        "s_endpgm",
    ]
    expected = [
        "v_add_f32",
        "v_mfma_f32_16x16x128_f8f6f4",
        "v_mfma_scale_f32_16x16x128_f8f6f4",
        "s_endpgm",
    ]
    assert names(assembled(lines, "gfx950")) == expected


@pytest.mark.parametrize(
    "line, name, size, literal",
    [
        ("v_mov_b32 v0, 0x12345678", "v_mov_b32", 8, 0x12345678),
        ("v_add_u32 v0, 0x12345678, v1", "v_add_u32", 8, 0x12345678),
        ("v_add_u32 v0, 1, v1", "v_add_u32", 4, None),
        ("v_cmp_lt_u32 vcc, 0x12345678, v1", "v_cmp_lt_u32", 8, 0x12345678),
        ("v_fmaak_f32 v0, v1, v2, 0x12345678", "v_fmaak_f32", 8, 0x12345678),
        ("s_and_b32 s0, s1, 0x12345678", "s_and_b32", 8, 0x12345678),
        ("s_mov_b32 s0, 0x12345678", "s_mov_b32", 8, 0x12345678),
        ("s_cmp_lt_u32 s0, 0x12345678", "s_cmp_lt_u32", 8, 0x12345678),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE), 0x123", "s_setreg_imm32_b32", 8, 0x123),
        ("s_movk_i32 s0, 5", "s_movk_i32", 4, None),
        ("s_load_dwordx4 s[0:3], s[4:5], 0x10", "s_load_dwordx4", 8, None),
        ("v_add_u32_dpp v0, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf", "v_add_u32", 8, None),
        (
            "v_add_u32_sdwa v0, v1, v2 dst_sel:DWORD src0_sel:BYTE_0 src1_sel:DWORD",
            "v_add_u32",
            8,
            None,
        ),
        ("v_add3_u32 v0, v1, v2, v3", "v_add3_u32", 8, None),
        ("ds_read_b128 v[0:3], v4", "ds_read_b128", 8, None),
        ("buffer_load_dword v0, off, s[0:3], 0", "buffer_load_dword", 8, None),
        ("global_load_dword v0, v[2:3], off", "global_load_dword", 8, None),
        ("scratch_load_dword v0, off, s0", "scratch_load_dword", 8, None),
    ],
)
def test_sizes_and_literals(line: str, name: str, size: int, literal: int | None) -> None:
    inst = decode(assembled([line], "gfx942"))
    assert (inst.name, inst.size, inst.literal) == (name, size, literal)


def test_nonsense_is_refused_by_its_bytes() -> None:
    with pytest.raises(UnknownInstruction, match="ffffffff"):
        decode(b"\xff" * 8)
    assert names(b"\xff" * 4 + assembled(["s_endpgm"], "gfx942")) == ["?", "s_endpgm"]


WHEEL = [
    f"{arch}/mla/mla_{name}.co"
    for arch, name in (
        ("gfx942", "a8w8_qh16_qseqlen1_gqaratio16_ps"),
        ("gfx942", "a16w16_qh16_m16x4_n16x1_coex0_mask1_ps"),
        ("gfx950", "a8w8_qh128_m32x4_n16x2_msk1"),
        ("gfx950", "dec_stage1_bf16_a16w16_subQ128_mqa128"),
        ("gfx942", "pfl_bf16_a16w16_causal_subQ128_mqa128"),
    )
]


def wheel_object(name: str) -> CodeObject:
    try:
        return load(code_object_path(name))
    except WheelUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", WHEEL)
def test_kernels_of_the_wheel_compile_completely(name: str) -> None:
    """Also those without a vector: every instruction has an implementation."""
    code = wheel_object(name)
    kernel = code.kernel()
    assert kernel.vgprs == 256 and kernel.agprs == 256 and kernel.mode == 0xC0
    assert kernel.lds_bytes == (65536 if code.arch == "gfx942" or "dec_stage1" in name else 163840)
    program = Program(code, kernel.vgprs, kernel.agprs)
    assert not [i for i in program.instructions.values() if not isinstance(i, Instruction)]
    assert program.untranslatable(kernel.mode) == []


def test_static_count_of_a_known_kernel() -> None:
    code = wheel_object(WHEEL[0])
    found = names(code.text)
    assert (
        len(found) == 2936 and len(set(found)) == 76 - 3
    )  # isa-notes section 8 counts _e32 and _e64 apart
    assert found.count("v_mfma_f32_16x16x32_fp8_fp8") == 204


def test_descriptor_and_metadata() -> None:
    source = """#include <hip/hip_runtime.h>
    extern "C" __global__ __launch_bounds__(128) void k(int* x, short y) {
      __shared__ int s[100];
      s[threadIdx.x] = y;
      __syncthreads(); x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x]; }"""
    code = compile_cached(source, "gfx950")
    kernel = code.kernel()
    assert (kernel.name, kernel.lds_bytes, kernel.mode) == ("k", 400, 0x3F0)
    data = code.kernel_metadata("k")
    assert [(a[".offset"], a[".size"]) for a in data[".args"][:2]] == [(0, 8), (8, 2)]
    assert data[".max_flat_workgroup_size"] == 128
    assert code.kernel("k").user_sgprs >= 2


def test_messagepack() -> None:
    assert unpack_msgpack(bytes.fromhex("83a161 01 a162 92c3c0 a163 cd0102")) == (
        {"a": 1, "b": [True, None], "c": 258},
        14,
    )
    assert unpack_msgpack(b"\xd9\x03abc")[0] == "abc" and unpack_msgpack(b"\xff")[0] == -1
    with pytest.raises(ValueError, match="not an ELF"):
        parse(b"nothing")
