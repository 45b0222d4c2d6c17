"""What the machine can do at best, measured in the same run: reading bytes, and multiplying."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from mla_ops.bench.timing import Call
from mla_ops.workload import Workload

CUBE = {"cpu": 2048, "cuda": 8192}  # sizes of the square matmul


def readers(made: Workload) -> dict[str, Call]:
    """Return ways to read the useful bytes of a case once, from its own caches. The quickest of
    them is the floor: none does anything but read, and each is torch's own code.
    """
    count = made.case.useful_bytes // 4
    flat = [_numbers(cache, count) for cache in made.caches]
    found: dict[str, Call] = {
        "read sum": lambda turn: flat[turn % len(flat)].sum(),
        "read max": lambda turn: flat[turn % len(flat)].amax(),
    }
    if made.q.device.type == "cuda":
        half = count // 2
        found["read dot"] = lambda turn: torch.dot(
            flat[turn % len(flat)][:half], flat[turn % len(flat)][half : 2 * half]
        )
    return found


def _numbers(cache: Tensor, count: int) -> Tensor:
    """Return so many numbers of a cache; with many heads and few tokens some come twice."""
    flat = cache.flatten().view(torch.float32)
    return flat.repeat(-(-count // flat.numel()))[:count] if count > flat.numel() else flat[:count]


def matmul_flops(device: torch.device) -> float:
    """Return the FLOP/s of a square matmul, the quicker of bfloat16 and float32."""
    size = CUBE[device.type]
    best = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        a @ b
        seconds = []
        for _ in range(5):
            _wait(device)
            begin = time.perf_counter()
            a @ b
            _wait(device)
            seconds.append(time.perf_counter() - begin)
        best = max(best, 2 * size**3 / statistics.median(seconds))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
