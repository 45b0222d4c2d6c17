"""What `enable` was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ops import checks

# None: the model's own. Of fp8 the device says which one.
CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Options:
    """The arguments of `enable`, checked, and what is known of the model."""

    cache_dtype: str
    page_size: int
    backend: str
    kv_scale: float | tuple[float, ...] | None
    layers: frozenset[int]  # of the cache, that hold latents
    sparse: bool  # an indexer chooses the tokens
    base: str  # the attn_implementation that prefills

    def kv_scale_of(
        self, layer_idx: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Return the given scale of a layer, or None where it is to be measured."""
        if dtype not in checks.FLOAT8 or self.kv_scale is None:
            return None
        many = self.kv_scale
        value = many if isinstance(many, float) else many[sorted(self.layers).index(layer_idx)]
        return torch.full((1,), value, dtype=torch.float32, device=device)


def checked(
    cache_dtype: str,
    page_size: int,
    backend: str,
    kv_scale: float | Sequence[float] | None,
    layers: frozenset[int],
    sparse: bool,
    base: str,
) -> Options:
    """Return the options, or raise ValueError or TypeError with what was expected and what came."""
    if cache_dtype not in CACHE_DTYPES:
        raise ValueError(
            f"cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {cache_dtype!r}"
        )
    if not isinstance(page_size, int) or isinstance(page_size, bool):
        raise TypeError(f"page_size must be an integer, got {type(page_size).__name__}")
    if not 1 <= page_size <= checks.INT32_MAX:
        raise ValueError(f"page_size must be between 1 and {checks.INT32_MAX}, got {page_size}")
    if backend not in checks.BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(checks.BACKENDS)}, got {backend!r}")
    scale: float | tuple[float, ...] | None = None
    if kv_scale is not None:
        if cache_dtype != "fp8":
            raise ValueError(f"kv_scale must be None for cache_dtype={cache_dtype!r}, got one")
        if isinstance(kv_scale, Sequence):
            values = tuple(float(one) for one in kv_scale)
            if len(values) != len(layers):
                raise ValueError(
                    f"kv_scale must be one number or one for each of the {len(layers)} layers, "
                    f"got {len(values)}"
                )
            scale = values
        else:
            values = (float(kv_scale),)
            scale = values[0]
        if not all(0 < one <= checks.FLOAT32_MAX for one in values):
            raise ValueError(f"kv_scale must be positive and finite, got {kv_scale}")
    return Options(cache_dtype, page_size, backend, scale, layers, sparse, base)
