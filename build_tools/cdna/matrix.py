"""Matrix instructions (MFMA), scaled ones included.

Layouts (isa-notes 5.2; CDNA3 ISA, "Matrix Arithmetic Instructions"): of a K x M operand lane l
holds row l % M and the k-block l // M, K * M / 64 consecutive elements, packed from the low end. Of
a result, register r of lane l is row 4 * (l // 16) + r, column l % 16 (16x16), or row 8 * (r // 4)
+ 4 * (l // 32) + r % 4, column l % 32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .floats import E2M1, E4M3, E5M2, widen_bf16
from .operands import Getter, Step, Target, source_getter
from .state import Array, Group

_NAME = re.compile(r"v_mfma(_scale)?_(f32|i32)_(16x16|32x32)x(\d+)_(\w+)$")
_TYPES = {"bf16": 2, "bf16_1k": 2, "f16": 2, "f32": 4, "i8": 1}  # bytes per element
_CODES = {"fp8": 0, "bf8": 1}
F8F6F4_BITS = {
    0: 8,
    1: 8,
    4: 4,
}  # cbsz/blgp: e4m3, e5m2, e2m1; the 6-bit formats are not implemented


def _element_types(inst: Instruction, kind: str) -> list[str | int]:
    """What A and B hold: a key of _TYPES, or a format number of F8F6F4_BITS."""
    if kind == "f8f6f4":
        types: list[str | int] = [inst["cbsz"], inst["blgp"]]
        if any(t not in F8F6F4_BITS for t in types):
            raise UnknownInstruction(f"{inst}: 6-bit operand formats are not implemented")
        return types
    if inst["cbsz"] or inst["abid"] or inst["blgp"]:
        raise UnknownInstruction(
            f"{inst}: broadcast and lane permutation of MFMA operands are not implemented"
        )
    halves = kind.split("_")
    if len(halves) == 2 and all(h in _CODES for h in halves):
        return [_CODES[h] for h in halves]
    if kind not in _TYPES:
        raise UnknownInstruction(f"{inst}: operand type {kind} is not implemented")
    return [kind, kind]


def _decoder(target: Target, element: str | int) -> Callable[[Array], Array]:
    """[waves, M, dwords] uint32 to [waves, M, K] float64 (int64 for i8)."""
    if element in (0, 1):
        values = (E4M3, E5M2)[int(element)][target.arch].values.astype(np.float64)
        return lambda words: values.take(words.view(np.uint8))
    if element == 4:
        nibbles = E2M1.astype(np.float64)

        def fp4(words: Array) -> Array:
            raw = words.view(np.uint8)
            return nibbles.take(np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1))

        return fp4
    if element in ("bf16", "bf16_1k"):
        return lambda words: widen_bf16(words.view(np.uint16)).astype(np.float64)
    dtype: Any = {"f16": np.float16, "f32": np.float32, "i8": np.int8}[str(element)]
    return lambda words: words.view(dtype).astype(np.int64 if element == "i8" else np.float64)


def _operand(
    target: Target, inst: Instruction, code: int, agpr: int, element: str | int, m: int, k: int
) -> Getter:
    """[waves, M, K] values of an MFMA operand."""
    if code < 256:
        raise UnknownInstruction(f"{inst}: MFMA operand {code} is not a vector register")
    bits = F8F6F4_BITS[element] if isinstance(element, int) else 8 * _TYPES[element]
    blocks = 64 // m
    count = k // blocks * bits // 32
    register = target.vector(code - 256, count, agpr)
    decode = _decoder(target, element)
    key = ("mfma", register, count, m)

    def make(g: Group) -> Array:
        return g.block(register, count).reshape(count, g.n, blocks, m).transpose(1, 3, 2, 0)

    def get(g: Group) -> Array:
        words = np.ascontiguousarray(g.view(key, make)).reshape(g.n, m, -1)
        return decode(words)

    return get


def _scaled(
    target: Target, inst: Instruction, values: Getter, code: int, byte: int, m: int
) -> Getter:
    """An operand times one E8M0 byte of each lane, for the lane's own row and k-block."""
    raw = source_getter(target, inst, code, "u", 0)
    shift, blocks = np.uint32(8 * byte), 64 // m

    def get(g: Group) -> Array:
        exponent = np.broadcast_to(raw(g) >> shift & np.uint32(255), (g.n, 64)).astype(np.int32)
        factor = np.where(exponent == 255, np.nan, np.ldexp(1.0, exponent - 127))
        by_block = factor.reshape(g.n, blocks, m).transpose(0, 2, 1)[..., None]
        plain = values(g)
        return (plain.reshape(g.n, m, blocks, -1) * by_block).reshape(plain.shape)

    return get


def compile_matrix(target: Target, inst: Instruction) -> Step:
    """The function that executes an MFMA. EXEC does not matter to it; sums are rounded to float32
    once.
    """
    match = _NAME.match(inst.name)
    if match is None:
        raise UnknownInstruction(f"{inst} is not implemented")
    m, k, kind = int(match[3][:2]), int(match[4]), match[5]
    integer = match[2] == "i32"
    types = _element_types(inst, kind)
    a = _operand(target, inst, inst["src0"], inst["acc"] & 1, types[0], m, k)
    b = _operand(target, inst, inst["src1"], inst["acc"] >> 1, types[1], m, k)
    if match[1]:  # op_sel and op_sel_hi choose the byte
        low, high = inst["opsel"], inst["opsel_hi"]
        a = _scaled(target, inst, a, inst["scale_src0"], low & 1 | (high & 1) << 1, m)
        b = _scaled(target, inst, b, inst["scale_src1"], low >> 1 & 1 | high & 2, m)
    count = m * m // 64
    destination = target.vector(inst["vdst"], count, inst["acc_cd"])
    tile = _tile(destination, m)
    if inst["src2"] >= 256:
        addend = _tile(target.vector(inst["src2"] - 256, count, inst["acc_cd"]), m)
    else:
        constant = source_getter(target, inst, inst["src2"], "u", 2)
        addend = lambda g: constant(g)[0, 0]  # noqa: E731
    dtype: Any = np.int32 if integer else np.float32

    def step(g: Group) -> None:
        product = np.matmul(a(g), b(g).transpose(0, 2, 1))
        total = _by_registers(product, m) + addend(g).view(dtype)
        np.copyto(tile(g).view(dtype), total, casting="unsafe")

    return step


def _tile(register: int, m: int) -> Getter:
    """View of a result's registers with the axes of `_by_registers`."""
    count = m * m // 64
    key = ("tile", register, m)

    def make(g: Group) -> Array:
        block = g.block(register, count)
        return block.reshape(count, g.n, 4, 16) if m == 16 else block.reshape(4, 4, g.n, 2, 32)

    return lambda g: g.view(key, make)


def _by_registers(product: Array, m: int) -> Array:
    """[waves, M, N] to [register(s), waves, lane group, column]."""
    n = product.shape[0]
    if m == 16:
        return product.reshape(n, 4, 4, 16).transpose(2, 0, 1, 3)
    return product.reshape(n, 4, 2, 4, 32).transpose(1, 3, 0, 2, 4)
