"""Models of transformers decode through the op, family by family, as they do without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from torch import Tensor

from mla_ops.integrations.transformers import LatentCache, enable, families
from mla_ops.integrations.transformers.pool import LatentPool

STEPS = 64
PROMPT = 24

# Families with seeds at which the best token of every step is ahead of the second by at least
# MARGIN of the logits' deviation: float16 moves them by up to 0.0037 of it, and more is never asked
# for by chance.
MARGIN = 0.012
SEEDS = {
    "deepseek_v2": 20,
    "deepseek_v2_lite": 39,
    "deepseek_v3": 9,
    "glm4_moe_lite": 1,
    "youtu": 30,
    "axk1": 20,
    "longcat_flash": 5,
    "minicpm3": 11,
    "mistral4": 12,
    "kimi_linear": 18,
    "bailing_hybrid": 1,
}
SPARSE = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note")
WITHOUT_HEAD = ("glm5_next", "mistral_large4")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These matrices are too small for two, which would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of q of each attention that the op has served."""
    seen: list[tuple[int, ...]] = []
    real = LatentPool.decode

    def counted(self: LatentPool, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(q.shape))
        return real(self, q, *args, **kwargs)

    monkeypatch.setattr(LatentPool, "decode", counted)
    return seen


def prompt(batch: int = 1, length: int = PROMPT) -> Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def greedy(model: Any, ids: Tensor, steps: int = STEPS, **options: Any) -> Any:
    return model.generate(
        ids,
        max_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def skip_unless_there(family: str) -> None:
    if not tiny_models.is_there(family):
        pytest.skip(f"transformers {transformers.__version__} has no {family} as it is now")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("family", SEEDS)
def test_greedy_tokens_are_the_same(
    family: str, dtype: torch.dtype, calls: list[tuple[int, ...]]
) -> None:
    skip_unless_there(family)
    model = tiny_models.make(family, SEEDS[family]).to(dtype)
    want = greedy(model, prompt())
    with enable(model):
        got = greedy(model, prompt())
    assert torch.equal(got.sequences, want.sequences)
    assert want.sequences.shape[1] == PROMPT + STEPS
    # The comparison says something: the tokens differ, and none is a matter of rounding.
    assert want.sequences[0, PROMPT:].unique().numel() >= 12
    logits = torch.stack(want.logits, 1).float()
    best, second = logits.topk(2, -1).values.unbind(-1)
    assert ((best - second) / logits.std(-1)).min() > MARGIN * (dtype == torch.float32)
    if dtype == torch.float32:
        error = (torch.stack(got.logits, 1) - logits).norm() / logits.norm()
        assert error < 3e-6
    assert len(calls) % (STEPS - 1) == 0 and calls, "every step but the prefill, in every layer"
    assert {shape[1] for shape in calls} == {1}


def walk(model: Any, ids: Tensor, mask: Tensor, cuts: tuple[int, ...]) -> tuple[Tensor, Any]:
    """Feed tokens piece by piece; return what came out at the tokens that are not padding."""
    cache, outputs = None, []
    name = tiny_models.cache_name()
    with torch.inference_mode():
        for begin, end in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
            given = {} if cache is None else {name: cache}
            result = model(
                input_ids=ids[:, begin:end],
                attention_mask=mask[:, :end],
                use_cache=True,
                **given,
            )
            cache = result[name]
            outputs.append(result.logits if "logits" in result else result.last_hidden_state)
    return torch.cat(outputs, 1)[mask.bool()], cache


@pytest.mark.parametrize("family", [*SEEDS, *SPARSE, *WITHOUT_HEAD])
def test_padded_batches_and_pieces_of_any_length(family: str, calls: list[tuple[int, ...]]) -> None:
    """A prefill, single tokens, three and eight at once, a second prefill; padding on the left, on
    the right and in the middle. Sparse models choose 12 tokens of up to 60."""
    skip_unless_there(family)
    model = tiny_models.make(family, SEEDS.get(family, 0))
    if family in SPARSE and families.version() < families.OLDEST_SPARSE:
        with pytest.raises(ValueError, match=r"transformers must be 5\.17 .*self_attn .*, got 5"):
            enable(model)
        return
    ids = prompt(3, 60)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    mask[1, 20:30] = 0
    cuts = (30, 31, 34, 42, 43)
    want, _ = walk(model, ids, mask, cuts)
    with enable(model, page_size=4):
        got, cache = walk(model, ids, mask, cuts)
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < 5e-6
    assert {shape[1] for shape in calls} == {1, 3, 8}
    assert any(type(layer).__name__ == "PagedLayer" for layer in cache.layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3"])
def test_as_near_to_float64_as_transformers(family: str, dtype: torch.dtype) -> None:
    """Over three models each: the error of all logits of decoded tokens, teacher-forced."""
    ours = theirs = 0.0
    ids, cuts = prompt(2, 56), (40, *range(41, 56))
    mask = torch.ones_like(ids)
    decoded = torch.arange(2 * 56).remainder(56) >= 40
    for seed in range(3):
        model = tiny_models.make(family, seed).to(dtype).double()  # the weights that dtype has
        truth = walk(model, ids, mask, cuts)[0][decoded]
        model = model.to(dtype)
        plain = walk(model, ids, mask, cuts)[0][decoded]
        with enable(model):
            served = walk(model, ids, mask, cuts)[0][decoded]
        theirs += float((plain - truth).norm() / truth.norm()) ** 2
        ours += float((served - truth).norm() / truth.norm()) ** 2
    ratio = (ours / theirs) ** 0.5
    print(f"{family}: {ratio:.2f} times transformers' own error, {(theirs / 3) ** 0.5:.1e}")
    assert ratio <= 1.2


@pytest.mark.parametrize("given", [False, True], ids=["measured", "given"])
@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_fp8_cache(family: str, given: bool, record_property: Any) -> None:
    """The logits' error on a model that is sure of its tokens, and how often it still is."""
    model = tiny_models.make(family, SEEDS[family], initializer_range=0.1)
    with torch.no_grad():
        model.lm_head.weight *= 10
    ids, cuts = prompt(2, 120), tuple(range(60, 120))
    mask = torch.ones_like(ids)
    want, _ = walk(model, ids, mask, cuts)
    with enable(model, cache_dtype="fp8", kv_scale=[0.02] * 2 if given else None):
        got, cache = walk(model, ids, mask, cuts)
    probability = want.softmax(-1).amax(-1).mean()
    assert probability > 0.5, f"a peaked model, not {probability:.2f}"
    error = float((got - want).norm() / want.norm())
    agreement = float((got.argmax(-1) == want.argmax(-1)).float().mean())
    record_property("top-1 agreement", agreement)
    print(f"{family}: error {error:.1e}, top-1 agreement {agreement:.1%}")
    assert 1e-4 < error < 5e-2
    assert agreement > 0.9
    for layer in cache.layers:
        assert layer.pool.dtype == torch.float8_e4m3fn
        assert (layer.pool.kv_scale == 0.02) == given


@pytest.mark.parametrize("family", ["deepseek_v3", "mistral4", "kimi_linear"])
def test_a_long_prompt(family: str, calls: list[tuple[int, ...]]) -> None:
    skip_unless_there(family)
    model = tiny_models.make(family, SEEDS[family])
    ids, cuts = prompt(1, 2100), (2060, *range(2061, 2100))
    mask = torch.ones_like(ids)
    want, _ = walk(model, ids, mask, cuts)
    with enable(model):
        got, _ = walk(model, ids, mask, cuts)
    assert (got - want).norm() / want.norm() < 2e-6
    assert len(calls) >= 40


def test_softmax_scale_is_the_models() -> None:
    """YaRN's mscale is in it: 1 / sqrt(40) alone is not what deepseek_v3 has here."""
    model = tiny_models.make("deepseek_v3", 9)
    scaling = model.model.layers[0].self_attn.scaling
    assert scaling == pytest.approx(40**-0.5 * 1.2079**2, rel=1e-3)


MUTANTS = {
    "scale without mscale": lambda pool, q, n, scale, kw: ((q, n, 40**-0.5), kw),
    "one token less": lambda pool, q, n, scale, kw: ((q, n - 1, scale), kw),
    "padding is seen": lambda pool, q, n, scale, kw: ((q, n, scale), {**kw, "columns": None}),
    "no rope": lambda pool, q, n, scale, kw: (
        (torch.cat((q[..., :40], q[..., 40:] * 0), -1), n, scale),
        kw,
    ),
    "heads swapped": lambda pool, q, n, scale, kw: ((q.flip(2), n, scale), kw),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.make("deepseek_v3", 9)
    ids = prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    cuts = (30, 31, 34)
    want, _ = walk(model, ids, mask, cuts)
    real = LatentPool.decode

    def wrong(self: LatentPool, q: Tensor, n: Any, scale: float, **kw: Any) -> Any:
        args, kw = MUTANTS[mutant](self, q, n, scale, kw)
        return real(self, *args, **kw)

    monkeypatch.setattr(LatentPool, "decode", wrong)
    if mutant == "one token less":
        mask[0] = 1
        want, _ = walk(model, ids, mask, cuts)
    with enable(model):
        got, _ = walk(model, ids, mask, cuts)
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() > 1e-3


def test_bytes_are_those_of_the_formula() -> None:
    model = tiny_models.make("deepseek_v3", 9, num_hidden_layers=3)
    for dtype, itemsize in (("auto", 4), ("bf16", 2), ("fp8", 1)):
        with enable(model, cache_dtype=dtype, page_size=16):
            cache = LatentCache(model, max_cache_len=100)
            with torch.inference_mode():
                model(prompt(2), use_cache=True, **{tiny_models.cache_name(): cache})
            # layers * sequences * columns in whole pages * (R + rope) * element
            assert cache.nbytes == 3 * 2 * 112 * (40 + 16) * itemsize
            # What generate announces is all that is taken: 24 + 30 columns.
            cache = LatentCache(model)
            greedy(model, prompt(2), 30, **{tiny_models.cache_name(): cache})
            assert cache.nbytes == 3 * 2 * 64 * (40 + 16) * itemsize
