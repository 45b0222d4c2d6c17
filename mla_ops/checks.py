"""What a caller may pass: every check of every public op, in one place.

The same function runs before the kernel in eager mode and in the fake kernel under `torch.compile`,
so that a mistake is reported alike in both. Sizes may be symbolic, so nothing here turns them into
plain integers. Contents of tensors are not looked at: see `validate.py`. The C++ files check again
what guards the memory they touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mla_ops.plan_spec import AITER, KINDS, NATIVE, AiterPlanSpec, PlanSpec, numel

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
WIDE = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = (*WIDE, *FLOAT8)
BACKENDS = ("auto", "aiter", "native", "torch")
MAX_HEADS = 128
MAX_Q_LEN = 8
# Beyond what any device has, few enough for a loop over them.
MAX_WORKERS = 1 << 16
INT32_MAX = (1 << 31) - 1
FLOAT32_MAX = torch.finfo(torch.float32).max


def _value(name: str, expected: object, got: object) -> NoReturn:
    raise ValueError(f"{name} must be {expected}, got {got}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def tensors(**tensors: Tensor) -> None:
    """The dispatcher takes None for any tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")


def scales_are_tensors(**scales: object) -> None:
    for name, scale in scales.items():
        if scale is not None and not isinstance(scale, Tensor):
            raise TypeError(
                f"{name} must be a one-element float32 tensor (a number would be baked into a "
                f"captured graph), got {type(scale).__name__}"
            )


def cache_request(
    pages: int, page_size: int, kv_lora_rank: int, rope: int, dtype: torch.dtype
) -> None:
    """What `mla_ops.new_kv_cache` makes."""
    _number("pages", pages, 0, INT32_MAX)
    _number("page_size", page_size, 1, INT32_MAX)
    _number("kv_lora_rank", kv_lora_rank, 1, INT32_MAX)
    _number("rope", rope, 0, INT32_MAX)
    if dtype not in (*WIDE, *FLOAT8):
        raise TypeError(f"dtype must be one of {_names([*WIDE, *FLOAT8])}, got {dtype}")


def _dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} must be {_names(allowed)}, got {_names([tensor.dtype])}")


def _dim(name: str, tensor: Tensor, layout: str, *dims: int) -> None:
    if tensor.dim() not in dims:
        _value(name, layout, f"shape {list(tensor.shape)}")


def _shape(name: str, tensor: Tensor, layout: str, *shape: int) -> None:
    if tensor.dim() != len(shape) or any(a != b for a, b in zip(tensor.shape, shape, strict=True)):
        _value(name, f"{layout} = {list(shape)}", f"shape {list(tensor.shape)}")


