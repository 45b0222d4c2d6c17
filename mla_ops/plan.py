"""Split scheduling: how the tokens of a batch are shared out among workers (`csrc/schedule.h` has
the rule).

A plan is one int32 tensor, `first_unit[B + 1]`: a sequence of L tokens is max(1, ceil(L /
unit_tokens)) units, and first_unit[b] counts the units before sequence b. It holds offsets, never
addresses, so a graph may copy it. The integers of `PlanSpec` travel beside it on the host: a plan
for another problem is refused without reading the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops import checks, tuned

NATIVE = 0

# Tokens per unit. Small enough that a worker's share is within a few per cent of the mean, and a
# whole number of the kernels' tiles (64 tokens), so that cutting a sequence costs no ragged tile.
UNIT_TOKENS = 64

# Tokens per piece in batch-invariant mode: the partial result of a piece (R + 3 floats a row) is
# then under a tenth of the bytes of the cache it stands for, at 16 heads.
SPLIT_TOKENS = 1024


class PlanSpec(NamedTuple):
    """The host side of a plan; `csrc/plan_spec.h` reads the fields in this order."""

    kind: int
    batch: int
    q_len: int
    heads: int
    workers: int
    unit_tokens: int
    fixed_split: int
    unit_capacity: int


@dataclass(frozen=True, eq=False)  # a tensor has no one truth to compare by
class DecodePlan:
    """A plan for one decode step, good for all layers of the step.

    tensor: [B + 1] int32 on the device of the batch. spec: what it was made for.

    Under `mode="reduce-overhead"` mark `tensor` with `torch._dynamo.mark_static_address`, like the
    cache, and refresh it between replays, outside the compiled function.
    """

    tensor: Tensor
    spec: PlanSpec

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.tensor.numel() * self.tensor.element_size()

    def update_(self, seq_lens: Tensor, block_table: Tensor) -> DecodePlan:
        """Refresh in place for new lengths and tables of the same batch; capture-safe."""
        torch.ops.mla.plan_(self.tensor, seq_lens, block_table, self.spec)
        return self


def plan(
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    num_heads: int,
    q_len: int = 1,
    workers: int | None = None,
    batch_invariant: bool = False,
    split_tokens: int = SPLIT_TOKENS,
) -> DecodePlan:
    """Make a plan for `mla_ops.decode`.

    seq_lens: [B] int32. block_table: [B, pages] int32; pages * page_size bounds what the plan has
        room for.
    page_size, num_heads, q_len: of the decode it is for.
    workers: how many share the work; by default what `python -m mla_ops tune` found for such
        shapes, or else the threads of a CPU or the multiprocessors of a GPU.
    batch_invariant: cut sequences every `split_tokens` tokens and nowhere else, so that a
        sequence's result has the same bits alone, in any batch and at any place in it.

    Raises ValueError or TypeError for wrong shapes, dtypes and numbers.
    """
    checks.plan_request(seq_lens, block_table, page_size, split_tokens, workers)
    if workers is None and not batch_invariant:
        workers = _tuned_workers(seq_lens, block_table.shape[1] * page_size, num_heads, q_len)
    if workers is None:
        workers = default_workers(seq_lens.device)
    unit = split_tokens if batch_invariant else UNIT_TOKENS
    batch = seq_lens.shape[0]
    capacity = batch * max(1, -(-block_table.shape[1] * page_size // unit))
    capacity = min(capacity, checks.INT32_MAX)
    spec = PlanSpec(NATIVE, batch, q_len, num_heads, workers, unit, int(batch_invariant), capacity)
    return DecodePlan(torch.ops.mla.plan(seq_lens, block_table, spec), spec)


@torch.compiler.assume_constant_result
def default_workers(device: torch.device) -> int:
    """Return how many share the work where nothing else was said or tuned."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()


def _tuned_workers(seq_lens: Tensor, tokens: int, heads: int, q_len: int) -> int | None:
    # Under torch.compile sizes may be symbolic, and plans are made outside.
    if torch.compiler.is_compiling():
        return None
    found = tuned.choice(seq_lens.device, "native", seq_lens.shape[0], tokens, heads, q_len)
    return found.get("workers")
