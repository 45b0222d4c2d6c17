"""The attention function and the mask function that transformers calls for an enabled model.

Up to MAX_Q_LEN query tokens are decoded by the op; more are a prefill, which transformers' own
implementation (`base`) does on expanded keys and values. So is what the op does not do: gradients,
dropout, attention weights, additive masks.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_ops.checks import MAX_Q_LEN
from mla_ops.integrations.transformers import absorption, columns
from mla_ops.integrations.transformers.families import BASES, is_sparse
from mla_ops.integrations.transformers.layers import CachedLatents
from mla_ops.integrations.transformers.options import Options
from mla_ops.integrations.transformers.pool import Chunk, LatentPool

logger = logging.getLogger("mla_ops")

NAMES = {base: "mla_ops" if base == "sdpa" else f"mla_ops_{base}" for base in BASES}


def keep_latents(self: nn.Module, kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
    """Stands for a module's `expand_kv`: the attention function gets what the cache returned."""
    return kv_nope, k_rot


def attend(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    *,
    base: str,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend; called by every attention module of a model whose attn_implementation is ours.

    query: [B, H, S, nope + rope]. key, value: what the cache's update returned: CachedLatents, or
    latents [B, 1, T, R] and rope parts [B, 1, T, rope]. attention_mask: None where query token s
    sees all columns up to its own; `columns.py`'s list; or a mask [B, 1, S, T], True where seen.
    indices: [B, S, k], the columns that a sparse model chose among those of the mask. s_aux: [H],
    logits of attention sinks.

    Returns [B, S, H, v] and attention weights, None where the op decoded.
    """
    options: Options | None = getattr(module, "_mla_ops", None)
    if options is not None and hasattr(module, "build_attention_mask_from_topk"):
        # glm5_next: made of 0 and the least number, for every implementation but sdpa.
        attention_mask = attention_mask >= 0 if attention_mask is not None else None
    reason = _not_ours(query, attention_mask, dropout, kwargs)
    if options is not None and reason is None:
        seen = _seen(attention_mask, indices)
        pool, length = _pool(key, value)
        q = torch.cat(absorption.absorb(module, query), -1)
        out, lse = pool.decode(
            q,
            length,
            scaling if scaling is not None else module.scaling,
            columns=seen,
            return_lse=s_aux is not None,
            backend=options.backend,
        )
        if s_aux is not None and lse is not None:
            # A sink takes part in the sum of exponentials and has no value.
            out = out * torch.sigmoid(lse - s_aux.float())[..., None].to(out.dtype)
        return absorption.expand(module, out), None
    if options is not None:
        logger.info("transformers' %s attention: %s", base, reason)
        key, value = _expanded(module, key, value)
        attention_mask = _base_mask(query, key, attention_mask, indices, base)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(base, _eager_of(module))
    rest = {"s_aux": s_aux} if s_aux is not None else {}
    return function(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=scaling,
        dropout=dropout,
        **rest,
        **kwargs,
    )


def _not_ours(
    query: Tensor, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """Return why the op does not serve this call, or None where it does."""
    if query.shape[2] > MAX_Q_LEN:
        return f"a prefill (more than {MAX_Q_LEN} query tokens)"
    if dropout:
        return "dropout"
    if torch.is_grad_enabled() and query.requires_grad:
        return "gradients are wanted"
    if attention_mask is not None and attention_mask.is_floating_point():
        return "an additive mask"
    if kwargs.get("output_attentions"):
        return "attention weights are wanted"
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            return name
    return None


def _seen(mask: Tensor | None, indices: Tensor | None) -> Tensor | None:
    """Return the columns that are seen, [B, S, 1 + most], or None for all."""
    if mask is None:
        if indices is not None:
            raise ValueError("a sparse model must bring a mask with its indices, got None")
        return None
    mask = mask[:, 0]
    if mask.dtype != torch.bool:
        return mask
    if indices is None:
        return columns.of_mask(mask)
    width = mask.shape[-1]
    allowed = mask.gather(-1, indices.long().clamp(0, width - 1))
    return columns.of_names(indices, allowed & (indices >= 0) & (indices < width))


def _pool(key: Any, value: Any) -> tuple[LatentPool, Any]:
    """Return the pages of a paged cache, or those of another one: a page for each sequence."""
    if isinstance(key, CachedLatents):
        return key.pool, key.length
    rows = torch.cat((key, value), -1)[:, 0]
    batch, length, _ = rows.shape
    pool = LatentPool(
        batch,
        key.shape[-1],
        value.shape[-1],
        page_size=length,
        dtype=rows.dtype,
        device=rows.device,
    )
    table = torch.arange(batch, dtype=torch.int32, device=rows.device)[:, None]
    pool.chunks.append(Chunk(0, length, rows, table))
    return pool, length


def _expanded(module: Any, key: Any, value: Any) -> tuple[Tensor, Tensor]:
    if isinstance(key, CachedLatents):
        key, value = key.all()
    return type(module).expand_kv(module, key, value)


def _base_mask(
    query: Tensor, key: Tensor, mask: Tensor | None, indices: Tensor | None, base: str
) -> Tensor | None:
    """Return the mask that transformers' own attention wants, from what `make_mask` made or a user
    brought."""
    q_len, width = query.shape[2], key.shape[2]
    if mask is None and q_len > MAX_Q_LEN:
        return None  # sdpa knows the causal one by itself
    if mask is None:
        mask = torch.ones(q_len, width, dtype=torch.bool, device=query.device)
        mask = mask.tril(width - q_len)[None, None]
    elif mask.dtype == torch.int32:
        mask = columns.as_mask(mask, width)
    mask = mask[..., :width]  # a static cache's is longer
    if indices is not None:
        chosen = columns.as_mask(columns.of_names(indices, indices >= 0), width)[:, None]
        if mask.dtype == torch.bool:
            mask = mask & chosen
        else:
            mask = mask.masked_fill(~chosen, torch.finfo(query.dtype).min)
    if base == "eager" and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, zero, torch.finfo(query.dtype).min)
    return mask


def _eager_of(module: nn.Module) -> Any:
    """Return the `eager_attention_forward` of the file that the module's class is from."""
    import sys

    return vars(sys.modules[type(module).__module__]).get("eager_attention_forward")


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    base: str,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Make the mask of a step; called by transformers once for all layers.

    A prefill gets that of `base`. A decode step gets None where nothing is padded, a list of
    columns [B, 1, S, 1 + T] elsewhere, and a mask [B, 1, S, T] for models whose indexer reads it.
    """
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "config": config,
        **kwargs,
    }
    if q_length > MAX_Q_LEN:
        return ALL_MASK_ATTENTION_FUNCTIONS[base](**arguments)
    sparse = is_sparse(config)
    if not sparse and mask_function is causal_mask_function and kwargs.get("local_size") is None:
        if _nothing_hidden(attention_mask, q_offset, q_length):
            return None
    arguments["allow_is_causal_skip"] = False
    arguments.pop("allow_is_bidirectional_skip", None)
    allowed = sdpa_mask(**arguments)
    return allowed if sparse else columns.of_mask(allowed)


def _nothing_hidden(attention_mask: Tensor | None, q_offset: Any, q_length: int) -> bool:
    """Whether no column is padding. Asks the device, as transformers does; not while compiling."""
    if attention_mask is None:
        return True
    if torch.compiler.is_compiling():
        return False
    return attention_mask.shape[-1] >= int(q_offset) + q_length and bool(attention_mask.all())


def register() -> None:
    """Make our attention and mask functions known to transformers, one pair for each base."""
    for base, name in NAMES.items():
        AttentionInterface.register(name, _with_base(attend, base))
        AttentionMaskInterface.register(name, _with_base(make_mask, base))


def _with_base(function: Any, base: str) -> Any:
    # Not functools.partial: torch.compile of torch 2.11 traces a closure without a graph break.
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, base=base, **kwargs)

    return call
