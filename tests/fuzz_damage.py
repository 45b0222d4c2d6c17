"""What the fuzzer does to the arguments of a good call."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
NUMBERS = (-1, 0, 1, 2, 7, 8, 9, 127, 129, INT_MAX, INT_MIN, INT_MAX + 1, 2**62, -(2**63), 2**63)
FLOATS = (0.0, -0.0, -1.0, 1e-45, 1e38, 1e39, 1e308, float("inf"), float("-inf"), float("nan"))
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)
BACKENDS = ("auto", "native", "torch", "aiter", "", "AUTO", "cuda", "\0", "é" * 50)
JUNK = (None, 1, 1.5, "x", (), [1, 2], {}, object())


def _cast(rng: random.Random, x: Tensor) -> Tensor:
    return x.to(rng.choice(DTYPES))


def _reshape(rng: random.Random, x: Tensor) -> Tensor:
    return rng.choice(
        (x[None], x.flatten(), x.reshape(-1, 1), x.sum().to(x.dtype), x.unsqueeze(-1))
    )


def _cut(rng: random.Random, x: Tensor) -> Tensor:
    if x.dim() == 0:
        return x
    dim = rng.randrange(x.dim())
    return x.narrow(dim, 0, rng.choice((0, max(0, x.shape[dim] - 1))))


def _grow(rng: random.Random, x: Tensor) -> Tensor:
    if x.dim() == 0:
        return x
    dim = rng.randrange(x.dim())
    return torch.cat((x, x), dim)


def _expand(rng: random.Random, x: Tensor) -> Tensor:
    if x.dim() == 0 or 0 in x.shape:
        return x
    dim = rng.randrange(x.dim())
    shape = list(x.shape)
    return x.narrow(dim, 0, 1).expand(shape)


def _apart(rng: random.Random, x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


def _transpose(rng: random.Random, x: Tensor) -> Tensor:
    if x.dim() < 2:
        return x
    order = list(range(x.dim()))
    rng.shuffle(order)
    return x.permute(order) if rng.random() < 0.5 else x.mT.contiguous().mT


def _meta(rng: random.Random, x: Tensor) -> Tensor:
    return x.to("meta")


def _misaligned(rng: random.Random, x: Tensor) -> Tensor:
    if x.numel() == 0:
        return x
    memory = torch.zeros(x.numel() * x.element_size() + 1, dtype=torch.uint8)
    memory[1:] = x.detach().contiguous().flatten().view(torch.uint8)
    return torch.frombuffer(memory.numpy(), dtype=x.dtype, offset=1).view(x.shape)


def _grad(rng: random.Random, x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x


def _wild_values(rng: random.Random, x: Tensor) -> Tensor:
    x = x.clone()
    flat = x.view(-1) if x.is_contiguous() else None
    if flat is None or flat.numel() == 0:
        return x
    for _ in range(rng.choice((1, 1, 3))):
        i = rng.randrange(flat.numel())
        if x.dtype == torch.int32:
            flat[i] = rng.choice([n for n in NUMBERS if INT_MIN <= n <= INT_MAX])
        elif x.dtype == torch.int64:
            flat[i] = rng.choice([n for n in NUMBERS if n < 2**63])
        elif x.dtype in (torch.float32, torch.bfloat16):
            flat[i] = rng.choice([n for n in FLOATS if abs(n) < 1e38 or n != n])
    return x


TENSOR = (
    _cast,
    _reshape,
    _cut,
    _grow,
    _expand,
    _apart,
    _transpose,
    _meta,
    _misaligned,
    _grad,
    _wild_values,
    _wild_values,
)


def _alias(rng: random.Random, arguments: dict[str, Any], name: str) -> Tensor:
    """The shape and dtype of one argument, in the memory of another."""
    x = arguments[name]
    if x.device.type != "cpu":
        return x
    others = [y for y in arguments.values() if isinstance(y, Tensor) and y is not x]
    others = [y for y in others if y.device == x.device and not y.requires_grad]
    wanted = x.numel() * x.element_size()
    for y in rng.sample(others, len(others)):
        raw = torch.empty(0, dtype=torch.uint8).set_(y.untyped_storage())
        room = raw.numel() - wanted
        if room >= 0:
            start = rng.randrange(room + 1) // 16 * 16
            try:
                return raw[start : start + wanted].view(x.dtype).view(x.shape)
            except RuntimeError:
                continue
    return x


def damage(rng: random.Random, arguments: dict[str, Any]) -> None:
    """Change one argument into something else, in place; often, but not always, a mistake."""
    name = rng.choice([name for name in arguments if not name.startswith("_")])
    value = arguments[name]
    if rng.random() < 0.04:
        arguments[name] = rng.choice(JUNK)
    elif isinstance(value, Tensor):
        if rng.random() < 0.12:
            arguments[name] = _alias(rng, arguments, name)
        else:
            try:
                arguments[name] = rng.choice(TENSOR)(rng, value)
            except RuntimeError:  # an operator that the dtype does not have
                return
    elif isinstance(value, bool):
        arguments[name] = not value
    elif isinstance(value, int):
        arguments[name] = rng.choice(NUMBERS)
    elif isinstance(value, float):
        arguments[name] = rng.choice(FLOATS)
    elif isinstance(value, str):
        arguments[name] = rng.choice(BACKENDS)
    elif isinstance(value, torch.dtype):
        arguments[name] = rng.choice(DTYPES)
    elif isinstance(value, list):
        spec = list(value)
        if not spec or rng.random() < 0.2:
            spec = spec[: rng.randrange(len(spec) + 1)]
        else:
            spec[rng.randrange(len(spec))] = rng.choice(NUMBERS)
        arguments[name] = spec
