"""The table of mla_ops/capability.py against what aiter ships."""

from __future__ import annotations

import json
import zipfile
from typing import NamedTuple

import aiter_wheel
import pytest
import stand_in
from cases import BF16
from stand_in import FLOAT8

from mla_ops.capability import TABLE, Row


class Kernel(NamedTuple):
    arch: str
    q: str
    cache: str
    heads: int
    q_len: int
    lse: int
    file: str


SHIPPED = [
    Kernel(*row)
    for row in json.loads((stand_in.DATA / "persistent_kernels_2026_08.json").read_text())
]
ROWS = [row for row in TABLE if row.backend == "aiter"]
OURS = [row for row in ROWS if "rounded" not in row.reason]


def facts(row: Row) -> tuple[str, str, str, set[int]]:
    """Arch, q and cache as the csv names them, and query tokens as the kernel gets them."""
    (arch,), (q,), (cache,) = row.arch or (), row.q_dtype, row.cache_dtype
    names = {BF16: "bf16", FLOAT8[arch]: "fp8"}
    assert row.q_len is not None
    return arch, names[q], names[cache], {4 if s == 3 else s for s in row.q_len}


def serves(kernel: Kernel, arch: str, q: str, cache: str, q_len: int, heads: int = 16) -> bool:
    """As csrc/py_itfs_cu/asm_mla.cu chooses, for 16 heads: kernels of float8 q by the number of
    tokens, others for up to four; on gfx950 bfloat16 goes to those for 64 heads and one token. For
    128 heads and float8, one of its own on gfx942, and on gfx950 that for 32 heads and four
    tokens."""
    if (kernel.arch, kernel.q, kernel.cache) != (arch, q, cache):
        return False
    if heads == 128:
        return (kernel.heads, kernel.q_len) == ((128, 0) if arch == "gfx942" else (32, 4))
    if arch == "gfx950" and q == cache == "bf16":
        return (kernel.heads, kernel.q_len) == (64, 1)
    return kernel.heads == 16 and kernel.q_len == (q_len if q == "fp8" else 4)


@pytest.mark.parametrize("row", OURS, ids=lambda row: f"{row.kernel} {sorted(row.arch)[0]}")
def test_a_row_has_a_kernel_in_the_csv_and_in_the_wheel(row: Row) -> None:
    arch, q, cache, q_lens = facts(row)
    for q_len in q_lens:
        heads = 128 if "qh128" in row.kernel else 16
        found = [kernel for kernel in SHIPPED if serves(kernel, arch, q, cache, q_len, heads)]
        assert any(not kernel.lse for kernel in found), f"{row}: no such kernel"
    kind = row.kernel.split("_")[1]
    most = max(q_lens) if kind == "a8w8" else 4
    name = stand_in.FOR_128_HEADS if heads == 128 else stand_in.KERNELS[kind, most]
    assert stand_in.code_object(arch, name).kernels


def test_no_kernel_for_16_heads_is_left_out() -> None:
    """What the csv has for 16 heads is in the table, if only to say why it is not used."""
    have = {(arch, q, cache, s) for arch, q, cache, q_lens in map(facts, OURS) for s in q_lens}
    for kernel in SHIPPED:
        if kernel.heads == 16 and kernel.cache != "byte":
            tokens = [kernel.q_len] if kernel.q == "fp8" else [1, 2, 4]
            for s in tokens:
                assert (kernel.arch, kernel.q, kernel.cache, s) in have, kernel


def test_kernels_that_write_an_lse_are_on_one_chip_alone() -> None:
    """Why LSE is had from partial results: on gfx942 there is one kernel, for 64 heads."""
    on_gfx942 = [kernel for kernel in SHIPPED if kernel.lse and kernel.arch == "gfx942"]
    assert [(kernel.heads, kernel.q_len) for kernel in on_gfx942] == [(64, 1)]
    assert all(row.lse == {True, False} for row in ROWS)


def test_rows_that_round_mirror_rows_for_float8_queries() -> None:
    rounding = [row for row in ROWS if row not in OURS]
    assert rounding and all(row.q_dtype == {BF16} for row in rounding)
    plain = {(row.kernel, row.arch, row.q_len) for row in OURS if row.q_dtype != {BF16}}
    assert {(row.kernel, row.arch, row.q_len) for row in rounding} == plain


def test_the_wheel_has_no_csv_and_every_file_that_is_executed() -> None:
    aiter_wheel.code_object_path("gfx942/mla/mla_a8w8_qh16_qseqlen1_gqaratio16_ps.co")
    (wheel,) = (aiter_wheel.ROOT / "build" / "cdna-wheel").glob("amd_aiter-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not any(name.endswith("mla_asm.csv") for name in names)
    for arch in FLOAT8:
        for name in (*stand_in.KERNELS.values(), stand_in.FOR_128_HEADS):
            assert f"aiter_meta/hsa/{arch}/mla/{name}.co" in names
