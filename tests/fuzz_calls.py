"""The fuzzer's calls: a good call of a random op, in a random layout, and often damage to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import BF16, FN, FNUZ, FP16, FP32, HUGE, quantise
from compare import LSE_BAR, OUT_BAR
from fuzz_damage import damage
from torch import Tensor

import mla_ops
from mla_ops import reference

WIDE, FLOAT8 = (BF16, FP16, FP32), (FN, FNUZ)
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Arguments = dict[str, Any]


@dataclass
class Call:
    """A call, what it may write, and how its result is judged (None: it only has to live)."""

    op: str
    function: Callable[..., Any]
    arguments: Arguments
    valid: bool
    writes: set[str] = field(default_factory=set)
    judge: Callable[[Any, dict[str, Any]], str | None] | None = None

    def run(self) -> Any:
        return self.function(**self.arguments)


def lay_out(rng: random.Random, x: Tensor) -> Tensor:
    """The same numbers somewhere else: with an offset, in wider rows, its first dims swapped."""
    kind = rng.randrange(4)
    if kind == 1 and x.dim() >= 1:
        wider = torch.zeros((*x.shape[:-1], x.shape[-1] + rng.randrange(1, 9)), dtype=x.dtype)
        place = wider[..., wider.shape[-1] - x.shape[-1] :]
        return place.copy_(x)
    if kind == 2 and x.dim() >= 3:
        return torch.empty_like(x.transpose(0, 1).contiguous()).transpose(0, 1).copy_(x)
    if kind == 3:
        memory = torch.zeros(x.numel() + 3, dtype=x.dtype)
        return memory[3:].view(x.shape).copy_(x)
    return x


def _decode_arguments(rng: random.Random) -> Arguments:
    batch = rng.choice((0, 1, 2, 2, 3, 5))
    q_len, heads = rng.choice(
        ((1, 1), (1, 16), (1, 128), (2, 3), (2, 17), (4, 1), (4, 5), (8, 2), (8, 20))
    )
    rank, rope = rng.choice(((1, 0), (7, 3), (32, 32), (64, 16), (100, 5), (512, 64), (512, 0)))
    page = rng.choice((1, 2, 7, 16, 64, 300))
    pages, columns = rng.randrange(1, 9), rng.randrange(0, 5)
    capacity = min(page * columns, 300)
    lengths = [rng.choice((0, 1, capacity, rng.randrange(capacity + 1))) for _ in range(batch)]
    lengths = [min(length, capacity) for length in lengths]
    table = torch.full((batch, columns), rng.choice((HUGE, -1, -HUGE)), dtype=torch.int32)
    for b, length in enumerate(lengths):
        used = -(-length // page)
        table[b, :used] = torch.randint(pages, (used,), dtype=torch.int32)
    dtypes = (*WIDE, *FLOAT8)
    q, q_scale = quantise(
        torch.randn(batch, q_len, heads, rank + rope)
        if batch
        else torch.zeros(0, q_len, heads, rank + rope),
        rng.choice(WIDE if batch == 0 else dtypes),
    )
    cache, kv_scale = quantise(torch.randn(pages, page, rank + rope), rng.choice(dtypes))
    if rng.random() < 0.2:
        cache = cache.unsqueeze(2)
    return {
        "q": lay_out(rng, q),
        "kv_cache": lay_out(rng, cache),
        "block_table": lay_out(rng, table),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "softmax_scale": rng.choice((0.3, 0.05, 1.0)) / (rank + rope) ** 0.5,
        "kv_lora_rank": rank,
        "causal": rng.random() < 0.7,
        "q_scale": q_scale,
        "kv_scale": kv_scale,
        "backend": rng.choice(("auto", "native", "torch")),
    }


def _add_plan(rng: random.Random, a: Arguments) -> None:
    page = rng.choice((a["kv_cache"].shape[1], 1000))
    q_len, heads = a["q"].shape[1:3]
    plan = mla_ops.plan(
        a["seq_lens"],
        a["block_table"].contiguous(),
        page_size=max(page, a["kv_cache"].shape[1]),
        num_heads=heads,
        q_len=q_len,
        workers=rng.choice((None, 1, 2, 3, 64, 65536)),
        batch_invariant=rng.random() < 0.5,
        split_tokens=rng.choice((3, 64, 100, 2**31 - 1)),
    )
    a["plan"], a["plan_spec"] = plan.tensor, list(plan.spec)


def _judge_decode(a: Arguments, out: Tensor, lse: Tensor | None) -> str | None:
    names = ("q", "kv_cache", "block_table", "seq_lens", "softmax_scale")
    named = {name: a[name] for name in ("kv_lora_rank", "causal", "q_scale", "kv_scale")}
    want, want_lse = reference.decode(*(a[name] for name in names), **named)
    if out.shape != want.shape:
        return f"out has shape {list(out.shape)} and not {list(want.shape)}"
    # Twice the suite's bar, for the short and narrow rows that are drawn here, where a single
    # rounding decides; and values that nearly cancel are judged by what they are sums of.
    values = reference.dequantise(a["kv_cache"], a["kv_scale"]).square().mean().sqrt()
    size = want.norm(dim=-1)
    if a["kv_lora_rank"] < 64:
        size = size + values * a["kv_lora_rank"] ** 0.5
    error = torch.where(size == 0, 0.0, (out.double() - want).norm(dim=-1) / size)
    worst = float(error.max()) if error.numel() else 0.0
    if not worst < 2 * OUT_BAR[out.dtype]:
        return f"relative L2 error {worst:.2e}"
    if lse is not None and want_lse.numel():
        difference = torch.where(lse == want_lse, 0.0, (lse.double() - want_lse).abs()).max()
        if not difference < LSE_BAR[out.dtype]:
            return f"lse error {float(difference):.2e}"
    return None


def _decode(rng: random.Random) -> Call:
    a = _decode_arguments(rng)
    if rng.random() < 0.4:
        _add_plan(rng, a)
    which = rng.choice(("decode", "decode_lse", "decode_out", "front door"))
    if which == "decode":
        return Call(
            which, torch.ops.mla.decode, a, True, set(), lambda r, _: _judge_decode(a, r, None)
        )
    if which == "decode_lse":
        return Call(
            which, torch.ops.mla.decode_lse, a, True, set(), lambda r, _: _judge_decode(a, *r)
        )
    if which == "front door":
        a.pop("plan", None), a.pop("plan_spec", None)
        a["return_lse"] = True
        return Call(which, mla_ops.decode, a, True, set(), lambda r, _: _judge_decode(a, *r))
    batch, q_len, heads, _ = a["q"].shape
    dtype = BF16 if a["q"].dtype in FLOAT8 else a["q"].dtype
    a["out"] = lay_out(rng, torch.full((batch, q_len, heads, a["kv_lora_rank"]), -77.0).to(dtype))
    a["lse"] = rng.choice((None, lay_out(rng, torch.full((batch, q_len, heads), -77.0))))
    judge = lambda _, __: _judge_decode(a, a["out"], a["lse"])  # noqa: E731
    return Call(which, torch.ops.mla.decode_out, a, True, {"out", "lse"}, judge)


def _plan(rng: random.Random) -> Call:
    lengths = [rng.choice((0, 1, 64, 65, rng.randrange(5000))) for _ in range(rng.randrange(6))]
    unit = rng.choice((1, 64, 1024, 2**31 - 1))
    want = [0]
    for length in lengths:
        want.append(want[-1] + max(1, -(-length // unit)))
    spec = [0, len(lengths), 1, 16, rng.choice((1, 2, 65536)), unit, rng.randrange(2), 2**31 - 1]
    a: Arguments = {
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_table": torch.zeros(len(lengths), 3, dtype=torch.int32),
        "plan_spec": spec,
    }

    def judge(result: Any, _: Any) -> str | None:
        made = (a["plan"] if result is None else result).tolist()
        return None if made == want else f"plan {made} and not {want}"

    if rng.random() < 0.5:
        return Call("plan", torch.ops.mla.plan, a, True, set(), judge)
    a["plan"] = torch.full((len(lengths) + 1,), -77, dtype=torch.int32)
    return Call("plan_", torch.ops.mla.plan_, a, True, {"plan"}, judge)


def _quantize(rng: random.Random) -> Call:
    shape = [rng.choice((0, 1, 3, 33)) for _ in range(rng.randrange(4))]
    x = (torch.randn(shape) * 10.0 ** rng.randrange(-6, 5)).to(rng.choice(WIDE))
    scale = rng.choice((None, torch.tensor(0.37), torch.tensor([[2.5e-3]])))
    a: Arguments = {"x": lay_out(rng, x), "scale": scale, "dtype": rng.choice(FLOAT8)}

    def judge(result: Any, _: Any) -> str | None:
        one = None if scale is None else scale.reshape(())
        want, want_scale = reference.quantize_fp8(x, one, a["dtype"])
        if not torch.equal(result[1].reshape(()), want_scale.reshape(())):
            return f"scale {result[1]} and not {want_scale}"
        same = torch.equal(result[0].view(torch.uint8), want.view(torch.uint8))
        return None if same else "other codes than the nearest"

    return Call("quantize_fp8", mla_ops.quantize_fp8, a, True, set(), judge)


def _write(rng: random.Random) -> Call:
    pages, page = rng.randrange(1, 5), rng.choice((1, 3, 16))
    rank, rope, tokens = rng.choice((1, 16, 512)), rng.choice((0, 8, 64)), rng.randrange(9)
    dtype, source = rng.choice((*WIDE, *FLOAT8)), rng.choice(WIDE)
    cache = torch.full((pages, page, rank + rope), -7.0).to(dtype)
    slots = torch.randint(-1, pages * page, (tokens,), dtype=rng.choice((torch.int32, torch.int64)))
    a: Arguments = {
        "kv_c": lay_out(rng, torch.randn(tokens, rank).to(source)),
        "k_pe": lay_out(rng, torch.randn(tokens, rope).to(source)),
        "kv_cache": lay_out(rng, cache.unsqueeze(2) if rng.random() < 0.2 else cache),
        "slot_mapping": slots,
        "kv_scale": torch.tensor([0.02]) if dtype in FLOAT8 else None,
    }
    target = a["kv_cache"]

    def judge(_: Any, before: dict[str, Any]) -> str | None:
        want = torch.full((pages * page, rank + rope), -7.0).to(dtype)
        rows = torch.cat((a["kv_c"], a["k_pe"]), 1)
        if dtype in FLOAT8:
            rows = reference.quantize_fp8(rows, a["kv_scale"], dtype)[0]
        raw = RAW[want.element_size()]
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want.view(raw)[slot] = rows[t].to(dtype).view(raw)
        got = target.reshape(want.shape).view(raw)
        return None if torch.equal(got, want.view(raw)) else "other rows than were written"

    return Call("write_kv_cache", mla_ops.write_kv_cache, a, True, {"kv_cache"}, judge)


def _merge(rng: random.Random) -> Call:
    shape = [rng.choice((0, 1, 2, 5)) for _ in range(rng.randrange(3))]
    width, dtype = rng.choice((0, 1, 16, 512)), rng.choice(WIDE)
    a: Arguments = {}
    for side in "ab":
        a[f"out_{side}"] = lay_out(rng, torch.randn(*shape, width).to(dtype))
        lse = torch.randn(shape) * 3
        a[f"lse_{side}"] = torch.where(torch.rand(shape) < 0.2, -torch.inf, lse)

    def judge(result: Any, _: Any) -> str | None:
        logs = torch.stack((a["lse_a"], a["lse_b"])).double()
        lse = logs.logsumexp(0)
        weight = torch.where(lse == -torch.inf, 0.0, (logs - lse).exp())[..., None]
        want = weight[0] * a["out_a"].double() + weight[1] * a["out_b"].double()
        close = torch.allclose(result[0].double(), want, rtol=8e-3, atol=8e-3)
        return (
            None
            if close and torch.allclose(result[1].double(), lse, atol=1e-5)
            else "another state"
        )

    return Call("merge_states", mla_ops.merge_states, a, True, set(), judge)


OPS = (_decode, _decode, _decode, _decode, _plan, _quantize, _write, _merge)


def draw(rng: random.Random) -> Call:
    """Return a random call, good for two in five."""
    call = rng.choice(OPS)(rng)
    if rng.random() < 0.4:
        return call
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        damage(rng, call.arguments)
    call.valid, call.judge = False, None
    return call
