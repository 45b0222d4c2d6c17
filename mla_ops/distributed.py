"""Context parallel decode: the tokens of each sequence spread over the ranks of a process group.

Token p of a sequence is held by rank `(p // interleave) % world`, as in vLLM's decode context
parallelism. A rank keeps its tokens in order and without gaps: its j-th one is row `j % page_size`
of page `block_table[b, j // page_size]` of its own cache. Every rank decodes what it holds, the
partial results are gathered, and every rank merges them in the order of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines torch.ops._c10d_functional
from torch import Tensor

from mla_ops import checks
from mla_ops.decode import decode


def shard_seq_lens(
    seq_lens: Tensor, world: int, rank: int, interleave: int = 1, q_len: int = 1
) -> Tensor:
    """Return how many of the tokens that each query token sees lie on a rank.

    seq_lens: [B] int32; tokens of whole sequences, the q_len query tokens included.
    world, rank: ranks there are, and the one asked about.
    interleave: consecutive tokens that lie on one rank.

    Returns [B * q_len] int32, query tokens of a sequence side by side. Query token s sees the first
    seq_lens - q_len + 1 + s tokens: the cut is made in whole sequences, since that off the end of a
    rank's share would be another. Stays on the device; capture-safe.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or number.
    """
    checks.tensors(seq_lens=seq_lens)
    checks.sharding(seq_lens, world, rank, interleave, q_len)
    behind = torch.arange(q_len - 1, -1, -1, dtype=torch.int32, device=seq_lens.device)
    seen = (seq_lens[:, None] - behind).clamp(min=0).flatten()
    turn = world * interleave
    whole_turns = seen.div(turn, rounding_mode="floor") * interleave
    return whole_turns + (seen % turn - rank * interleave).clamp(0, interleave)


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of attention over N disjoint sets of tokens, in float32 and in their order.

    outs: [N, ..., R] bfloat16, float16 or float32.
    lses: [N, ...] float32, natural log; -inf (or FlashMLA's +inf) marks a part that saw nothing,
        whose out may hold anything.

    Returns (out [..., R] of outs' dtype, lse [...] float32): what one attention over all sets would
    have given, 0 and -inf where none saw anything.
    """
    checks.partials(outs, lses)
    lses = torch.where(lses == torch.inf, -torch.inf, lses)
    largest = lses.amax(0)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = (lses - largest).exp()
    # One by one: the order in which `sum` adds is not promised.
    out = torch.zeros(outs.shape[1:], dtype=torch.float32, device=outs.device)
    total = torch.zeros_like(largest)
    for part, weight in zip(outs.unbind(), weights.unbind(), strict=True):
        out = out + torch.where(weight[..., None] == 0, 0.0, part.float() * weight[..., None])
        total = total + weight
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    return out.to(outs.dtype), largest + total.log()


def context_parallel_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    group: dist.ProcessGroup | None = None,
    interleave: int = 1,
    *,
    causal: bool = True,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode over sequences whose tokens are spread over the ranks of a group.

    q: [B, S, H, D], or [B, H, D] for S = 1; the same on every rank, all heads.
    kv_cache, block_table: this rank's share, as `mla_ops.decode` takes them; a rank that holds
        nothing of a sequence needs no page for it.
    seq_lens: [B] int32; tokens of the whole sequences, the same on every rank.
    group: a process group; None is the default one.
    interleave: consecutive tokens that lie on one rank.
    causal, return_lse: as in `mla_ops.decode`, over the whole sequences.
    options: kv_lora_rank, q_scale, kv_scale and backend, as in `mla_ops.decode`.

    Returns what `mla_ops.decode` would over the whole cache, the same bits on every rank of one
    kind of processor and number of threads. Partial results travel in q's dtype, which rounds once
    more than one rank would.

    Raises as `mla_ops.decode` does, before anything is sent: where one rank alone raises, the
    others wait until the group's timeout.
    """
    group = dist.distributed_c10d._get_default_group() if group is None else group
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    arguments = (q, kv_cache, block_table, seq_lens, softmax_scale)
    out, lse = _partial(*arguments, world, rank, interleave, causal=causal, **options)
    if out.numel():
        out, lse = merge_partials(_gathered(out, world, group), _gathered(lse, world, group))
    return (out, lse) if return_lse else out


def _partial(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    world: int,
    rank: int,
    interleave: int,
    *,
    causal: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention over the tokens of one rank."""
    refused = options.keys() - {"kv_lora_rank", "q_scale", "kv_scale", "backend"}
    if refused:
        raise TypeError(
            "options must be kv_lora_rank, q_scale, kv_scale or backend, got "
            + ", ".join(sorted(refused))
        )
    checks.tensors(q=q, block_table=block_table, seq_lens=seq_lens)
    shape = q.shape
    # A share of what query tokens see is no run of tokens that ends with them: a row for each.
    rows = shape[1] if causal and q.dim() == 4 else 1
    if rows != 1:
        q, block_table = q.flatten(0, 1).unsqueeze(1), block_table.repeat_interleave(rows, 0)
    lengths = shard_seq_lens(seq_lens, world, rank, interleave, rows)
    out, lse = decode(
        q, kv_cache, block_table, lengths, softmax_scale, causal=causal, return_lse=True, **options
    )
    return out.reshape(*shape[:-1], out.shape[-1]), lse.reshape(shape[:-1])


def _gathered(x: Tensor, world: int, group: dist.ProcessGroup) -> Tensor:
    # The op itself: its wrappers in torch.distributed change their names.
    ops = torch.ops._c10d_functional
    flat = ops.all_gather_into_tensor(x.reshape(-1), world, group.group_name)
    return ops.wait_tensor(flat).view(world, *x.shape)
