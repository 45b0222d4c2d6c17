"""The private ops in plain torch: any device, nothing compiled, no host sync on a GPU. Correct, not
fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_ops import validate

# Float32 numbers of the cache gathered at a time: 64 MiB.
_GATHERED = 1 << 24

# Tokens at a time, at most: a matmul may add them one by one, and equal values then all round the
# same way, to errors of 0.7 % at 262,144.
_CHUNK = 512

_BYTES_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _decode(
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
    batch, q_len, heads, width = q.shape
    cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    pages, page_size, _ = cache.shape
    if batch == 0:
        return
    capacity = block_table.shape[1] * page_size
    if q.device.type == "cpu":
        capacity = int(seq_lens.max())
    scale = q.new_full((), softmax_scale, dtype=torch.float32)
    for factor in (q_scale, kv_scale):
        scale = scale if factor is None else scale * factor.reshape(())
    queries = q.float().reshape(batch, q_len * heads, width) * scale
    offset = (
        torch.arange(q_len, device=q.device) - (q_len - 1) if causal else seq_lens.new_zeros(q_len)
    )
    visible = (seq_lens[:, None] + offset).repeat_interleave(heads, 1)

    top = queries.new_full((batch, q_len * heads), -torch.inf)
    total = torch.zeros_like(top)
    result = queries.new_zeros((batch, q_len * heads, kv_lora_rank))
    # fp8 has no gather on every device; its bytes have.
    raw = cache.view(_BYTES_AS[cache.element_size()])
    chunk = max(1, min(_CHUNK, _GATHERED // (batch * width)))
    for begin in range(0, capacity if pages > 0 else 0, chunk):
        position = torch.arange(begin, min(begin + chunk, capacity), device=q.device)
        # Entries behind a sequence's end may hold anything, and so may the rows behind it.
        in_use = position < seq_lens[:, None]
        page = torch.where(in_use, block_table[:, position // page_size], 0).long()
        rows = raw[page, position % page_size].view(cache.dtype).float()
        rows = torch.where(in_use[..., None], rows, 0.0)
        scores = queries @ rows.mT
        scores = scores.masked_fill(position >= visible[..., None], -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        shift = torch.where(new_top == -torch.inf, 0.0, new_top)
        weights = torch.exp(scores - shift[..., None])
        decay = torch.exp(top - shift)
        total = total * decay + weights.sum(-1)
        result = result * decay[..., None] + weights @ rows[..., :kv_lora_rank]
        top = new_top
    empty = total == 0
    result = torch.where(empty[..., None], 0.0, result / total[..., None])
    if kv_scale is not None:
        result = result * kv_scale.reshape(())
    out.copy_(result.reshape(out.shape))
    if lse is not None:
        lse.copy_(torch.where(empty, -torch.inf, top + total.log()).reshape(lse.shape))


def _plan(seq_lens: Tensor, block_table: Tensor, plan_spec: Sequence[int], plan: Tensor) -> None:
    unit_tokens = plan_spec[5]
    units = torch.clamp((seq_lens + (unit_tokens - 1)) // unit_tokens, min=1)
    plan[1:] = units.cumsum(0)
    plan[:1] = 0


def _quantize_fp8(
    x: Tensor, scale: Tensor | None, per_row: bool, out: Tensor, scale_out: Tensor
) -> None:
    largest = torch.finfo(out.dtype).max
    wide = x.float()
    if scale is None:
        finite = torch.where(wide.isfinite(), wide.abs(), 0.0)
        if x.numel() == 0:
            top = torch.zeros_like(scale_out)
        else:
            top = finite.amax(-1, keepdim=True) if per_row else finite.amax()
        scale = top / largest
        scale = torch.where(scale == 0, 1.0, scale)
    scale_out.copy_(scale.reshape(scale_out.shape))
    by = scale_out if per_row else scale.reshape(())
    out.copy_((wide / by).clamp(-largest, largest).to(out.dtype))


def _write_kv_cache(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    pages, page_size, _ = cache.shape
    validate.slots(slot_mapping, pages, page_size)
    rows = torch.cat((kv_c, k_pe), 1)
    if kv_scale is None:
        rows = rows.to(cache.dtype)
    else:
        converted = torch.empty_like(rows, dtype=cache.dtype)
        _quantize_fp8(rows, kv_scale, False, converted, torch.empty_like(kv_scale).reshape(1))
        rows = converted
    if rows.shape[0] == 0 or pages == 0:
        return
    # Every token brings the row of the last token for its slot, so that the order of the writes
    # does not matter: a stable sort puts a slot's tokens beside each other, the last one behind.
    # Skipped tokens (-1) stand for slot 0, and bring what it holds where no token is for it.
    slots, order = torch.sort(slot_mapping.long(), stable=True)
    target = slots.clamp(min=0)
    source = torch.searchsorted(slots, target, right=True) - 1
    raw = cache.view(_BYTES_AS[cache.element_size()])
    page, offset = target // page_size, target % page_size
    new = rows.view(raw.dtype)[order[source]]
    raw[page, offset] = torch.where((slots[source] == target)[:, None], new, raw[page, offset])


def _merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    # FlashMLA writes +inf for a row that sees nothing; nothing else can.
    a = torch.where(lse_a == torch.inf, -torch.inf, lse_a)
    b = torch.where(lse_b == torch.inf, -torch.inf, lse_b)
    top = torch.maximum(a, b)
    shift = torch.where(top == -torch.inf, 0.0, top)
    weight_a, weight_b = torch.exp(a - shift), torch.exp(b - shift)
    total = weight_a + weight_b

    def part(values: Tensor, weight: Tensor) -> Tensor:
        factor = torch.where(total == 0, 0.0, weight / total)[..., None]
        # A side without weight may hold anything, NaN included.
        return torch.where(factor == 0, 0.0, values.float() * factor)

    out.copy_(part(out_a, weight_a) + part(out_b, weight_b))
    lse.copy_(torch.where(total == 0, -torch.inf, shift + total.log()))


def _decode_as_given(q: Tensor, *args: Any, **kwargs: Any) -> None:
    """Decode in the precision that is written here, whatever autocast says to matmul."""
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            _decode(q, *args, **kwargs)
    else:
        _decode(q, *args, **kwargs)


KERNELS: dict[str, Callable[..., Any]] = {
    "_decode_torch": _decode_as_given,
    "_plan": _plan,
    "_quantize_fp8": _quantize_fp8,
    "_write_kv_cache": _write_kv_cache,
    "_merge_states": _merge_states,
}
