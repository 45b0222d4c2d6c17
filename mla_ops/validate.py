"""Checks of what tensors hold: lengths, page numbers, slots.

On a CPU they run in every call. On a GPU reading them would wait for the device, so that they run
only under `MLA_OPS_VALIDATE=1`, which refuses to work while a graph is captured. The compiled CPU
kernels make the same checks themselves (`csrc/cpu/plan.cpp`).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor


def _wanted(tensor: Tensor) -> bool:
    if tensor.device.type == "cpu":
        return True
    wanted = os.environ.get("MLA_OPS_VALIDATE", "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"MLA_OPS_VALIDATE must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "MLA_OPS_VALIDATE=1 reads lengths and tables on the host and cannot run while a graph "
            "is captured: expected it unset, got 1"
        )
    return True


def checked_by_kernel(backend: str, device: torch.device) -> bool:
    """Say whether a backend's decode checks lengths and tables itself."""
    return backend == "native" and device.type == "cpu"


def tables(block_table: Tensor, seq_lens: Tensor, pages: int, page_size: int) -> None:
    """Raise ValueError with the first length, or page in use, that is not there."""
    if not _wanted(seq_lens):
        return
    columns = block_table.shape[1]
    capacity = columns * page_size
    bad = ((seq_lens < 0) | (seq_lens > capacity)).nonzero()
    if bad.numel():
        b = int(bad[0])
        raise ValueError(
            f"seq_lens[{b}] must be between 0 and {capacity} ({columns} pages of {page_size} "
            f"tokens in block_table), got {int(seq_lens[b])}"
        )
    in_use = torch.arange(columns, device=seq_lens.device) * page_size < seq_lens[:, None]
    bad = (in_use & ((block_table < 0) | (block_table >= pages))).nonzero()
    if bad.numel():
        b, i = bad[0].tolist()
        raise ValueError(
            f"block_table[{b}, {i}] must be between 0 and {pages - 1} (kv_cache has {pages} "
            f"pages), got {int(block_table[b, i])}"
        )


def first_row(kv_cache: Tensor) -> None:
    """Raise ValueError if the first row of the cache holds NaN or infinity.

    aiter's kernels read it in place of the tokens that a last tile does not have, and multiply it
    by weights of 0.
    """
    if _wanted(kv_cache) and not bool(kv_cache[0, 0].float().isfinite().all()):
        raise ValueError(
            "row 0 of page 0 of kv_cache must be finite for aiter, whether a sequence uses it or "
            "not, got NaN or infinity"
        )


def slots(slot_mapping: Tensor, pages: int, page_size: int) -> None:
    """Raise ValueError with the first slot that the cache does not have."""
    if not _wanted(slot_mapping):
        return
    capacity = pages * page_size
    bad = ((slot_mapping < -1) | (slot_mapping >= capacity)).nonzero()
    if bad.numel():
        t = int(bad[0])
        raise ValueError(
            f"slot_mapping[{t}] must be between 0 and {capacity - 1} ({pages} pages of {page_size} "
            f"tokens), or -1 to skip, got {int(slot_mapping[t])}"
        )
