"""The kernels of csrc/hip, compiled for both chips and executed: results to the bit, races, and
what the compiler made of them.
"""

from __future__ import annotations

import project_kv_cache
import project_merge
import project_quantize
import pytest
import torch
from project import FILES, FLOAT8, HARDWARE, WIDE, Kernels, mangled

from build_tools.cdna.compiler import ARCHES
from build_tools.cdna.report import KernelReport, describe

both = pytest.mark.parametrize("arch", ARCHES)
to_float8 = pytest.mark.parametrize("to", FLOAT8, ids=["e4m3fn", "e4m3fnuz"])
from_wide = pytest.mark.parametrize("dtype", WIDE, ids=["f32", "f16", "bf16"])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reports(arch: str) -> list[KernelReport]:
    """Of all kernels but merge_pieces, which is a part of decode: test_project_decode.py."""
    entries = [entry for file in FILES for entry in describe(Kernels(arch).code(file))]
    return [entry for entry in entries if "merge_pieces" not in entry.name]


@both
def test_nothing_goes_to_memory_that_is_not_asked_for(arch: str) -> None:
    """No scratch and no vector register spilled. A few kernels keep up to eight scalar registers in
    lanes of a vector register, which is no memory access; more would be noticed.
    """
    entries = reports(arch)
    assert len(entries) == 15 + 3 + 3 + 3 * len(WIDE) * len(FLOAT8)
    for entry in entries:
        assert entry.scratch_bytes == entry.vgpr_spills == entry.mix["scratch"] == 0, entry.name
        assert entry.sgpr_spills <= 8 and entry.agprs == 0, (entry.name, entry.sgpr_spills)
        assert entry.occupancy >= 4, (entry.name, entry.occupancy)
    assert sum(entry.sgpr_spills > 0 for entry in entries) <= 6


@both
def test_instructions(arch: str) -> None:
    """In the code: 16 bytes at a time, and the float8 conversion for the family of the hardware
    alone. In what ran: the same, and not where addresses do not allow it.
    """
    other = next(dtype for dtype in FLOAT8 if dtype != HARDWARE[arch])
    for entry in reports(arch):
        names = [f"{len(n)}{n}E" for n in ("Float8E4M3FN", "Float8E4M3FNUZ")]
        to = next((t for t, n in zip(FLOAT8, names, strict=True) if n in entry.name), None)
        converts = entry.opcodes["v_cvt_pk_fp8_f32"] > 0
        assert converts == (to == HARDWARE[arch]), entry.name
        assert to != other or not converts
        assert entry.opcodes["global_load_dwordx4"] > 0, entry.name
        if "find_largest" not in entry.name and "Li4E" not in entry.name:
            assert entry.opcodes["global_store_dwordx4"] > 0, entry.name
    project_quantize.check_instructions(Kernels(arch))


@both
@to_float8
@pytest.mark.parametrize("dtype", WIDE[1:], ids=["f16", "bf16"])
def test_every_pattern(arch: str, dtype: torch.dtype, to: torch.dtype) -> None:
    project_quantize.check_patterns(Kernels(arch), dtype, to)


@both
@to_float8
def test_float32(arch: str, to: torch.dtype) -> None:
    project_quantize.check_float32(Kernels(arch), to)


@both
@from_wide
@to_float8
def test_counts_and_found_scales(arch: str, dtype: torch.dtype, to: torch.dtype) -> None:
    project_quantize.check_counts(Kernels(arch), dtype, to)
    project_quantize.check_found_scale(Kernels(arch), dtype, to)


@both
@from_wide
@to_float8
def test_rows_and_strides(arch: str, dtype: torch.dtype, to: torch.dtype) -> None:
    project_quantize.check_strides(Kernels(arch), dtype, to)
    project_quantize.check_rows(Kernels(arch), dtype, to)


@both
def test_cache_write(arch: str) -> None:
    project_kv_cache.check_types(Kernels(arch))
    project_kv_cache.check_layouts(Kernels(arch))


@both
def test_cache_write_in_any_order(arch: str) -> None:
    project_kv_cache.check_duplicates(Kernels(arch))


@both
@from_wide
def test_merge(arch: str, dtype: torch.dtype) -> None:
    project_merge.check_merge(Kernels(arch), dtype)


def test_names_are_those_of_the_compiler() -> None:
    kernels = Kernels("gfx942")
    assert mangled("merge_states", torch.float16) == "_ZN3mla3gpu12merge_statesINS0_7Float16EEEv"
    same = kernels.find("kv_cache", "write_kv_cache", torch.float16, torch.float16)
    assert "S2_" in same
    with pytest.raises(ValueError):
        kernels.find("merge", "merge_states", FLOAT8[0])
