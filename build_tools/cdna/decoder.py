"""Machine code -> `Instruction`, on top of the tables in PyPI's tinygrad (made from AMD's machine-readable ISA).

Only tinygrad's format tables are used (bit positions and opcode names), not its objects: an `Instruction`
holds raw field values under the names of AMD's ISA document.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinygrad.renderer.amd import _load_formats, _matches
from tinygrad.renderer.amd.dsl import BitField, EnumBitField, FixedBitField

MFMA_SCALE_PREFIX = 0xD3AC  # upper half of the first dword of v_mfma_ld_scale_b32
_SUFFIX = re.compile(r"_(e32|e64)$")
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
        return self.fields.get(field, 0)

    def __str__(self) -> str:
        return f"{self.name} ({self.format}{' ' + self.variant if self.variant else ''}) at {self.pc:#x}"


@dataclass(frozen=True)
class _Format:
    cls: Any
    name: str
    variant: str
    size: int
    fields: tuple[tuple[str, int, int], ...]  # name, lowest bit, mask
    op: Any


@functools.cache
def _formats() -> tuple[_Format, ...]:
    formats = []
    for cls in _load_formats()["cdna"]:
        fields, op = [], None
        for name, field in cls._fields:
            if isinstance(field, EnumBitField):
                op = field
            elif isinstance(field, BitField) and not isinstance(field, FixedBitField):
                fields.append((name, field.lo, field.mask))
        name, variant = cls.__name__, ""
        for suffix in ("_SDWA_SDST", "_SDWA", "_DPP16"):
            if name.endswith(suffix):
                name, variant = name.removesuffix(suffix), suffix[1:5].removesuffix("_")
                variant = "DPP16" if variant == "DPP1" else "SDWA"
        name = name.removesuffix("_LIT")
        top = max(f.hi for _, f in cls._fields)
        formats.append(_Format(cls, name, variant, 4 * (top // 32 + 1), tuple(fields), op))
    return tuple(formats)


@functools.lru_cache(maxsize=1 << 14)
def _match(first: int, data: bytes) -> _Format | None:
    """The format of an instruction, found from its first dword (and the second where the format needs it)."""
    scaled = first >> 16 == MFMA_SCALE_PREFIX
    for fmt in _formats():
        # VOP3PX2 keeps its encoding in the *third* dword: tried on anything else it swallows an ordinary
        # instruction that happens to stand before an MFMA.
        if (fmt.name == "VOP3PX2") == scaled and _matches(data, fmt.cls):
            return fmt
    return None


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
    fmt = _match(raw & 0xFFFFFFFF, data if raw >> 16 & 0xFFFF == MFMA_SCALE_PREFIX else data[:8] + bytes(8))
    if fmt is None:
        raise UnknownInstruction(f"no CDNA encoding matches {data[:8].hex()} at {where:#x}")
    name = fmt.op.decode(raw >> fmt.op.lo & fmt.op.mask).name.lower()
    name = _SUFFIX.sub("", name)
    fields = {key: raw >> low & mask for key, low, mask in fmt.fields}
    literal, size = fields.pop("literal", None), fmt.size
    if literal is None and _carries_literal(fmt, fields, name):
        literal, size = raw >> 32 & 0xFFFFFFFF, 8
    if literal is not None:
        size = 8
    return Instruction(where, name, fmt.name, fmt.variant, size, fields, literal)


def sweep(code: bytes, base: int = 0) -> Iterator[Instruction | UnknownInstruction]:
    """Decode from the first byte to the last; what cannot be decoded is yielded as the error and skipped."""
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
