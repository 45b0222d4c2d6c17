"""A good call per op, and what a mistake in one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mla_ops

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

B, S, H, R, ROPE, P, PAGE = 2, 2, 3, 16, 8, 5, 4
D = R + ROPE
SENTINEL = -77.0

Arguments = dict[str, Any]


def ints(*values: Any, dtype: torch.dtype = INT32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _decode() -> Arguments:
    generator = torch.Generator().manual_seed(3)
    return {
        "q": torch.randn(B, S, H, D, generator=generator).to(BF16),
        "kv_cache": torch.randn(P, PAGE, D, generator=generator).to(BF16),
        "block_table": ints([3, 1], [0, 4]),
        "seq_lens": ints(5, 8),
        "softmax_scale": 0.2,
        "kv_lora_rank": R,
    }


def _float8() -> Arguments:
    arguments = _decode()
    arguments["kv_cache"] = arguments["kv_cache"].to(FN)
    arguments["kv_scale"] = torch.full((1,), 0.5)
    return arguments


def _decode_out() -> Arguments:
    out, lse = torch.full((B, S, H, R), SENTINEL, dtype=BF16), torch.full((B, S, H), SENTINEL)
    return {**_decode(), "out": out, "lse": lse}


def good_plan() -> mla_ops.DecodePlan:
    a = _decode()
    return mla_ops.plan(
        a["seq_lens"], a["block_table"], page_size=PAGE, num_heads=H, q_len=S, workers=2
    )


def _make_plan() -> Arguments:
    a = _decode()
    numbers = {"page_size": PAGE, "num_heads": H, "q_len": S, "workers": 2}
    return {"seq_lens": a["seq_lens"], "block_table": a["block_table"], **numbers}


def _refresh_plan() -> Arguments:
    a = _decode()
    plan = torch.full((B + 1,), -77, dtype=INT32)
    tables = {"seq_lens": a["seq_lens"], "block_table": a["block_table"]}
    return {"plan": plan, **tables, "plan_spec": list(good_plan().spec)}


def _write() -> Arguments:
    return {
        "kv_c": torch.randn(3, R).to(BF16),
        "k_pe": torch.randn(3, ROPE).to(BF16),
        "kv_cache": torch.full((P, PAGE, D), SENTINEL).to(BF16),
        "slot_mapping": ints(0, -1, P * PAGE - 1, dtype=torch.int64),
    }


def _merge() -> Arguments:
    side = {"out": torch.randn(B, S, H, R), "lse": torch.randn(B, S, H)}
    return {f"{name}_{which}": x.clone() for which in "ab" for name, x in side.items()}


# The front door where it has the argument, the op where the mistake is in what it would pass on.
GOOD: dict[str, Callable[[], tuple[Callable[..., Any], Arguments]]] = {
    "decode": lambda: (mla_ops.decode, _decode()),
    "decode float8": lambda: (mla_ops.decode, _float8()),
    "decode planned": lambda: (mla_ops.decode, {**_decode(), "plan": good_plan()}),
    "decode with spec": lambda: (
        torch.ops.mla.decode,
        {**_decode(), "plan": good_plan().tensor, "plan_spec": list(good_plan().spec)},
    ),
    "decode into": lambda: (mla_ops.decode, {**_decode_out(), "return_lse": True}),
    "decode_out": lambda: (torch.ops.mla.decode_out, _decode_out()),
    "plan": lambda: (mla_ops.plan, _make_plan()),
    "plan_": lambda: (torch.ops.mla.plan_, _refresh_plan()),
    "quantize_fp8": lambda: (mla_ops.quantize_fp8, {"x": torch.randn(4, 6).to(BF16)}),
    "write_kv_cache": lambda: (mla_ops.write_kv_cache, _write()),
    "merge_states": lambda: (mla_ops.merge_states, _merge()),
}


@dataclass(frozen=True)
class Mistake:
    """What is wrong with a call of `op`, and what must be said about it."""

    name: str
    op: str
    change: Callable[[Arguments], Arguments]
    error: type[Exception]
    says: str
    contents: bool = False  # what tensors hold: known only when the call runs
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


def of(op: str, *rows: tuple[Any, ...], contents: bool = False) -> list[Mistake]:
    return [Mistake(row[0], op, *row[1:], contents=contents) for row in rows]


def strided(x: Tensor) -> Tensor:
    """The same numbers, two elements apart."""
    return torch.stack((x, x), -1)[..., 0]


def spec(**changes: int) -> Callable[[Arguments], Arguments]:
    return lambda a: {"plan_spec": list(good_plan().spec._replace(**changes))}
