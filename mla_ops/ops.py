"""The ops of namespace `mla`: every schema, fake kernel and backward, and nothing else has one.

Shape letters, used in all docstrings: B sequences, S query tokens per sequence, H query heads,
R `kv_lora_rank` (the latent width), D = R + rope width (of q and of a cache row), P pages of the
cache.

Each public op is a pair: `prepare` checks the arguments and allocates the outputs, `run` fills them
through a private op. The fake kernel *is* `prepare`, so that compiled and eager mode cannot
disagree. Private ops (leading underscore) write into buffers; the compiled module and
`backends/torch.py` implement them. A new backend of decode is a row in `capability.py`, its name in
`checks.BACKENDS` and a private op `_decode_<name>`; a new public op is listed in
`csrc/bindings.cpp` too, for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_ops import _autograd, _compiled, capability, checks, validate
from mla_ops.backends import aiter as aiter_backend
from mla_ops.backends import torch as torch_backend
from mla_ops.plan_spec import AITER, numel

LIBRARY = torch.library.Library("mla", "DEF")
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

_PROBLEM = (
    "Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, float softmax_scale, *, "
    "int kv_lora_rank=512, bool causal=True, Tensor? q_scale=None, Tensor? kv_scale=None, "
    "Tensor? plan=None, SymInt[]? plan_spec=None"
)
_PUBLIC = _PROBLEM + ', str backend="auto"'
_INTO = _PROBLEM + ", Tensor(a!) out, Tensor(b!)? lse"

PRIVATE = {
    "_decode_native": f"({_INTO}) -> ()",
    "_decode_torch": f"({_INTO}) -> ()",
    "_decode_aiter": f"({_INTO}) -> ()",
    "_plan_aiter": "(Tensor seq_lens, Tensor block_table, SymInt[] plan_spec, Tensor(a!) plan) "
    "-> ()",
    "_plan": "(Tensor seq_lens, Tensor block_table, SymInt[] plan_spec, Tensor(a!) plan) -> ()",
    "_quantize_fp8": "(Tensor x, Tensor? scale, bool per_row, Tensor(a!) out, "
    "Tensor(b!) scale_out) -> ()",
    "_write_kv_cache": "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, "
    "Tensor? kv_scale) -> ()",
    "_merge_states": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
}
PUBLIC: dict[str, str] = {}


def _define(
    name: str,
    schema: str,
    prepare: Callable[..., Any],
    run: Callable[..., None],
    written: Callable[..., Iterable[Tensor | None]] = lambda *args, **kwargs: (),
) -> None:
    """Define an op. `written` picks the arguments that it writes into: their versions go up, so
    that a backward that needs what they held raises."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        outputs = prepare(*args, **kwargs)
        run(outputs, *args, **kwargs)
        for tensor in written(*args, **kwargs):
            if tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return outputs

    PUBLIC[name] = schema
    LIBRARY.define(name + schema, tags=TAGS)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mla::{name}", prepare, lib=LIBRARY)


# decode


