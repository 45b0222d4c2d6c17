"""What a HIP file costs on gfx942 and gfx950: registers, LDS, spills, instruction mix,
occupancy.

Limits of a compute unit: AMD's CDNA3 and CDNA4 ISA documents and LLVM's AMDGPU backend (512
vector registers per SIMD lane in granules of 8, 8 waves per SIMD, 4 SIMDs per CU, LDS of 64 and
160 KiB).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .code_object import CodeObject, Kernel
from .compiler import ARCHES, compile_hip
from .decoder import Instruction, sweep

SIMDS, WAVES_PER_SIMD, REGISTERS_PER_SIMD, GRANULE = 4, 8, 512, 8
LDS_PER_CU = {"gfx942": 64 << 10, "gfx950": 160 << 10}
CLASSES = (
    ("mfma", re.compile(r"v_mfma")),
    ("transcendental", re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)")),
    ("vector alu", re.compile(r"v_")),
    ("lds", re.compile(r"ds_")),
    ("global load", re.compile(r"(global|flat|buffer)_load")),
    ("global store", re.compile(r"(global|flat|buffer)_store")),
    ("atomic", re.compile(r"(global|flat|buffer)_atomic")),
    ("scratch", re.compile(r"scratch_")),
    ("scalar load", re.compile(r"s_(buffer_)?load")),
    ("barrier", re.compile(r"s_barrier")),
    ("branch", re.compile(r"s_(c?branch|setpc|swappc|call)")),
    ("wait", re.compile(r"s_(waitcnt|nop|sleep)")),
    ("scalar alu", re.compile(r"s_")),
)


@dataclass(frozen=True)
class KernelReport:
    """Static figures of one kernel on one architecture."""

    name: str
    arch: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    work_group: int  # the largest the kernel is compiled for
    opcodes: Counter[str]

    @property
    def mix(self) -> Counter[str]:
        """Instructions by class."""
        out: Counter[str] = Counter()
        for name, count in self.opcodes.items():
            out[classify(name)] += count
        return out

    @property
    def mfmas(self) -> int:
        return self.mix["mfma"]

    @property
    def waves_by_registers(self) -> int:
        """Waves per SIMD that the vector registers allow. With AGPRs in use, the VGPRs are
        rounded up to a multiple of four first (ACCUM_OFFSET).
        """
        total = (self.vgprs + 3) // 4 * 4 + self.agprs if self.agprs else self.vgprs
        rounded = max((total + GRANULE - 1) // GRANULE * GRANULE, GRANULE)
        return min(REGISTERS_PER_SIMD // rounded, WAVES_PER_SIMD)

    @property
    def work_groups_by_lds(self) -> int | None:
        """Work-groups per compute unit that LDS allows; None without LDS."""
        return LDS_PER_CU[self.arch] // self.lds_bytes if self.lds_bytes else None

    @property
    def occupancy(self) -> int:
        """Waves per SIMD, with whole work-groups of the largest size resident."""
        waves = max((self.work_group + 63) // 64, 1)
        groups = self.waves_by_registers * SIMDS // waves
        if self.work_groups_by_lds is not None:
            groups = min(groups, self.work_groups_by_lds)
        return min(groups * waves // SIMDS, WAVES_PER_SIMD)


def classify(opcode: str) -> str:
    for name, pattern in CLASSES:
        if pattern.match(opcode):
            return name
    return "other"


def kernel_instructions(code: CodeObject, kernel: Kernel) -> Iterator[Instruction]:
    """Instructions from the kernel's entry to the next kernel's; padding after the last
    s_endpgm is left out.
    """
    later = [k.entry for k in code.kernels.values() if k.entry > kernel.entry]
    start = kernel.entry - code.text_address
    stop = min(later) - code.text_address if later else len(code.text)
    pending: list[Instruction] = []
    for item in sweep(code.text[start:stop], kernel.entry):
        if isinstance(item, Instruction):
            pending.append(item)
            if item.name == "s_endpgm" or "branch" in item.name or "setpc" in item.name:
                yield from pending
                pending = []


def describe(code: CodeObject) -> list[KernelReport]:
    """Reports of all kernels of a code object."""
    out = []
    for name, kernel in sorted(code.kernels.items()):
        data = code.kernel_metadata(name)
        agprs = data.get(".agpr_count", 0)
        out.append(
            KernelReport(
                name,
                code.arch,
                data.get(".vgpr_count", kernel.registers) - agprs,  # the metadata counts both
                agprs,
                data.get(".sgpr_count", 0),
                data.get(".vgpr_spill_count", 0),
                data.get(".sgpr_spill_count", 0),
                kernel.lds_bytes,
                kernel.scratch_bytes,
                data.get(".max_flat_workgroup_size", 1024),
                Counter(inst.name for inst in kernel_instructions(code, kernel)),
            )
        )
    return out


def report(
    path: Path, flags: tuple[str, ...] = (), arches: tuple[str, ...] = ARCHES
) -> list[KernelReport]:
    """Compile a HIP file for each architecture and describe its kernels."""
    return [entry for arch in arches for entry in describe(compile_hip(path, arch, flags))]


def render(entries: list[KernelReport], top: int = 12) -> str:
    """Plain text, one block per kernel and architecture."""
    lines = []
    for e in entries:
        total = sum(e.opcodes.values())
        lds = (
            "no LDS"
            if e.work_groups_by_lds is None
            else f"{e.work_groups_by_lds} work-groups by LDS"
        )
        lines += [
            f"{e.name} on {e.arch}",
            f"  registers  {e.vgprs} vector, {e.agprs} accumulation, {e.sgprs} scalar",
            f"  spills     {e.vgpr_spills} vector, {e.sgpr_spills} scalar",
            f"  scratch    {e.scratch_bytes} bytes a lane",
            f"  LDS        {e.lds_bytes} bytes a work-group of at most {e.work_group}",
            f"  occupancy  {e.occupancy} waves a SIMD; {e.waves_by_registers} by registers, {lds}",
            f"  code       {total} instructions, {e.mfmas} MFMA",
            "  mix        " + ", ".join(f"{name} {count}" for name, count in e.mix.most_common()),
            "  opcodes    "
            + ", ".join(f"{name} {count}" for name, count in e.opcodes.most_common(top)),
            "",
        ]
    return "\n".join(lines)
