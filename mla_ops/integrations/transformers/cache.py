"""A transformers `Cache` whose layers hold latents in pages, and how other caches come to that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import cache_utils

from mla_ops.integrations.transformers.layers import PagedLayer, StaticPagedLayer
from mla_ops.integrations.transformers.options import Options


class LatentCache(cache_utils.Cache):
    """A cache for an enabled model, to pass to `model(...)` or `generate(...)` and to go on with.

    model: one that `enable` was called on. max_cache_len: None grows as needed; a number has room
        for as many tokens per sequence from the start, for graphs and `torch.compile`.

    Layers that hold something else than latents (linear attention, sliding windows) are
    transformers' own.
    """

    def __init__(self, model: Any, *, max_cache_len: int | None = None) -> None:
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

    announced: how many columns there will be at most, or None.

    Other caches (quantised, offloaded, filled already) stay what they are; what they return is
    attended to as it is.
    """
    if not isinstance(cache, cache_utils.Cache) or cache.offloading:
        return
    wanted = options.layers
    if not cache.layers and cache.layer_class_to_replicate is cache_utils.DynamicLayer:
        if options.sparse or wanted != frozenset(range(len(wanted))):
            return  # made without a config, for a model whose layers are not all alike
        cache.layers = [cache_utils.DynamicLayer() for _ in wanted]
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PagedLayer):
            layer.announced = announced or layer.announced
        elif index in wanted and not getattr(layer, "is_initialized", True):
            cache.layers[index] = _paged_instead_of(layer, options, index)
            cache.layers[index].announced = announced


def _paged_instead_of(layer: Any, options: Options, index: int) -> Any:
    kind = type(layer)
    if kind is cache_utils.DynamicLayer:
        return PagedLayer(options, index)
    if kind is cache_utils.DynamicIndexedLayer:
        return PagedLayer(options, index, indexer=layer)
    if kind is cache_utils.StaticLayer:
        return StaticPagedLayer(options, index, layer.max_cache_len)
    if kind is cache_utils.StaticIndexedLayer:
        return StaticPagedLayer(options, index, layer.max_cache_len, indexer=layer)
    return layer
