"""Plans for aiter: its metadata, made by its own planner on the device, and the token indices.

A plan is one int32 tensor with the sections of `AiterPlanSpec.sections`. It holds offsets and no
addresses: the table of two addresses that aiter's kernels read is written inside each decode.

Whatever the cache's page size, aiter sees pages of one token, for its kernels read only the first
row of a larger page (ROCm/aiter#3095). Whatever the number of heads, it sees groups of 16, or of
128: group j of sequence b is planned as a sequence of its own, b * groups + j, and all groups of a
sequence then read the same token indices. So its planner never folds heads itself, which it does
differently from release to release.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_ops import checks
from mla_ops.backends import aiter_choice, aiter_release
from mla_ops.plan_spec import AITER, AiterPlanSpec, aligned

# Columns of work_info (contract of aiter's csrc/include/mla.h).
BATCH, PARTIAL_ROW, KV_START, KV_END = 0, 1, 4, 6  # KV_END: behind the two columns of the range

# Tokens: each sequence's indices begin at a multiple of 256 bytes.
PITCH = 64

# Offsets of 2 GiB into the token indices.
MOST_INDICES = 1 << 29


class Parts:
    """The sections of a plan tensor, as views."""

    def __init__(self, plan: Tensor, spec: AiterPlanSpec) -> None:
        at = 0
        views = {}
        for name, size in spec.sections().items():
            views[name] = plan[at : at + size]
            at += aligned(size)
        self.kv_indptr = views["kv_indptr"]
        self.qo_indptr = views["qo_indptr"]
        self.ones = views["ones"]
        self.work_indptr = views["work_indptr"]
        self.work_info = views["work_info"].view(-1, 8)
        self.reduce_indptr = views["reduce_indptr"]
        self.reduce_final_map = views["reduce_final_map"].view(-1, 2)
        self.reduce_partial_map = views["reduce_partial_map"]
        self.token_indices = views["token_indices"]

    def addresses(self) -> Tensor:
        """Return [2] int64 on the device: where work_indptr and work_info are now. One launch that
        reads nothing of the host, so that a graph may capture it."""
        first, second = self.work_indptr.data_ptr(), self.work_info.data_ptr()
        step = second - first
        return torch.arange(
            first, first + 2 * step, step, dtype=torch.int64, device=self.work_info.device
        )


def spec_for(
    batch: int,
    q_len: int,
    heads: int,
    q_dtype: torch.dtype,
    kv_cache: Tensor,
    columns: int,
    lse: bool,
) -> AiterPlanSpec:
    """Return what a plan is made for; `columns` is the width of its block table.

    Raises RuntimeError where the installed release wants more room than we know of.
    """
    page_size = kv_cache.shape[1]
    choice = aiter_choice.choose(
        aiter_choice.Shape(batch, q_len, heads, columns * page_size, q_dtype, kv_cache.dtype)
    )
    spec = AiterPlanSpec(
        kind=AITER,
        batch=batch,
        q_len=q_len,
        heads=heads,
        workers=1,
        granularity=choice.granularity,
        max_splits=choice.max_splits,
        pitch=-(-max(1, columns * page_size) // PITCH) * PITCH,
        page_size=page_size,
        page_rows=page_rows(kv_cache),
        q_dtype=checks.DTYPES.index(q_dtype),
        cache_dtype=checks.DTYPES.index(kv_cache.dtype),
        lse=int(lse),
        group_heads=aiter_choice.group_heads(q_dtype, kv_cache.dtype, q_len, heads),
    )
    if batch * spec.pitch > MOST_INDICES or spec.tiles * spec.pitch > checks.INT32_MAX:
        raise ValueError(
            f"batch * pages * page_size must be at most {MOST_INDICES}, and {checks.INT32_MAX} "
            f"times the groups of heads, for a plan of aiter, got {batch * spec.pitch} and "
            f"{spec.tiles * spec.pitch}"
        )
    if batch == 0:
        return spec
    wanted = [math.prod(_sizes(shape)) for shape, _ in _info(spec)]
    spec = spec._replace(workers=wanted[1] - 1)
    sections = spec.sections()
    names = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
    for name, size in zip(names, wanted[1:], strict=True):
        if size > sections[name]:
            raise RuntimeError(
                f"the installed aiter must need at most {sections[name]} integers of {name} for "
                f"{spec}, got {size}"
            )
    return spec


def _sizes(shape: object) -> Sequence[int]:
    return (shape,) if isinstance(shape, int) else shape  # type: ignore[return-value]


def _info(spec: AiterPlanSpec) -> Sequence[tuple[object, torch.dtype]]:
    q_dtype, cache_dtype = kernel_dtypes(spec)
    return aiter_release.get().info(
        batch_size=spec.tiles,
        max_seqlen_qo=spec.kernel_q_len,
        num_head_qo=spec.group_heads,
        q_dtype=q_dtype,
        kv_dtype=cache_dtype,
        is_sparse=False,
        fast_mode=True,
        intra_batch_mode=False,
        max_split_per_batch=spec.max_splits,
    )


def kernel_dtypes(spec: AiterPlanSpec) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes that the kernel gets q and the cache in."""
    q_dtype, cache_dtype = checks.DTYPES[spec.q_dtype], checks.DTYPES[spec.cache_dtype]
    rounded = aiter_choice.rounds_q(q_dtype, cache_dtype)
    return (cache_dtype if rounded else q_dtype), cache_dtype


