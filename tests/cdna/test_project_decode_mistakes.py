"""One mistake at a time in a copy of decode's sources: each has to fail the checks that the
unchanged sources pass in test_project_decode.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import decode_checks
import pytest
import torch
from cases import BF16, FP16
from mistake import Check, Mistake
from project import HARDWARE, NAMES

LOOP, TILE = "hip/decode_mfma.h", "hip/tile_mfma.h"
ROWS, MFMA = "hip/rows_mfma.h", "hip/mfma.h"
SHARED = "hip/decode.h"


def of(name: str, cache: torch.dtype | None = BF16) -> Check:
    """A check on a cache of a type; None is the hardware's float8."""
    check = getattr(decode_checks, f"check_{name}")
    return lambda kernels: check(kernels, HARDWARE[kernels.arch] if cache is None else cache)


def float8(name: str) -> Check:
    return of(name, None)


MISTAKES = [
    Mistake(
        "even and odd numbers change places",
        MFMA,
        "__builtin_amdgcn_perm(high, low, 0x05040100)",
        "__builtin_amdgcn_perm(high, low, 0x07060302)",
        of("rows"),
        "gfx950",
    ),
    Mistake(
        "two tokens' bytes change places",
        MFMA,
        "__builtin_amdgcn_perm(high, low, 0x05010400)",
        "__builtin_amdgcn_perm(high, low, 0x04000501)",
        float8("rows"),
    ),
    Mistake(
        "rows are read where they were not written",
        TILE,
        "chunk[unit_place<S>(4 * group + i, place)]",
        "chunk[unit_place<S>(4 * group + i, place ^ 1)]",
        of("rows"),
        "gfx950",
    ),
    Mistake(
        "all waves transpose in one place",
        LOOP,
        "Word4* const chunk = shared_.words + wave_ * DecodeShared::kWordsPerWave;",
        "Word4* const chunk = shared_.words;",
        float8("rows"),
        "gfx950",
    ),
    Mistake(
        "no barrier before the query is read",
        LOOP,
        "query.store(shared_.words, shared_.inverse_scale);\n  __syncthreads();",
        "query.store(shared_.words, shared_.inverse_scale);",
        of("rows"),
    ),
    Mistake(
        "no barrier after the query was read",
        LOOP,
        "shared_.inverse_scale[place_];\n  __syncthreads();",
        "shared_.inverse_scale[place_];",
        of("rows"),
    ),
    Mistake(
        "no barrier before the waves' outputs are added",
        LOOP,
        "      }\n    __syncthreads();\n#pragma unroll\n    for (int half",
        "      }\n#pragma unroll\n    for (int half",
        of("rows"),
    ),
    Mistake(
        "no barrier after the waves' outputs were added",
        LOOP,
        "four);\n    }\n    __syncthreads();",
        "four);\n    }",
        float8("rows"),
    ),
    Mistake(
        "a token too many is seen",
        LOOP,
        "4 * group_ + i >= seen",
        "4 * group_ + i > seen",
        of("rows"),
    ),
    Mistake(
        "a query token sees the next",
        SHARED,
        "const int32_t hidden = static_cast<int32_t>(args.q_len) - 1 -",
        "const int32_t hidden = static_cast<int32_t>(args.q_len) - 2 -",
        of("rows"),
    ),
    Mistake(
        "the last tile goes beyond the end",
        ROWS,
        "return wanted < end_ ? wanted : end_ - 1;",
        "return wanted;",
        of("rows"),
    ),
    Mistake(
        "pages are those of the tile after",
        LOOP,
        "  cache.look_up(tile + kStep, pages);\n#pragma",
        "  cache.look_up(tile + 2 * kStep, pages);\n#pragma",
        of("plans"),
    ),
    Mistake(
        "pages of 7 tokens are taken for 8",
        ROWS,
        "(at - page_of(at) * page_size_)",
        "(at & (page_size_ - 1))",
        of("rows"),
    ),
    Mistake(
        "sums keep the old reference",
        TILE,
        "sum *= factor, exact_sum *= factor;",
        "",
        of("reference"),
    ),
    Mistake(
        "the output keeps the old reference",
        LOOP,
        "out_[i] *= factor;",
        "out_[i] *= 1.0f;",
        float8("reference"),
    ),
    Mistake(
        "the reference never moves",
        LOOP,
        "if (__builtin_amdgcn_ballot_w64(softmax_.is_far_above(top)) != 0) {",
        "if (softmax_.reference == -kInfinity) {",
        float8("reference"),
    ),
    Mistake(
        "a row that has seen nothing is rescaled by NaN",
        TILE,
        "reference == after ? 1.0f : exp2_fast(reference - after)",
        "exp2_fast(reference - after)",
        of("plans"),
    ),
    Mistake(
        "a row that has seen nothing has weights of NaN",
        TILE,
        "const float shift = reference == -kInfinity ? 0.0f : reference;",
        "const float shift = reference;",
        of("rows"),
    ),
    Mistake(
        "waves are added without weights",
        LOOP,
        ": weight(softmax_.reference) * decode.args.output_scale() / sum;",
        ": decode.args.output_scale() / sum;",
        of("reference"),
    ),
    Mistake(
        "the cache's scale does not get to the output",
        LOOP,
        "weight(softmax_.reference) * decode.args.output_scale() / sum",
        "weight(softmax_.reference) / sum",
        float8("rows"),
    ),
    Mistake(
        "the logarithm is of the rounded weights",
        TILE,
        "exact += weight;",
        "",
        of("rows"),
    ),
    Mistake(
        "the output is divided by the exact sum",
        TILE,
        "rounded[2 * i] += pair.x, rounded[2 * i + 1] += pair.y;",
        "rounded[2 * i] += weight[2 * i], rounded[2 * i + 1] += weight[2 * i + 1];",
        of("equal_values"),
        "gfx950",
    ),
    Mistake(
        "the query's second float8 number is lost",
        ROWS,
        "rest[i] = (rest[i] - unpack_float8<false>(codes[i])) * kPartUnit;",
        "rest[i] = Sum4{0, 0, 0, 0};",
        float8("rows"),
    ),
    Mistake(
        "the weights' second float8 number is lost",
        TILE,
        "sum = multiply_wide(value[i], weights[1], sum);",
        "",
        float8("rows"),
        "gfx950",
    ),
    Mistake(
        "the weights' second float8 number has the range of the first",
        TILE,
        "pack_float8<true>(weight - high)",
        "pack_float8<true>(unpack_float8<false>(pack_float8<false>(weight - high)))",
        float8("long_tail"),
        "gfx950",
    ),
    Mistake(
        "query rows are scaled beyond float8",
        ROWS,
        "S::kTop + 126 - exponent",
        "S::kTop + 128 - exponent",
        float8("magnitudes"),
    ),
    Mistake(
        "query rows are not scaled",
        ROWS,
        "up = float_of(static_cast<uint32_t>(bits) << 23);",
        "up = 1.0f + 0.0f * bits;",
        of("magnitudes", FP16),
    ),
    Mistake(
        "the last unit goes beyond the row",
        ROWS,
        "return first < last ? first : last;",
        "return first;",
        of("widths"),
    ),
    Mistake(
        "numbers of two units count twice",
        ROWS,
        "const bool is_new = is_there_ && first + i >= begin;",
        "const bool is_new = is_there_ && first + i >= 0;",
        float8("widths"),
    ),
    Mistake(
        "a row shorter than a unit lies at its begin",
        ROWS,
        "for (int i = 0; i < width_; ++i) {",
        "for (int i = 0; i < width_ - 1; ++i) {",
        of("widths"),
    ),
    Mistake(
        "rows that are not there are written",
        LOOP,
        "const bool is_stored = is_safe && row_begin_ + row < rows;",
        "const bool is_stored = is_safe;",
        of("rows"),
    ),
    Mistake(
        "a bad page goes unnoticed",
        LOOP,
        "    has_bad_page_ |= !cache.locate(tile + kStep, pages, places);",
        "    cache.locate(tile + kStep, pages, places);",
        of("bad_pages"),
    ),
    Mistake(
        "a bad page is read",
        ROWS,
        "(is_page ? pages[block] : 0) * page_bytes_",
        "pages[block] * page_bytes_",
        float8("bad_pages"),
    ),
    Mistake(
        "only the first wave's bad pages count",
        LOOP,
        "is_bad |= shared_.has_bad_page[wave] != 0;",
        "is_bad |= shared_.has_bad_page[0] != 0;",
        of("bad_pages"),
    ),
    Mistake(
        "a cache without pages is read",
        LOOP,
        "if (!cache.has_pages()) {",
        "if (false) {",
        of("no_pages"),
    ),
    Mistake(
        "a stale plan goes unnoticed",
        SHARED,
        "planned_units == Schedule::units_of(length, decode.schedule.unit_tokens)",
        "planned_units > 0",
        of("stale_plans"),
    ),
    Mistake(
        "lengths beyond the table are believed",
        SHARED,
        "length <= decode.args.table_pages * decode.args.page_size &&",
        "",
        of("bad_lengths"),
    ),
    Mistake(
        "the plan forgets the last token",
        "schedule.h",
        "(tokens + unit - 1) / unit",
        "(tokens + unit - 2) / unit",
        of("plans"),
    ),
    Mistake(
        "the merging is not told where pieces are",
        LOOP,
        "if (threadIdx.x == 0 && row_begin_ == 0)",
        "if (threadIdx.x == 0 && row_begin_ < 0)",
        of("plans"),
    ),
    Mistake(
        "pieces are merged without weights",
        "hip/merge.hip",
        "const float weight = exp2f(lse[(at + k * kStride) * next] - top) * inverse;",
        "const float weight = inverse;",
        of("plans"),
    ),
    Mistake(
        "a group of threads is left out of the merge",
        "hip/merge.hip",
        "for (int k = 1; k < kPieceGroups; ++k) {",
        "for (int k = 1; k < kPieceGroups - 1; ++k) {",
        of("plans"),
    ),
    Mistake(
        "a token's page is that of the token after",
        ROWS,
        "__umulhi(2 * static_cast<uint32_t>(token), page_factor_)",
        "__umulhi(2 * static_cast<uint32_t>(token) + 2, page_factor_)",
        float8("rows"),
    ),
]


def keep_what_is_checked(folder: Path, mistake: Mistake) -> None:
    """Leave out the instantiations that a check does not launch: most of the compile."""
    path = folder / LOOP
    text = path.read_text()
    lines = re.findall(r"^MLA_NAME\(\w+, \d\)\n", text, re.MULTILINE)
    assert len(lines) == 4
    (closure,) = (
        c.cell_contents for c in mistake.check.__closure__ if not callable(c.cell_contents)
    )  # type: ignore[attr-defined]
    kept = "HardwareFloat8, 2" if closure is None else f"{NAMES[closure]}, 1"
    for line in lines:
        if kept not in line:
            text = text.replace(line, "")
    path.write_text(text)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_is_noticed(mistake: Mistake, tmp_path: Path) -> None:
    mistake.put_into(tmp_path)
    keep_what_is_checked(tmp_path, mistake)
    mistake.assert_noticed(tmp_path)
