"""The grammar of cases, after vLLM's: `64q1s8k` is 64 sequences with 1 query token and 8192 tokens.

    64q1s8k-h128-fp8-page16-ragged      options: heads, cache, page size, ragged lengths
    4,32q1s1k..8k-h16,128-bf16,fp8      lists multiply; 1k..8k is 1k,2k,4k,8k and 4..16+4 is
                                        4,8,12,16
    qfp8 qfp16  rank256 rope32          dtype of q; other widths
    seed  serving  long  mtp  quick     presets

`fp8` is the float8 of the device; `e4m3fn` and `e4m3fnuz` name one.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import torch

from mla_ops import capability, checks
from mla_ops.workload import SHORT, Case

PRESETS = {
    # The contest program's: what this project started from.
    "seed": "4,32,64,256q1s1k,8k-fp8",
    "serving": "16,64,256q1s2k,8k-h16,128-bf16,fp8-ragged",
    "long": "1,4,16q1s32k,128k-bf16,fp8",
    "mtp": "8,32,128q2,4s4k-h16,128-fp8",
    "quick": "4q1s1k,8k-bf16,fp8",
}

_NUMBER = r"\d+[km]?"
_UNITS = {"k": 1 << 10, "m": 1 << 20}


def parse(text: str, device: torch.device) -> list[Case]:
    """Return the cases of a word. Raises ValueError with what is wrong with it."""
    if text in PRESETS:
        text = PRESETS[text]
    first, *options = text.split("-")
    match = re.fullmatch(r"([^qs]+)q([^s]+)s(.+)", first)
    if match is None:
        known = ", ".join(PRESETS)
        raise ValueError(f"a case must be a preset ({known}) or like 64q1s8k, got {text!r}")
    batches, q_lens, contexts = (numbers(group) for group in match.groups())
    cases = [Case(b, s, q) for b, q, s in itertools.product(batches, q_lens, contexts)]
    for option in options:
        cases = [replace(case, **change) for case in cases for change in _changes(option, device)]
    for case in cases:
        _check(case)
    return cases


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with ranges: 4,1k..8k,4..16+4."""
    found: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(rf"({_NUMBER})(?:\.\.({_NUMBER})(?:\+({_NUMBER}))?)?", word)
        if match is None:
            raise ValueError(f"a number must be like 4, 8k, 1k..8k or 4..16+4, got {word!r}")
        begin, end, step = (None if one is None else _number(one) for one in match.groups())
        assert begin is not None
        if end is not None and (begin < 1 or end < begin or step == 0):
            raise ValueError(f"a range must go upwards from at least 1, got {word!r}")
        while True:
            found.append(begin)
            begin = begin + step if step else begin * 2
            if end is None or begin > end:
                break
    return found


def _number(text: str) -> int:
    unit = _UNITS.get(text[-1])
    return int(text) if unit is None else int(text[:-1]) * unit


def _changes(option: str, device: torch.device) -> list[dict[str, Any]]:
    """Return what an option changes in a case, once for each member of a list."""
    if option == "ragged":
        return [{"ragged": True}]
    dtypes = SHORT | {"fp8": capability.float8_dtype(device)}
    if all(word in dtypes for word in option.split(",")):
        return [{"cache_dtype": dtypes[word]} for word in option.split(",")]
    if option[:1] == "q" and all(word in dtypes for word in option[1:].split(",")):
        return [{"q_dtype": dtypes[word]} for word in option[1:].split(",")]
    names = {"h": "heads", "page": "page_size", "rank": "rank", "rope": "rope"}
    match = re.fullmatch(r"(h|page|rank|rope)(\d.*)", option)
    if match is None:
        raise ValueError(
            f"an option must be h.., page.., rank.., rope.., ragged or a dtype "
            f"({', '.join(dtypes)}; after a q that of q), got {option!r}"
        )
    return [{names[match[1]]: number} for number in numbers(match[2])]


def _check(case: Case) -> None:
    limits = {
        "batch": (1, checks.INT32_MAX),
        "q_len": (1, checks.MAX_Q_LEN),
        "context": (case.q_len, checks.INT32_MAX),
        "heads": (1, checks.MAX_HEADS),
        "page_size": (1, checks.INT32_MAX),
        "rank": (1, checks.INT32_MAX),
        "rope": (0, checks.INT32_MAX),
    }
    for name, (least, most) in limits.items():
        if not least <= getattr(case, name) <= most:
            got = getattr(case, name)
            raise ValueError(f"{name} of {case} must be between {least} and {most}, got {got}")
