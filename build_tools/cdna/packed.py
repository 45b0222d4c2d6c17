"""VOP3P: two operations in one instruction, dot products, and multiply-adds of mixed precision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decoder import Instruction, UnknownInstruction
from .float_ops import dot2, half_bits, maximum, minimum
from .floats import flush, fma32, widen_bf16
from .integer_ops import byte_dot
from .operands import Getter, Step, Target, half_view, source_getter, writer
from .state import Array, Group
from .vector_ops import VECTOR_OPS

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


def compile_packed(target: Target, inst: Instruction) -> Step:
    """The function that executes a VOP3P instruction other than an MFMA."""
    name = inst.name
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
        a, b, c = (
            source_getter(target, inst, inst[f"src{s}"], x, s) for s, x in enumerate("uu" + letter)
        )
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
    if name in (
        "v_mad_mix_f32",
        "v_fma_mix_f32",
        "v_mad_mixlo_f16",
        "v_fma_mixlo_f16",
        "v_mad_mixhi_f16",
        "v_fma_mixhi_f16",
    ):
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
    sources = [
        [_word(target, inst, s, bits >> s & 1) for bits in (low, high)] for s in range(arity)
    ]
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
            compute(getters[0](g), getters[1](g), out=out)
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


def _packed16(
    target: Target, inst: Instruction, letters: str, compute: Callable[..., Array]
) -> Step:
    select = _selection(inst)
    getters: list[list[Getter]] = [[], []]
    for half, field in enumerate(("neg", "neg_hi")):
        for slot, letter in enumerate(letters):
            get = source_getter(
                target, inst, inst[f"src{slot}"], letter, slot, select[half] >> slot & 1
            )
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
