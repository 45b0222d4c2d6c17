"""Everything people pass to `generate`, and what they do with a cache between its calls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from test_transformers import SEEDS, calls, greedy, one_thread, prompt, walk  # noqa: F401
from torch import Tensor

from mla_ops.integrations.transformers import LatentCache, disable, enable, pool
from mla_ops.integrations.transformers.layers import PagedLayer

NAME = tiny_models.cache_name()
FAMILY = "deepseek_v3"


@pytest.fixture
def model() -> Any:
    return tiny_models.make(FAMILY, SEEDS[FAMILY])


@pytest.fixture
def padded() -> dict[str, Tensor]:
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[0, :9] = 0
    mask[2, :1] = 0
    return {"input_ids": prompt(3), "attention_mask": mask}


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "beams, several": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "beams, early": {"num_beams": 3, "early_stopping": True, "eos_token_id": [5, 9]},
    "stops apart": {"eos_token_id": [5, 9, 14, 30]},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "sampled, several": {"do_sample": True, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
    "static beams": {"cache_implementation": "static", "num_beams": 3},
    "without a cache": {"use_cache": False, "max_new_tokens": 5},
    "prefill in chunks": {"prefill_chunk_size": 7},
    "prefill in large chunks": {"prefill_chunk_size": 10},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "dynamic": {"cache_implementation": "dynamic"},
}


@pytest.mark.parametrize("case", CASES)
def test_generate(
    case: str,
    model: Any,
    padded: dict[str, Tensor],
    calls: list[tuple[int, ...]],  # noqa: F811
) -> None:
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **CASES[case]}
    torch.manual_seed(0)
    want = model.generate(**padded, **options)
    with enable(model, page_size=8):
        torch.manual_seed(0)
        got = model.generate(**padded, **options)
    assert torch.equal(got, want)
    assert bool(calls) == options.get("use_cache", True)


@pytest.mark.parametrize("how", ["prompt lookup", "assistant", "assistant enabled too"])
def test_assisted(how: str, model: Any, calls: list[tuple[int, ...]]) -> None:  # noqa: F811
    """Several tokens a step, and columns taken back."""
    ids = prompt().repeat(1, 3)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in assistant.named_parameters():
            if "mlp" in name:
                weight.mul_(0.9)  # often right, not always
    options = (
        {"prompt_lookup_num_tokens": 4}
        if how == "prompt lookup"
        else {"assistant_model": assistant}
    )
    want = greedy(model, ids)
    with enable(model, page_size=4):
        if how == "assistant enabled too":
            enable(assistant)
        got = greedy(model, ids, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert max(shape[1] for shape in calls) > 1


@pytest.mark.slow
@pytest.mark.parametrize("is_padded", [False, True], ids=["plain", "padded"])
def test_static_cache_compiled(is_padded: bool, model: Any, padded: dict[str, Tensor]) -> None:
    """The whole forward, in one graph, made once for all steps."""
    if not is_padded:
        padded["attention_mask"].fill_(1)
    config = transformers.CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**padded, **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with enable(model):
        got = model.generate(
            **padded, **options, cache_implementation="static", compile_config=config
        )
    assert torch.equal(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["latent", "static latent", "dynamic", "lazy dynamic", "static"])
def test_one_cache_for_several_calls(kind: str, model: Any) -> None:
    """Continued with longer prompts, and with a prompt that ends inside what is cached already."""
    config = model.config
    makers: dict[str, Any] = {
        "latent": lambda: LatentCache(model),
        "static latent": lambda: LatentCache(model, max_cache_len=200),
        "dynamic": lambda: transformers.DynamicCache(config=config),
        "lazy dynamic": lambda: transformers.DynamicCache(),
        "static": lambda: transformers.StaticCache(config=config, max_cache_len=200),
    }
    plain_kind = transformers.StaticCache if "static" in kind else transformers.DynamicCache
    extra = {"max_cache_len": 200} if "static" in kind else {}

    def talk(cache: Any) -> Tensor:
        ids = prompt(2)
        for turn in range(3):
            ids = model.generate(
                ids, **{NAME: cache}, max_new_tokens=20, do_sample=False, pad_token_id=0
            )
            more = torch.full((2, (1, 12, 3)[turn]), 7 + turn)
            ids = torch.cat((ids, more), 1)
        return ids

    want = talk(plain_kind(config=config, **extra))
    with enable(model, page_size=8):
        cache = makers[kind]()
        got = talk(cache)
    assert torch.equal(got, want)
    assert all(isinstance(layer, PagedLayer) for layer in cache.layers)


def test_a_cache_filled_before_goes_on(model: Any, calls: list[Any]) -> None:  # noqa: F811
    """What it returns are plain tensors, and the op attends to these."""
    ids, mask = prompt(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0
    want, _ = walk(model, ids, mask, (30, 31, 34))
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        outputs = [model(ids[:, :30], attention_mask=mask[:, :30], **{NAME: cache}).logits]
        with enable(model):
            for begin, end in ((30, 31), (31, 34), (34, 40)):
                result = model(ids[:, begin:end], attention_mask=mask[:, :end], **{NAME: cache})
                outputs.append(result.logits)
    got = torch.cat(outputs, 1)[mask.bool()]
    assert (got - want).norm() / want.norm() < 2e-6
    assert len(calls) == 3 * 2 and type(cache.layers[0]) is transformers.DynamicLayer


def both(model: Any, act: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of a step after `act(cache)`, without and with the op."""
    results = []
    for enabled in (False, True):
        if enabled:
            enable(model, page_size=4)
        cache = LatentCache(model) if enabled else transformers.DynamicCache(config=model.config)
        with torch.inference_mode():
            model(prompt(3, 23), **{NAME: cache})
            act(cache)
            batch = getattr(act, "batch", 3)
            for tokens in (1, 5):
                length = cache.get_seq_length()
                step = model(prompt(batch, 40)[:, length : length + tokens], **{NAME: cache})
            results.append(step.logits)
    disable(model)
    return results[0], results[1]


