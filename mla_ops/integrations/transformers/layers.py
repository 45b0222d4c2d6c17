"""Layers of a transformers `Cache` over pages of latents.

`update` stores the new latents and returns, as keys and as values, one `CachedLatents`: what the
attention function of `attention.py` needs. The whole context is no tensor any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from mla_ops import capability
from mla_ops.integrations.transformers.options import CACHE_DTYPES, Options
from mla_ops.integrations.transformers.pool import LatentPool


@dataclass
class Extent:
    """What stands for a layer's `keys`: models ask for its shape."""

    layer: PagedLayer

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, 1, columns, R], as of the tensor that other caches hold and return."""
        pool = self.layer.pool
        return pool.batch, 1, self.layer.columns, pool.kv_lora_rank


@dataclass
class CachedLatents(Extent):
    """One forward's view of a layer: its latents so far, and the new ones as the model made them.

    kv_c: [B, 1, S, R] and k_pe: [B, 1, S, rope], also the last S columns of `layer`.
    """

    kv_c: Tensor
    k_pe: Tensor

    @property
    def pool(self) -> LatentPool:
        return self.layer.pool

    @property
    def length(self) -> int | Tensor:
        """Columns written, the new ones included."""
        return self.layer.length

    def all(self) -> tuple[Tensor, Tensor]:
        """Return the latents of all columns, [B, 1, T, R] and [B, 1, T, rope] of the model's dtype.

        The new ones are as the model made them where there are no others.
        """
        if self.layer.holds_only(self.kv_c.shape[2]):
            return self.kv_c, self.k_pe
        kv_c, k_pe = self.pool.latents(self.layer.columns_to_expand(), self.kv_c.dtype)
        return kv_c[:, None], k_pe[:, None]


class PagedLayer(cache_utils.CacheLayerMixin):
    """Grows by whole chunks; what was written stays where it is.

    indexer: for a sparse model, the layer of transformers that keeps the keys by which tokens are
        chosen; nothing else of it is used.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False  # transformers would give the shape of expanded heads

    def __init__(self, options: Options, layer_idx: int, indexer: Any = None) -> None:
        super().__init__()
        self.options = options
        self.layer_idx = layer_idx
        self.indexer = indexer
        self.announced: int | None = None  # how many columns `generate` will need
        self.length: int | Tensor = 0
        self.pool: LatentPool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the pool for latents [B, 1, S, R] and rope parts [B, 1, S, rope]."""
        dtype = CACHE_DTYPES[self.options.cache_dtype]
        if dtype is None:
            dtype = key_states.dtype
        elif dtype.itemsize == 1:
            dtype = capability.float8_dtype(key_states.device)
        self.pool = LatentPool(
            key_states.shape[0],
            key_states.shape[-1],
            value_states.shape[-1],
            page_size=self.options.page_size,
            dtype=dtype,
            device=key_states.device,
            kv_scale=self.options.kv_scale_of(self.layer_idx, dtype, key_states.device),
        )
        self.keys = Extent(self)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CachedLatents, CachedLatents]:
        """Store the latents of S tokens: [B, 1, S, R] and [B, 1, S, rope]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.pool.batch:
            raise ValueError(
                f"the batch must be that of the cache, {self.pool.batch}, got {key_states.shape[0]}"
            )
        self._store(key_states[:, 0], value_states[:, 0])
        seen = CachedLatents(self, key_states, value_states)
        return seen, seen

    def _store(self, kv_c: Tensor, k_pe: Tensor) -> None:
        count = kv_c.shape[1]
        self.pool.reserve(self.columns + count, self.announced)
        self.pool.write(kv_c, k_pe, self.columns)
        self.length = self.columns + count

    @property
    def columns(self) -> int:
        """Columns that masks have."""
        return int(self.length)

    def columns_to_expand(self) -> int:
        """Columns that a prefill expands."""
        return self.columns

    def holds_only(self, count: int) -> bool:
        """Whether the last `count` columns are all there are."""
        return self.columns == count

    @property
    def nbytes(self) -> int:
        """Bytes of cache: B * columns * D * element size, columns in whole pages."""
        return self.pool.nbytes if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> Any:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget the tokens, and a scale that was measured on them; keep the memory."""
        if self.is_initialized:
            pool = self.pool
            pool.kv_scale = self.options.kv_scale_of(self.layer_idx, pool.dtype, pool.device)
            pool.crop(0)
        self._set_length(0)
        if self.indexer is not None:
            self.indexer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove columns. A positive number is how many shall stay, as
        transformers had it until 5.17."""
        have = int(self.length)
        keep = have + tokens_to_remove if tokens_to_remove <= 0 else min(have, tokens_to_remove)
        keep = max(0, keep)
        if self.is_initialized and keep != have:
            self.pool.crop(keep)
            self._set_length(keep)
            if self.indexer is not None:
                self.indexer.crop(keep - have)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence b continue sequence beam_idx[b]; copies at most a page of each."""
        if self.is_initialized:
            self.pool.reorder(beam_idx, int(self.length))
        if self.indexer is not None:
            self.indexer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.pool.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.pool.select(torch.as_tensor(indices))
        if self.indexer is not None:
            self.indexer.batch_select_indices(indices)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store and return an indexer's keys, for sparse models."""
        return self.indexer.update_indexer(indexer_key_states)

    def offload(self) -> None:
        raise ValueError("a paged cache stays on its device: pass offloading=False, got True")

    prefetch = offload

    def _set_length(self, length: int) -> None:
        self.length = length


class StaticPagedLayer(PagedLayer):
    """Room for max_cache_len columns from the start and a length on the device, so that a compiled
    or captured step is good for all steps."""

    is_compileable = True

    def __init__(
        self, options: Options, layer_idx: int, max_cache_len: int, indexer: Any = None
    ) -> None:
        super().__init__(options, layer_idx, indexer)
        self.max_cache_len = max_cache_len
        self.length: Tensor = torch.tensor(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.length = self.length.to(key_states.device)
        self.pool.reserve(self.max_cache_len, self.max_cache_len)
        if not torch.compiler.is_compiling():
            (chunk,) = self.pool.chunks
            # Else mode="reduce-overhead" would copy them, or do without graphs.
            for tensor in (self.length, chunk.kv_cache, chunk.block_table, self.pool._zeros):
                torch._dynamo.mark_static_address(tensor)

    def _store(self, kv_c: Tensor, k_pe: Tensor) -> None:
        self.pool.write(kv_c, k_pe, self.length)
        self.length.add_(kv_c.shape[1])

    @property
    def columns(self) -> int:
        return self.max_cache_len

    def columns_to_expand(self) -> int:
        return self.max_cache_len if torch.compiler.is_compiling() else int(self.length)

    def holds_only(self, count: int) -> bool:
        return not torch.compiler.is_compiling() and int(self.length) == count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_seq_length(self) -> Any:
        return self.length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def check_room(self, count: int) -> None:
        """Raise where the next `count` tokens do not fit. Asks the device for the length."""
        if int(self.length) + count > self.max_cache_len:
            raise ValueError(
                f"the static cache must hold {int(self.length) + count} tokens, got "
                f"max_cache_len={self.max_cache_len}"
            )

    def _set_length(self, length: int) -> None:
        self.length.fill_(length)