def partial_rows(spec: AiterPlanSpec) -> int:
    """Return how many rows of a group's heads stage 1 may write as partial results."""
    whole = spec.tiles if spec.lse else 0
    return (spec.partials + whole) * spec.kernel_q_len


def page_rows(kv_cache: Tensor) -> int:
    """Return the distance of two pages, in rows."""
    return kv_cache.stride(0) // kv_cache.stride(1)


def fill(seq_lens: Tensor, block_table: Tensor, plan_spec: Sequence[int], plan: Tensor) -> None:
    """Write a plan: torch ops and aiter's planner, on the current stream, without a host sync.

    The token indices are made by torch's own kernels, for a step of all layers; a kernel of ours
    would save half a dozen launches and temporaries of the size of the indices, and no more.
    """
    spec = AiterPlanSpec(*plan_spec)
    if spec.batch == 0:
        return
    parts = Parts(plan, spec)
    # aiter's kernels end a whole work-group at an empty sequence, and leave those behind it
    # unwritten. So every sequence has a token; decode overwrites what comes of it.
    most = max(1, block_table.shape[1] * spec.page_size)
    lengths = seq_lens.clamp(1, most)
    _expand(parts.token_indices.view(spec.batch, spec.pitch), seq_lens, block_table, spec)
    parts.kv_indptr[:1] = 0
    folded = lengths.repeat_interleave(spec.groups)
    torch.cumsum(folded, 0, dtype=torch.int32, out=parts.kv_indptr[1:])
    tile = torch.arange(spec.tiles + 1, dtype=torch.int32, device=plan.device)
    parts.qo_indptr.copy_(tile * spec.kernel_q_len)
    parts.ones.fill_(1)
    _metadata(parts, spec)
    info = parts.work_info
    # aiter's planner lays the tokens of its sequences end to end; ours are `pitch` apart.
    moved = tile[:-1] // spec.groups * spec.pitch - parts.kv_indptr[:-1]
    batch = info[:, BATCH].clamp(0, spec.tiles - 1)  # rows that are not in use hold anything
    info[:, KV_START:KV_END] += moved[batch][:, None]
    if spec.lse:
        # The kernels write no LSE for a sequence in one piece. As a partial result it has one.
        row = (spec.partials + batch) * spec.kernel_q_len
        info[:, PARTIAL_ROW] = torch.where(info[:, PARTIAL_ROW] < 0, row, info[:, PARTIAL_ROW])


def _expand(indices: Tensor, seq_lens: Tensor, block_table: Tensor, spec: AiterPlanSpec) -> None:
    """Write the cache row of every token, [B, pitch].

    Row 0 stands behind a sequence's end, and for the one token of an empty sequence.
    """
    columns = block_table.shape[1]
    if columns == 0:
        indices.zero_()
        return
    token = torch.arange(spec.pitch, dtype=torch.int32, device=indices.device)
    page = block_table[:, (token // spec.page_size).clamp(max=columns - 1)]
    rows = page * spec.page_rows + token % spec.page_size
    indices.copy_(rows.masked_fill_(token >= seq_lens[:, None], 0))


def _metadata(parts: Parts, spec: AiterPlanSpec) -> None:
    call = aiter_release.get().metadata
    q_dtype, cache_dtype = kernel_dtypes(spec)
    dtypes = {"dtype_q": q_dtype, "dtype_kv": cache_dtype}
    if not call.plain_dtypes:  # two days of July 2026
        dtypes = {
            f"dtype_{side}_{half}": dtype
            for side, dtype in (("q", q_dtype), ("kv", cache_dtype))
            for half in ("nope", "rope")
        }
    call(
        seqlens_qo_indptr=parts.qo_indptr,
        seqlens_kv_indptr=parts.kv_indptr,
        kv_last_page_lens=parts.ones,
        num_heads_per_head_k=spec.group_heads,
        num_heads_k=1,
        is_causal=True,
        # Its addresses are those of now; decode writes its own.
        work_metadata_ptrs=torch.empty(2, dtype=torch.uint64, device=parts.ones.device),
        work_indptr=parts.work_indptr,
        work_info_set=parts.work_info,
        reduce_indptr=parts.reduce_indptr,
        reduce_final_map=parts.reduce_final_map,
        reduce_partial_map=parts.reduce_partial_map,
        page_size=1,
        kv_granularity=spec.granularity,
        max_seqlen_qo=spec.kernel_q_len,
        uni_seqlen_qo=spec.kernel_q_len,
        fast_mode=True,
        max_split_per_batch=spec.max_splits,
        intra_batch_mode=False,
        **dtypes,
    )
