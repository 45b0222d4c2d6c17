"""AMDGPU code objects: ELF segments, symbols, kernel descriptors and the metadata note.

Layouts: LLVM's "User Guide for AMDGPU Backend", sections "ELF Code Object" and "Kernel Descriptor".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PT_LOAD, SHT_SYMTAB, SHT_RELA, SHT_DYNSYM = 1, 2, 4, 11
R_AMDGPU_RELATIVE64 = 13
NT_AMDGPU_METADATA = 32
_MACHINES = {0x4C: "gfx942", 0x4F: "gfx950"}  # e_flags & 0xff: EF_AMDGPU_MACH_AMDGCN_*


@dataclass(frozen=True)
class Kernel:
    """What the 64-byte kernel descriptor says."""

    name: str
    entry: int  # virtual address of the first instruction
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload: int

    @property
    def user_sgprs(self) -> int:
        return self.rsrc2 >> 1 & 31

    @property
    def float_mode(self) -> int:
        """MODE[7:0] at the start: rounding and denormal bits."""
        return self.rsrc1 >> 12 & 0xFF

    @property
    def mode(self) -> int:
        """The MODE register at the start: FLOAT_MODE, DX10_CLAMP (bit 8), IEEE (9), FP16_OVFL
        (23).
        """
        bits = self.rsrc1
        return (
            self.float_mode | (bits >> 21 & 1) << 8 | (bits >> 23 & 1) << 9 | (bits >> 26 & 1) << 23
        )

    @property
    def registers(self) -> int:
        """Registers of the unified file a wave gets (granules of 8 on gfx90a and later)."""
        return ((self.rsrc1 & 63) + 1) * 8

    @property
    def vgprs(self) -> int:
        """Where the accumulation registers start: ACCUM_OFFSET, granules of 4."""
        return ((self.rsrc3 & 63) + 1) * 4

    @property
    def agprs(self) -> int:
        return max(self.registers - self.vgprs, 0)


@dataclass(eq=False)
class CodeObject:
    arch: str
    segments: list[tuple[int, bytes]]  # virtual address, content padded to its memory size
    text: bytes
    text_address: int
    kernels: dict[str, Kernel]
    relocations: list[tuple[int, int]]  # where, addend
    metadata: dict[str, Any] = field(default_factory=dict)

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of that name, or the only one; raises KeyError with the names there are."""
        if name is None and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise KeyError(f"no kernel {name!r}; there are {sorted(self.kernels)}")
        return self.kernels[name]

    def kernel_metadata(self, name: str) -> dict[str, Any]:
        for entry in self.metadata.get("amdhsa.kernels", []):
            if entry.get(".name") == name:
                return entry
        return {}

    def __post_init__(self) -> None:
        if self.arch not in ("gfx942", "gfx950"):
            raise ValueError(f"expected a gfx942 or gfx950 code object, got {self.arch}")


def unpack_msgpack(data: bytes, offset: int = 0) -> tuple[Any, int]:
    """The MessagePack subset that AMDGPU metadata uses: nil, bool, int, str, array, map."""
    tag = data[offset]
    offset += 1
    if tag < 0x80:
        return tag, offset
    if tag >= 0xE0:
        return tag - 256, offset
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], offset
    if 0xCC <= tag <= 0xD3:
        width = 1 << (tag & 3)
        return int.from_bytes(
            data[offset : offset + width], "big", signed=tag >= 0xD0
        ), offset + width
    count = {0x80: tag & 15, 0x90: tag & 15}.get(tag & 0xF0, tag & 31)
    kind = "map" if tag < 0x90 else "array" if tag < 0xA0 else "str"
    if tag >= 0xC0:
        kind, width = {
            0xD9: ("str", 1),
            0xDA: ("str", 2),
            0xDB: ("str", 4),
            0xDC: ("array", 2),
            0xDD: ("array", 4),
            0xDE: ("map", 2),
            0xDF: ("map", 4),
        }[tag]
        count = int.from_bytes(data[offset : offset + width], "big")
        offset += width
    if kind == "str":
        return data[offset : offset + count].decode(), offset + count
    items = []
    for _ in range(count * (2 if kind == "map" else 1)):
        item, offset = unpack_msgpack(data, offset)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items), offset


def _notes(data: bytes) -> dict[str, Any]:
    offset = 0
    while offset + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, offset)
        start = offset + 12 + (name_size + 3 & ~3)
        if kind == NT_AMDGPU_METADATA:
            return unpack_msgpack(data, start)[0]
        offset = start + (size + 3 & ~3)
    return {}


def _string(blob: bytes, offset: int) -> str:
    return blob[offset : blob.index(b"\0", offset)].decode()


def parse(blob: bytes, arch: str | None = None) -> CodeObject:
    """Parse a code object. `arch` overrides what the ELF flags say."""
    if blob[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    program_offset, section_offset, flags = struct.unpack_from("<QQI", blob, 32)
    program_size, programs, section_size, sections, name_section = struct.unpack_from(
        "<HHHHH", blob, 54
    )
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", blob, section_offset + i * section_size)
        for i in range(sections)
    ]
    names = headers[name_section][4]
    by_name = {_string(blob, names + h[0]): h for h in headers}
    segments = []
    for i in range(programs):
        kind, _, offset, address, _, size, memory, _ = struct.unpack_from(
            "<IIQQQQQQ", blob, program_offset + i * program_size
        )
        if kind == PT_LOAD:
            segments.append((address, blob[offset : offset + size].ljust(memory, b"\0")))
    symbols: dict[str, int] = {}
    relocations = []
    for header in headers:
        if header[1] in (SHT_SYMTAB, SHT_DYNSYM):
            strings = headers[header[6]][4]
            for at in range(header[4], header[4] + header[5], 24):
                name_at, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", blob, at)
                symbols[_string(blob, strings + name_at)] = value
        elif header[1] == SHT_RELA:
            for at in range(header[4], header[4] + header[5], 24):
                where, info, addend = struct.unpack_from("<QQq", blob, at)
                if info & 0xFFFFFFFF != R_AMDGPU_RELATIVE64:
                    raise ValueError(f"relocation type {info & 0xFFFFFFFF} is not supported")
                relocations.append((where, addend))
    text = by_name[".text"]
    note = by_name.get(".note")
    kernels = {}
    for name, address in symbols.items():
        if name.endswith(".kd"):
            kernels[name[:-3]] = _descriptor(name[:-3], address, segments)
    return CodeObject(
        arch or _MACHINES.get(flags & 0xFF, f"machine {flags & 0xFF:#x}"),
        segments,
        blob[text[4] : text[4] + text[5]],
        text[3],
        kernels,
        relocations,
        _notes(blob[note[4] : note[4] + note[5]]) if note else {},
    )


def _descriptor(name: str, address: int, segments: list[tuple[int, bytes]]) -> Kernel:
    for base, content in segments:
        if base <= address < base + len(content):
            at = address - base
            lds, scratch, kernarg = struct.unpack_from("<III", content, at)
            (entry,) = struct.unpack_from("<q", content, at + 16)
            rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from(
                "<IIIHH", content, at + 44
            )
            return Kernel(
                name,
                address + entry,
                lds,
                scratch,
                kernarg,
                rsrc1,
                rsrc2,
                rsrc3,
                properties,
                preload,
            )
    raise ValueError(f"kernel descriptor of {name} lies in no segment")


def load(path: str | Path, arch: str | None = None) -> CodeObject:
    """Read and parse a code object file."""
    return parse(Path(path).read_bytes(), arch)
