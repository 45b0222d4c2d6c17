"""FlashMLA's names (`flash_mla/flash_mla_interface.py`, 2026) over `mla_ops.decode`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ops.compat._arguments import refuse
from mla_ops.decode import decode
from mla_ops.plan import DecodePlan, plan


@dataclass
class FlashMLASchedMeta:
    """Empty until the first call, which plans; good for calls with the same shapes and lengths."""

    plan: DecodePlan | None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Return (metadata, None). As in FlashMLA, arguments of its older interface are not looked
    at."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend densely, as FlashMLA.

    q: [B, S, H, D]. k_cache: [P, page_size, 1, D] of any page size. block_table: [B, pages] int32.
    cache_seqlens: [B] int32. head_dim_v: R.
    tile_scheduler_metadata: of `get_mla_metadata`, new for each step.
    softmax_scale: 1/sqrt(D) where None, as in FlashMLA; wrong for DeepSeek models.
    Everything behind `causal` must be as it is by default.

    Returns out [B, S, H, R] and lse [B, H, S] float32, natural log, +inf for a row that sees
    nothing (whose output is 0).

    Raises ValueError or TypeError for what is not served, by name, and as `mla_ops.decode`.
    """
    refuse(
        "flashmla",
        num_splits=(num_splits, None),
        is_fp8_kvcache=(is_fp8_kvcache, False),
        indices=(indices, None),
        attn_sink=(attn_sink, None),
        extra_k_cache=(extra_k_cache, None),
        extra_indices_in_kvcache=(extra_indices_in_kvcache, None),
        topk_length=(topk_length, None),
        extra_topk_length=(extra_topk_length, None),
    )
    if block_table is None or cache_seqlens is None:
        raise ValueError("block_table and cache_seqlens must be tensors, got None")
    meta = tile_scheduler_metadata
    if not isinstance(meta, FlashMLASchedMeta):
        raise TypeError(
            "tile_scheduler_metadata must come from mla_ops.compat.flashmla.get_mla_metadata(), "
            f"got {type(meta).__name__}"
        )
    if q.dim() != 4 or k_cache.dim() != 4:
        raise ValueError(
            "q and k_cache must be [B, S, H, D] and [P, page_size, 1, D], got shapes "
            f"{list(q.shape)} and {list(k_cache.shape)}"
        )
    if meta.plan is None:
        meta.plan = plan(
            cache_seqlens,
            block_table,
            page_size=k_cache.shape[1],
            num_heads=q.shape[2],
            q_len=q.shape[1],
            kv_cache=k_cache if head_dim_v == 512 else None,
            q_dtype=q.dtype,
            return_lse=True,
        )
    out, lse = decode(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        kv_lora_rank=head_dim_v,
        causal=causal,
        plan=meta.plan,
        return_lse=True,
    )
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return out, lse.transpose(1, 2).contiguous()
