"""What the adapters share: refusing arguments by name, and tables from index pointers."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse(where: str, **arguments: tuple[object, object]) -> None:
    """Raise ValueError for the first argument that is not what is served; name=(got, served)."""
    for name, (got, served) in arguments.items():
        if got is not served and (isinstance(got, Tensor) or got != served):
            came = f"a tensor of shape {list(got.shape)}" if isinstance(got, Tensor) else repr(got)
            raise ValueError(f"{name} must be {served!r} for mla_ops.compat.{where}, got {came}")


def uniform_q_len(qo_indptr: Tensor, tokens: int | None = None) -> int:
    """Return the query tokens of each sequence, which must be alike. Reads the device."""
    steps = qo_indptr.tolist()
    lengths = [end - begin for begin, end in zip(steps, steps[1:], strict=False)]
    if not lengths or steps[0] != 0 or min(lengths) != max(lengths) or lengths[0] < 1:
        raise ValueError(f"qo_indptr must be 0, S, 2 S, ... with one S >= 1, got {steps[:9]}")
    if tokens is not None and tokens != steps[-1]:
        raise ValueError(f"qo_indptr must end at the {tokens} rows of q, got {steps[-1]}")
    return int(lengths[0])


def block_table(kv_indptr: Tensor, kv_indices: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Return the int32 table [B, most pages] of the index form, and the pages [B] of each sequence
    on the host. Reads the device: the width of the table is a size."""
    if kv_indptr.shape != (batch + 1,):
        raise ValueError(
            f"kv_indptr must be [batch + 1] = {[batch + 1]}, got {list(kv_indptr.shape)}"
        )
    ends = kv_indptr.cpu()
    pages = ends.diff()
    if int(ends[0]) < 0 or bool((pages < 0).any()) or int(ends[-1]) > kv_indices.numel():
        raise ValueError(
            f"kv_indptr must rise from 0 or more to at most the {kv_indices.numel()} of "
            f"kv_indices, got {ends[:9].tolist()}"
        )
    columns = int(pages.max())
    if not columns:
        return kv_indices.new_zeros((batch, 1), dtype=torch.int32), pages
    entry = kv_indptr[:-1, None] + torch.arange(columns, device=kv_indptr.device)
    entry = entry.clamp(max=kv_indices.numel() - 1)  # behind a sequence's end: not read
    return kv_indices[entry.long()].to(torch.int32), pages
