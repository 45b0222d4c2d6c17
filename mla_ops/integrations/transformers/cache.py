"""transformers' `Cache` over pages of latents.

`update` stores the new latents and returns, as keys and as values, one `CachedLatents`: what the
attention function of `attention.py` needs, and not the whole context, which nobody expands any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils

from mla_ops import capability
from mla_ops.integrations.transformers.options import CACHE_DTYPES, Options
from mla_ops.integrations.transformers.pool import LatentPool


@dataclass
class CachedLatents:
    """One forward's view of a layer: its latents so far, and the new ones as the model made them.

    kv_c: [B, 1, S, R] and k_pe: [B, 1, S, rope], also the last S columns of `layer`.
    """

    layer: PagedLayer
    kv_c: Tensor
    k_pe: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, 1, columns, R], as of the tensor that other caches return; sparse models ask."""
        batch, one, _, rank = self.kv_c.shape
        return batch, one, self.layer.columns, rank

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
    """Grows by whole chunks; what was written stays where it is."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False  # transformers would give the shape of expanded heads

    def __init__(self, options: Options, layer_idx: int) -> None:
        super().__init__()
        self.options = options
        self.layer_idx = layer_idx
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

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove columns. A positive number is how many shall stay, as
        transformers had it until 5.17."""
        have = int(self.length)
        keep = have + tokens_to_remove if tokens_to_remove <= 0 else min(have, tokens_to_remove)
        if self.is_initialized and keep != have:
            self.pool.crop(max(0, keep))
            self._set_length(max(0, keep))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence b continue sequence beam_idx[b]; copies at most a page of each."""
        if self.is_initialized:
            self.pool.reorder(beam_idx, int(self.length))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.pool.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.pool.select(torch.as_tensor(indices))

    def offload(self) -> None:
        raise ValueError("a paged cache stays on its device: pass offloading=False, got True")

    prefetch = offload

    def _set_length(self, length: int) -> None:
        self.length = length


class StaticPagedLayer(PagedLayer):
    """Room for max_cache_len columns from the start and a length on the device, so that a compiled
    or captured step is good for all steps."""

    is_compileable = True

    def __init__(self, options: Options, layer_idx: int, max_cache_len: int) -> None:
        super().__init__(options, layer_idx)
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


class LatentCache(cache_utils.Cache):
    """A cache for an enabled model, to pass to `model(...)` or `generate(...)` and to go on with.

    model: one that `enable` was called on. max_cache_len: None grows as needed; a number has room
        for as many tokens per sequence from the start, for graphs and `torch.compile`.

    Layers that hold something else than latents (linear attention, sliding windows, the keys of an
    indexer) are transformers' own.
    """

    def __init__(self, model: nn.Module, *, max_cache_len: int | None = None) -> None:
        options: Options | None = getattr(model, "_mla_ops", None)
        if options is None:
            raise ValueError("model must be one that enable(model) was called on, got another")
        config = model.config.get_text_config(decoder=True)
        if max_cache_len is None:
            plain = cache_utils.DynamicCache(config=config)
        else:
            plain = cache_utils.StaticCache(config=config, max_cache_len=max_cache_len)
        super().__init__(layers=plain.layers)
        adopt(self, options)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages of all layers: layers * B * columns * D * element size, columns in
        whole pages."""
        return sum(layer.nbytes for layer in paged(self))


def paged(cache: cache_utils.Cache) -> Iterable[PagedLayer]:
    """Yield the paged layers of a cache."""
    return (layer for layer in cache.layers if isinstance(layer, PagedLayer))


def adopt(cache: Any, options: Options, announced: int | None = None) -> None:
    """Let an empty cache keep latents in pages, where it would hold them in plain tensors.

    Other caches (quantised, offloaded, filled already) stay what they are; what they return is
    attended to as it is.
    """
    if not isinstance(cache, cache_utils.Cache) or cache.offloading:
        return
    wanted = options.layers
    if not cache.layers and cache.layer_class_to_replicate is cache_utils.DynamicLayer:
        if wanted != frozenset(range(len(wanted))):
            return  # made without a config, for a model whose layers are not all alike
        cache.layers = [cache_utils.DynamicLayer() for _ in wanted]
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PagedLayer):
            layer.announced = announced
        elif index in wanted and not getattr(layer, "is_initialized", True):
            if type(layer) is cache_utils.DynamicLayer:
                cache.layers[index] = PagedLayer(options, index)
                cache.layers[index].announced = announced
            elif type(layer) is cache_utils.StaticLayer:
                cache.layers[index] = StaticPagedLayer(options, index, layer.max_cache_len)
