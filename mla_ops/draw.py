"""Random caches, quickly: eight bytes at a time, as one integer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 32 << 20  # bytes drawn at a time

# (and, or) for each number's bits, that leave no NaN, no infinity and a mean square near 1 once
# multiplied with SCALES: float8 loses the top bit of its exponent (8 exponents alike often, up to
# 1.875; e4m3fnuz also the pattern 0x80, which is its NaN), the others keep its two lowest bits
# alone, below 1 (4 exponents, 0.125 to 2).
MASKS = {
    torch.float8_e4m3fn: (0xBF, 0),
    torch.float8_e4m3fnuz: (0xBF, 0x08),
    torch.bfloat16: (0x81FF, 0x3E00),
    torch.float16: (0x8FFF, 0x3000),
    torch.float32: (0x81FFFFFF, 0x3E000000),
}
SCALES = {torch.float8_e4m3fn: 1.67, torch.float8_e4m3fnuz: 2.4}


def cache(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    step: Callable[[], object] = lambda: None,
) -> Tensor:
    """Return random numbers of a dtype; their bytes must be a multiple of 8. Calls `step` after
    each chunk."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size % 8:
        raise ValueError(f"the bytes of {list(shape)} must be a multiple of 8, got {size}")
    words = torch.empty(size // 8, dtype=torch.int64, device=device)
    keep, force = (_spread(mask, dtype.itemsize) for mask in MASKS[dtype])
    for chunk in words.split(CHUNK // 8):
        chunk.random_(-(1 << 63), None, generator=generator)
        chunk &= keep
        chunk |= force
        step()
    return words.view(dtype).view(shape)


def scale(dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the scale that goes with a cache of float8; None for the others."""
    number = SCALES.get(dtype)
    return None if number is None else torch.full((1,), number, device=device)


def _spread(mask: int, itemsize: int) -> int:
    """Return a mask for one number as one for eight bytes of them, as a signed integer."""
    whole = sum(mask << (8 * itemsize * i) for i in range(8 // itemsize))
    return whole - (1 << 64) if whole >> 63 else whole
