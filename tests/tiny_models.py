"""Tiny random models of every MLA family of transformers, by family name.

Sizes are odd on purpose: heads, widths and ranks all differ, so that one taken for another shows.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 28,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "attention_dropout": 0.0,
}
MOE: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 9,  # where a router decides, a rounding is a jump
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
LONGCAT: dict[str, Any] = {
    "num_hidden_layers": 4,  # attention layers, two in each of its layers
    "head_dim": 16,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 24,
    "moe_topk": 2,
    "zero_expert_num": 2,
}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_head_dim": 16,
    "linear_num_heads": 2,
}
GLM5: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "qk_rope_head_dim": 0,
    "hc_mult": 2,
    "index_kpool": 4,
}
LARGE4: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": 3, "kv_source_layers": [0, 1, 0]}
INDEXER: dict[str, Any] = {"index_topk": 12, "index_n_heads": 2, "index_head_dim": 24}

# Family: (package, classes' prefix, what its config has beside COMMON and MOE).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", "DeepseekV2", {}),
    "deepseek_v2_lite": ("deepseek_v2", "DeepseekV2", {"q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", {"rope_parameters": YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite", {}),
    "youtu": ("youtu", "Youtu", {}),
    "axk1": ("axk1", "AXK1", {}),
    "longcat_flash": ("longcat_flash", "LongcatFlash", LONGCAT),
    "minicpm3": ("minicpm3", "MiniCPM3", {}),
    "mistral4": ("mistral4", "Mistral4", {}),
    "kimi_linear": ("kimi_linear", "KimiLinear", HYBRID),
    "bailing_hybrid": ("bailing_hybrid", "BailingHybrid", HYBRID),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32", INDEXER),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsa", INDEXER),
    "axk2": ("axk2", "AXK2", INDEXER),
    "glm5_next": ("glm5_next", "Glm5Next", {**INDEXER, **HYBRID, **GLM5}),
    "hy_v4": ("hy_v4", "HYV4", INDEXER),
    "mistral_large4": ("mistral_large4", "MistralLarge4", {**INDEXER, **LARGE4}),
    "dots3_note": ("dots3_note", "Dots3Note", INDEXER),
}


def make(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random model in evaluation mode, the same one every time.

    A family of image models gives its text model, which has no head and cannot generate.
    """
    package, prefix, extra = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{package}")
    config_class = getattr(module, f"{prefix}TextConfig", None) or getattr(
        module, f"{prefix}Config"
    )
    model_class = getattr(module, f"{prefix}ForCausalLM", None)
    model_class = model_class or getattr(module, f"{prefix}TextModel")
    torch.manual_seed(seed)
    config = config_class(**{**COMMON, **MOE, **extra, **changes})
    return model_class(config).eval()


def is_there(family: str) -> bool:
    """Whether the installed transformers has a family, with the config it has now."""
    package = FAMILIES[family][0]
    found = importlib.util.find_spec(f"transformers.models.{package}") is not None
    return found and (family != "glm5_next" or cache_name() == "cache")


def cache_name() -> str:
    """Return what forward calls the cache in the installed transformers."""
    import transformers

    major, minor = map(int, transformers.__version__.split(".")[:2])
    return "cache" if (major, minor) >= (5, 24) else "past_key_values"