ACTS: dict[str, tuple[int, Any]] = {
    "crop": (3, lambda cache: cache.crop(-6)),
    "crop nothing": (3, lambda cache: cache.crop(0)),
    "crop all": (3, lambda cache: cache.crop(-23)),
    "reorder": (3, lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0]))),
    "reorder, crop": (
        3,
        lambda cache: (cache.reorder_cache(torch.tensor([2, 2, 0])), cache.crop(-9)),
    ),
    "repeat": (6, lambda cache: cache.batch_repeat_interleave(2)),
    "select": (2, lambda cache: cache.batch_select_indices(torch.tensor([2, 0]))),
    "select by mask": (
        2,
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    ),
    "reset": (3, lambda cache: cache.reset()),
}


@pytest.mark.parametrize("name", ACTS)
def test_cache_methods(name: str, model: Any) -> None:
    batch, act = ACTS[name]

    def wrapped(cache: Any) -> None:
        if name == "reset" and isinstance(cache, transformers.DynamicCache):
            cache.crop(-23)  # until 5.17 its reset left the length
        else:
            act(cache)

    wrapped.batch = batch  # type: ignore[attr-defined]
    want, got = both(model, wrapped)
    assert (got - want).norm() / want.norm() < 2e-6


def test_lengths_are_as_transformers_tells_them(model: Any) -> None:
    plain, static = (
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=50),
    )
    with torch.inference_mode():
        for cache in (plain, static):
            model(prompt(), **{NAME: cache})
        enable(model)
        ours = LatentCache(model), LatentCache(model, max_cache_len=50)
        for cache in ours:
            model(prompt(), **{NAME: cache})
    for theirs, mine in zip((plain, static), ours, strict=True):
        for question in ("get_seq_length", "get_max_length"):
            assert getattr(mine, question)() == getattr(theirs, question)()
        assert mine.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
        for name in ("is_compileable", "is_sliding", "is_initialized"):
            assert getattr(mine, name) == getattr(theirs, name) or name == "is_initialized"


