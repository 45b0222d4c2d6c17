"""Cache formats, their bytes, and writing."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops import checks


def new_kv_cache(
    pages: int,
    page_size: int,
    *,
    kv_lora_rank: int = 512,
    rope: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return a zeroed cache [pages, page_size, kv_lora_rank + rope] for one layer.

    A token takes (kv_lora_rank + rope) elements: 1152 bytes in bfloat16, 576 in float8, for
    DeepSeek's 512 + 64.
    """
    checks.cache_request(pages, page_size, kv_lora_rank, rope, dtype)
    return torch.zeros(pages, page_size, kv_lora_rank + rope, dtype=dtype, device=device)


def write_kv_cache(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
) -> None:
    """Write tokens into the cache, converting to its dtype.

    kv_c: [tokens, R] latents and k_pe: [tokens, rope], bfloat16, float16 or float32.
    kv_cache: [P, page_size, D] or [P, page_size, 1, D], written in place.
    slot_mapping: [tokens] int64 or int32; token t goes to row slot % page_size of page
        slot // page_size, -1 skips it, and of several tokens for one slot the last stays.
    kv_scale: one-element float32, needed by a float8 cache: what is stored is round(x / kv_scale),
        saturated.

    Raises TypeError or ValueError; then nothing was written.
    """
    checks.tensors(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    checks.scales_are_tensors(kv_scale=kv_scale)
    torch.ops.mla.write_kv_cache(kv_c, k_pe, kv_cache, slot_mapping, kv_scale)


def quantize_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    per_row: bool = False,
) -> tuple[Tensor, Tensor]:
    """Convert to float8: round(x / scale), to nearest with ties to even.

    x: any shape, bfloat16, float16 or float32. scale: one-element float32; None takes the largest
        finite magnitude of x over the largest number of dtype (1 where that is 0).
    dtype: torch.float8_e4m3fn or torch.float8_e4m3fnuz, by default the one that x's device
        multiplies.
    per_row: a scale for each row of the last dimension, given or found: x's shape with 1 for the
        last. It multiplies what it belongs to by broadcasting. (Cache and q take one scale for
        all: `mla_ops.decode` has no place for these.)

    Returns (float8 tensor of x's shape, contiguous; scale float32, [1] or per row). Beyond the
    largest number (448 or 240) values saturate, NaN stays NaN, and -0 keeps its sign where the type
    has one.
    """
    checks.tensors(x=x)
    checks.scales_are_tensors(scale=scale)
    return torch.ops.mla.quantize_fp8(x, scale, dtype, per_row)
