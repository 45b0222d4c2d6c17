"""Split scheduling: how the tokens of a batch are shared out among workers (`csrc/schedule.h` has
the rule).

A plan is one int32 tensor. For the native and torch backends it is `first_unit[B + 1]`: a sequence
of L tokens is max(1, ceil(L / unit_tokens)) units, and first_unit[b] counts the units before
sequence b. For aiter it holds aiter's metadata and token indices (`backends/aiter_plan.py`). It
holds offsets, never addresses, so a graph may copy it. The integers of its spec travel beside it on
the host: a plan for another problem is refused without reading the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ops import _compiled, capability, checks, tuned
from mla_ops.backends import aiter_choice, aiter_plan
from mla_ops.plan_spec import NATIVE, AiterPlanSpec, PlanSpec

# Tokens per unit. Small enough that a worker's share is within a few per cent of the mean, and a
# whole number of the kernels' tiles (64 tokens), so that cutting a sequence costs no ragged tile.
UNIT_TOKENS = 64

# Tokens per piece in batch-invariant mode: the partial result of a piece (R + 3 floats a row) is
# then under a tenth of the bytes of the cache it stands for, at 16 heads.
SPLIT_TOKENS = 1024


@dataclass(frozen=True, eq=False)  # a tensor has no one truth to compare by
class DecodePlan:
    """A plan for one decode step, good for all layers of the step.

    tensor: int32 on the device of the batch. spec: what it was made for; it says for which backend.

    Under `mode="reduce-overhead"` mark `tensor` with `torch._dynamo.mark_static_address`, like the
    cache, and refresh it between replays, outside the compiled function.
    """

    tensor: Tensor
    spec: PlanSpec | AiterPlanSpec

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def partial_nbytes(self) -> int:
        """Bytes that each decode takes from torch's allocator for partial results, with a plan for
        aiter: 512 numbers and an LSE for each head, in float32."""
        if not isinstance(self.spec, AiterPlanSpec):
            raise TypeError("partial_nbytes must be asked of a plan for aiter, got a native one")
        return aiter_plan.partial_rows(self.spec) * self.spec.group_heads * (512 + 1) * 4

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
    kv_cache: Tensor | None = None,
    q_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    backend: str = "auto",
) -> DecodePlan:
    """Make a plan for `mla_ops.decode`.

    seq_lens: [B] int32. block_table: [B, pages] int32; pages * page_size bounds what the plan has
        room for.
    page_size, num_heads, q_len: of the decode it is for.
    workers: how many share the work; by default what `python -m mla_ops tune` found for such
        shapes, or else the threads of a CPU or the multiprocessors of a GPU.
    batch_invariant: cut sequences every `split_tokens` tokens and nowhere else, so that a
        sequence's result has the same bits alone, in any batch and at any place in it. aiter does
        not have it.
    kv_cache, q_dtype, return_lse, backend: of the decode it is for. With `kv_cache` the plan is for
        the backend that will serve that decode; without, it is for the native and torch backends,
        which need to know none of them. A plan decides: where the call says "auto", a decode with
        it runs on the backend it was made for. One for aiter with return_lse=True serves decodes
        without LSE too.

    Raises ValueError or TypeError for wrong shapes, dtypes and numbers.
    """
    checks.plan_request(seq_lens, block_table, page_size, split_tokens, workers)
    if kv_cache is not None:
        checks.plan_cache(kv_cache, page_size, q_dtype)
        for_aiter = _for_aiter(kv_cache, q_dtype, num_heads, q_len, return_lse, backend)
        if for_aiter and not batch_invariant:
            return _aiter_plan(
                seq_lens, block_table, kv_cache, q_dtype, num_heads, q_len, return_lse
            )
    if backend == "aiter":
        wrong = "with batch_invariant=True" if batch_invariant else "without one"
        raise ValueError(
            "a plan for aiter must be made with kv_cache and without batch_invariant, got a "
            f"request {wrong}"
        )
    if workers is None and not batch_invariant:
        workers = _tuned_workers(seq_lens, block_table.shape[1] * page_size, num_heads, q_len)
    if workers is None:
        workers = default_workers(seq_lens.device, seq_lens.shape[0], q_len * num_heads)
    unit = split_tokens if batch_invariant else UNIT_TOKENS
    batch = seq_lens.shape[0]
    capacity = batch * max(1, -(-block_table.shape[1] * page_size // unit))
    capacity = min(capacity, checks.INT32_MAX)
    spec = PlanSpec(NATIVE, batch, q_len, num_heads, workers, unit, int(batch_invariant), capacity)
    return DecodePlan(torch.ops.mla.plan(seq_lens, block_table, spec), spec)


def default_workers(device: torch.device, batch: int, rows: int) -> int:
    """Return how many share the work of a batch, with `rows` query rows for each sequence, where
    nothing else was said or tuned."""
    most = _most_workers(device, rows)
    if device.type != "cuda" or not batch:
        return most
    # Sequences of one length are best cut at the same places: a few processors may stay idle for
    # that, up to a sixteenth.
    turns = -(-batch // most)
    even = most // batch * batch if batch <= most else -(-batch // turns)
    return even if even * 16 > most * 15 else most


@torch.compiler.assume_constant_result
def _most_workers(device: torch.device, rows: int) -> int:
    if device.type != "cuda":
        return torch.get_num_threads()
    compiled = _compiled.load()
    if compiled is None or not hasattr(compiled, "gpu_workers"):
        return torch.cuda.get_device_properties(device).multi_processor_count
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(compiled.gpu_workers(index, rows))


def _for_aiter(
    kv_cache: Tensor, q_dtype: torch.dtype, heads: int, q_len: int, lse: bool, backend: str
) -> bool:
    cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    q = cache.new_empty((1, q_len, heads, cache.shape[-1]), dtype=q_dtype, device="meta")
    decision = capability.decide_for(cache.device, q, cache, 512, True, lse, backend)
    return decision.backend == "aiter"


def _aiter_plan(
    seq_lens: Tensor,
    block_table: Tensor,
    kv_cache: Tensor,
    q_dtype: torch.dtype,
    heads: int,
    q_len: int,
    lse: bool,
) -> DecodePlan:
    cache = kv_cache.squeeze(2) if kv_cache.dim() == 4 else kv_cache
    batch, columns = block_table.shape
    spec = aiter_plan.spec_for(batch, q_len, heads, q_dtype, cache, columns, lse)
    return DecodePlan(torch.ops.mla.plan(seq_lens, block_table, spec), spec)


def _tuned_choice(shape: aiter_choice.Shape) -> aiter_choice.Choice | None:
    if not tuned.entries():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = (shape.batch, shape.max_tokens, shape.heads, shape.q_len)
    found = tuned.choice(device, "aiter", *sizes)
    return None if not found else aiter_choice.DEFAULT._replace(**found)


aiter_choice.tuned = _tuned_choice


def _tuned_workers(seq_lens: Tensor, tokens: int, heads: int, q_len: int) -> int | None:
    # Under torch.compile sizes may be symbolic, and plans are made outside.
    if torch.compiler.is_compiling():
        return None
    found = tuned.choice(seq_lens.device, "native", seq_lens.shape[0], tokens, heads, q_len)
    return found.get("workers")