def _device(reference: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != reference.device:
            _value(name, f"on {reference.device} like the first tensor", f"one on {tensor.device}")


def _last_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        _value(name, "contiguous in its last dimension", f"strides {list(tensor.stride())}")


def _scale(name: str, scale: Tensor | None, of: str, dtype: torch.dtype, reference: Tensor) -> None:
    if dtype not in FLOAT8:
        if scale is not None:
            _value(name, f"None for a {of} of {_names([dtype])} (it belongs to float8)", "a tensor")
        return
    if scale is None:
        _value(name, f"a one-element float32 tensor for a {of} of {_names([dtype])}", "None")
    _one_float32(name, scale, reference)


def _one_float32(name: str, scale: Tensor, reference: Tensor) -> None:
    _dtype(name, scale, torch.float32)
    if scale.numel() != 1:
        _value(name, "one element", f"shape {list(scale.shape)}")
    _device(reference, **{name: scale})


def _kv_cache(kv_cache: Tensor) -> None:
    layout = "[pages, page_size, width], or [pages, page_size, 1, width],"
    _dim("kv_cache", kv_cache, layout, 3, 4)
    if kv_cache.dim() == 4 and kv_cache.shape[2] != 1:
        _value("kv_cache", layout + " with a 1 before width", f"shape {list(kv_cache.shape)}")
    if not 1 <= kv_cache.shape[1] <= INT32_MAX:
        _value("the page size of kv_cache", f"between 1 and {INT32_MAX}", kv_cache.shape[1])
    if kv_cache.shape[-1] < 1:
        _value("the width of kv_cache", "at least 1", kv_cache.shape[-1])
    _dtype("kv_cache", kv_cache, *WIDE, *FLOAT8)
    _last_contiguous("kv_cache", kv_cache)


def _buffer(name: str, tensor: Tensor) -> None:
    """A tensor that is written into: no two of its elements may share memory."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                _value(name, "without elements that overlap", f"strides {list(tensor.stride())}")
            span = stride * size
    no_gradient(**{name: tensor})


def no_gradient(**tensors: Tensor | None) -> None:
    """Refuse gradients through what is written in place, where they would end without a word.

    The ops that return tensors take them, and their backward raises.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            _value(
                name,
                "without requires_grad, or used under torch.no_grad() (nothing flows back from "
                "what is written in place)",
                "one that requires it",
            )


def decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    plan: Tensor | None,
    plan_spec: Sequence[int] | None,
    backend: str,
    want_lse: bool = False,
) -> None:
    tensors(q=q, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens)
    _dim("q", q, "[batch, q_len, heads, width]", 4)
    _dtype("q", q, *WIDE, *FLOAT8)
    batch, q_len, heads, width = q.shape
    if not 1 <= q_len <= MAX_Q_LEN:
        _value("q_len (the second size of q)", f"between 1 and {MAX_Q_LEN}", q_len)
    if not 1 <= heads <= MAX_HEADS:
        _value("heads (the third size of q)", f"between 1 and {MAX_HEADS}", heads)
    _last_contiguous("q", q)
    _kv_cache(kv_cache)
    if kv_cache.shape[-1] != width:
        _value("the width of kv_cache", f"q's, {width}", kv_cache.shape[-1])
    if not 1 <= kv_lora_rank <= width:
        _value("kv_lora_rank", f"between 1 and the width of q, {width}", kv_lora_rank)
    _dim("block_table", block_table, "[batch, pages]", 2)
    _dtype("block_table", block_table, torch.int32)
    if block_table.shape[0] != batch:
        _value("the first size of block_table", f"the batch, {batch}", block_table.shape[0])
    _last_contiguous("block_table", block_table)
    _dtype("seq_lens", seq_lens, torch.int32)
    _shape("seq_lens", seq_lens, "[batch]", batch)
    _last_contiguous("seq_lens", seq_lens)
    _device(q, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens, plan=plan)
    if isinstance(softmax_scale, float) and not abs(softmax_scale) <= FLOAT32_MAX:
        _value("softmax_scale", "a finite float32", softmax_scale)
    _scale("q_scale", q_scale, "q", q.dtype, q)
    _scale("kv_scale", kv_scale, "kv_cache", kv_cache.dtype, q)
    if backend not in BACKENDS:
        _value("backend", "one of " + ", ".join(BACKENDS), repr(backend))
    if (plan is None) != (plan_spec is None):
        _value("plan and plan_spec", "given together", "only one of them")
    if plan is not None and plan_spec is not None:
        plan_tensor(plan, plan_spec)
        made_for, needed = list(plan_spec[1:4]), [batch, q_len, heads]
        if any(a != b for a, b in zip(made_for, needed, strict=True)):
            _value("plan", f"made for [batch, q_len, heads] = {needed}", made_for)
        if plan_spec[0] == AITER:
            _aiter_plan(AiterPlanSpec(*plan_spec), q, kv_cache, want_lse)


