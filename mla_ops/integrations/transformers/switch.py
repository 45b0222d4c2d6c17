"""`enable` and `disable`: what is hung onto a model, and taken off again."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mla_ops.integrations.transformers import absorption, attention, families, options
from mla_ops.integrations.transformers.cache import LatentCache, adopt, paged
from mla_ops.integrations.transformers.layers import StaticPagedLayer

_MARK = "_mla_ops"  # on the model and its attention modules: the Options


class Enabled:
    """Returned by `enable`; as a context manager it disables the model at the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *exception: object) -> None:
        disable(self.model)


def enable(
    model: Any,
    cache_dtype: str = "auto",
    page_size: int = 64,
    backend: str = "auto",
    kv_scale: float | Sequence[float] | None = None,
) -> Enabled:
    """Let a model with multi-head latent attention decode through `torch.ops.mla.decode`.

    model: a `PreTrainedModel` of transformers 5.15 or newer, with attn_implementation "sdpa" or
        "eager", which goes on prefilling. Changed in place; `disable(model)` undoes it.
    cache_dtype: "auto" (the model's dtype), "bf16", or "fp8": float8 with one scale per layer.
    page_size: tokens in a page of the cache.
    backend: of `mla_ops.decode`.
    kv_scale: for "fp8", what the codes are multiplied with: one number, or one for each layer. By
        default it is measured on the first tokens that a cache sees, with room for values twice as
        large; beyond that they saturate.

    Returns a context manager, which need not be used as one. Of a model that is enabled already the
    options change. Caches made before keep theirs.

    Raises ValueError or TypeError, naming the module, for a model without MLA, a transformers that
    is too old, a `kv_b_proj` that is quantised or not in memory, and an expansion of another kind.
    """
    modules = families.attentions(model)
    for name, module in modules.items():
        absorption.check(name, module)
    if hasattr(model, _MARK):
        disable(model)
    decoder = families.decoder_of(model, modules)
    configs = {id(module.config): module.config for module in modules.values()}
    bases = {families.base_of(config) for config in configs.values()}
    if len(bases) > 1:
        raise ValueError(f"attn_implementation must be one for all layers, got {sorted(bases)}")
    chosen = options.checked(
        cache_dtype,
        page_size,
        backend,
        kv_scale,
        frozenset(int(module.layer_idx) for module in modules.values()),
        any(families.is_sparse(config) for config in configs.values()),
        bases.pop(),
    )

    attention.register()
    for module in modules.values():
        module.expand_kv = types.MethodType(attention.keep_latents, module)
        setattr(module, _MARK, chosen)
    for config in configs.values():
        config._attn_implementation = attention.NAMES[chosen.base]
    setattr(model, _MARK, chosen)
    model._mla_ops_hook = decoder.register_forward_pre_hook(
        _before(model, decoder), with_kwargs=True
    )
    if hasattr(model, "_prepare_cache_for_generation"):
        model._prepare_cache_for_generation = types.MethodType(_prepare_cache, model)
    return Enabled(model)


def disable(model: Any) -> None:
    """Undo `enable`; does nothing to a model that is not enabled. Its caches end with it: what is
    in a `LatentCache` cannot be read by transformers' own attention."""
    chosen: options.Options | None = getattr(model, _MARK, None)
    if chosen is None:
        return
    for module in families.attentions(model).values():
        vars(module).pop("expand_kv", None)
        vars(module).pop(_MARK, None)
        module.config._attn_implementation = chosen.base
    model._mla_ops_hook.remove()
    for name in ("_mla_ops_hook", "_prepare_cache_for_generation", _MARK):
        vars(model).pop(name, None)


def _before(model: Any, decoder: Any) -> Any:
    """Return a hook that runs before the decoder: it brings a paged cache where none was given."""
    name = families.cache_name(decoder)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get(name)
        if cache is None:
            cache = kwargs.get("past_key_values")
        if cache is None:
            wanted = kwargs.get("use_cache")
            wanted = decoder.config.use_cache if wanted is None else wanted
            # Where gradients flow, the latents stay in plain tensors, through which they can.
            if not wanted or torch.is_grad_enabled():
                return None
            kwargs[name] = LatentCache(model)
            return args, kwargs
        if not _in_a_graph():
            adopt(cache, getattr(model, _MARK))
            _check_room(cache, args, kwargs)
        return None

    return before


def _in_a_graph() -> bool:
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or capturing


def _check_room(cache: Any, args: Any, kwargs: dict[str, Any]) -> None:
    tokens = kwargs.get("inputs_embeds")
    if tokens is None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
    for layer in paged(cache):
        if isinstance(layer, StaticPagedLayer) and tokens is not None:
            layer.check_room(tokens.shape[1])
        return


def _prepare_cache(
    self: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    """Stands for the method of the same name: the cache it made, or was given, is paged."""
    result = type(self)._prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )
    name = families.cache_name(families.decoder_of(self, families.attentions(self)))
    adopt(model_kwargs.get(name), getattr(self, _MARK), max_cache_length)
    return result
