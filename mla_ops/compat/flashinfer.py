"""FlashInfer's MLA wrapper (`flashinfer/mla.py`, backends fa2 and fa3) over `mla_ops.decode`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_ops import checks
from mla_ops.compat._arguments import block_table, refuse, uniform_q_len
from mla_ops.decode import decode
from mla_ops.plan import DecodePlan, plan


class BatchMLAPagedAttentionWrapper:
    """`plan(...)` once for each step, `run(...)` once for each layer.

    float_workspace_buffer: only its device is used. backend: "auto", "fa2" or "fa3", all alike.
    use_cuda_graph must be False; the buffers behind it then have no effect, as in FlashInfer.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        refuse("flashinfer", use_cuda_graph=(use_cuda_graph, False))
        if backend not in ("auto", "fa2", "fa3"):
            raise ValueError(f"backend must be one of auto, fa2, fa3, got {backend!r}")
        self.device = float_workspace_buffer.device
        self._table: Tensor | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Say what the next calls of `run` attend to; copies index pointers to the host, as
        FlashInfer.

        qo_indptr: [B + 1], the same number of query tokens for each sequence. kv_indptr: [B + 1],
        kv_indices: pages. kv_len_arr: [B], tokens in the cache, the query tokens included.
        """
        refuse("flashinfer", use_profiler=(use_profiler, False))
        for name, dtype in (("q_data_type", q_data_type), ("kv_data_type", kv_data_type)):
            if dtype not in checks.WIDE:
                raise TypeError(f"{name} must be bfloat16, float16 or float32, got {dtype}")
        self._q_len = uniform_q_len(qo_indptr)
        batch = qo_indptr.numel() - 1
        kv_indptr, kv_indices = kv_indptr.to(self.device), kv_indices.to(self.device)
        table, pages = block_table(kv_indptr, kv_indices, batch)
        lengths = kv_len_arr.cpu()
        if lengths.shape != (batch,) or bool(((lengths < 0) | (lengths > pages * page_size)).any()):
            raise ValueError(
                f"kv_len_arr must be [{batch}] between 0 and the rows of each sequence's pages, "
                f"{(pages * page_size)[:9].tolist()}, got {lengths[:9].tolist()}"
            )
        self._table, self._seq_lens = table, lengths.to(self.device, torch.int32)
        # Where latent and rope part lie in two places, the pages in use are put together in order.
        self._used = kv_indices[int(kv_indptr[0]) : int(kv_indptr[-1])].long()
        packed = torch.arange(len(self._used), device=self.device, dtype=torch.int32)
        self._packed_table, _ = block_table(kv_indptr - kv_indptr[0], packed, batch)
        self._sizes = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self._dtypes = (q_data_type, kv_data_type)
        self._causal, self._sm_scale = causal, sm_scale
        self._plan: DecodePlan | None = None

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to what was planned.

        q_nope: [T, H, R]. q_pe: [T, H, rope]. ckv_cache: [P, page_size, R].
        kpe_cache: [P, page_size, rope]. If these two are neighbouring slices of one
        [P, page_size, R + rope] tensor it is read in place; otherwise the pages in use are copied.
        out, lse: buffers of the shapes returned.

        Returns out [T, H, R], with return_lse also lse [T, H] float32, to the base 2, or natural
        with return_lse_base_on_e; -inf for a row that sees nothing (whose output is 0).

        Raises RuntimeError before `plan`; ValueError or TypeError for what is not served, by name.
        """
        refuse(
            "flashinfer",
            profiler_buffer=(profiler_buffer, None),
            kv_len=(kv_len, None),
            page_table=(page_table, None),
            o_scale=(o_scale, None),
            ckv_scale=(ckv_scale, None),
            kpe_scale=(kpe_scale, None),
        )
        if self._table is None:
            raise RuntimeError("plan() must be called before run()")
        heads, rank, rope, page_size = self._sizes
        batch, q_dtype, kv_dtype = len(self._seq_lens), *self._dtypes
        tokens = batch * self._q_len
        pages = ckv_cache.shape[0]
        for name, tensor, shape, dtype in (
            ("q_nope", q_nope, (tokens, heads, rank), q_dtype),
            ("q_pe", q_pe, (tokens, heads, rope), q_dtype),
            ("ckv_cache", ckv_cache, (pages, page_size, rank), kv_dtype),
            ("kpe_cache", kpe_cache, (pages, page_size, rope), kv_dtype),
            ("out", out, (tokens, heads, rank), q_dtype),
            ("lse", lse, (tokens, heads), torch.float32),
        ):
            if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
                kind = ValueError if tensor.dtype == dtype else TypeError
                raise kind(
                    f"{name} must be {dtype} {list(shape)} as planned, got {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
        cache, table = _in_place(ckv_cache, kpe_cache), self._table
        if cache is None:
            cache = torch.cat((ckv_cache[self._used], kpe_cache[self._used]), -1)
            table = self._packed_table
        if self._plan is None:
            self._plan = plan(
                self._seq_lens,
                table,
                page_size=page_size,
                num_heads=heads,
                q_len=self._q_len,
                kv_cache=cache if rank == 512 else None,
                q_dtype=q_dtype,
                return_lse=True,
            )
        each = (batch, self._q_len)
        result = decode(
            torch.cat((q_nope, q_pe), -1).unflatten(0, each),
            cache,
            table,
            self._seq_lens,
            self._sm_scale,
            kv_lora_rank=rank,
            causal=self._causal,
            plan=self._plan,
            return_lse=return_lse,
            out=None if out is None else out.unflatten(0, each),
            lse=lse.unflatten(0, each) if lse is not None and return_lse else None,
        )
        if isinstance(result, Tensor):
            return result.flatten(0, 1) if out is None else out
        found = result[1].flatten(0, 1) if lse is None else lse
        if not return_lse_base_on_e:
            found.mul_(1 / math.log(2))
        return result[0].flatten(0, 1) if out is None else out, found


def _in_place(ckv: Tensor, kpe: Tensor) -> Tensor | None:
    """Return the tensor [P, page_size, R + rope] that both are slices of, if there is one."""
    rank, rope = ckv.shape[-1], kpe.shape[-1]
    neighbours = (
        ckv.untyped_storage().data_ptr() == kpe.untyped_storage().data_ptr()
        and ckv.stride() == kpe.stride()
        and ckv.stride(-1) == 1
        and ckv.stride(1) >= rank + rope
        and ckv.storage_offset() + rank == kpe.storage_offset()
    )
    return ckv.as_strided((*ckv.shape[:2], rank + rope), ckv.stride()) if neighbours else None
