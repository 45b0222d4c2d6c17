"""Lengths, tables and slots are checked alike by the compiled kernels and by validate.py, and
MLA_OPS_VALIDATE does what it says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops import validate

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
PAGES, PAGE, COLUMNS = 6, 4, 3


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def message(call: Any) -> str | None:
    """The ValueError's text, or None."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def decode_with(backend: str, table: Tensor, lengths: Tensor) -> str | None:
    q = torch.ones(len(lengths), 1, 2, 8)
    cache = torch.ones(PAGES, PAGE, 8)
    options = {"kv_lora_rank": 8, "backend": backend}
    return message(lambda: mla_ops.decode(q, cache, table, lengths, 1.0, **options))


TABLES = [
    (ints([0, 1, 2], [3, 4, 5]), ints(12, 0)),
    (ints([0, 1, 2], [3, 4, 5]), ints(12, -1)),
    (ints([0, 1, 2], [3, 4, 5]), ints(13, 14)),
    (ints([0, 1, 2], [3, 4, 5]), ints(INT_MIN, INT_MAX)),
    (ints([0, 1, 6], [3, 4, 5]), ints(9, 12)),
    (ints([0, 1, 6], [3, 4, 5]), ints(8, 12)),  # not in use
    (ints([0, -1, 2], [-3, 4, 5]), ints(4, 1)),
    (ints([INT_MAX, 1, 2], [3, INT_MIN, 5]), ints(0, 5)),
    (ints([9, 9, 9], [9, 9, 9]), ints(0, 0)),
    (ints([9, 9, 9], [9, 9, 9]), ints(1, -1)),  # two mistakes: the same one is named
]


@pytest.mark.parametrize(("table", "lengths"), TABLES, ids=lambda x: str(x.tolist()))
def test_both_say_the_same_of_tables(table: Tensor, lengths: Tensor) -> None:
    python = message(lambda: validate.tables(table, lengths, PAGES, PAGE))
    assert decode_with("native", table, lengths) == python
    assert decode_with("torch", table, lengths) == python


def test_both_say_the_same_of_random_tables() -> None:
    rng = random.Random(5)
    said = set()
    for _ in range(300):
        lengths = ints(*(rng.choice((0, 1, 4, 5, 12, 12, 13, -1)) for _ in range(3)))
        table = ints(*([rng.choice((0, 5, 5, 5, 6, -1)) for _ in range(COLUMNS)] for _ in range(3)))
        python = message(lambda t=table, n=lengths: validate.tables(t, n, PAGES, PAGE))
        assert decode_with("native", table, lengths) == python
        said.add(None if python is None else python.split("[")[0])
    assert said == {None, "seq_lens", "block_table"}


@pytest.mark.parametrize(
    "slots", [(0, 23), (-1, -1), (-2, 0), (0, 24), (INT_MAX, 0), (INT_MIN, 24)], ids=str
)
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_both_say_the_same_of_slots(slots: tuple[int, ...], dtype: torch.dtype) -> None:
    mapping = torch.tensor(slots, dtype=dtype)
    python = message(lambda: validate.slots(mapping, PAGES, PAGE))
    cache = torch.zeros(PAGES, PAGE, 8)
    arguments = (torch.ones(2, 6), torch.ones(2, 2), cache, mapping)
    assert message(lambda: mla_ops.write_kv_cache(*arguments)) == python
    assert bool(cache.any()) == (python is None and max(slots) >= 0)


@pytest.mark.parametrize("value", (None, "0", "1", "yes"))
def test_on_a_cpu_contents_are_always_checked(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLA_OPS_VALIDATE", raising=False)
    if value is not None:
        monkeypatch.setenv("MLA_OPS_VALIDATE", value)
    for backend in ("native", "torch"):
        assert decode_with(backend, ints([0, 1, 2]), ints(13)) is not None


class OnGpu:
    """A tensor as far as validate.py asks before it reads one on a GPU."""

    device = torch.device("cuda")
    is_cuda = True


@pytest.mark.parametrize(("value", "wanted"), ((None, False), ("0", False), ("1", True)))
def test_on_a_gpu_the_environment_decides(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("MLA_OPS_VALIDATE", raising=False)
    if value is not None:
        monkeypatch.setenv("MLA_OPS_VALIDATE", value)
    assert validate._wanted(OnGpu()) is wanted


def test_it_refuses_to_work_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert validate._wanted(OnGpu()) is False
    monkeypatch.setenv("MLA_OPS_VALIDATE", "1")
    with pytest.raises(RuntimeError, match="cannot run while a graph is captured.*got 1"):
        validate._wanted(OnGpu())
