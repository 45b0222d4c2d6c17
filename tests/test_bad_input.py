"""A mistake gives an error that names what was expected and what came, the process lives, and
nothing is written: eager and under torch.compile alike."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import mistakes_decode
import mistakes_decode_more
import mistakes_ops
import pytest
import torch
from good_calls import GOOD, Mistake
from torch import Tensor

MISTAKES = [*mistakes_decode.MISTAKES, *mistakes_decode_more.MISTAKES, *mistakes_ops.MISTAKES]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch logs a traceback of every error that a fake kernel raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
    torch._dynamo.reset()


def memory_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """A copy of all memory behind the arguments, bit by bit."""
    copies = {}
    for name, value in arguments.items():
        value = getattr(value, "tensor", value)  # a DecodePlan's
        if isinstance(value, Tensor) and value.device.type == "cpu":
            raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
            copies[name] = raw.clone()
    return copies


def arguments_of(mistake: Mistake) -> tuple[Callable[..., Any], dict[str, Any]]:
    op, arguments = GOOD[mistake.op]()
    arguments.update(mistake.change(arguments))
    return op, arguments


def check_raises(mistake: Mistake, compiled: bool) -> BaseException:
    op, arguments = arguments_of(mistake)

    def call(arguments: dict[str, Any]) -> Any:
        return op(**arguments)

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    before = memory_of(arguments)
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call(arguments)
    assert re.search(mistake.says, str(caught.value), re.DOTALL), str(caught.value)
    for name, memory in memory_of(arguments).items():
        assert torch.equal(memory, before[name]), f"{name} was written"
    return caught.value


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_eager(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in mistake.environment.items():
        monkeypatch.setenv(name, value)
    assert type(check_raises(mistake, compiled=False)) is mistake.error


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_compiled(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tensors are is wrong at compile time, what they hold when the graph runs."""
    for name, value in mistake.environment.items():
        monkeypatch.setenv(name, value)
    error = check_raises(mistake, compiled=True)
    if mistake.contents:
        assert type(error) is mistake.error
    else:
        assert isinstance(error, torch._dynamo.exc.TorchDynamoException)
        assert not isinstance(error, torch._dynamo.exc.InternalTorchDynamoError)


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize("compiled", (False, True))
def test_without_the_mistake_the_call_is_fine(op: str, compiled: bool) -> None:
    function, arguments = GOOD[op]()

    def call(arguments: dict[str, Any]) -> Any:
        return function(**arguments)

    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    call(arguments)


def test_there_are_enough_mistakes() -> None:
    assert len({str(mistake) for mistake in MISTAKES}) == len(MISTAKES) >= 40
    for mistake in MISTAKES:
        assert "got" in mistake.says or mistake.error is RuntimeError, mistake.name
