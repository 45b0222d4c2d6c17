"""One mistake at a time in a copy of csrc: each has to fail the checks of our kernels.

The unchanged sources pass the same checks in test_project_kernels.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import project_kv_cache
import project_merge
import project_quantize
import pytest
import torch
from mistake import Check, Mistake
from project import FLOAT8, HARDWARE

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ = FLOAT8


def quantize(name: str, *arguments: torch.dtype) -> Check:
    check = getattr(project_quantize, f"check_{name}")
    return lambda kernels: check(kernels, *arguments)


def native(name: str, dtype: torch.dtype = BF16) -> Check:
    """To the float8 family of the hardware."""
    check = getattr(project_quantize, f"check_{name}")
    return lambda kernels: check(kernels, dtype, HARDWARE[kernels.arch])


def cache(name: str) -> Check:
    return getattr(project_kv_cache, f"check_{name}")


MISTAKES = [
    Mistake(
        "NaN goes through the clamp",
        "hip/fp8.h",
        "in[i] = value[i] != value[i] ? value[i] : clamped;",
        "in[i] = clamped;",
        native("patterns"),
    ),
    Mistake(
        "the hardware conversion is not clamped",
        "hip/fp8.h",
        "__builtin_amdgcn_fmed3f(value[i], -kBound, kBound)",
        "value[i]",
        native("patterns"),
        "gfx950",
    ),
    Mistake(
        "two bytes of a word change places",
        "hip/fp8.h",
        "__builtin_amdgcn_cvt_pk_fp8_f32(in[0], in[1], 0, false)",
        "__builtin_amdgcn_cvt_pk_fp8_f32(in[1], in[0], 0, false)",
        native("counts"),
    ),
    Mistake(
        "gfx942 is taken to speak OCP float8",
        "hip/fp8.h",
        "#if defined(MLA_GFX942)\nusing HardwareFloat8 = Float8E4M3FNUZ;",
        "#if defined(MLA_GFX942)\nusing HardwareFloat8 = Float8E4M3FN;",
        quantize("patterns", BF16, FN),
    ),
    Mistake(
        "truncated instead of rounded",
        "numbers.h",
        "(bits + (1u << (kShift - 1)) - 1 + ((bits >> kShift) & 1)) >> kShift",
        "bits >> kShift",
        quantize("patterns", BF16, FN),
    ),
    Mistake(
        "ties go up",
        "numbers.h",
        "(1u << (kShift - 1)) - 1 + ((bits >> kShift) & 1)",
        "(1u << (kShift - 1))",
        quantize("float32", FN),
    ),
    Mistake(
        "subnormal numbers are lost",
        "numbers.h",
        "return bits < kSmallestNormal ? subnormal : normal;",
        "return bits < kSmallestNormal ? 0 : normal;",
        quantize("patterns", F16, FNUZ),
        "gfx950",
    ),
    Mistake(
        "e4m3fnuz has a negative zero",
        "numbers.h",
        "const uint32_t sign = code == 0 ? 0 : (bits_of(value) >> 24) & 0x80u;",
        "const uint32_t sign = (bits_of(value) >> 24) & 0x80u;",
        quantize("patterns", BF16, FNUZ),
        "gfx950",
    ),
    Mistake(
        "the largest number is one too small",
        "numbers.h",
        "magnitude > 448.0f ? 448.0f : magnitude",
        "magnitude > 416.0f ? 416.0f : magnitude",
        quantize("patterns", BF16, FN),
    ),
    Mistake(
        "a product with the reciprocal, not mended",
        "hip/fp8.h",
        "fmaf(remainder, reciprocal_, quotient)",
        "quotient",
        quantize("float32", FNUZ),
    ),
    Mistake(
        "every scale is taken for a fast one",
        "hip/fp8.h",
        "return scale_ > 0x1p-60f && scale_ < 0x1p60f;",
        "return true;",
        quantize("float32", FNUZ),
    ),
    Mistake(
        "an index of a row is not reduced",
        "hip/quantize.hip",
        "offset += row % rows.size[i] * rows.stride[i];",
        "offset += row * rows.stride[i];",
        native("strides"),
    ),
    Mistake(
        "result rows have the stride of one number less",
        "hip/quantize.hip",
        "out + row * rows.columns",
        "out + row * (rows.columns - 1)",
        native("rows"),
    ),
    Mistake(
        "a scale of 0 stays 0",
        "hip/quantize.hip",
        "return scale == 0.0f ? 1.0f : scale;",
        "return scale;",
        native("found_scale"),
    ),
    Mistake(
        "only the first wave of a block looks for the largest",
        "hip/vectors.h",
        "for (int i = 0; i < THREADS / MLA_WAVE; ++i) all",
        "for (int i = 0; i < 1; ++i) all",
        native("found_scale"),
    ),
    Mistake(
        "the half of a wave looks for the largest",
        "hip/vectors.h",
        "int mask = MLA_WAVE / 2; mask > 0",
        "int mask = MLA_WAVE / 4; mask > 0",
        native("rows"),
    ),
    Mistake(
        "infinity is mended",
        "hip/fp8.h",
        "return size < 0x1p60f && size > 0x1p-60f ? mended : quotient;",
        "return mended;",
        quantize("float32", FN),
    ),
    Mistake(
        "unaligned memory is read 16 bytes at a time",
        "hip/vectors.h",
        "if (aligned(from, 16) && aligned(to, 16)) {",
        "if (true) {",
        quantize("instructions"),
    ),
    Mistake(
        "no barrier before the waves' results are read",
        "hip/vectors.h",
        "of_wave[threadIdx.x / MLA_WAVE] = value;\n  __syncthreads();",
        "of_wave[threadIdx.x / MLA_WAVE] = value;",
        native("found_scale"),
    ),
    Mistake(
        "rows that a later token overwrites are written",
        "hip/kv_cache.hip",
        "if (slots[i] < 0 || overwritten >> i & 1) continue;",
        "if (slots[i] < 0) continue;",
        cache("duplicates"),
    ),
    Mistake(
        "later tokens of the same block alone are looked at",
        "hip/kv_cache.hip",
        "later < write.tokens; later += kWriteThreads",
        "later < write.tokens && later < first + kTokens; later += kWriteThreads",
        cache("duplicates"),
    ),
    Mistake(
        "slot -1 is not skipped",
        "hip/kv_cache.hip",
        "if (slots[i] < 0 || overwritten >> i & 1) continue;",
        "if (first + i >= write.tokens || overwritten >> i & 1) continue;",
        cache("layouts"),
    ),
    Mistake(
        "slots beyond the cache are written",
        "hip/kv_cache.hip",
        "slots[threadIdx.x] = slot < write.capacity ? slot : -1;",
        "slots[threadIdx.x] = slot;",
        cache("layouts"),
    ),
    Mistake(
        "pages are taken to lie side by side",
        "hip/kv_cache.hip",
        "slot / write.page_size * write.page_stride",
        "slot / write.page_size * write.page_size * write.row_stride",
        cache("layouts"),
    ),
    Mistake(
        "the stride of the slots is forgotten",
        "hip/kv_cache.hip",
        "static_cast<const int64_t*>(write.slots)[token * write.slot_stride]",
        "static_cast<const int64_t*>(write.slots)[token]",
        cache("layouts"),
    ),
    Mistake(
        "nothing is subtracted before exp",
        "hip/merge.hip",
        "const float shift = top == -kInfinity ? 0.0f : top;",
        "const float shift = 0.0f;",
        partial(project_merge.check_merge, dtype=F32),
    ),
    Mistake(
        "two sides without weight",
        "hip/merge.hip",
        "const float shift = top == -kInfinity ? 0.0f : top;",
        "const float shift = top;",
        partial(project_merge.check_merge, dtype=F32),
    ),
    Mistake(
        "a side without weight is multiplied by 0",
        "hip/merge.hip",
        "return factor == 0.0f ? 0.0f : value * factor;",
        "return value * factor;",
        partial(project_merge.check_merge, dtype=BF16),
    ),
    Mistake(
        "the rest of a row is left out",
        "hip/merge.hip",
        "for (int64_t i = done + lane; i < width; i += MLA_WAVE)",
        "for (int64_t i = done + lane; i < done; i += MLA_WAVE)",
        partial(project_merge.check_merge, dtype=F16),
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_is_noticed(mistake: Mistake, tmp_path: Path) -> None:
    mistake.put_into(tmp_path)
    mistake.assert_noticed(tmp_path)
