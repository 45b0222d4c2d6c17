"""Multi-head Latent Attention decode as one PyTorch op: `torch.ops.mla.decode`, or
`mla_ops.decode`."""

import sys

__version__ = "0.1.0"

# `python -m mla_ops doctor` must work where torch does not. While the package is imported to look
# for its __main__, Python's own arguments stand as -m and what follows the module's name.
if sys.argv[:2] != ["-m", "doctor"] or "mla_ops" not in sys.orig_argv:
    from mla_ops import _log
    from mla_ops.capability import explain, supports
    from mla_ops.decode import decode, merge_states
    from mla_ops.kv_cache import new_kv_cache, quantize_fp8, write_kv_cache
    from mla_ops.plan import DecodePlan, plan
    from mla_ops.subjects import warmup

    _log.follow_environment()

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
