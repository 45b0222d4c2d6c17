"""Which columns of the cache each query token sees, as the op wants it: a list, not a mask.

The form is one int32 tensor [..., 1 + most]: the number of columns, then their names in ascending
order; what follows is not read. Made once per step where transformers makes its masks, it serves
all layers, and has a static shape where the mask has one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_mask(allowed: Tensor) -> Tensor:
    """Return the list [..., 1 + T] of a mask [..., T] that is True where a column is seen."""
    most = allowed.shape[-1]
    names = torch.arange(most, dtype=torch.int32, device=allowed.device)
    return of_names(names.expand(allowed.shape), allowed)


def of_names(names: Tensor, allowed: Tensor) -> Tensor:
    """Return the list [..., 1 + most] of those names [..., most] that are allowed, in order."""
    most = names.shape[-1]
    count = allowed.sum(-1, keepdim=True, dtype=torch.int32)
    # What is not allowed goes behind the end, all to one place.
    place = torch.where(allowed, allowed.cumsum(-1), most + 1)
    result = names.new_zeros((*names.shape[:-1], most + 2), dtype=torch.int32)
    result.scatter_(-1, place, names.to(torch.int32))
    result[..., :1] = count
    return result[..., :-1]


def causal(batch: int, q_len: int, length: int, device: torch.device) -> Tensor:
    """Return [batch, q_len, 1 + length]: query token s of S sees length - S + 1 + s columns."""
    names = torch.arange(length, dtype=torch.int32, device=device)
    counts = torch.arange(length - q_len + 1, length + 1, dtype=torch.int32, device=device)
    one = torch.cat((counts[:, None], names.expand(q_len, -1)), -1)
    return one.expand(batch, -1, -1)


def parts(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts [B * S] and names [B * S, most] of a list [B, S, 1 + most]."""
    flat = columns.flatten(0, 1)
    return flat[:, 0].contiguous(), flat[:, 1:]


def between(counts: Tensor, names: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return those of the columns that lie in start to start + size, counted from start."""
    most = names.shape[1]
    position = torch.arange(most, device=names.device)
    real = position < counts[:, None]
    before = (real & (names < start)).sum(-1, dtype=torch.int32)
    until = (real & (names < start + size)).sum(-1, dtype=torch.int32)
    place = (before[:, None] + position[: min(most, size)]).clamp(max=most - 1)
    return until - before, names.gather(1, place.long()) - start


def as_mask(columns: Tensor, width: int) -> Tensor:
    """Return the mask [..., width] of a list; names of width and more are left out."""
    names, counts = columns[..., 1:], columns[..., :1]
    real = torch.arange(names.shape[-1], device=columns.device) < counts
    real &= names < width
    mask = torch.zeros((*names.shape[:-1], width + 1), dtype=torch.bool, device=columns.device)
    place = torch.where(real, names, width).long()
    return mask.scatter_(-1, place, True)[..., :width]
