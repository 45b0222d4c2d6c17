"""Conversions to and from float8: gfx942 speaks the FNUZ family, gfx950 the OCP one, with the same
opcodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .floats import E4M3, E5M2, round_bf16
from .modifiers import getters_of
from .operands import Step, Target, writer
from .state import Array, Group


def _encode_float8(target: Target, inst: Instruction) -> Step:
    """v_cvt_pk_fp8_f32 / bf8: two codes into the half that op_sel[3] names; the other half
    stays.
    """
    fmt = (E4M3 if "fp8" in inst.name else E5M2)[target.arch]
    a, b = getters_of(target, inst, "ff")
    high = inst["opsel"] >> 3 & 1
    write = writer(target, inst["vdst"], "j", high, keep=True)
    saturate = target.mode.saturate

    def step(g: Group) -> None:
        code = fmt.encode(a(g), saturate) | fmt.encode(b(g), saturate) << np.uint32(8)
        write(g, code.astype(np.uint16))

    return step


def _decode_float8(target: Target, inst: Instruction) -> Step:
    """v_cvt_pk_f32_fp8 / bf8 (two codes of a word) and v_cvt_f32_fp8 / bf8 (one byte)."""
    fmt = (E4M3 if "fp8" in inst.name else E5M2)[target.arch]
    if "_pk_" not in inst.name:
        if inst.variant == "SDWA":
            (byte,) = getters_of(target, inst, "u")
        else:
            (raw,) = getters_of(target, replace(inst, fields={**inst.fields, "opsel": 0}), "u")
            # VOP3: op_sel[1:0] selects the byte, with op_sel[0] the upper bit (LLVM,
            # V_CVT_F32_FP8_e64)
            select = inst["opsel"] & 3 if inst.format == "VOP3" else 0
            if select:
                raise UnknownInstruction(f"{inst}: byte selection by op_sel is not implemented")
            byte = raw
        write = writer(target, inst["vdst"], "f")
        return lambda g: write(g, fmt.decode(byte(g) & np.uint32(255)))
    (word,) = getters_of(target, inst, "j")
    low, high = writer(target, inst["vdst"], "f"), writer(target, inst["vdst"] + 1, "f")
    target.destination(inst["vdst"], 2)

    def step(g: Group) -> None:
        bits = word(g)
        a, b = fmt.decode(bits & np.uint16(255)), fmt.decode(bits >> np.uint16(8))
        low(g, a)
        high(g, b)

    return step


def _scaled_float8(target: Target, inst: Instruction) -> Step:
    """gfx950 v_cvt_scalef32_pk_{bf16,f32}_{fp8,bf8}: two codes of the word op_sel[0] names, times
    2^(e-127) with e the exponent field of src1; and v_cvt_scalef32_pk_{fp8,bf8}_f32: two floats
    divided by it.
    """
    name = inst.name
    codes = re.findall(r"_(fp8|bf8)", name)[0]
    fmt = (E4M3 if codes == "fp8" else E5M2)[target.arch]
    plain = replace(inst, fields={**inst.fields, "opsel": 0})

    def scale_of(bits: Array) -> Array:
        return np.ldexp(
            np.float64(1), (bits >> np.uint32(23) & np.uint32(255)).astype(np.int32) - 127
        )

    if name.endswith("_f32"):
        a, b, s = getters_of(target, plain, "ffu")
        write_word = writer(target, inst["vdst"], "j", inst["opsel"] >> 3 & 1, keep=True)
        saturate = target.mode.saturate

        def encode(g: Group) -> None:
            scale = scale_of(s(g))
            x, y = (
                fmt.encode((v.astype(np.float64) / scale).astype(np.float32), saturate)
                for v in (a(g), b(g))
            )
            write_word(g, (x | y << np.uint32(8)).astype(np.uint16))

        return encode
    raw, s = getters_of(target, plain, "uu")
    half = np.uint32(16 * (inst["opsel"] & 1))
    target.destination(inst["vdst"], 2 if "pk_f32" in name else 1)
    writes = [writer(target, inst["vdst"] + k, "f") for k in range(2 if "pk_f32" in name else 1)]
    write = writer(target, inst["vdst"], "u")

    def step(g: Group) -> None:
        bits, scale = raw(g) >> half, scale_of(s(g))
        x, y = (
            (fmt.decode(bits >> np.uint32(k) & np.uint32(255)).astype(np.float64) * scale).astype(
                np.float32
            )
            for k in (0, 8)
        )
        if len(writes) == 2:
            writes[0](g, x)
            writes[1](g, y)
        else:
            write(g, round_bf16(x) | round_bf16(y) << np.uint32(16))

    return step


CONVERSIONS: dict[str, Callable[[Target, Instruction], Step]] = {
    "v_cvt_pk_fp8_f32": _encode_float8,
    "v_cvt_pk_bf8_f32": _encode_float8,
    **dict.fromkeys(
        ("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8", "v_cvt_f32_fp8", "v_cvt_f32_bf8"), _decode_float8
    ),
    **{
        f"v_cvt_scalef32_pk_{to}_{of}": _scaled_float8
        for to in ("bf16", "f32")
        for of in ("fp8", "bf8")
    },
    **{f"v_cvt_scalef32_pk_{to}_f32": _scaled_float8 for to in ("fp8", "bf8")},
}
