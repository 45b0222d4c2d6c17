"""Machine code -> `Instruction`, on top of the tables in PyPI's tinygrad (made from AMD's
machine-readable ISA).

Only tinygrad's format tables are used (bit positions and opcode names), not its objects: an
`Instruction` holds raw field values under the names of AMD's ISA document.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinygrad.renderer.amd import _load_formats
from tinygrad.renderer.amd.dsl import EnumBitField, FixedBitField

MFMA_SCALE_PREFIX = 0xD3AC  # upper half of the first dword of v_mfma_ld_scale_b32
_SUFFIX = re.compile(r"_(e32|e64)$")
_MODIFIERS = frozenset(
    ("abs", "neg", "omod", "clmp", "opsel", "acc", "cbsz", "abid", "blgp", "sd", "s1")
    + tuple(f"src{k}_{what}" for k in (0, 1) for what in ("abs", "neg", "sel", "sext"))
)
_LITERAL_SOURCES = ("src0", "src1", "ssrc0", "ssrc1")


class UnknownInstruction(Exception):
    """An encoding or an opcode that this package does not implement; the message names it."""


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction; `fields` are raw bit fields by their ISA names."""

    pc: int
    name: str  # lower case, without the _e32/_e64 of the encoding
    format: str  # SOP1, VOP3, VOP3P_MFMA, ... without _LIT, _DPP16, _SDWA
    variant: str  # "", "DPP16" or "SDWA"
    size: int
    fields: dict[str, int]
    literal: int | None

    def __getitem__(self, field: str) -> int:
        """A field by name; modifiers that the encoding does not have read as 0."""
        value = self.fields.get(field)
        if value is None:
            if field not in _MODIFIERS:
                raise KeyError(f"{self} has no field {field}")
            return 0
        return value

    def __str__(self) -> str:
        encoding = f"{self.format} {self.variant}".strip()
        return f"{self.name} ({encoding}) at {self.pc:#x}"


@dataclass(frozen=True, eq=False)
class _Format:
    name: str
    variant: str
    size: int
    fixed: tuple[tuple[int, int, int], ...]  # lowest bit, mask, required value
    opcode: tuple[int, int]  # lowest bit, mask
    names: dict[int, str]  # of the opcodes that this encoding has
    fields: tuple[tuple[str, int, int], ...]  # name, lowest bit, mask

    def matches(self, raw: int) -> bool:
        low, mask = self.opcode
        return raw >> low & mask in self.names and all(
            raw >> lo & m == value for lo, m, value in self.fixed
        )


@functools.cache
def _formats() -> tuple[_Format, ...]:
    """tinygrad's format tables in its order: specific encodings before the ones that would swallow
    them.
    """
    return tuple(_format(cls) for cls in _load_formats()["cdna"])


def _format(cls: Any) -> _Format:
    fixed, fields = [], []
    opcode, names = (0, 0), {}
    for name, bits in cls._fields:
        if isinstance(bits, EnumBitField):
            opcode = (bits.lo, bits.mask)
            members = list(bits._enum) if bits.allowed is None else bits.allowed
            names = {member.value: _SUFFIX.sub("", member.name.lower()) for member in members}
        elif isinstance(bits, FixedBitField):
            fixed.append((bits.lo, bits.mask, bits.default))
        else:
            fields.append((name, bits.lo, bits.mask))
    name, variant = cls.__name__, ""
    for suffix, kind, source in (
        ("_SDWA_SDST", "SDWA", 0xF9),
        ("_SDWA", "SDWA", 0xF9),
        ("_DPP16", "DPP16", 0xFA),
    ):
        if name.endswith(suffix):
            name, variant = name.removesuffix(suffix), kind
            fixed.append((0, 0x1FF, source))
            break
    size = 4 * (max(bits.hi for _, bits in cls._fields) // 32 + 1)
    return _Format(
        name.removesuffix("_LIT"), variant, size, tuple(fixed), opcode, names, tuple(fields)
    )


@functools.cache
def _candidates(top: int, scaled: bool) -> tuple[_Format, ...]:
    """Formats whose encoding bits agree with the upper nine bits of the first dword."""
    out = []
    for fmt in _formats():
        # VOP3PX2 keeps its encoding in the *third* dword: tried on anything else it swallows an
        # ordinary instruction that happens to stand before an MFMA.
        if (fmt.name == "VOP3PX2") == scaled and all(
            top >> lo - 23 & mask == value for lo, mask, value in fmt.fixed if 23 <= lo < 32
        ):
            out.append(fmt)
    return tuple(out)


def _carries_literal(fmt: _Format, fields: dict[str, int], name: str) -> bool:
    if fmt.name in ("SOP1", "SOP2", "SOPC", "VOP1", "VOP2", "VOPC") and not fmt.variant:
        if name.startswith("s_set_gpr_idx_on"):
            return fields["ssrc0"] == 255
        return any(fields.get(source) == 255 for source in _LITERAL_SOURCES)
    return False


def decode(code: bytes, offset: int = 0, pc: int | None = None) -> Instruction:
    """Decode the instruction at `offset` of `code`; raises UnknownInstruction."""
    data = code[offset : offset + 16].ljust(16, b"\0")
    where = offset if pc is None else pc
    raw = int.from_bytes(data, "little")
    for fmt in _candidates(raw >> 23 & 0x1FF, raw >> 16 & 0xFFFF == MFMA_SCALE_PREFIX):
        if fmt.matches(raw):
            break
    else:
        raise UnknownInstruction(f"no CDNA encoding matches {data[:8].hex()} at {where:#x}")
    name = fmt.names[raw >> fmt.opcode[0] & fmt.opcode[1]]
    fields = {key: raw >> low & mask for key, low, mask in fmt.fields}
    literal, size = fields.pop("literal", None), fmt.size
    if literal is None and _carries_literal(fmt, fields, name):
        literal, size = raw >> 32 & 0xFFFFFFFF, 8
    if literal is not None:
        size = 8
    return Instruction(where, name, fmt.name, fmt.variant, size, fields, literal)


def sweep(code: bytes, base: int = 0) -> Iterator[Instruction | UnknownInstruction]:
    """Decode from the first byte to the last; what cannot be decoded is yielded as the error and
    skipped.
    """
    offset = 0
    while offset + 4 <= len(code):
        try:
            instruction = decode(code, offset, base + offset)
        except UnknownInstruction as error:
            yield error
            offset += 4
            continue
        yield instruction
        offset += instruction.size
