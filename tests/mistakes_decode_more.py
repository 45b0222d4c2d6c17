"""Mistakes in decode's lengths and tables, float8 scales, plans and buffers."""

from __future__ import annotations

import torch
from good_calls import (
    BF16,
    FNUZ,
    FP32,
    INT_MAX,
    INT_MIN,
    B,
    H,
    Mistake,
    R,
    S,
    good_plan,
    ints,
    of,
    spec,
)

MISTAKES: list[Mistake] = [
    Mistake(
        "MLA_OPS_BACKEND unknown",
        "decode",
        lambda a: {},
        ValueError,
        "MLA_OPS_BACKEND must be one of auto, aiter, native, torch, got 'cutlass'",
        environment={"MLA_OPS_BACKEND": "cutlass"},
    ),
    *of(
        "decode",
        (
            "page negative",
            lambda a: {"block_table": ints([3, 1], [-1, 4])},
            ValueError,
            r"block_table\[1, 0\] must be between 0 and 4 \(kv_cache has 5 pages\), got -1",
        ),
        ("page too large", lambda a: {"block_table": ints([3, 5], [0, 4])}, ValueError, "got 5"),
        (
            "page of INT_MAX",
            lambda a: {"block_table": ints([3, INT_MAX], [0, 4])},
            ValueError,
            r"block_table\[0, 1\] must be between 0 and 4 .*got 2147483647",
        ),
        (
            "length negative",
            lambda a: {"seq_lens": ints(5, -1)},
            ValueError,
            r"seq_lens\[1\] must be between 0 and 8 \(2 pages of 4 tokens in block_table\), got -1",
        ),
        ("length of INT_MIN", lambda a: {"seq_lens": ints(INT_MIN, 1)}, ValueError, "got -2147483"),
        (
            "length beyond the table",
            lambda a: {"seq_lens": ints(9, 8)},
            ValueError,
            r"seq_lens\[0\] must be between 0 and 8 .*got 9",
        ),
        (
            "a cache without pages",
            lambda a: {"kv_cache": a["kv_cache"][:0]},
            ValueError,
            r"block_table\[0, 0\] must be between 0 and -1 \(kv_cache has 0 pages\), got 3",
        ),
        contents=True,
    ),
    *of(
        "decode float8",
        ("kv_scale missing", lambda a: {"kv_scale": None}, ValueError, "kv_scale .*got None"),
        (
            "kv_scale of two elements",
            lambda a: {"kv_scale": torch.ones(2)},
            ValueError,
            r"kv_scale must be one element, got shape \[2\]",
        ),
        (
            "kv_scale of float64",
            lambda a: {"kv_scale": torch.ones(1, dtype=torch.float64)},
            TypeError,
            "kv_scale must be float32, got float64",
        ),
        (
            "kv_scale on another device",
            lambda a: {"kv_scale": torch.ones(1, device="meta")},
            ValueError,
            "kv_scale must be on cpu .*got one on meta",
        ),
        (
            "q_scale missing",
            lambda a: {"q": a["q"].to(FNUZ)},
            ValueError,
            "q_scale must be a one-element float32 tensor for a q of float8_e4m3fnuz, got None",
        ),
    ),
    *of(
        "decode planned",
        (
            "plan for another batch",
            lambda a: {"q": a["q"][:1], "block_table": ints([3, 1]), "seq_lens": ints(5)},
            ValueError,
            r"plan must be made for \[batch, q_len, heads\] = \[1, 2, 3\], got \[2, 2, 3\]",
        ),
        (
            "plan for other heads",
            lambda a: {"q": a["q"][:, :, :2]},
            ValueError,
            r"plan must be made for .* = \[2, 2, 2\], got \[2, 2, 3\]",
        ),
        (
            "plan for another S",
            lambda a: {"q": a["q"][:, :1]},
            ValueError,
            r"plan must be made for .* = \[2, 1, 3\], got \[2, 2, 3\]",
        ),
    ),
    *of(
        "decode with spec",
        ("plan without spec", lambda a: {"plan_spec": None}, ValueError, "together, got only one"),
        ("spec without plan", lambda a: {"plan": None}, ValueError, "together, got only one"),
        (
            "spec of 7 integers",
            lambda a: {"plan_spec": list(good_plan().spec)[:7]},
            ValueError,
            r"plan_spec must be 8 integers.*got \[0, 2, 2, 3, 2, 64, 0\]",
        ),
        ("plan of an unknown kind", spec(kind=2), ValueError, r"0 \(native\) or 1 .*, got 2"),
        ("half a plan of aiter", spec(kind=1), ValueError, r"must be 14 integers .*, got"),
        ("plan for 0 workers", spec(workers=0), ValueError, "workers .*1 and 65536, got 0"),
        ("plan for 2^31 workers", spec(workers=2**31), ValueError, "workers .*got 2147483648"),
        ("plan of units of 0 tokens", spec(unit_tokens=0), ValueError, "unit_tokens .*got 0"),
        ("plan without room", spec(unit_capacity=1), ValueError, "unit_capacity .*2 and.*got 1"),
        (
            "plan of int64",
            lambda a: {"plan": a["plan"].long()},
            TypeError,
            "plan must be int32, got int64",
        ),
        (
            "plan of another size",
            lambda a: {"plan": a["plan"][:-1]},
            ValueError,
            r"plan must be \[batch \+ 1\] = \[3\], got shape \[2\]",
        ),
        (
            "plan on another device",
            lambda a: {"plan": a["plan"].to("meta")},
            ValueError,
            "plan must be on cpu like the first tensor, got one on meta",
        ),
    ),
    *of(
        "decode with spec",
        (
            "plan of other lengths",
            lambda a: {"plan": ints(0, 1, 3)},
            ValueError,
            "plan must be made for the lengths in seq_lens .*got 3 units before sequence 2 and not",
        ),
        (
            "plan of garbage",
            lambda a: {"plan": ints(INT_MIN, INT_MAX, -5)},
            ValueError,
            "plan must be made for the lengths in seq_lens .*got -2147483648 units",
        ),
        contents=True,
    ),
    *of(
        "decode into",
        (
            "out of float32",
            lambda a: {"out": a["out"].float()},
            TypeError,
            "out must be bfloat16, got float32",
        ),
        (
            "out of another shape",
            lambda a: {"out": a["out"][..., :-1]},
            ValueError,
            r"out must be .* = \[2, 2, 3, 16\], got shape \[2, 2, 3, 15\]",
        ),
        (
            "out transposed",
            lambda a: {"out": a["out"].mT.contiguous().mT},
            ValueError,
            "out must be contiguous in its last dimension, got strides",
        ),
        (
            "out expanded",
            lambda a: {"out": a["out"][:1].expand(B, S, H, R)},
            ValueError,
            "out must be without elements that overlap, got strides",
        ),
        (
            "out on another device",
            lambda a: {"out": a["out"].to("meta")},
            ValueError,
            "out must be on cpu like the first tensor, got one on meta",
        ),
        (
            "lse of bfloat16",
            lambda a: {"lse": a["lse"].to(BF16)},
            TypeError,
            "lse must be float32, got bfloat16",
        ),
        (
            "lse of another shape",
            lambda a: {"lse": a["lse"].mT},
            ValueError,
            r"lse must be \[batch, q_len, heads\] = \[2, 2, 3\], got shape \[2, 3, 2\]",
        ),
        (
            "lse expanded",
            lambda a: {"lse": a["lse"][:, :1].expand(B, S, H)},
            ValueError,
            "lse must be without elements that overlap, got strides",
        ),
        (
            "out in q",
            lambda a: {"out": a["q"][..., :R]},
            ValueError,
            "out must be in memory of its own, apart from q, got one that overlaps it",
        ),
        (
            "out in the cache",
            lambda a: {"out": a["kv_cache"].view(-1)[3 : 3 + B * S * H * R].view(B, S, H, R)},
            ValueError,
            "out must be in memory of its own, apart from kv_cache, got one that overlaps it",
        ),
        (
            "out, and q that requires grad",
            lambda a: {"q": a["q"].requires_grad_()},
            ValueError,
            r"q must be without requires_grad, or used under torch.no_grad\(\).*got",
        ),
    ),
    *of(
        "decode_out",
        (
            # torch's own, before ours.
            "out that requires grad",
            lambda a: {"out": a["out"].requires_grad_()},
            RuntimeError,
            "out=... arguments don.t support automatic differentiation",
        ),
        ("out None", lambda a: {"out": None}, TypeError, "out must be a tensor, got NoneType"),
        (
            "lse in out",
            # One buffer of bytes, seen as both.
            lambda a: {
                "out": (raw := torch.zeros(B * S * H * R * 2, dtype=torch.uint8))
                .view(BF16)
                .view(B, S, H, R),
                "lse": raw[: B * S * H * 4].view(FP32).view(B, S, H),
            },
            ValueError,
            "lse must be in memory of its own, apart from out, got one that overlaps it",
        ),
    ),
]
