"""Single bugs in a copy of the executor: each has to make some test fail.

A mutant is one replacement in one file; the named tests run on it in a process of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str  # a test file, or file::test; those that ought to notice


MUTANTS = [
    Mutant(
        "VOP3PX2 is looked for everywhere",
        "decoder.py",
        '(fmt.name == "VOP3PX2") == scaled and ',
        "",
        "test_decoder.py::test_an_instruction_before_an_mfma_is_not_swallowed",
    ),
    Mutant(
        "literals are 16 bits",
        "decoder.py",
        "raw >> 32 & 0xFFFFFFFF",
        "raw >> 32 & 0xFFFF",
        "test_decoder.py",
    ),
    Mutant(
        "gfx942 speaks OCP float8",
        "floats.py",
        'Float8("e4m3fnuz", 3, 8, True, False)',
        'Float8("e4m3fnuz", 3, 7, False, False)',
        "test_matrix.py::test_float8_families_differ",
    ),
    Mutant(
        "float8 ties go up",
        "floats.py",
        "sticky = (bits & np.uint32(0xFFFF)) != 0",
        "sticky = bits == bits",
        "test_float8.py::test_encode",
    ),
    Mutant(
        "FNUZ has a negative zero",
        "floats.py",
        "np.where(code == 0, 0, sign)",
        "sign",
        "test_float8.py::test_encode",
    ),
    Mutant(
        "FP16_OVFL is ignored",
        "state.py",
        "bool(self.mode >> 23 & 1)",
        "False",
        "test_float8.py::test_encode",
    ),
    Mutant(
        "fma rounds twice",
        "floats.py",
        "if 1 in suspect.tobytes():",
        "if False:",
        "test_vector_float.py::test_fma_rounds_once",
    ),
    Mutant(
        "denormals are never flushed",
        "state.py",
        "self.mode >> 4 & 3 == 0",
        "False",
        "test_vector_float.py::test_flushed_denormals",
    ),
    Mutant(
        "bf16 rounds half up",
        "floats.py",
        "np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))",
        "np.uint32(0x8000)",
        "test_float8.py::test_bf16_of_all_patterns",
    ),
    Mutant(
        "i24 does not extend the sign",
        "integer_ops.py",
        "low - ((low & 0x800000) << 1)",
        "low",
        "test_hip_kernels.py::test_24_bit_multiplication",
    ),
    Mutant(
        "u24 keeps the upper byte",
        "integer_ops.py",
        "(a & U(0xFFFFFF)).astype(np.uint64)",
        "a.astype(np.uint64)",
        "test_hip_kernels.py::test_24_bit_multiplication",
    ),
    Mutant(
        "shifts take all bits of the amount",
        "integer_ops.py",
        "return amount & amount.dtype.type(bits)",
        "return amount",
        "test_vector_integer.py",
    ),
    Mutant(
        "v_perm numbers its bytes from src0",
        "integer_ops.py",
        "for x in (b, a)]",
        "for x in (a, b)]",
        "test_vector_integer.py",
    ),
    Mutant(
        "v_max3 takes the smallest",
        "float_ops.py",
        "return maximum(maximum(a, b), c)",
        "return maximum(minimum(a, b), c)",
        "test_vector_float.py::test_exact",
    ),
    Mutant(
        "NaN wins in v_max",
        "float_ops.py",
        "out = np.fmax(a, b)",
        "out = np.maximum(a, b)",
        "test_vector_float.py::test_exact",
    ),
    Mutant(
        "med3 of a NaN is a NaN",
        "float_ops.py",
        "np.where(nan, min3(a, b, c), middle)",
        "np.where(nan, a + b + c, middle)",
        "test_vector_float.py::test_exact",
    ),
    Mutant(
        "moves ignore EXEC",
        "vector.py",
        "np.copyto(g.u[d], g.u[s], where=g.mask)",
        "g.u[d][...] = g.u[s]",
        "test_modifiers.py::test_inactive_lanes_keep_their_value",
    ),
    Mutant(
        "abs is dropped",
        "modifiers.py",
        "return lambda g: np.abs(get(g))",
        "return get",
        "test_modifiers.py::test_abs_and_neg",
    ),
    Mutant(
        "neg is dropped",
        "modifiers.py",
        "return lambda g: np.negative(get(g))",
        "return get",
        "test_modifiers.py::test_abs_and_neg",
    ),
    Mutant(
        "clamp keeps NaN with DX10_CLAMP",
        "modifiers.py",
        "v.dtype.type(0) if dx10 else v",
        "v",
        "test_modifiers.py::test_clamp",
    ),
    Mutant(
        "omod counts in IEEE mode too",
        "modifiers.py",
        "if omod and letter in FLOATS and not target.mode.ieee:",
        "if omod and letter in FLOATS:",
        "test_modifiers.py::test_omod",
    ),
    Mutant(
        "omod of 4 is 2",
        "modifiers.py",
        "(1.0, 2.0, 4.0, 0.5)",
        "(1.0, 2.0, 2.0, 0.5)",
        "test_modifiers.py::test_omod",
    ),
    Mutant(
        "DPP reads inactive lanes",
        "vector.py",
        "else exists & mask.take(lanes, axis=1)",
        "else np.broadcast_to(exists, (g.n, 64))",
        "test_modifiers.py::test_dpp",
    ),
    Mutant(
        "DPP row_shr goes the other way",
        "vector.py",
        "return LANE - amount, column >= amount",
        "return LANE + amount, column + amount < 16",
        "test_modifiers.py::test_dpp",
    ),
    Mutant(
        "SDWA words are bytes",
        "modifiers.py",
        "(16 * (select - 4), 16)",
        "(16 * (select - 4), 8)",
        "test_modifiers.py::test_sdwa_sources",
    ),
    Mutant(
        "carry in is forgotten",
        "arithmetic.py",
        "x + y + c",
        "x + y",
        "test_vector_integer.py::test_carries",
    ),
    Mutant(
        "division scales the wrong way",
        "division.py",
        "fmt.exponent(quotient) > fmt.bias",
        "fmt.exponent(quotient) < fmt.bias",
        "test_vector_float.py::test_division_sequence_is_correctly_rounded",
    ),
    Mutant(
        "compare leaves inactive bits",
        "operands.py",
        "lanes = lanes & g.mask",
        "lanes = lanes | ~g.mask",
        "test_vector_integer.py::test_compare",
    ),
    Mutant(
        "SCC of s_add is signed overflow",
        "scalar_ops.py",
        "return out, out < a",
        "return out, out >= a",
        "test_scalar.py",
    ),
    Mutant(
        "saveexec saves the new EXEC",
        "scalar.py",
        "        write(g, old)\n",
        "        write(g, new)\n",
        "test_scalar.py::test_saveexec",
    ),
    Mutant(
        "scalar loads ignore the offset register",
        "scalar.py",
        "address = address + extra(g)",
        "pass",
        "test_scalar.py::test_scalar_loads",
    ),
    Mutant(
        "LDS offset is dropped",
        "lds.py",
        'offset = inst["offset1"] << 8 | inst["offset0"]\n    match',
        "offset = 0\n    match",
        "test_lds.py::test_read",
    ),
    Mutant(
        "read2 offsets are bytes",
        "lds.py",
        "unit = nbytes * (64 if wide_step else 1)",
        "unit = 1",
        "test_lds.py::test_two_at_once",
    ),
    Mutant(
        "bpermute reads inactive lanes",
        "lds.py",
        "np.where(g.mask, g.u[data], U(0))\n        if not push",
        "g.u[data]\n        if not push",
        "test_lds.py::test_bpermute_and_permute",
    ),
    Mutant(
        "transposing reads do not transpose",
        "lds.py",
        "tile.transpose(0, 1, 3, 2)",
        "tile",
        "test_lds.py::test_transposing_reads",
    ),
    Mutant(
        "LDS loads forget inst_offset",
        "access.py",
        "m0 + (offset + access.nbytes * LANE)",
        "m0 + access.nbytes * LANE",
        "test_memory.py::test_loads_to_lds",
    ),
    Mutant(
        "M0 has 16 bits",
        "access.py",
        "LDS_ADDRESS_BITS = 0x3FFFF",
        "LDS_ADDRESS_BITS = 0xFFFF",
        "test_memory.py::test_loads_to_lds",
    ),
    Mutant(
        "signed bytes are unsigned",
        "access.py",
        "    if access.signed:\n",
        "    if False:\n",
        "test_memory.py::test_load",
    ),
    Mutant(
        "out-of-range buffer loads fetch",
        "buffers.py",
        "valid = at + width <= words[:, 2:3].astype(I64) - extra",
        "valid = at + width <= at + width",
        "test_memory.py::test_out_of_range_loads_give_zero_dword_by_dword",
    ),
    Mutant(
        "buffer bounds ignore soffset",
        "buffers.py",
        "words[:, 2:3].astype(I64) - extra",
        "words[:, 2:3].astype(I64)",
        "test_memory.py::test_out_of_range_loads_give_zero_dword_by_dword",
    ),
    Mutant(
        "buffers are checked as a whole",
        "buffers.py",
        "            at = at + ahead\n",
        "            at = at + 0 * ahead\n",
        "test_memory.py",
    ),
    Mutant(
        "global offsets are unsigned",
        "memory.py",
        "value - 0x2000 if value & 0x1000 else value",
        "value",
        "test_memory.py::test_negative_offsets_and_unaligned_addresses",
    ),
    Mutant(
        "memory bounds are not checked",
        "state.py",
        "if 0 in room.tobytes():",
        "if False:",
        "test_memory.py::test_accesses_outside_allocations_are_faults",
    ),
    Mutant(
        "MFMA drops the addend",
        "matrix.py",
        "_by_registers(product, m) + addend(g).view(dtype)",
        "_by_registers(product, m) + 0 * addend(g).view(dtype)",
        "test_matrix.py::test_mfma",
    ),
    Mutant(
        "MFMA transposes its result",
        "matrix.py",
        "np.matmul(a(g), b(g).transpose(0, 2, 1))",
        "np.matmul(b(g), a(g).transpose(0, 2, 1))",
        "test_matrix.py::test_mfma",
    ),
    Mutant(
        "A is always in v[]",
        "matrix.py",
        'inst["acc"] & 1, types[0]',
        "0, types[0]",
        "test_matrix.py::test_mfma",
    ),
    Mutant(
        "block scales are off by one",
        "matrix.py",
        "exponent - 127)",
        "exponent - 126)",
        "test_matrix.py::test_block_scales",
    ),
    Mutant(
        "packed op_sel is ignored",
        "packed.py",
        "bits >> s & 1) for bits in (low, high)]",
        "bits >> s & 1) for bits in (0, 7)]",
        "test_vector_float.py::test_packed_float",
    ),
    Mutant(
        "cbranch_scc0 is scc1",
        "program.py",
        "[not b for b in g.scc.tobytes()]",
        "[bool(b) for b in g.scc.tobytes()]",
        "test_control.py::test_conditions",
    ),
    Mutant(
        "indexed registers ignore M0",
        "operands.py",
        "moved = self.mode.index_by if self.mode.index_mode >> slot & 1 else 0",
        "moved = 0",
        "test_control.py::test_indexed_registers",
    ),
    Mutant(
        "barriers do not wait",
        "program.py",
        "return lambda g: _flag(g.batch.waiting, g, after)",
        "return lambda g: after",
        "test_control.py::test_barriers_are_counted_per_wave",
    ),
    Mutant(
        "work-item ids are not packed",
        "launch.py",
        "x | y << 10 | z << 20",
        "x",
        "test_hip_kernels.py::test_three_dimensional_grids",
    ),
    Mutant(
        "partial waves run with all lanes",
        "launch.py",
        "active = thread < threads[0]",
        "active = thread >= 0 * threads[0]",
        "test_hip_kernels.py::test_grid_stride_reduction",
    ),
    Mutant("reads are not races", "races.py", "self.readers[at] |= me", "pass", "test_races.py"),
    Mutant(
        "barriers do not end an interval",
        "races.py",
        "self.writers[part] = 0",
        "pass",
        "test_races.py",
    ),
]


def test_there_are_enough() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "build_tools", tmp_path / "build_tools", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = tmp_path / "build_tools" / "cdna" / mutant.file
    text = path.read_text()
    assert mutant.old in text, f"{mutant.file} no longer contains {mutant.old!r}"
    path.write_text(text.replace(mutant.old, mutant.new, 1))
    environment = {
        **os.environ,
        "MLA_OPS_BUILD_TOOLS_ROOT": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--override-ini",
        "addopts=",
        str(HERE / mutant.tests),
    ]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, (
        f"not caught (pytest status {done.returncode}):\n{done.stdout[-1500:]}"
    )
