"""Matrix instructions (MFMA), scaled ones included, and packed two-at-a-time arithmetic (VOP3P).

Layouts (isa-notes 5.2; CDNA3 ISA, "Matrix Arithmetic Instructions"): of a K x M operand lane l holds row l % M
and the k-block l // M, K * M / 64 consecutive elements, packed from the low end. Of a result, register r of lane
l is row 4 * (l // 16) + r, column l % 16 (16x16), or row 8 * (r // 4) + 4 * (l // 32) + r % 4, column l % 32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .floats import E2M1, E4M3, E5M2, flush, fma32, widen_bf16
from .operands import Getter, Step, Target, half_view, source_getter, writer
from .state import Array, Group
from .vector_ops import VECTOR_OPS, byte_dot, dot2, half_bits, maximum, minimum

_NAME = re.compile(r"v_mfma(_scale)?_(f32|i32)_(16x16|32x32)x(\d+)_(\w+)$")
_TYPES = {"bf16": 2, "bf16_1k": 2, "f16": 2, "f32": 4, "i8": 1}  # bytes per element
_CODES = {"fp8": 0, "bf8": 1}
F8F6F4_BITS = {0: 8, 1: 8, 4: 4}  # cbsz/blgp: e4m3, e5m2, e2m1; the 6-bit formats are not implemented


def compile_matrix(target: Target, inst: Instruction) -> Step:
    """The function that executes a VOP3P, VOP3P_MFMA or VOP3PX2 instruction."""
    if "mfma" in inst.name:
        return _mfma(target, inst)
    return _packed(target, inst)


def _element_types(inst: Instruction, kind: str) -> list[str | int]:
    """What A and B hold: a key of _TYPES, or a format number of F8F6F4_BITS."""
    if kind == "f8f6f4":
        types: list[str | int] = [inst["cbsz"], inst["blgp"]]
        if any(t not in F8F6F4_BITS for t in types):
            raise UnknownInstruction(f"{inst}: 6-bit operand formats are not implemented")
        return types
    if inst["cbsz"] or inst["abid"] or inst["blgp"]:
        raise UnknownInstruction(f"{inst}: broadcast and lane permutation of MFMA operands are not implemented")
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


def _scale(target: Target, inst: Instruction, code: int, byte: int, m: int, k: int) -> Getter:
    """[waves, M, blocks, 1] factors: one E8M0 byte of each lane, for its own row and k-block."""
    raw = source_getter(target, inst, code, "u", 0)
    shift, blocks = np.uint32(8 * byte), 64 // m

    def get(g: Group) -> Array:
        exponent = np.broadcast_to(raw(g) >> shift & np.uint32(255), (g.n, 64)).astype(np.int32)
        factor = np.where(exponent == 255, np.nan, np.ldexp(1.0, exponent - 127))
        return factor.reshape(g.n, blocks, m).transpose(0, 2, 1)[..., None]

    def scaled(values: Array, g: Group) -> Array:
        return (values.reshape(g.n, m, blocks, -1) * get(g)).reshape(g.n, m, k)

    return lambda g: scaled(g.memo["mfma"], g)


def _mfma(target: Target, inst: Instruction) -> Step:
    match = _NAME.match(inst.name)
    if match is None:
        raise UnknownInstruction(f"{inst} is not implemented")
    m, k, kind = int(match[3][:2]), int(match[4]), match[5]
    integer = match[2] == "i32"
    types = _element_types(inst, kind)
    a = _operand(target, inst, inst["src0"], inst["acc"] & 1, types[0], m, k)
    b = _operand(target, inst, inst["src1"], inst["acc"] >> 1, types[1], m, k)
    if match[1]:
        a, b = _with_scales(target, inst, a, b, m, k)
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


def _with_scales(
    target: Target, inst: Instruction, a: Getter, b: Getter, m: int, k: int
) -> tuple[Getter, Getter]:
    sa = _scale(target, inst, inst["scale_src0"], inst["opsel"] & 1 | (inst["opsel_hi"] & 1) << 1, m, k)
    sb = _scale(target, inst, inst["scale_src1"], inst["opsel"] >> 1 & 1 | inst["opsel_hi"] & 2, m, k)

    def apply(get: Getter, scale: Getter) -> Getter:
        def scaled(g: Group) -> Array:
            g.memo["mfma"] = get(g)
            return scale(g)

        return scaled

    return apply(a, sa), apply(b, sb)


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


# ---- packed arithmetic


_PACKED32: dict[str, tuple[int, Callable[..., Array]]] = {
    "v_pk_mul_f32": (2, np.multiply),
    "v_pk_add_f32": (2, np.add),
    "v_pk_fma_f32": (3, fma32),
}
_PACKED16: dict[str, tuple[str, Callable[..., Array]]] = {
    "v_pk_add_f16": ("hh", np.add),
    "v_pk_mul_f16": ("hh", np.multiply),
    "v_pk_fma_f16": ("hhh", VECTOR_OPS["v_fma_f16"].compute),
    "v_pk_max_f16": ("hh", maximum),
    "v_pk_min_f16": ("hh", minimum),
    "v_pk_add_u16": ("jj", np.add),
    "v_pk_add_i16": ("kk", np.add),
    "v_pk_sub_u16": ("jj", np.subtract),
    "v_pk_sub_i16": ("kk", np.subtract),
    "v_pk_mul_lo_u16": ("jj", np.multiply),
    "v_pk_max_u16": ("jj", np.maximum),
    "v_pk_min_u16": ("jj", np.minimum),
    "v_pk_max_i16": ("kk", np.maximum),
    "v_pk_min_i16": ("kk", np.minimum),
    "v_pk_lshlrev_b16": ("jj", VECTOR_OPS["v_lshlrev_b16"].compute),
    "v_pk_lshrrev_b16": ("jj", VECTOR_OPS["v_lshrrev_b16"].compute),
    "v_pk_ashrrev_i16": ("kk", VECTOR_OPS["v_ashrrev_i16"].compute),
    "v_pk_mad_u16": ("jjj", lambda a, b, c: a * b + c),
    "v_pk_mad_i16": ("kkk", lambda a, b, c: a * b + c),
}
_DOTS: dict[str, tuple[str, Callable[..., Array]]] = {
    "v_dot2_f32_f16": ("f", dot2(half_bits)),
    "v_dot2_f32_bf16": ("f", dot2(widen_bf16)),
    "v_dot4_i32_i8": ("u", byte_dot(True)),
    "v_dot4_u32_u8": ("u", byte_dot(False)),
}


def _selection(inst: Instruction) -> tuple[int, int]:
    """op_sel and op_sel_hi of a VOP3P instruction, three bits each."""
    return inst["opsel"], inst["opsel_hi"] | inst["opsel_hi2"] << 2


def _packed(target: Target, inst: Instruction) -> Step:
    name = inst.name
    if name.startswith("v_accvgpr"):
        from .vector import compile_vector

        return compile_vector(target, inst)
    if inst["clmp"]:
        raise UnknownInstruction(f"{inst}: clamp on packed arithmetic is not implemented")
    if name in _PACKED32:
        return _packed32(target, inst, *_PACKED32[name])
    if name in _PACKED16:
        return _packed16(target, inst, *_PACKED16[name])
    if name in _DOTS:
        letter, compute = _DOTS[name]
        low, high = _selection(inst)
        if inst["neg"] or inst["neg_hi"] or low or high & 3 != 3:
            raise UnknownInstruction(f"{inst}: modifiers on a dot product are not implemented")
        a, b, c = (source_getter(target, inst, inst[f"src{s}"], x, s) for s, x in enumerate("uu" + letter))
        write = writer(target, inst["vdst"], letter)
        return lambda g: write(g, compute(a(g), b(g), c(g)))
    if name == "v_pk_mov_b32":
        low, _ = _selection(inst)
        first = _word(target, inst, 0, low & 1)
        second = _word(target, inst, 1, low >> 1 & 1)
        target.destination(inst["vdst"], 2)
        to_low, to_high = writer(target, inst["vdst"], "u"), writer(target, inst["vdst"] + 1, "u")

        def move(g: Group) -> None:
            x, y = g.u[first].copy(), g.u[second].copy()
            to_low(g, x)
            to_high(g, y)

        return move
    if name in ("v_mad_mix_f32", "v_fma_mix_f32", "v_mad_mixlo_f16", "v_fma_mixlo_f16", "v_mad_mixhi_f16",
                "v_fma_mixhi_f16"):  # fmt: skip
        return _mix(target, inst)
    raise UnknownInstruction(f"{inst} is not implemented")


def _word(target: Target, inst: Instruction, slot: int, high: int) -> int:
    """Operand index of the lower or upper 32 bits of a 64-bit source."""
    code = inst[f"src{slot}"]
    if 128 <= code < 256:
        if high:
            raise UnknownInstruction(f"{inst}: upper half of a constant")
        return target.source(inst, code, slot)
    return target.source(inst, code + high, slot)


def _packed32(target: Target, inst: Instruction, arity: int, compute: Callable[..., Array]) -> Step:
    low, high = _selection(inst)
    sources = [[_word(target, inst, s, bits >> s & 1) for bits in (low, high)] for s in range(arity)]
    flips = [[inst[field] >> s & 1 for field in ("neg", "neg_hi")] for s in range(arity)]
    d = target.destination(inst["vdst"], 2)
    registers = target.vgprs + target.agprs

    def both(s: int) -> Getter:
        """[2 or 1, waves, lanes] float32."""
        first, second = sources[s]
        if first == second:
            get: Getter = lambda g: g.f[first][None]  # noqa: E731
        elif second == first + 1 and first < registers:
            key = ("pairs", first)
            get = lambda g: g.view(key, lambda g: g.block(first, 2).view(np.float32))  # noqa: E731
        else:
            get = lambda g: np.stack([g.f[first], g.f[second]])  # noqa: E731
        if any(flips[s]):
            sign = np.array([[[-1.0 if f else 1.0]] for f in flips[s]], np.float32)
            return lambda g: get(g) * sign
        return get

    getters = [both(s) for s in range(arity)]
    flushing = target.mode.flush_f32
    key = ("pairs", d)
    direct = isinstance(compute, np.ufunc) and not flushing

    def step(g: Group) -> None:
        out = g.view(key, lambda g: g.block(d, 2).view(np.float32))
        if direct and g.mask is None:
            compute(getters[0](g), getters[1](g), out)
            return
        values = [get(g) for get in getters]
        if flushing:
            value = flush(compute(*[flush(v) for v in values]))
        else:
            value = compute(*values)
        if g.mask is None:
            out[...] = value
        else:
            np.copyto(out, value, where=g.mask)

    return step


def _packed16(target: Target, inst: Instruction, letters: str, compute: Callable[..., Array]) -> Step:
    select = _selection(inst)
    getters: list[list[Getter]] = [[], []]
    for half, field in enumerate(("neg", "neg_hi")):
        for slot, letter in enumerate(letters):
            get = source_getter(target, inst, inst[f"src{slot}"], letter, slot, select[half] >> slot & 1)
            if inst[field] >> slot & 1:
                if letter != "h":
                    raise UnknownInstruction(f"{inst}: negation of an integer")
                getters[half].append(lambda g, get=get: np.negative(get(g)))  # type: ignore[misc]
            else:
                getters[half].append(get)
    low, high = (writer(target, inst["vdst"], letters[0], half, keep=True) for half in (0, 1))

    def step(g: Group) -> None:
        first, second = (compute(*[get(g) for get in halves]) for halves in getters)
        low(g, first)
        high(g, second)

    return step


def _mix(target: Target, inst: Instruction) -> Step:
    """Fused multiply-add of sources that are float32 or a half each; neg_hi is abs here."""
    select, halves = _selection(inst)
    getters: list[Getter] = []
    for slot in range(3):
        code = inst[f"src{slot}"]
        if halves >> slot & 1:
            base = half_view(target.source(inst, code, slot), select >> slot & 1, np.float16)
            get: Getter = lambda g, base=base: base(g).astype(np.float32)  # type: ignore[misc] # noqa: E731
        else:
            get = source_getter(target, inst, code, "f", slot)
        if inst["neg_hi"] >> slot & 1:
            get = lambda g, get=get: np.abs(get(g))  # type: ignore[misc] # noqa: E731
        if inst["neg"] >> slot & 1:
            get = lambda g, get=get: np.negative(get(g))  # type: ignore[misc] # noqa: E731
        getters.append(get)
    if inst.name.endswith("f32"):
        write = writer(target, inst["vdst"], "f")
        return lambda g: write(g, fma32(*[get(g) for get in getters]))
    write = writer(target, inst["vdst"], "h", int("mixhi" in inst.name), keep=True)
    return lambda g: write(g, fma32(*[get(g) for get in getters]).astype(np.float16))
