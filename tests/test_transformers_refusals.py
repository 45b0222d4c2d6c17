"""What `enable` does not serve it names; and nothing else of mla_ops needs transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from torch import nn

from mla_ops.integrations.transformers import LatentCache, attention, disable, enable

NAME = "model.layers.1.self_attn"


@pytest.fixture
def model() -> Any:
    return tiny_models.make("deepseek_v3", 9)


def of(model: Any) -> Any:
    return model.model.layers[1].self_attn


class Linear4bit(nn.Linear):
    """What quantisers put in a linear layer's place."""


def quantised(model: Any) -> None:
    of(model).kv_b_proj = Linear4bit(40, 156, bias=False)


def offloaded(model: Any) -> None:
    of(model).kv_b_proj.to("meta")


def double(model: Any) -> None:
    model.double()


def biased(model: Any) -> None:
    of(model).kv_b_proj.bias = nn.Parameter(torch.zeros(156))


def flash(model: Any) -> None:
    model.config._attn_implementation = "flash_attention_2"


def other_expansion(model: Any) -> None:
    class Other(type(of(model))):  # type: ignore[misc]
        def expand_kv(self, kv_nope: Any, k_rot: Any) -> Any:
            keys, values = super().expand_kv(kv_nope, k_rot)
            return keys, values * 1.1

    of(model).__class__ = Other


def not_mla_as_we_know_it(model: Any) -> None:
    for layer in model.model.layers:
        del layer.self_attn.scaling


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (quantised, rf"{NAME}.kv_b_proj must be a torch.nn.Linear, got Linear4bit"),
        (offloaded, rf"{NAME}.kv_b_proj must hold its weight, got one on the meta device"),
        (double, r"kv_b_proj.weight must be a plain bfloat16, .*, got Tensor of float64"),
        (biased, rf"{NAME}.kv_b_proj must have no bias, got one"),
        (flash, r"attn_implementation must be one of sdpa, eager .* got 'flash_attention_2'"),
        (other_expansion, rf"the values of {NAME}.expand_kv must be kv_b_proj of the latent"),
        (not_mla_as_we_know_it, r"model.layers.0.self_attn .* must have scaling for mla_ops"),
    ],
)
def test_a_model_that_is_not_served(model: Any, spoil: Callable[[Any], None], message: str) -> None:
    spoil(model)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        enable(model)
    # Nothing was changed.
    assert model.config._attn_implementation == before
    assert not hasattr(model, "_mla_ops") and "expand_kv" not in vars(of(model))


def test_models_without_mla() -> None:
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    llama = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match=r"multi-head latent .*, got LlamaForCausalLM"):
        enable(llama)
    with pytest.raises(TypeError, match="must be a PreTrainedModel, got Linear"):
        enable(nn.Linear(1, 1))


def test_an_old_transformers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.14.2")
    with pytest.raises(ValueError, match=r"transformers must be 5\.15 or newer.*, got 5\.14\.2"):
        enable(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache_dtype": "int4"}, ValueError, "one of auto, bf16, fp8, got 'int4'"),
        ({"page_size": 0}, ValueError, "page_size must be between 1 and"),
        ({"page_size": 2.5}, TypeError, "page_size must be an integer, got float"),
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, .*, got 'cuda'"),
        ({"kv_scale": 0.1}, ValueError, "kv_scale must be None for cache_dtype='auto'"),
        ({"cache_dtype": "fp8", "kv_scale": [1.0]}, ValueError, "one for each of the 2 layers"),
        ({"cache_dtype": "fp8", "kv_scale": -1.0}, ValueError, "must be positive and finite"),
    ],
)
def test_mistaken_options(
    model: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        enable(model, **options)


def test_mistaken_caches(model: Any) -> None:
    with pytest.raises(ValueError, match=r"one that enable\(model\) was called on"):
        LatentCache(model)
    enable(model)
    name = tiny_models.cache_name()
    ids = torch.ones(2, 20, dtype=torch.long)
    with torch.inference_mode():
        cache = LatentCache(model, max_cache_len=22)
        model(ids, **{name: cache})
        with pytest.raises(ValueError, match="must hold 23 tokens, got max_cache_len=22"):
            model(ids[:, :3], **{name: cache})
        model(ids[:, :2], **{name: cache})  # the refused tokens were not written
        with pytest.raises(ValueError, match="batch must be that of the cache, 2, got 1"):
            LatentCache.update(cache, torch.ones(1, 1, 1, 40), torch.ones(1, 1, 1, 16), 0)


def test_a_forced_backend_is_used(model: Any) -> None:
    with enable(model, backend="aiter"), pytest.raises(ValueError, match="'aiter' cannot serve"):
        model.generate(torch.ones(1, 20, dtype=torch.long), max_new_tokens=3)


def test_disable_leaves_nothing(model: Any) -> None:
    state = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = len(model.model._forward_pre_hooks)
    enabled = enable(model)
    enable(model, cache_dtype="fp8")  # again, with other options
    assert model._mla_ops.cache_dtype == "fp8" and model._mla_ops.base == "sdpa"
    with enabled as same:
        assert same is model
        assert model.config._attn_implementation == attention.NAMES["sdpa"]
    assert {name: set(vars(module)) for name, module in model.named_modules()} == state
    assert len(model.model._forward_pre_hooks) == hooks
    assert model.config._attn_implementation == "sdpa"
    disable(model)  # is not enabled


def test_nothing_else_needs_transformers() -> None:
    program = (
        "import sys, mla_ops, mla_ops.__main__, mla_ops.integrations\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'transformers'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
