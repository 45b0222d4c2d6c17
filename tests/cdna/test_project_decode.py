"""decode, plan and merge_pieces of csrc/hip, compiled for both AMD chips and executed."""

from __future__ import annotations

from collections import Counter

import decode_checks
import pytest
import torch
from cases import BF16, FP16
from project import FLOAT8, HARDWARE, Kernels

from build_tools.cdna.compiler import ARCHES
from build_tools.cdna.report import KernelReport, describe

both = pytest.mark.parametrize("arch", ARCHES)
LDS_LIMIT = {"gfx942": 64 << 10, "gfx950": 160 << 10}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@both
def test_resources(arch: str) -> None:
    """No register spilled, no scratch, LDS that fits; loads of 16 bytes."""
    entries = [
        entry
        for file in ("decode", "plan", "merge")
        for entry in describe(Kernels(arch).code(file))
        if "merge_states" not in entry.name
    ]
    assert len(entries) == 8 + 1 + 2
    for entry in entries:
        assert entry.scratch_bytes == entry.vgpr_spills == 0, entry.name
        # merge_pieces keeps scalars in lanes of a vector register, which is no memory access.
        assert entry.sgpr_spills <= (64 if "merge" in entry.name else 0), entry.name
        assert entry.mix["scratch"] == 0 and entry.lds_bytes <= LDS_LIMIT[arch], entry.name
        if "decode_tiles" in entry.name:
            check_tiles(entry)


def check_tiles(entry: KernelReport) -> None:
    """Of a tile's loop: matrix instructions, and the tile loaded twice in the code, before the loop
    and in it.
    """
    pieces = 18  # 16-byte loads of a lane for a tile: 18 of one row, or 9 of two
    assert entry.opcodes["global_load_dwordx4"] >= 2 * pieces, entry.name
    matrix = Counter({n: c for n, c in entry.opcodes.items() if n.startswith("v_mfma")})
    wide = entry.arch == "gfx950"
    if "Float8" in entry.name:
        parts = 3 if "Li3E" in entry.name else 2
        assert matrix == {
            "v_mfma_f32_16x16x32_fp8_fp8": 36 * parts + 32,
            "v_mfma_f32_16x16x32_fp8_bf8": 32,
        }
        assert any(
            HARDWARE[entry.arch] == t and n in entry.name
            for t, n in zip(FLOAT8, ("FNE", "FNUZE"), strict=True)
        )
    else:
        kind = "bf16" if "BFloat16" in entry.name else "f16"
        scores = {f"v_mfma_f32_16x16x32_{kind}": 18} if wide else {}
        assert matrix == scores | {f"v_mfma_f32_16x16x16_{kind}": 32 if wide else 68}


@both
def test_types(arch: str) -> None:
    decode_checks.check_types(Kernels(arch))


CHECKS = (
    "rows",
    "plans",
    "batch_invariance",
    "widths",
    "needles",
    "reference",
    "magnitudes",
    "bad_pages",
    "no_pages",
    "bad_lengths",
    "stale_plans",
    "schedules",
    "equal_values",
    "long_tail",
)


@both
@pytest.mark.parametrize("cache", [BF16, None], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", CHECKS)
def test_decode(arch: str, cache: torch.dtype | None, name: str) -> None:
    check = getattr(decode_checks, f"check_{name}")
    check(Kernels(arch), HARDWARE[arch] if cache is None else cache)


@both
@pytest.mark.parametrize("name", ["reference", "magnitudes"])
def test_decode_of_float16(arch: str, name: str) -> None:
    """The code of bfloat16, but for what it multiplies, rounds to and scales by."""
    getattr(decode_checks, f"check_{name}")(Kernels(arch), FP16)
