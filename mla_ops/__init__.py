"""Multi-head Latent Attention decode as one PyTorch op: `torch.ops.mla.decode`, or
`mla_ops.decode`."""

from mla_ops.capability import explain, supports
from mla_ops.decode import decode, merge_states
from mla_ops.kv_cache import new_kv_cache, quantize_fp8, write_kv_cache
from mla_ops.plan import DecodePlan, plan
from mla_ops.subjects import warmup

__version__ = "0.1.0"

__all__ = [
    "DecodePlan",
    "decode",
    "explain",
    "merge_states",
    "new_kv_cache",
    "plan",
    "quantize_fp8",
    "supports",
    "warmup",
    "write_kv_cache",
]