def test_many_chunks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody announces a length to `forward`: the cache grows in chunks, here from 8 columns on."""
    monkeypatch.setattr(pool, "FIRST_CHUNK", 8)
    ids, mask = prompt(2, 90), torch.ones(2, 90, dtype=torch.long)
    cuts = (6, *range(7, 30), 33, 41, 44, 60, *range(61, 70))
    for hidden in (0, 5):
        mask[0, :hidden] = 0
        want, _ = walk(model, ids, mask, cuts)
        with enable(model, page_size=4):
            got, cache = walk(model, ids, mask, cuts)
        assert (got - want).norm() / want.norm() < 2e-6
        assert len(cache.layers[0].pool.chunks) >= 4


@pytest.fixture
def eager() -> Iterator[Any]:
    model = tiny_models.make(FAMILY, SEEDS[FAMILY])
    model.set_attn_implementation("eager")
    yield model


def test_eager_base_and_attention_weights(
    eager: Any,
    padded: dict[str, Tensor],
    calls: list[Any],  # noqa: F811
) -> None:
    """Who asks for weights gets them, from transformers' own attention."""
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    want = eager.generate(**padded, **options, output_attentions=True)
    with enable(eager):
        fast = eager.generate(**padded, **options)
        assert calls
        calls.clear()
        got = eager.generate(**padded, **options, output_attentions=True)
    assert torch.equal(fast.sequences, want.sequences)
    assert torch.equal(got.sequences, want.sequences)
    for mine, theirs in zip(got.attentions, want.attentions, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            # Rows of padding see nothing, and their weights are anybody's.
            seen = padded["attention_mask"][:, -other.shape[2] :].bool()
            rows, others = one.transpose(1, 2)[seen], other.transpose(1, 2)[seen]
            assert torch.allclose(rows, others, atol=1e-5)


def test_gradients_flow_as_without(model: Any, calls: list[Any]) -> None:  # noqa: F811
    gradients = []
    for enabled in (False, True):
        if enabled:
            enable(model)
        model.zero_grad()
        for length in (5, 20):
            model(prompt(2, length), labels=prompt(2, length)).loss.backward()
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    assert not calls and len(gradients[0]) == len(gradients[1])
    for theirs, mine in zip(*gradients, strict=True):
        assert torch.allclose(theirs, mine, atol=1e-6)


def test_weights_that_change_are_seen(model: Any) -> None:
    """Absorption keeps no copy: training, loading and moving weights need no second enable."""
    ids, mask = prompt(1, 30), torch.ones(1, 30, dtype=torch.long)
    with enable(model):
        before, _ = walk(model, ids, mask, (20, 21))
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.kv_b_proj.weight.data = torch.randn_like(
                    layer.self_attn.kv_b_proj.weight
                )
        got, _ = walk(model, ids, mask, (20, 21))
    want, _ = walk(model, ids, mask, (20, 21))
    assert (got - want).norm() / want.norm() < 2e-6
    assert (got - before).norm() / before.norm() > 0.1


def test_a_custom_mask(model: Any) -> None:
    """A tree of drafts: 4D masks, boolean ones by the op, additive ones by transformers."""
    ids = prompt(2, 29)
    tree = torch.ones(2, 1, 5, 29, dtype=torch.bool).tril(24)
    tree[:, :, 3, 26] = False
    tree[:, :, 4, 24:27] = False
    results = []
    for mask in (tree, torch.where(tree, 0.0, torch.finfo(torch.float32).min)):
        for enabled in (False, True):
            if enabled:
                enable(model)
            with torch.inference_mode():
                cache = model(ids[:, :24], use_cache=True)[NAME]
                step = model(ids[:, 24:], attention_mask=mask, **{NAME: cache})
            results.append(step.logits)
            disable(model)
    for one in results[1:]:
        assert (one - results[0]).norm() / results[0].norm() < 2e-6
