"""A backward that raises, for where nothing was compiled.

The compiled module registers torch's own `autogradNotImplementedFallback`, which costs nothing;
this is the same in Python. Without either, `backward()` would succeed and leave the gradients None.
`register_autograd` is no way out: it refuses keyword-only tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class _NotImplemented(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, call: Callable[[], Any], *inputs: Tensor) -> Any:
        ctx.name = name
        return call()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"derivative for mla::{ctx.name} is not implemented")


def _kernel(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        op = getattr(torch.ops.mla, name).default

        def call() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)

        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        # What writes in place returns nothing to hang a backward on: its checks refuse gradients.
        if wanted and op._schema.returns:
            return _NotImplemented.apply(name, call, *tensors)
        return call()

    return kernel


def register(library: torch.library.Library, names: Iterable[str]) -> None:
    """Give each of the library's ops an Autograd kernel."""
    for name in names:
        library.impl(name, _kernel(name), "Autograd")
