"""The front door: what people call, turned into ops."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops import checks
from mla_ops.ops import output_dtype
from mla_ops.plan import DecodePlan


def decode(
    q: Tensor | tuple[Tensor, Tensor],
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    *,
    kv_lora_rank: int = 512,
    causal: bool = True,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: DecodePlan | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend every query token to the cached latents of its sequence (absorbed MLA).

    q: [B, S, H, D], or [B, H, D] for S = 1, or a pair (q_nope [..., R], q_pe [..., rope]) of either
        form; bfloat16, float16, float32, or float8 with q_scale. S is 1 to 8, H 1 to 128.
    kv_cache: [P, page_size, D] or [P, page_size, 1, D]; bfloat16, float16, float32, or
        float8_e4m3fn or float8_e4m3fnuz with kv_scale. A row holds a token's latent (R numbers:
        keys and values) and rope part (keys).
    block_table: [B, pages] int32; the page of the cache with tokens i * page_size onwards of
        sequence b is block_table[b, i]. Entries behind a sequence's end are not read.
    seq_lens: [B] int32; tokens in the cache, the S query tokens included. With causal=True query
        token s sees the first seq_lens - S + 1 + s of them, without it all.
    softmax_scale: what q . k is multiplied with. There is no default: for DeepSeek models it is
        1/sqrt(qk_nope_head_dim + rope), times YaRN's mscale squared, and not 1/sqrt(D).
    kv_lora_rank: R.
    q_scale, kv_scale: one-element float32 tensors on q's device; the numbers that float8 values are
        multiplied with.
    plan: of `mla_ops.plan(...)`; made here where there is none.
    return_lse: also return the logarithm of the sum of exponentials, natural log, -inf for a row
        that sees nothing (whose output is 0).
    out, lse: buffers to write to, of the shapes and dtypes returned. lse is only for
        return_lse=True.
    backend: "auto", "aiter", "native" or "torch"; see `mla_ops.explain`.

    Returns out [B, S, H, R] (or [B, H, R]) of q's dtype, bfloat16 for float8 q; with return_lse
    also lse [B, S, H] (or [B, H]) float32.

    Raises TypeError for a wrong dtype, ValueError for anything else, with what was expected and
    what came.
    """
    if isinstance(q, (tuple, list)):
        q = _joined(q, kv_lora_rank)
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a tensor or a pair (q_nope, q_pe), got {type(q).__name__}")
    checks.tensors(q=q, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens)
    checks.scales_are_tensors(q_scale=q_scale, kv_scale=kv_scale)
    if not isinstance(softmax_scale, (int, float, torch.SymFloat)):
        raise TypeError(f"softmax_scale must be a float, got {type(softmax_scale).__name__}")
    if plan is not None and not isinstance(plan, DecodePlan):
        raise TypeError(f"plan must come from mla_ops.plan(), got {type(plan).__name__}")
    if lse is not None and not return_lse:
        raise ValueError("lse must be None unless return_lse=True, got a buffer")

    flat = q.dim() == 3
    if flat:
        q = q.unsqueeze(1)
        out = None if out is None else out.unsqueeze(1)
        lse = None if lse is None else lse.unsqueeze(1)
    arguments = (q, kv_cache, block_table, seq_lens, softmax_scale)
    options = {
        "kv_lora_rank": kv_lora_rank,
        "causal": causal,
        "q_scale": q_scale,
        "kv_scale": kv_scale,
        "plan": None if plan is None else plan.tensor,
        "plan_spec": None if plan is None else plan.spec,
        "backend": backend,
    }
    if out is not None or lse is not None:
        if out is None:
            out = q.new_empty((*q.shape[:3], kv_lora_rank), dtype=output_dtype(q))
        if lse is None and return_lse:
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        torch.ops.mla.decode_out(*arguments, **options, out=out, lse=lse)
    elif return_lse:
        out, lse = torch.ops.mla.decode_lse(*arguments, **options)
    else:
        out = torch.ops.mla.decode(*arguments, **options)
    result = out.squeeze(1) if flat else out
    if lse is None:
        return result
    return result, (lse.squeeze(1) if flat else lse)


def _joined(pair: tuple[Tensor, Tensor] | list[Tensor], kv_lora_rank: int) -> Tensor:
    if len(pair) != 2:
        raise ValueError(f"q must be a tensor or a pair (q_nope, q_pe), got {len(pair)} tensors")
    q_nope, q_pe = pair
    for name, part in (("q_nope", q_nope), ("q_pe", q_pe)):
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(part).__name__}")
    if q_nope.dim() not in (3, 4):
        raise ValueError(
            f"q_nope must be [batch, heads, kv_lora_rank] or [batch, q_len, heads, kv_lora_rank], "
            f"got shape {list(q_nope.shape)}"
        )
    if q_nope.shape[:-1] != q_pe.shape[:-1] or q_nope.dtype != q_pe.dtype:
        raise ValueError(
            f"q_nope and q_pe must agree in dtype and in all sizes but the last, got "
            f"{q_nope.dtype} {list(q_nope.shape)} and {q_pe.dtype} {list(q_pe.shape)}"
        )
    if q_nope.shape[-1] != kv_lora_rank:
        raise ValueError(
            f"q_nope must be absorbed, [..., kv_lora_rank = {kv_lora_rank}], got shape "
            f"{list(q_nope.shape)}"
        )
    return torch.cat((q_nope, q_pe), -1)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the results of attention over two disjoint sets of tokens.

    out_a, out_b: [..., R] bfloat16, float16 or float32.
    lse_a, lse_b: [...] float32, natural log; -inf (or FlashMLA's +inf) marks a side that saw
        nothing, whose out may hold anything.

    Returns (out, lse) of the same shapes: what one attention over both sets would have given.
    """
    return torch.ops.mla.merge_states(out_a, lse_a, out_b, lse_b)
