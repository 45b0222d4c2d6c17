"""aiter's `mla_decode_fwd` (`aiter/mla.py`, 2026-08) over `mla_ops.decode`, whichever backend
serves it."""

from __future__ import annotations

from torch import Tensor

from mla_ops.compat._arguments import block_table, refuse, uniform_q_len
from mla_ops.decode import decode


def mla_decode_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: Tensor | None = None,
    work_meta_data: Tensor | None = None,
    work_indptr: Tensor | None = None,
    work_info_set: Tensor | None = None,
    reduce_indptr: Tensor | None = None,
    reduce_final_map: Tensor | None = None,
    reduce_partial_map: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    intra_batch_mode: bool = False,
    return_logits: bool = False,
    return_lse: bool = False,
    g_kv_indptr: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    causal: bool = True,
) -> tuple[None, Tensor | None]:
    """Attend, into `o`, as aiter.

    q: [T, H, D], S = max_seqlen_q rows for each sequence. kv_buffer: [P, page_size, 1, D].
    o: [T, H, R], written in place, its storage kept.
    qo_indptr, kv_indptr: [B + 1]. kv_indices: pages of all sequences. kv_last_page_lens: [B], rows
        of the last page. They are read on the host: not for graph capture.
    sm_scale: 1/sqrt(D) where None, as in aiter; wrong for DeepSeek models.
    num_kv_splits to reduce_partial_map, intra_batch_mode: how aiter cuts the work. Not looked at:
        `mla_ops.decode` has its own plan.
    q_scale, kv_scale: of float8, as in `mla_ops.decode`.

    Returns (None, lse): lse [T, H] float32, natural log, -inf for a row that sees nothing (whose
    output is 0), or None without return_lse. aiter's first value, partial results, has no like.

    Raises ValueError or TypeError for what is not served, by name, and as `mla_ops.decode`.
    """
    if kv_buffer.dim() != 4 or q.dim() != 3 or o.dim() != 3:
        raise ValueError(
            "q, kv_buffer and o must be [T, H, D], [P, page_size, 1, D] and [T, H, R], got shapes "
            f"{list(q.shape)}, {list(kv_buffer.shape)} and {list(o.shape)}"
        )
    refuse(
        "aiter",
        page_size=(page_size, kv_buffer.shape[1]),
        nhead_kv=(nhead_kv, 1),
        logit_cap=(max(logit_cap, 0.0), 0.0),
        return_logits=(return_logits, False),
        g_kv_indptr=(g_kv_indptr, None),
        cp_world_size=(cp_world_size, 1),
        cp_rank=(cp_rank, 0),
    )
    q_len = uniform_q_len(qo_indptr, q.shape[0])
    if q_len != max_seqlen_q:
        raise ValueError(f"max_seqlen_q must be the {q_len} of qo_indptr, got {max_seqlen_q}")
    if o.shape[:2] != q.shape[:2]:
        raise ValueError(f"o must be [T, H, R] with q's {list(q.shape[:2])}, got {list(o.shape)}")
    batch = qo_indptr.numel() - 1
    table, pages = block_table(kv_indptr, kv_indices, batch)
    last = kv_last_page_lens.cpu()
    if last.shape != (batch,) or bool(((last < 1) | (last > page_size))[pages > 0].any()):
        raise ValueError(
            f"kv_last_page_lens must be [{batch}] between 1 and page_size = {page_size}, got "
            f"{last[:9].tolist()}"
        )
    lengths = ((pages - 1) * page_size + last).where(pages > 0, 0)
    result = decode(
        q.unflatten(0, (batch, q_len)),
        kv_buffer,
        table,
        lengths.to(q.device, table.dtype),
        q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
        kv_lora_rank=o.shape[-1],
        causal=causal,
        q_scale=q_scale,
        kv_scale=kv_scale,
        return_lse=return_lse,
        out=o.unflatten(0, (batch, q_len)),
    )
    return None, (result[1].flatten(0, 1) if return_lse else None)