def _aiter_plan(spec: AiterPlanSpec, q: Tensor, kv_cache: Tensor, want_lse: bool) -> None:
    if want_lse and not spec.lse:
        _value("plan", "made with return_lse=True", "one without")
    dtypes = [DTYPES[spec.q_dtype], DTYPES[spec.cache_dtype]]
    needed = [q.dtype, kv_cache.dtype]
    if dtypes != needed:
        _value("plan", f"made for q and kv_cache of {_names(needed)}", _names(dtypes))
    rows = [kv_cache.shape[1], kv_cache.stride(0) // kv_cache.stride(1)]
    made_for = [spec.page_size, spec.page_rows]
    if any(a != b for a, b in zip(made_for, rows, strict=True)):
        _value("plan", f"made for [page size, rows from page to page] = {rows}", made_for)


def decode_buffers(
    q: Tensor, kv_lora_rank: int, out_dtype: torch.dtype, out: Tensor, lse: Tensor | None
) -> None:
    tensors(out=out)
    batch, q_len, heads, _ = q.shape
    _shape("out", out, "[batch, q_len, heads, kv_lora_rank]", batch, q_len, heads, kv_lora_rank)
    _dtype("out", out, out_dtype)
    _last_contiguous("out", out)
    _buffer("out", out)
    if lse is not None:
        _shape("lse", lse, "[batch, q_len, heads]", batch, q_len, heads)
        _dtype("lse", lse, torch.float32)
        _buffer("lse", lse)
    _device(q, out=out, lse=lse)


def no_overlap(written: dict[str, Tensor | None], read: dict[str, Tensor | None]) -> None:
    """Refuse buffers whose memory range meets that of another argument."""
    seen = {name: _memory_range(tensor) for name, tensor in read.items() if tensor is not None}
    for name, tensor in written.items():
        if tensor is None:
            continue
        storage, begin, end = _memory_range(tensor)
        for other, (other_storage, other_begin, other_end) in seen.items():
            if storage == other_storage and begin < other_end and other_begin < end:
                _value(name, f"in memory of its own, apart from {other}", "one that overlaps it")
        seen[name] = (storage, begin, end)


def _memory_range(tensor: Tensor) -> tuple[int, int | torch.SymInt, int | torch.SymInt]:
    """Return (storage, first byte, byte behind the last). Fake tensors have no addresses, but share
    storages where the real ones do; real ones may share memory and not the storage."""
    itemsize = tensor.element_size()
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        storage = tensor.untyped_storage()._cdata
        begin = tensor.storage_offset() * itemsize
    else:
        storage, begin = 0, tensor.data_ptr()
    if tensor.numel() == 0:
        return storage, begin, begin
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return storage, begin, begin + (last + 1) * itemsize


def _number(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if not least <= value <= most:
        _value(name, f"between {least} and {most}", value)


def plan_spec(spec: Sequence[int]) -> None:
    kind = spec[0] if spec else None
    if kind not in (NATIVE, AITER):
        _value("the kind of plan", "0 (native) or 1 (aiter)", kind)
    fields = (PlanSpec if kind == NATIVE else AiterPlanSpec)._fields
    if len(spec) != len(fields):
        what = f"{len(fields)} integers for a plan of {KINDS[spec[0]]} (see mla_ops/plan_spec.py)"
        _value("plan_spec", what, list(spec))
    batch = spec[1]
    bounds = {
        "batch": (0, INT32_MAX - 1),
        "q_len": (1, MAX_Q_LEN),
        "heads": (1, MAX_HEADS),
        "workers": (1, MAX_WORKERS),
        "unit_tokens": (1, INT32_MAX),
        "unit_capacity": (batch, INT32_MAX),
        "granularity": (1, INT32_MAX),
        "max_splits": (-1, INT32_MAX),
        "pitch": (1, INT32_MAX),
        "page_size": (1, INT32_MAX),
        "page_rows": (1, INT32_MAX),
        "q_dtype": (0, len(DTYPES) - 1),
        "cache_dtype": (0, len(DTYPES) - 1),
        "lse": (0, 1),
        "group_heads": (1, MAX_HEADS),
    }
    for name, value in zip(fields, spec, strict=True):
        if name in bounds:
            _number(f"the {name} of a plan", value, *bounds[name])


def question(
    arch: str,
    backend: str,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    q_len: int,
    page_size: int,
    kv_lora_rank: int,
    rope: int,
) -> None:
    """What `mla_ops.supports` and `explain` are asked."""
    if not isinstance(arch, str) or not arch:
        raise TypeError(f"arch must be a string such as cpu, gfx942 or sm_90, got {arch!r}")
    if backend not in BACKENDS:
        _value("backend", "one of " + ", ".join(BACKENDS), repr(backend))
    for name, dtype in (("q_dtype", q_dtype), ("cache_dtype", cache_dtype)):
        if dtype not in (*WIDE, *FLOAT8):
            raise TypeError(f"{name} must be one of {_names([*WIDE, *FLOAT8])}, got {dtype!r}")
    _number("heads", heads, 1, MAX_HEADS)
    _number("q_len", q_len, 1, MAX_Q_LEN)
    _number("page_size", page_size, 1, INT32_MAX)
    _number("kv_lora_rank", kv_lora_rank, 1, INT32_MAX)
    _number("rope", rope, 0, INT32_MAX)


def plan_request(
    seq_lens: Tensor, block_table: Tensor, page_size: int, split_tokens: int, workers: int | None
) -> None:
    """What `mla_ops.plan` computes with; `plan` checks the rest."""
    tensors(seq_lens=seq_lens, block_table=block_table)
    _dim("seq_lens", seq_lens, "[batch]", 1)
    _dim("block_table", block_table, "[batch, pages]", 2)
    _number("page_size", page_size, 1, INT32_MAX)
    _number("split_tokens", split_tokens, 1, INT32_MAX)
    if workers is not None:
        _number("workers", workers, 1, MAX_WORKERS)


def plan_cache(kv_cache: Tensor, page_size: int, q_dtype: torch.dtype) -> None:
    """The cache that a plan is made for."""
    tensors(kv_cache=kv_cache)
    _kv_cache(kv_cache)
    if kv_cache.shape[1] != page_size:
        _value("page_size", f"that of kv_cache, {kv_cache.shape[1]}", page_size)
    if q_dtype not in DTYPES:
        raise TypeError(f"q_dtype must be one of {_names(DTYPES)}, got {q_dtype!r}")


def plan_tensor(plan: Tensor, spec: Sequence[int]) -> None:
    plan_spec(spec)
    tensors(plan=plan)
    _dtype("plan", plan, torch.int32)
    layout = "[batch + 1]" if spec[0] == NATIVE else "[integers that its sections need]"
    _shape("plan", plan, layout, numel(spec))
    _last_contiguous("plan", plan)


def plan(seq_lens: Tensor, block_table: Tensor, spec: Sequence[int]) -> None:
    plan_spec(spec)
    tensors(seq_lens=seq_lens, block_table=block_table)
    _dtype("seq_lens", seq_lens, torch.int32)
    _shape("seq_lens", seq_lens, "[batch]", spec[1])
    _last_contiguous("seq_lens", seq_lens)
    _dim("block_table", block_table, "[batch, pages]", 2)
    _dtype("block_table", block_table, torch.int32)
    if block_table.shape[0] != spec[1]:
        _value("the first size of block_table", f"the batch, {spec[1]}", block_table.shape[0])
    _device(seq_lens, block_table=block_table)
    if spec[0] == AITER:
        made_for = AiterPlanSpec(*spec)
        tokens = block_table.shape[1] * made_for.page_size
        if tokens > made_for.pitch:
            what = f"for sequences of at most {made_for.pitch} tokens, as the plan is"
            _value("block_table", what, f"one for {tokens}")


def quantize_fp8(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype | None, per_row: bool = False
) -> None:
    tensors(x=x)
    _dtype("x", x, *WIDE)
    if dtype is not None and dtype not in FLOAT8:
        raise TypeError(f"dtype must be {_names(FLOAT8)}, got {_names([dtype])}")
    if per_row and x.dim() < 1:
        _value("x", "[..., columns] for scales per row", "a scalar")
    if scale is not None and per_row:
        _dtype("scale", scale, torch.float32)
        _shape("scale", scale, "x's shape with 1 for the last", *x.shape[:-1], 1)
        _device(x, scale=scale)
    elif scale is not None:
        _one_float32("scale", scale, x)


def write_kv_cache(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    tensors(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    no_gradient(kv_c=kv_c, k_pe=k_pe, kv_scale=kv_scale)
    _dim("kv_c", kv_c, "[tokens, kv_lora_rank]", 2)
    _dim("k_pe", k_pe, "[tokens, rope]", 2)
    _dtype("kv_c", kv_c, *WIDE)
    _dtype("k_pe", k_pe, kv_c.dtype)
    _kv_cache(kv_cache)
    _buffer("kv_cache", kv_cache)
    if kv_c.shape[1] + k_pe.shape[1] != kv_cache.shape[-1]:
        widths = f"{kv_c.shape[1]} + {k_pe.shape[1]}"
        _value("the widths of kv_c and k_pe together", f"kv_cache's, {kv_cache.shape[-1]}", widths)
    _dim("slot_mapping", slot_mapping, "[tokens]", 1)
    _dtype("slot_mapping", slot_mapping, torch.int64, torch.int32)
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        if tensor.shape[0] != slot_mapping.shape[0]:
            _value(
                f"the first size of {name}",
                f"slot_mapping's, {slot_mapping.shape[0]}",
                tensor.shape[0],
            )
        _last_contiguous(name, tensor)
    _device(kv_cache, kv_c=kv_c, k_pe=k_pe, slot_mapping=slot_mapping)
    _scale("kv_scale", kv_scale, "kv_cache", kv_cache.dtype, kv_cache)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if out_a.dim() < 1:
        _value("out_a", "[..., kv_lora_rank]", "a scalar")
    _dtype("out_a", out_a, *WIDE)
    _dtype("out_b", out_b, out_a.dtype)
    _shape("out_b", out_b, "out_a's shape", *out_a.shape)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _dtype(name, lse, torch.float32)
        _shape(name, lse, "out_a's shape without the last", *out_a.shape[:-1])
    _device(out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


def sharding(seq_lens: Tensor, world: int, rank: int, interleave: int, q_len: int) -> None:
    """How `mla_ops.distributed` spreads sequences over ranks."""
    _dtype("seq_lens", seq_lens, torch.int32)
    _dim("seq_lens", seq_lens, "[batch]", 1)
    _number("world", world, 1, INT32_MAX)
    _number("rank", rank, 0, world - 1)
    _number("interleave", interleave, 1, INT32_MAX // world)
    _number("q_len", q_len, 1, MAX_Q_LEN)


def partials(outs: Tensor, lses: Tensor) -> None:
    tensors(outs=outs, lses=lses)
    if outs.dim() < 2 or not outs.shape[0]:
        _value("outs", "[parts, ..., kv_lora_rank] of one part or more", list(outs.shape))
    _dtype("outs", outs, *WIDE)
    _dtype("lses", lses, torch.float32)
    _shape("lses", lses, "outs' shape without the last", *outs.shape[:-1])
    _device(outs, lses=lses)
