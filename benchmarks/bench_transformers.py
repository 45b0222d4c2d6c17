"""Decode steps of transformers' DeepSeek models, plain and with mla_ops, at growing context.

    python benchmarks/bench_transformers.py --device cuda --csv FILE
    python benchmarks/bench_transformers.py --device cpu --csv FILE

Random weights, caches filled with random latents up to the context, one sequence, one new token.
"attention" is the first layer's attention module (projections and cache write included), "step"
the whole model. All have static caches (transformers' dynamic one copies itself at every step); on
a GPU a step is captured in a graph, on a CPU it runs eagerly, contenders in turn. Compared are
medians of one run. A contender that does not fit into memory is left out, and said so.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm

import mla_ops
from mla_ops.bench.table import markdown, write_csv
from mla_ops.bench.timing import interleaved
from mla_ops.integrations.transformers import LatentCache, enable, families
from mla_ops.machine import cpu_name

# V2-Lite and V3 as published (config.json of deepseek-ai/DeepSeek-V2-Lite and -V3); of V3 the first
# three layers, which are dense. "small" is V2-Lite's attention in a model that a CPU steps through.
V2_LITE = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
}
V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
}
SMALL = {**V2_LITE, "vocab_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
SMALL["first_k_dense_replace"] = 2
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 1 << 18,
}
MODELS = {
    "v2_lite": ("DeepseekV2", V2_LITE),
    "v3_3_layers": ("DeepseekV3", V3),
    "small": ("DeepseekV2", SMALL),
}
DEFAULT_MODELS = {"cpu": ["small"], "cuda": ["v2_lite", "v3_3_layers"]}
CONTEXTS = {"cpu": [1, 4, 16, 32], "cuda": [1, 4, 16, 32, 64, 128]}  # in 1024 tokens
ROOM = 64  # tokens of a static cache behind the context
PLAIN = ("eager", "sdpa")
REPEATS = {"cpu": 5, "cuda": 15}


class Contender(NamedTuple):
    """One way to decode: attn_implementation for plain transformers, cache_dtype for ours."""

    name: str
    plain: str | None = None
    cache_dtype: str = "auto"


CONTENDERS = (
    *(Contender(one, plain=one) for one in PLAIN),
    Contender("mla_ops", cache_dtype="auto"),
    Contender("mla_ops fp8", cache_dtype="fp8"),
)


def build(name: str, device: str, dtype: torch.dtype) -> Any:
    """Return a model with random weights, made on the device."""
    prefix, sizes = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**sizes, **LATENT)
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)


def variant(model: Any, contender: Contender) -> Any:
    """Return a copy of the model that has its weights in common, and decodes in this way."""
    shared = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    one = copy.deepcopy(model, shared)
    one.set_attn_implementation(contender.plain or "sdpa")
    if contender.plain is None:
        enable(one, cache_dtype=contender.cache_dtype)
    return one


def filled(model: Any, contender: Contender, context: int) -> Any:
    """Return a static cache with `context` random latents in every layer."""
    room = context + ROOM
    if contender.plain is None:
        cache: Any = LatentCache(model, max_cache_len=room)
    else:
        cache = transformers.StaticCache(config=model.config, max_cache_len=room)
    weight = model.model.embed_tokens.weight
    generator = torch.Generator(weight.device).manual_seed(1)
    sizes = (model.config.kv_lora_rank, model.config.qk_rope_head_dim)
    for index in range(len(cache.layers)):
        latents = (
            torch.randn(
                *(1, 1, context, size),
                generator=generator,
                device=weight.device,
                dtype=weight.dtype,
            )
            for size in sizes
        )
        cache.update(*latents, index)
    return cache


def cache_bytes(cache: Any, context: int) -> int:
    """Return the bytes that hold `context` tokens: the allocation's share of them."""
    if isinstance(cache, LatentCache):
        columns = cache.layers[0].pool.capacity
        return cache.nbytes * context // columns
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(one.numel() * one.element_size() for one in tensors) * context // (context + ROOM)


