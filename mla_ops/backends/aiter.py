"""Decode on aiter's persistent assembly kernels (MI300X, MI355X).

One decode is [queries to float8, where they are to be] -> a plan, unless the caller has one ->
stage 1 -> reduce -> rows that see nothing. All on the current stream, with no host sync; every
buffer is torch's, so a captured graph owns them.

Nothing that aiter would abort on, or do wrong without a word, comes this far: `capability.py` sends
it elsewhere. What remains is made the same for all: contiguous groups of 16 heads, or of 128, and
1, 2 or 4 query tokens (`aiter_plan.py` has the sequences' side of it).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_ops import validate
from mla_ops.backends import aiter_choice, aiter_plan, aiter_release
from mla_ops.plan_spec import AiterPlanSpec, numel


def decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    *,
    kv_lora_rank: int = 512,
    causal: bool = True,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    plan_spec: Sequence[int] | None = None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    batch, q_len, heads, _ = q.shape
    cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    if batch == 0:
        return
    if cache.numel() == 0:
        _no_tokens(out, lse)
        return
    validate.first_row(cache)
    if plan is None or plan_spec is None:
        columns = block_table.shape[1]
        spec = aiter_plan.spec_for(batch, q_len, heads, q.dtype, cache, columns, lse is not None)
        plan = seq_lens.new_empty(numel(spec))
        aiter_plan.fill(seq_lens, block_table, spec, plan)
    else:
        spec = AiterPlanSpec(*plan_spec)
    parts = aiter_plan.Parts(plan, spec)
    if aiter_choice.rounds_q(q.dtype, cache.dtype):
        q, q_scale = torch.ops.mla.quantize_fp8(q, None, cache.dtype)

    missing_scale = None
    if q_scale is not None and kv_scale is not None and spec.kernel_q_len == 4:
        # The a8w8 kernels for four tokens do not multiply their output by kv_scale (docs/amd.md).
        # Given as 1 it is missing in none, and is made up for below.
        missing_scale = kv_scale
        q_scale = q_scale.reshape(()) * kv_scale
        kv_scale = torch.ones_like(q_scale)

    tokens = spec.tiles * spec.kernel_q_len
    whole = spec.groups * spec.group_heads == heads and spec.kernel_q_len == q_len
    in_place = whole and (q_len == 1 or spec.groups == 1) and not spec.lse and out.is_contiguous()
    result = out if in_place else out.new_empty(tokens, spec.group_heads, kv_lora_rank)
    result = result.view(tokens, spec.group_heads, kv_lora_rank)
    rows = aiter_plan.partial_rows(spec)
    partial = q.new_empty(rows, 1, spec.group_heads, kv_lora_rank, dtype=torch.float32)
    partial_lse = q.new_empty(rows, 1, spec.group_heads, 1, dtype=torch.float32)
    merged_lse = q.new_empty(tokens, spec.group_heads, dtype=torch.float32) if spec.lse else None

    release = aiter_release.get()
    release.stage1(
        Q=_grouped(q, spec),
        KV=_rows_of(cache),
        qo_indptr=parts.qo_indptr,
        kv_indptr=parts.kv_indptr,
        kv_page_indices=parts.token_indices,
        kv_last_page_lens=parts.ones,
        num_kv_splits_indptr=None,
        work_meta_data=parts.addresses(),
        work_indptr=parts.work_indptr,
        work_info_set=parts.work_info,
        max_seqlen_q=spec.kernel_q_len,
        page_size=1,
        nhead_kv=1,
        softmax_scale=softmax_scale,
        splitData=partial,
        splitLse=partial_lse,
        output=result,
        q_scale=_one(q_scale),
        kv_scale=_one(kv_scale),
        causal=True,
    )
    # Always: which sequences are cut is known on the device alone.
    release.reduce(
        partial_output=partial,
        partial_lse=partial_lse,
        reduce_indptr=parts.reduce_indptr,
        reduce_final_map=parts.reduce_final_map,
        reduce_partial_map=parts.reduce_partial_map,
        max_seqlen_q=spec.kernel_q_len,
        num_kv_splits=0,  # as many as there are compute units
        final_output=result,
        final_lse=merged_lse,
    )
    unseen = _unseen(seq_lens, q_len, causal)
    if merged_lse is not None:
        uncut = (parts.reduce_indptr.diff() <= 1).repeat_interleave(spec.kernel_q_len)[:, None]
        own, own_lse = partial[-tokens:, 0], partial_lse[-tokens:, 0, :, 0]
        result = torch.where(uncut[..., None], own.to(result.dtype), result)
        merged_lse = torch.where(uncut, own_lse, merged_lse)
        if lse is not None:
            found = _ungrouped(merged_lse, spec)
            # aiter writes +inf for a row without weight.
            lse.copy_(found.masked_fill(unseen | (found == torch.inf), -torch.inf))
    if not in_place:
        out.copy_(_ungrouped(result, spec))
    if missing_scale is not None:
        out.mul_(missing_scale.reshape(()))
    out.masked_fill_(unseen[..., None], 0)


def _grouped(q: Tensor, spec: AiterPlanSpec) -> Tensor:
    """Return q as [tiles * kernel_q_len, group_heads, D], contiguous.

    Heads and query tokens that are not there are zeros: harmless, and thrown away. A fourth query
    token comes before the three, for the mask counts from the last.
    """
    batch, q_len, heads, width = q.shape
    padded_heads = spec.groups * spec.group_heads
    if heads != padded_heads or q_len != spec.kernel_q_len:
        raw = q.view(torch.uint8) if q.element_size() == 1 else q
        more = (0, 0, 0, padded_heads - heads, spec.kernel_q_len - q_len, 0)
        q = torch.nn.functional.pad(raw, more).view(q.dtype)
    q = q.reshape(batch, spec.kernel_q_len, spec.groups, spec.group_heads, width).transpose(1, 2)
    return q.reshape(-1, spec.group_heads, width).contiguous()


def _ungrouped(x: Tensor, spec: AiterPlanSpec) -> Tensor:
    """Return [tiles * kernel_q_len, group_heads, ...] as [B, S, H, ...]."""
    x = x.view(spec.batch, spec.groups, spec.kernel_q_len, spec.group_heads, *x.shape[2:])
    x = x[:, :, spec.kernel_q_len - spec.q_len :].transpose(1, 2)
    return x.reshape(spec.batch, spec.q_len, -1, *x.shape[4:])[:, :, : spec.heads]


def _rows_of(cache: Tensor) -> Tensor:
    """Return the cache as pages of one token, [rows, 1, 1, D]."""
    pages, page_size, width = cache.shape
    rows = (pages - 1) * aiter_plan.page_rows(cache) + page_size
    step = cache.stride(1)
    return cache.as_strided((rows, 1, 1, width), (step, step, step, 1))


def _one(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.reshape(1)


def _unseen(seq_lens: Tensor, q_len: int, causal: bool) -> Tensor:
    """Return [B, S, 1], true for query tokens that see nothing."""
    if q_len == 1 or not causal:
        return (seq_lens <= 0)[:, None, None].expand(-1, q_len, 1)
    token = torch.arange(q_len, dtype=torch.int32, device=seq_lens.device)
    return (seq_lens[:, None] < q_len - token)[..., None]


def _no_tokens(out: Tensor, lse: Tensor | None) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)


KERNELS = {"_decode_aiter": decode, "_plan_aiter": aiter_plan.fill}
