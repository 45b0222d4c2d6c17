"""Mistakes with the ops beside decode."""

from __future__ import annotations

import torch
from good_calls import BF16, FN, FNUZ, FP16, INT_MAX, PAGE, B, D, Mistake, P, R, ints, of

MISTAKES: list[Mistake] = [
    *of(
        "plan",
        ("q_len 0", lambda a: {"q_len": 0}, ValueError, "q_len .*between 1 and 8, got 0"),
        ("heads 129", lambda a: {"num_heads": 129}, ValueError, "heads .*1 and 128, got 129"),
        ("page_size 0", lambda a: {"page_size": 0}, ValueError, "page_size must .*got 0"),
        ("page_size 4.0", lambda a: {"page_size": 4.0}, TypeError, "an integer, got float"),
        ("split_tokens 0", lambda a: {"split_tokens": 0}, ValueError, "split_tokens .*got 0"),
        ("workers 0", lambda a: {"workers": 0}, ValueError, "workers .*1 and 65536, got 0"),
        (
            "seq_lens a scalar",
            lambda a: {"seq_lens": ints(5)[0]},
            ValueError,
            r"seq_lens must be \[batch\], got shape \[\]",
        ),
        (
            "seq_lens of int64",
            lambda a: {"seq_lens": a["seq_lens"].long()},
            TypeError,
            "seq_lens must be int32, got int64",
        ),
        (
            "block_table of another batch",
            lambda a: {"block_table": a["block_table"][:1]},
            ValueError,
            "first size of block_table must be the batch, 2, got 1",
        ),
    ),
    *of(
        "plan",
        (
            "length negative",
            lambda a: {"seq_lens": ints(-3, 5)},
            ValueError,
            r"seq_lens\[0\] must not be negative, got -3",
        ),
        (
            "lengths beyond the table",
            lambda a: {"seq_lens": ints(5, 200)},
            ValueError,
            r"seq_lens must fit the 2 units of 64 tokens .*got more at seq_lens\[1\] = 200",
        ),
        contents=True,
    ),
    *of(
        "plan_",
        (
            "plan of another size",
            lambda a: {"plan": a["plan"][:2]},
            ValueError,
            r"plan must be \[batch \+ 1\] = \[3\], got shape \[2\]",
        ),
        (
            "plan in seq_lens",
            lambda a: {"seq_lens": (raw := ints(5, 8, 0))[:B], "plan": raw},
            ValueError,
            "plan must be in memory of its own, apart from seq_lens, got one that overlaps it",
        ),
    ),
    *of(
        "plan_",
        (
            "lengths beyond the room",
            lambda a: {"seq_lens": ints(5, INT_MAX)},
            ValueError,
            r"seq_lens must fit the 2 units .*got more at seq_lens\[1\] = 2147483647",
        ),
        contents=True,
    ),
    *of(
        "quantize_fp8",
        ("to bfloat16", lambda a: {"dtype": BF16}, TypeError, "dtype must be float8.*got bfloat16"),
        ("of int32", lambda a: {"x": a["x"].int()}, TypeError, "x must be .*got int32"),
        ("of float8", lambda a: {"x": a["x"].to(FN)}, TypeError, "x must be .*got float8_e4m3fn"),
        ("of None", lambda a: {"x": None}, TypeError, "x must be a tensor, got NoneType"),
        (
            "with a scale per row",
            lambda a: {"scale": torch.ones(4)},
            ValueError,
            r"scale must be one element, got shape \[4\]",
        ),
        (
            "with a scale of bfloat16",
            lambda a: {"scale": torch.ones(1, dtype=BF16)},
            TypeError,
            "scale must be float32, got bfloat16",
        ),
    ),
    *of(
        "write_kv_cache",
        (
            "kv_c of int8",
            lambda a: {"kv_c": a["kv_c"].char()},
            TypeError,
            "kv_c must be .*got int8",
        ),
        (
            "k_pe of another dtype",
            lambda a: {"k_pe": a["k_pe"].float()},
            TypeError,
            "k_pe must be bfloat16, got float32",
        ),
        (
            "kv_c of another width",
            lambda a: {"kv_c": a["kv_c"][:, :-1]},
            ValueError,
            "widths of kv_c and k_pe together must be kv_cache's, 24, got 15",
        ),
        (
            "fewer rows of k_pe",
            lambda a: {"k_pe": a["k_pe"][:2]},
            ValueError,
            "first size of k_pe must be slot_mapping's, 3, got 2",
        ),
        (
            "slot_mapping of float32",
            lambda a: {"slot_mapping": a["slot_mapping"].float()},
            TypeError,
            "slot_mapping must be int64, int32, got float32",
        ),
        (
            "cache expanded",
            lambda a: {"kv_cache": a["kv_cache"][:1].expand(P, PAGE, D)},
            ValueError,
            "kv_cache must be without elements that overlap, got strides",
        ),
        (
            "kv_c in the cache",
            lambda a: {"kv_c": a["kv_cache"][0, :3, :R]},
            ValueError,
            "kv_cache must be in memory of its own, apart from kv_c, got one that overlaps it",
        ),
        (
            "kv_scale missing",
            lambda a: {"kv_cache": a["kv_cache"].to(FNUZ)},
            ValueError,
            "kv_scale must be .* for a kv_cache of float8_e4m3fnuz, got None",
        ),
        (
            "kv_c on another device",
            lambda a: {"kv_c": a["kv_c"].to("meta")},
            ValueError,
            "kv_c must be on cpu like the first tensor, got one on meta",
        ),
    ),
    *of(
        "write_kv_cache",
        (
            "slot too large",
            lambda a: {"slot_mapping": ints(0, 3, P * PAGE)},
            ValueError,
            r"slot_mapping\[2\] must be between 0 and 19 \(5 pages of 4 tokens\).*got 20",
        ),
        (
            "slot of -2",
            lambda a: {"slot_mapping": ints(0, -2, 1)},
            ValueError,
            r"slot_mapping\[1\] must be .*or -1 to skip, got -2",
        ),
        (
            "slot of 2^62",
            lambda a: {"slot_mapping": ints(2**62, 0, 1, dtype=torch.int64)},
            ValueError,
            r"slot_mapping\[0\] must be .*got 4611686018427387904",
        ),
        contents=True,
    ),
    *of(
        "merge_states",
        (
            "sides of two shapes",
            lambda a: {"out_b": a["out_b"][:1]},
            ValueError,
            r"out_b must be out_a's shape = \[2, 2, 3, 16\], got shape \[1, 2, 3, 16\]",
        ),
        (
            "sides of two dtypes",
            lambda a: {"out_b": a["out_b"].to(FP16)},
            TypeError,
            "out_b must be float32, got float16",
        ),
        (
            "lse of another shape",
            lambda a: {"lse_b": a["lse_b"].mT},
            ValueError,
            r"lse_b must be .* = \[2, 2, 3\], got shape \[2, 3, 2\]",
        ),
        (
            "lse of float64",
            lambda a: {"lse_a": a["lse_a"].double()},
            TypeError,
            "lse_a must be float32, got float64",
        ),
        (
            "out_a a scalar",
            lambda a: {"out_a": a["out_a"].sum()},
            ValueError,
            r"out_a must be \[\.\.\., kv_lora_rank\], got a scalar",
        ),
        (
            "a side on another device",
            lambda a: {"out_b": a["out_b"].to("meta")},
            ValueError,
            "out_b must be on cpu like the first tensor, got one on meta",
        ),
    ),
]
