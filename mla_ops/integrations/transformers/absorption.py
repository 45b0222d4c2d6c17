"""W_UK and W_UV of a model's `kv_b_proj`, and what they are multiplied with.

`kv_b_proj` makes keys and values of a latent c: k_nope = W_UK c and v = W_UV c for every head.
Since q . (W_UK c) = (W_UK' q) . c, the query takes W_UK in, attention runs on the latents
themselves, and W_UV is applied to its result (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). Both
matrices are views of the weight: no memory, and nothing goes stale when it is moved or trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mla_ops import checks

# Relative difference allowed between a module's own expansion and W_UK c, W_UV c: bfloat16 and TF32
# stay well below, and another expansion is as far off as the numbers are large.
AGREEMENT = 3e-2


def views(module: Any) -> tuple[Tensor, Tensor]:
    """Return W_UK [H, nope, R] and W_UV [H, v, R] of an attention module."""
    nope, value = module.qk_nope_head_dim, module.v_head_dim
    weight = module.kv_b_proj.weight
    per_head = weight.view(-1, nope + value, weight.shape[-1])
    return per_head[:, :nope], per_head[:, nope:]


def absorb(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries [B, H, S, nope + rope] into q_nope [B, S, H, R] and q_pe [B, S, H, rope]."""
    w_uk, _ = views(module)
    batch, heads, q_len, _ = query.shape
    q_nope, q_pe = query.split((w_uk.shape[1], query.shape[-1] - w_uk.shape[1]), -1)
    rows = q_nope.transpose(0, 1).reshape(heads, batch * q_len, -1)
    absorbed = torch.bmm(rows, w_uk).view(heads, batch, q_len, -1)
    return absorbed.permute(1, 2, 0, 3), q_pe.transpose(1, 2)


def expand(module: Any, out: Tensor) -> Tensor:
    """Turn attention over latents [B, S, H, R] into values [B, S, H, v]."""
    _, w_uv = views(module)
    batch, q_len, heads, rank = out.shape
    rows = out.permute(2, 0, 1, 3).reshape(heads, batch * q_len, rank)
    # The weight on the left: the other way round a CPU copies it in bfloat16, five times the time.
    values = torch.bmm(w_uv, rows.transpose(1, 2)).view(heads, -1, batch, q_len)
    return values.permute(2, 3, 0, 1)


def check(name: str, module: Any) -> None:
    """Refuse a module whose W_UK and W_UV cannot be taken. Raises ValueError with the reason."""
    linear = module.kv_b_proj
    what = f"{name}.kv_b_proj"
    if type(linear) is not nn.Linear:
        _refuse(
            f"{what} must be a torch.nn.Linear, got {type(linear).__name__}: the weight of a "
            "quantised layer cannot be split into W_UK and W_UV, and that of an adapter's is not "
            "all of it (merge adapters, and keep kv_b_proj out of the quantisation)"
        )
    weight = linear.weight
    if weight.is_meta:
        _refuse(
            f"{what} must hold its weight, got one on the meta device (offloaded by a device_map, "
            "or not loaded yet)"
        )
    if type(weight.data) is not Tensor or weight.dtype not in checks.WIDE:
        kind = f"{type(weight.data).__name__} of {str(weight.dtype).removeprefix('torch.')}"
        _refuse(f"{what}.weight must be a plain bfloat16, float16 or float32 tensor, got {kind}")
    if linear.bias is not None:
        _refuse(f"{what} must have no bias, got one")
    _check_agreement(name, module)


def _check_agreement(name: str, module: Any) -> None:
    """Compare with the module's own expansion on two tokens: a family that expands otherwise is
    refused by name and not served wrongly."""
    weight = module.kv_b_proj.weight
    generator = torch.Generator().manual_seed(0)
    sizes = (module.kv_lora_rank, module.qk_rope_head_dim)
    with torch.no_grad():
        kv_c, k_pe = (
            torch.randn(1, 1, 2, size, generator=generator).to(weight.device, weight.dtype)
            for size in sizes
        )
        keys, values = type(module).expand_kv(module, kv_c, k_pe)
        w_uk, w_uv = views(module)
        mine = torch.einsum("hnr,btr->hbtn", w_uk.float(), kv_c[0].float())[:, 0]
        pairs = (
            ("keys", keys[0], torch.cat((mine, k_pe[0].float().expand(mine.shape[0], -1, -1)), -1)),
            ("values", values[0], torch.einsum("hvr,tr->htv", w_uv.float(), kv_c[0, 0].float())),
        )
        for which, theirs, ours in pairs:
            if theirs.shape != ours.shape:
                _refuse(
                    f"the {which} of {name}.expand_kv must have shape {list(ours.shape)}, got "
                    f"{list(theirs.shape)}"
                )
            error = float((theirs.float() - ours).norm() / ours.norm().clamp(min=1e-30))
            if not error <= AGREEMENT:
                _refuse(
                    f"the {which} of {name}.expand_kv must be kv_b_proj of the latent, got others "
                    f"(relative difference {error:.1e})"
                )


def _refuse(reason: str) -> None:
    raise ValueError(f"mla_ops cannot serve this model: {reason}")
