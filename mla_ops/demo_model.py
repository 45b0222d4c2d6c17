"""The demo's second part: a DeepSeek-V3-shaped model writes, through transformers alone and through
the op.

Random weights and bytes for tokens, so what it writes has the shape of text and no sense. What
counts is that both write the same, and where their time goes.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# DeepSeek-V3's attention with 16 of its 128 heads, in a small model.
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONTEXT, TOKENS = 2048, 48
PROMPT = (
    "Attention over latents reads one row of 576 numbers for a token, and no key or value of any "
    "head is ever written down. What follows is the same sentence told again. "
)
PRINTABLE = range(32, 127)


class Written(NamedTuple):
    """One generation."""

    tokens: Tensor
    prefill: float  # seconds
    attention: float  # seconds of all decode steps in attention modules
    decode: float  # seconds of all decode steps
    cache_bytes: int


class Clock:
    """Seconds that a model spends in itself and in its attention modules, prefill apart."""

    def __init__(self, model: Any, device: torch.device, step: Callable[[], None]) -> None:
        self.seconds = {"prefill": 0.0, "decode": 0.0, "attention": 0.0}
        self._begun: dict[str, float] = {}
        self._device, self._step, self._prefilled = device, step, False
        self._hooks = self._watch(model, "forward")
        for layer in model.model.layers:
            self._hooks += self._watch(layer.self_attn, "attention")

    def _watch(self, module: Any, what: str) -> list[Any]:
        return [
            module.register_forward_pre_hook(lambda *_: self._begin(what)),
            module.register_forward_hook(lambda *_: self._end(what)),
        ]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _begin(self, what: str) -> None:
        self._begun[what] = self._now()

    def _end(self, what: str) -> None:
        taken = self._now() - self._begun[what]
        if what == "forward":
            self.seconds["decode" if self._prefilled else "prefill"] += taken
            self._prefilled = True
            self._step()
        elif self._prefilled:
            self.seconds["attention"] += taken

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def run(device: torch.device, progress: Any) -> bool:
    """Show the generations; return whether the op's tokens are transformers' own."""
    transformers = importlib.import_module("transformers")
    served = importlib.import_module("mla_ops.integrations.transformers")
    say = progress.say
    transformers.logging.set_verbosity_error()
    torch.manual_seed(1)
    config = transformers.DeepseekV3Config(**SIZES, max_position_embeddings=2 * CONTEXT)
    with torch.device(device):
        model = transformers.DeepseekV3ForCausalLM(config).eval()
    say(
        f"\na DeepSeek-V3-shaped model ({SIZES['num_hidden_layers']} layers, "
        f"{SIZES['num_attention_heads']} heads, float32, random weights, bytes for tokens) writes "
        f"{TOKENS} tokens\nafter {CONTEXT}, with transformers {transformers.__version__} alone and "
        f"through torch.ops.mla.decode\n"
    )
    say(
        f"{'':20}{'prefill':>9}{'tokens/s':>10}{'ms a token':>12}{'in attention':>14}{'cache':>10}"
        "  tokens"
    )
    plain = transformers.DynamicCache(config=config)
    first = write(model, plain, device, progress, "transformers")
    _show(say, "transformers", first, first)
    same = True
    for name, cache_dtype in (("mla_ops", "auto"), ("mla_ops, fp8 cache", "fp8")):
        with served.enable(model, cache_dtype=cache_dtype):
            one = write(model, served.LatentCache(model), device, progress, name)
        _show(say, name, one, first)
        same &= cache_dtype == "fp8" or torch.equal(one.tokens, first.tokens)
        if cache_dtype == "auto":
            faster = first.decode / one.decode
            say_text = text(one.tokens)
            in_attention = first.attention / one.attention
    say(
        f"\n  ...{PROMPT[-44:]}{say_text!r}\n"
        f"decode steps {faster:.1f} times as fast, their attention {in_attention:.1f} times; "
        + ("the tokens agree" if same else "THE TOKENS DIFFER")
    )
    return same


def write(model: Any, cache: Any, device: torch.device, progress: Any, name: str) -> Written:
    """Generate greedily from the prompt, cut to CONTEXT bytes."""
    bytes_ = (PROMPT * (CONTEXT // len(PROMPT) + 1)).encode()[-CONTEXT:]
    ids = torch.tensor([list(bytes_)], device=device)
    unprintable = [one for one in range(SIZES["vocab_size"]) if one not in PRINTABLE]
    clock = Clock(model, device, lambda: progress.step(name))
    try:
        # Announced to the cache by generate, as for everybody.
        tokens = model.generate(
            ids,
            **{cache_argument(model): cache},
            max_new_tokens=TOKENS,
            do_sample=False,
            suppress_tokens=unprintable,
            repetition_penalty=1.3,
        )[0, CONTEXT:]
    finally:
        clock.remove()
    return Written(
        tokens.cpu(),
        clock.seconds["prefill"],
        clock.seconds["attention"],
        clock.seconds["decode"],
        cache_bytes(cache),
    )


def cache_argument(model: Any) -> str:
    families = importlib.import_module("mla_ops.integrations.transformers.families")
    return str(families.cache_name(model.model))


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a cache's tensors."""
    own = getattr(cache, "nbytes", None)
    if own is not None:
        return int(own)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def text(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode("ascii", "replace")


def _show(say: Callable[[str], object], name: str, one: Written, first: Written) -> None:
    steps = len(one.tokens) - 1
    agree = int((one.tokens == first.tokens).sum())
    say(
        f"{name:20}{one.prefill:7.2f} s{steps / one.decode:10.1f}"
        f"{one.decode / steps * 1e3:12.1f}{one.attention / one.decode:14.0%}"
        f"{one.cache_bytes / 1e6:7.1f} MB  {agree} of {len(first.tokens)} agree"
    )


def is_possible() -> str | None:
    """Return why this part cannot run, or None where it can."""
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError:
        return "transformers is not installed (pip install 'transformers>=5.15')"
    if tuple(map(int, version.split(".")[:2])) < (5, 15):
        return f"transformers must be 5.15 or newer, got {version}"
    return None
