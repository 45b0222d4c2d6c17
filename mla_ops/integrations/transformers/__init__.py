"""DeepSeek-class models of Hugging Face transformers decode through `torch.ops.mla.decode`.

    from mla_ops.integrations.transformers import enable

    enable(model)
    model.generate(...)

Since 5.15 transformers caches latents and expands all of them to keys and values at every step.
`enable` keeps them in pages, absorbs `kv_b_proj` into the query and attends to the latents
themselves; a prefill stays transformers' own. docs/transformers.md says more.
"""

from __future__ import annotations

from mla_ops.integrations.transformers.cache import LatentCache
from mla_ops.integrations.transformers.switch import Enabled, disable, enable

__all__ = ["Enabled", "LatentCache", "disable", "enable"]
