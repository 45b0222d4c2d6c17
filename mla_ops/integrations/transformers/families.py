"""Which modules of a model are MLA, and what refuses a model.

No list of models: every family of transformers from 5.15 on has attention modules with the same
`expand_kv(kv_nope, k_rot)` and `kv_b_proj`, and is known by these. `absorption.check` compares what
they compute.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import nn

OLDEST = (5, 15)
# Before, sparse models cached expanded keys, and filled boolean masks with the least float: True.
OLDEST_SPARSE = (5, 17)
NEEDED = (
    *("expand_kv", "kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "kv_lora_rank", "layer_idx", "scaling", "config"),
)
BASES = ("sdpa", "eager")  # what prefills; others read their own name from the config


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def version() -> tuple[int, int]:
    """Return major and minor of the installed transformers."""
    major, minor = transformers.__version__.split(".")[:2]
    return int(major), int(minor)


def attentions(model: nn.Module) -> dict[str, Any]:
    """Return the MLA attention modules of a model by name. Raises ValueError where it has none, or
    this transformers caches expanded keys and values."""
    if version() < OLDEST:
        raise ValueError(
            f"transformers must be {_text(OLDEST)} or newer, which caches latents, got "
            f"{transformers.__version__}"
        )
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel, got {type(model).__name__}")
    found = {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in NEEDED)
    }
    for name, module in found.items():
        if is_sparse(module.config) and version() < OLDEST_SPARSE:
            raise ValueError(
                f"transformers must be {_text(OLDEST_SPARSE)} or newer for {name} "
                f"({type(module).__name__}), whose indexer did not keep to the mask before, got "
                f"{transformers.__version__}"
            )
    if found:
        return found
    for name, module in model.named_modules():
        if hasattr(module, "kv_b_proj"):
            missing = ", ".join(one for one in NEEDED if not hasattr(module, one))
            raise ValueError(
                f"{name} ({type(module).__name__}) must have {missing} for mla_ops to serve it, as "
                f"the MLA families of transformers {transformers.__version__} have"
            )
    raise ValueError(
        f"model must have multi-head latent attention (a kv_b_proj), got {type(model).__name__}"
    )


def decoder_of(model: Any, modules: dict[str, Any]) -> Any:
    """Return the innermost model around all these modules: it makes masks and a default cache."""
    inside = {id(module) for module in modules.values()}
    around = [
        candidate
        for candidate in model.modules()
        if isinstance(candidate, transformers.PreTrainedModel)
        and inside <= {id(module) for module in candidate.modules()}
    ]
    return around[-1]


def cache_name(decoder: nn.Module) -> str:
    """Return what forward calls the cache: `cache`, or `past_key_values` before 5.24."""
    names = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def base_of(config: Any) -> str:
    """Return the attention implementation that will prefill. Raises ValueError for others."""
    base = config._attn_implementation or "eager"
    if base not in BASES:
        raise ValueError(
            f"attn_implementation must be one of {', '.join(BASES)} (it goes on prefilling), got "
            f"{base!r}: call model.set_attn_implementation('sdpa') first"
        )
    return str(base)


def is_sparse(config: Any) -> bool:
    """Whether an indexer chooses the tokens that are attended to."""
    return getattr(config, "index_topk", None) is not None