def output_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of decode's output: q's, or bfloat16 where q is float8."""
    return torch.bfloat16 if q.dtype in checks.FLOAT8 else q.dtype


def _check_decode(
    want_lse: bool,
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
    plan: Tensor | None = None,
    plan_spec: Sequence[int] | None = None,
    backend: str = "auto",
) -> None:
    checks.decode(
        q,
        kv_cache,
        block_table,
        seq_lens,
        softmax_scale,
        kv_lora_rank,
        q_scale,
        kv_scale,
        plan,
        plan_spec,
        backend,
        want_lse,
    )
    capability.decide(q, kv_cache, kv_lora_rank, causal, want_lse, backend, plan_spec)


def _new_out(q: Tensor, kv_lora_rank: int) -> Tensor:
    return q.new_empty((*q.shape[:3], kv_lora_rank), dtype=output_dtype(q))


def _prepare_decode(q: Tensor, *args: Any, kv_lora_rank: int = 512, **kwargs: Any) -> Tensor:
    _check_decode(False, q, *args, kv_lora_rank=kv_lora_rank, **kwargs)
    return _new_out(q, kv_lora_rank)


def _prepare_decode_lse(
    q: Tensor, *args: Any, kv_lora_rank: int = 512, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    _check_decode(True, q, *args, kv_lora_rank=kv_lora_rank, **kwargs)
    return _new_out(q, kv_lora_rank), q.new_empty(q.shape[:3], dtype=torch.float32)


def _prepare_decode_out(
    *args: Any, out: Tensor, lse: Tensor | None, kv_lora_rank: int = 512, **kwargs: Any
) -> None:
    _check_decode(lse is not None, *args, kv_lora_rank=kv_lora_rank, **kwargs)
    q = args[0]
    checks.decode_buffers(q, kv_lora_rank, output_dtype(q), out, lse)
    read = dict(zip(("q", "kv_cache", "block_table", "seq_lens"), args[:4], strict=True))
    read.update({name: kwargs.get(name) for name in ("q_scale", "kv_scale", "plan")})
    checks.no_gradient(**read)
    checks.no_overlap({"out": out, "lse": lse}, read)


def _fill(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    kv_cache: Tensor,
    *args: Any,
    kv_lora_rank: int = 512,
    causal: bool = True,
    backend: str = "auto",
    **kwargs: Any,
) -> None:
    spec = kwargs.get("plan_spec")
    decision = capability.decide(q, kv_cache, kv_lora_rank, causal, lse is not None, backend, spec)
    private = getattr(torch.ops.mla, f"_decode_{decision.backend}").default
    kwargs.update(kv_lora_rank=kv_lora_rank, causal=causal, out=out, lse=lse)
    if not validate.checked_by_kernel(decision.backend, q.device):
        validate.tables(*args[:2], *kv_cache.shape[:2])
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.profiler.record_function(f"mla::decode[{decision.backend} {decision.kernel}]"):
            private(q, kv_cache, *args, **kwargs)
    else:
        private(q, kv_cache, *args, **kwargs)


# plan


def _prepare_plan(seq_lens: Tensor, block_table: Tensor, plan_spec: Sequence[int]) -> Tensor:
    checks.plan(seq_lens, block_table, plan_spec)
    return seq_lens.new_empty(numel(plan_spec))


def _prepare_plan_(
    plan: Tensor, seq_lens: Tensor, block_table: Tensor, plan_spec: Sequence[int]
) -> None:
    checks.plan(seq_lens, block_table, plan_spec)
    checks.plan_tensor(plan, plan_spec)
    checks.no_overlap({"plan": plan}, {"seq_lens": seq_lens, "block_table": block_table})


def _fill_plan(
    plan: Tensor, seq_lens: Tensor, block_table: Tensor, plan_spec: Sequence[int]
) -> None:
    ops = torch.ops.mla
    private = ops._plan_aiter if plan_spec[0] == AITER else ops._plan
    private.default(seq_lens, block_table, plan_spec, plan)


# the rest


def _prepare_quantize_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    per_row: bool = False,
) -> tuple[Tensor, Tensor]:
    checks.quantize_fp8(x, scale, dtype, per_row)
    dtype = capability.float8_dtype(x.device) if dtype is None else dtype
    if per_row:
        scale_out = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    elif scale is None:
        # The GPU kernel gathers the largest magnitude in a second float, behind the one returned.
        scale_out = x.new_empty(2, dtype=torch.float32)[:1]
    else:
        scale_out = x.new_empty(1, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scale_out


def _run_quantize_fp8(
    outputs: tuple[Tensor, Tensor],
    x: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    per_row: bool = False,
) -> None:
    torch.ops.mla._quantize_fp8.default(x, scale, per_row, *outputs)


def _prepare_write_kv_cache(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
) -> None:
    checks.write_kv_cache(kv_c, k_pe, kv_cache, slot_mapping, kv_scale)
    read = {"kv_c": kv_c, "k_pe": k_pe, "slot_mapping": slot_mapping, "kv_scale": kv_scale}
    checks.no_overlap({"kv_cache": kv_cache}, read)


def _run_write_kv_cache(
    _: None,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
) -> None:
    torch.ops.mla._write_kv_cache.default(kv_c, k_pe, kv_cache, slot_mapping, kv_scale)


def _prepare_merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    checks.merge_states(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


for _name, _schema in PRIVATE.items():
    LIBRARY.define(_name + _schema, tags=TAGS)

_define(
    "decode",
    f"({_PUBLIC}) -> Tensor",
    _prepare_decode,
    lambda out, *args, **kwargs: _fill(out, None, *args, **kwargs),
)
_define(
    "decode_lse",
    f"({_PUBLIC}) -> (Tensor, Tensor)",
    _prepare_decode_lse,
    lambda outputs, *args, **kwargs: _fill(*outputs, *args, **kwargs),
)
_define(
    "decode_out",
    f"({_PUBLIC}, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _prepare_decode_out,
    lambda _, *args, out, lse, **kwargs: _fill(out, lse, *args, **kwargs),
    written=lambda *args, out, lse, **kwargs: (out, lse),
)
_define(
    "plan",
    "(Tensor seq_lens, Tensor block_table, SymInt[] plan_spec) -> Tensor",
    _prepare_plan,
    _fill_plan,
)
_define(
    "plan_",
    "(Tensor(a!) plan, Tensor seq_lens, Tensor block_table, SymInt[] plan_spec) -> ()",
    _prepare_plan_,
    lambda _, *args: _fill_plan(*args),
    written=lambda plan, *args: (plan,),
)
_define(
    "quantize_fp8",
    "(Tensor x, Tensor? scale=None, ScalarType? dtype=None, bool per_row=False) "
    "-> (Tensor, Tensor)",
    _prepare_quantize_fp8,
    _run_quantize_fp8,
)
_define(
    "write_kv_cache",
    "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, "
    "Tensor? kv_scale=None) -> ()",
    _prepare_write_kv_cache,
    _run_write_kv_cache,
    written=lambda kv_c, k_pe, kv_cache, *args: (kv_cache,),
)
_define(
    "merge_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    _prepare_merge_states,
    lambda outputs, *args: torch.ops.mla._merge_states.default(*args, *outputs),
)

# In Python, for every device and op without a compiled kernel. _decode_native has none.
for _name, _kernel in (*torch_backend.KERNELS.items(), *aiter_backend.KERNELS.items()):
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")

if _compiled.load() is None:
    _autograd.register(LIBRARY, PUBLIC)
