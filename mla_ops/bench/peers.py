"""Other libraries' MLA decode kernels, where they can be imported.

Their results are checked before they are timed, like everybody's. Called as their releases of 2026
want it; written from their published signatures: docs/benchmarks says which of these have run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mla_ops import checks
from mla_ops.bench.providers import Provider, Refused, Run
from mla_ops.workload import SOFTMAX_SCALE, Workload

SPLITS = 32  # of a sequence, for the kernels that are told; a compromise over all cases
WORKSPACE = 128 << 20  # bytes, FlashInfer's own recommendation


def _missing(*modules: str) -> Callable[[torch.device], str | None]:
    """Say why none of these modules can be had, without importing more than their packages."""

    def missing(device: torch.device) -> str | None:
        package = modules[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if device.type != "cuda":
            return f"{package} is for GPUs"
        try:
            _first(modules)
        except Exception as error:
            return f"{package} cannot be imported: {type(error).__name__}: {error}"
        return None

    return missing


def _first(modules: Sequence[str]) -> object:
    """Import the first of these that there is."""
    for name in modules[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(modules[-1])


def _version(*names: str) -> Callable[[], str]:
    def version() -> str:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "unknown"

    return version


def _token_indices(made: Workload) -> tuple[Tensor, Tensor]:
    """Return where each sequence begins, [B + 1], and its rows in the flat cache, one after the
    other."""
    page_size, device = made.case.page_size, made.q.device
    rows = []
    for b, length in enumerate(made.case.lengths):
        token = torch.arange(length, device=device)
        rows.append(made.block_table[b, token // page_size] * page_size + token % page_size)
    begins = torch.tensor([0, *made.case.lengths], device=device).cumsum(0)
    return begins.int(), torch.cat(rows).int()


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise Refused(what)


def _one_query_token(made: Workload) -> None:
    _need(made.case.q_len == 1, f"it takes 1 query token, got {made.case.q_len}")


def _wide(made: Workload) -> None:
    _need(
        made.case.cache_dtype == made.case.q_dtype and made.kv_scale is None,
        "q and cache must be of one dtype that is not float8",
    )


def _flash_mla(made: Workload) -> Run:
    import flash_mla

    case = made.case
    _wide(made)
    _need(case.page_size == 64, f"pages must be of 64 tokens, got {case.page_size}")
    metadata, splits = flash_mla.get_mla_metadata(made.seq_lens, case.q_len * case.heads, 1)
    caches = [cache[:, :, None] for cache in made.caches]

    def run(turn: int) -> Tensor:
        out, _ = flash_mla.flash_mla_with_kvcache(
            made.q,
            caches[turn % len(caches)],
            made.block_table,
            made.seq_lens,
            case.rank,
            metadata,
            splits,
            softmax_scale=SOFTMAX_SCALE,
            causal=True,
        )
        return out

    return run


def _flashinfer(made: Workload) -> Run:
    from flashinfer.mla import (
        BatchMLAPagedAttentionWrapper,
    )

    case, device = made.case, made.q.device
    _wide(made)
    pages = torch.tensor([0, *(-(-n // case.page_size) for n in case.lengths)], device=device)
    begins = pages.cumsum(0).int()
    counts = pages[1:].tolist()
    indices = torch.cat([made.block_table[b, :count] for b, count in enumerate(counts)])
    queries = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE, dtype=torch.int8, device=device), backend="auto"
    )
    wrapper.plan(
        queries,
        begins,
        indices,
        made.seq_lens,
        case.heads,
        case.rank,
        case.rope,
        case.page_size,
        True,
        SOFTMAX_SCALE,
        made.q.dtype,
        case.cache_dtype,
    )
    flat = made.q.reshape(-1, case.heads, case.width)
    nope, pe = flat[..., : case.rank].contiguous(), flat[..., case.rank :].contiguous()

    def run(turn: int) -> Tensor:
        cache = made.caches[turn % len(made.caches)]
        out = wrapper.run(nope, pe, cache[..., : case.rank], cache[..., case.rank :])
        return out.view(case.batch, case.q_len, case.heads, case.rank)

    return run


VLLM = (
    "vllm.v1.attention.ops.triton_decode_attention",
    "vllm.attention.ops.triton_decode_attention",
)


def _vllm_triton(made: Workload) -> Run:
    forward = _first(VLLM).decode_attention_fwd  # type: ignore[attr-defined]
    case, q = made.case, made.q[:, 0]
    _one_query_token(made)
    _need(case.q_dtype not in checks.FLOAT8, "q must not be float8")
    out = q.new_empty(case.batch, case.heads, case.rank)
    lse = q.new_empty(case.batch, case.heads, dtype=torch.float32)
    shape = (case.batch, case.heads, SPLITS, case.rank + 1)
    parts = q.new_empty(shape, dtype=torch.float32)
    scales = {} if made.kv_scale is None else {"k_scale": made.kv_scale, "v_scale": made.kv_scale}

    def run(turn: int) -> Tensor:
        cache = made.caches[turn % len(made.caches)][:, :, None]
        forward(
            q,
            cache,
            cache[..., : case.rank],
            out,
            lse,
            made.block_table,
            made.seq_lens,
            parts,
            SPLITS,
            SOFTMAX_SCALE,
            page_size=case.page_size,
            **scales,
        )
        return out[:, None]

    return run


SGLANG = ("sglang.srt.layers.attention.triton_ops.decode_attention",)


def _sglang_triton(made: Workload) -> Run:
    forward = _first(SGLANG).decode_attention_fwd  # type: ignore[attr-defined]
    case, q = made.case, made.q[:, 0]
    _one_query_token(made)
    _need(case.q_dtype not in checks.FLOAT8, "q must not be float8")
    begins, rows = _token_indices(made)
    out = q.new_empty(case.batch, case.heads, case.rank)
    shape = (case.batch, case.heads, SPLITS, case.rank)
    parts = q.new_empty(shape, dtype=torch.float32)
    lse = q.new_empty(shape[:3], dtype=torch.float32)
    splits = torch.full((case.batch,), SPLITS, dtype=torch.int32, device=q.device)
    scale = 1.0 if made.kv_scale is None else float(made.kv_scale)

    def run(turn: int) -> Tensor:
        flat = made.caches[turn % len(made.caches)].view(-1, 1, case.width)
        forward(
            q,
            flat,
            flat[..., : case.rank],
            out,
            begins,
            rows,
            parts,
            lse,
            splits,
            SPLITS,
            sm_scale=SOFTMAX_SCALE,
            k_scale=scale,
            v_scale=scale,
        )
        return out[:, None]

    return run


def _aiter(made: Workload) -> Run:
    from aiter.mla import mla_decode_fwd

    case, device = made.case, made.q.device
    # With heads it has no kernel for it aborts the process: only what each release has.
    _need(case.heads in (16, 128), f"heads must be 16 or 128, got {case.heads}")
    _need(case.q_len in (1, 2, 4), f"query tokens must be 1, 2 or 4, got {case.q_len}")
    _need(case.width == 576, f"the width must be 576, got {case.width}")
    _need(
        (case.q_dtype in checks.FLOAT8) == (case.cache_dtype in checks.FLOAT8),
        "q and cache must both be float8, or neither",
    )
    begins, rows = _token_indices(made)
    queries = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len
    ones = torch.ones(case.batch, dtype=torch.int32, device=device)
    flat_q = made.q.reshape(-1, case.heads, case.width)
    out = torch.empty(len(flat_q), case.heads, case.rank, dtype=torch.bfloat16, device=device)

    def run(turn: int) -> Tensor:
        mla_decode_fwd(
            q=flat_q,
            kv_buffer=made.caches[turn % len(made.caches)].view(-1, 1, 1, case.width),
            o=out,
            qo_indptr=queries,
            kv_indptr=begins,
            kv_indices=rows,
            kv_last_page_lens=ones,
            max_seqlen_q=case.q_len,
            sm_scale=SOFTMAX_SCALE,
            q_scale=made.q_scale,
            kv_scale=made.kv_scale,
        )
        return out.view(case.batch, case.q_len, case.heads, case.rank)

    return run


PEERS = (
    Provider("FlashMLA", False, _flash_mla, _missing("flash_mla"), _version("flash_mla")),
    Provider(
        "FlashInfer",
        False,
        _flashinfer,
        _missing("flashinfer.mla"),
        _version("flashinfer-python", "flashinfer"),
    ),
    Provider("vLLM triton", False, _vllm_triton, _missing(*VLLM), _version("vllm")),
    Provider("SGLang triton", False, _sglang_triton, _missing(*SGLANG), _version("sglang")),
    Provider("aiter", False, _aiter, _missing("aiter.mla"), _version("amd-aiter", "aiter")),
)