def steps(model: Any, cache: Any, context: int) -> dict[str, Callable[[], Any]]:
    """Return the calls that are timed. Each takes its token back."""
    device = model.model.embed_tokens.weight.device
    token = torch.full((1, 1), 7, device=device)
    position = torch.full((1, 1), context, device=device)
    attention = model.model.layers[0].self_attn
    dtype = model.model.embed_tokens.weight.dtype
    hidden = torch.randn(1, 1, model.config.hidden_size, device=device, dtype=dtype)
    rotation = model.model.rotary_emb(hidden, position)
    name = families.cache_name(model.model)
    length = cache.layers[0].get_mask_sizes(1)[0]
    columns = torch.arange(length, device=device)
    # What the model would make; ours needs none.
    mask = (columns <= context)[None, None, None] if not isinstance(cache, LatentCache) else None
    if mask is not None and model.config._attn_implementation == "eager":
        mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)

    def attend() -> Any:
        out = attention(hidden, position_embeddings=rotation, attention_mask=mask, **{name: cache})[
            0
        ]
        _back(cache.layers[:1])
        return out

    def step() -> Any:
        out = model(token, position_ids=position, **{name: cache}).logits
        _back(cache.layers)
        return out

    return {"attention": attend, "step": step}


def _back(layers: Any) -> None:
    """Take the last token back without asking the device anything."""
    for layer in layers:
        length = getattr(layer, "cumulative_length", None)
        (layer.length if length is None else length).sub_(1)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a captured graph of the call; the call itself where it cannot be
    captured (transformers' masks for eager attention, made on the CPU), and say so."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        print(f"not captured in a graph: {str(error).splitlines()[0]}")
        return call
    return graph.replay


def timed_on_gpu(call: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a replay."""
    replay = captured(call)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for repeat in range(repeats + 3):
        begin.record()
        replay()
        end.record()
        end.synchronize()
        if repeat >= 3:
            seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def measure(
    model: Any, context: int, what: str, repeats: int, progress: Any
) -> tuple[dict[str, float], dict[str, int]]:
    """Return seconds and bytes of cache by contender."""
    device = model.model.embed_tokens.weight.device
    seconds: dict[str, float] = {}
    sizes: dict[str, int] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for contender in CONTENDERS:
        progress.set_description(f"{what} at {context}: {contender.name}")
        try:
            one = variant(model, contender)
            cache = filled(one, contender, context)
            call = steps(one, cache, context)[what]
            sizes[contender.name] = cache_bytes(cache, context)
            if device.type == "cuda":
                seconds[contender.name] = timed_on_gpu(call, repeats)
            else:
                calls[contender.name] = call
            del one, cache, call
        except torch.OutOfMemoryError as error:
            tqdm.write(f"{what} at {context}: {contender.name} left out: {str(error)[:100]}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        progress.update()
    if calls:
        repeated = {name: lambda turn, call=call: call() for name, call in calls.items()}
        times = interleaved(repeated, repeats, device)
        seconds = {name: one.median for name, one in times.items()}
    return seconds, sizes


def facts(device: str, dtype: torch.dtype) -> dict[str, object]:
    machine = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return {
        "device": machine,
        "threads": torch.get_num_threads() if device == "cpu" else "",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "mla_ops": mla_ops.__version__,
        "dtype": str(dtype).removeprefix("torch."),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--contexts", nargs="+", type=int, help="in 1024 tokens")
    parser.add_argument("--what", nargs="+", choices=("attention", "step"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's choice)")
    arguments = parser.parse_args()

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device: str = arguments.device
    dtype = getattr(torch, arguments.dtype)
    contexts = [1024 * one for one in arguments.contexts or CONTEXTS[device]]
    what = arguments.what or ["attention", "step"]
    models = arguments.models or DEFAULT_MODELS[device]
    rows: list[dict[str, object]] = []
    shown: list[list[object]] = []
    progress = tqdm(total=len(models) * len(contexts) * len(what) * len(CONTENDERS), disable=None)
    with torch.inference_mode():
        for name in models:
            model = build(name, device, dtype)
            for part in what:
                for context in contexts:
                    seconds, sizes = measure(
                        model, context, part, arguments.repeats or REPEATS[device], progress
                    )
                    best = min((seconds[one] for one in PLAIN if one in seconds), default=None)
                    for contender, taken in seconds.items():
                        ratio = "" if best is None else f"{best / taken:.2f}"
                        rows.append(
                            {
                                "model": name,
                                "what": part,
                                "context": context,
                                "provider": contender,
                                "milliseconds": f"{taken * 1e3:.4f}",
                                "tokens_per_second": f"{1 / taken:.1f}" if part == "step" else "",
                                "cache_bytes": sizes[contender],
                                "times_best_plain": ratio,
                                **facts(device, dtype),
                            }
                        )
                        shown.append(list(rows[-1].values())[:8])
                    write_csv(arguments.csv, rows)  # what there is, should the rest fail
            del model
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    progress.close()
    print(markdown(list(rows[0])[:8], shown))


if __name__ == "__main__":
    main()
