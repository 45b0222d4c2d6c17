"""How the tests call decode, and what they compare it with: thin, so that a test reads as its
promise."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from cases import Case, Problem, make
from torch import Tensor

import mla_ops
from mla_ops import reference

BACKENDS = ("native", "torch")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run(problem: Problem, backend: str = "native", **more: object) -> tuple[Tensor, Tensor]:
    """Decode through the front door, with lse."""
    options = {**problem.options, **more}
    return mla_ops.decode(*problem.arguments, **options, return_lse=True, backend=backend)


def oracle(problem: Problem) -> tuple[Tensor, Tensor]:
    return reference.decode(*problem.arguments, **problem.options)


@functools.lru_cache(maxsize=4)
def solved(case: Case) -> tuple[Problem, Tensor, Tensor]:
    """A case's problem and the oracle's answer, made once for the tests that follow each other."""
    problem = make(case)
    return problem, *oracle(problem)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns: unlike numbers, NaN equals itself there and -0 is not 0."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor that is NaN throughout."""
    return torch.full(shape, float("nan")).to(dtype)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
