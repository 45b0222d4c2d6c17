"""The oracle: absorbed MLA decode in float64, one sequence at a time, as the formula says it.

    out[b, s, h, :] = sum_t w_t row_t[:R],  w = softmax_t(softmax_scale * q[b, s, h, :] . row_t)

over the rows t that query token s may see, with rows and q dequantised (DeepSeek-V2,
arXiv:2405.04434, section 2.1.2).
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    *,
    kv_lora_rank: int = 512,
    causal: bool = True,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, S, H, R] and lse [B, S, H] (natural log), both float64. Arguments as
    `mla_ops.decode`."""
    batch, q_len, heads, _ = q.shape
    pages, page_size = kv_cache.shape[:2]
    out = torch.zeros(batch, q_len, heads, kv_lora_rank, dtype=torch.float64, device=q.device)
    lse = torch.full((batch, q_len, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for b in range(batch):
        length = int(seq_lens[b])
        token = torch.arange(length, device=q.device)
        page = block_table[b, token // page_size].long()
        rows = dequantise(kv_cache.reshape(pages, page_size, -1)[page, token % page_size], kv_scale)
        for s in range(q_len):
            visible = max(0, length - q_len + 1 + s) if causal else length
            if visible == 0:
                continue
            scores = softmax_scale * dequantise(q[b, s], q_scale) @ rows[:visible].T
            lse[b, s] = scores.logsumexp(-1)
            out[b, s] = scores.softmax(-1) @ rows[:visible, :kv_lora_rank]
    return out, lse


def dequantise(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return x in float64, times its scale where it has one."""
    return x.double() if scale is None else x.double() * scale.double().reshape(())


def quantize_fp8(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, per_row: bool = False
) -> tuple[Tensor, Tensor]:
    """Return x / scale as float8, the nearest code (ties to the even one), and the scale or scales.

    On the CPU.
    """
    if per_row:
        rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), 0)
        scales = [None] * len(rows) if scale is None else scale.reshape(-1)
        each = [quantize_fp8(row, one, dtype) for row, one in zip(rows, scales, strict=True)]
        parts = [torch.empty(0)] if not each else []
        codes = torch.cat([code.view(torch.uint8).reshape(-1) for code, _ in each] or parts)
        found = torch.cat([one.reshape(1) for _, one in each] or parts)
        return (
            codes.to(torch.uint8).view(dtype).reshape(x.shape),
            found.reshape(*x.shape[:-1], 1),
        )
    largest = torch.finfo(dtype).max
    wide = x.float()
    if scale is None:
        finite = wide[wide.isfinite()].abs()
        top = finite.max() if finite.numel() else torch.tensor(0.0)
        scale = (top / largest).reshape(1)
        scale = torch.where(scale == 0, 1.0, scale)
    wide = wide / scale.reshape(())
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    numbers, code = (
        codes[:0x7F].double() if dtype == torch.float8_e4m3fn else codes[:0x80].double(),
        torch.arange(0x80),
    )
    magnitude = wide.abs().double().clamp(max=largest).nan_to_num(0.0)
    above = torch.searchsorted(numbers, magnitude).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    up, down = numbers[above] - magnitude, magnitude - numbers[below]
    take_up = (up < down) | ((up == down) & (code[above] % 2 == 0))
    nearest = torch.where(take_up, above, below).to(torch.uint8)
    negative = torch.signbit(wide)
    if dtype == torch.float8_e4m3fnuz:
        negative &= nearest != 0
        nan = 0x80
    else:
        nan = 0x7F
    result = torch.where(negative, nearest | 0x80, nearest)
    result = torch.where(wide.isnan(), nan, result)
    if dtype == torch.float8_e4m3fn:
        result = torch.where(wide.isnan() & torch.signbit(wide), 0xFF, result)
    return result.to(torch.uint8).view(dtype), scale
