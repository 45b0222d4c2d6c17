"""One layer's latents in pages: growth, writing, attention, reordering. Knows nothing of
transformers.

A column is a position of the batch's common time line, padding included, as in transformers' own
caches: all sequences have the same number of columns. Chunks hold consecutive columns; a pool grows
by adding a chunk, so that nothing that was written is ever moved. Attention over several chunks is
merged by its LSE.

Column c of sequence b is *written* to its home: page b * pages + c // page_size of the chunk, where
pages is the chunk's per sequence. It is *read* through the block table, so that beams share the
pages of what they have in common: reordering permutes the table and copies one page per sequence,
the one that is partly filled. What makes this safe is that the table names home for every page at
or behind the next column (`_settle`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_ops import checks
from mla_ops.decode import decode, merge_states
from mla_ops.integrations.transformers import columns as columns_form
from mla_ops.kv_cache import new_kv_cache, write_kv_cache

# Columns of the smallest chunk, unless the announced length is less. Each further one is as long as
# all before it: a sequence of 128k tokens that nobody announced is in 8 chunks.
FIRST_CHUNK = 1024

# A measured fp8 scale leaves room for values this many times the largest one seen. Float8 has the
# same precision at every magnitude down to 2^-6 of its 448, so that room costs nothing.
HEADROOM = 2.0


@dataclass
class Chunk:
    """Columns start to start + size of every sequence."""

    start: int
    size: int
    kv_cache: Tensor  # [B * pages, page_size, D]
    block_table: Tensor  # [B, pages] int32

    def home(self) -> Tensor:
        """Return the table that names every sequence's own pages."""
        pages = torch.arange(
            self.block_table.numel(), dtype=torch.int32, device=self.block_table.device
        )
        return pages.view(self.block_table.shape)


class LatentPool:
    """The latents of one layer for a batch of sequences.

    batch: B. kv_lora_rank, rope: R and the rope width. dtype: of the cache, float8 included.
    kv_scale: one-element float32; for float8 it is measured at the first write where it is not
        given, as 2 * largest magnitude / largest number of the dtype.
    """

    def __init__(
        self,
        batch: int,
        kv_lora_rank: int,
        rope: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_scale: Tensor | None = None,
    ) -> None:
        self.batch, self.kv_lora_rank, self.rope = batch, kv_lora_rank, rope
        self.page_size, self.dtype, self.device = page_size, dtype, device
        self.kv_scale = kv_scale
        self.chunks: list[Chunk] = []
        self._shared = False  # whether a table may name another sequence's page
        self._zeros = torch.zeros(batch, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        """Columns there is room for."""
        return self.chunks[-1].start + self.chunks[-1].size if self.chunks else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pages: B * columns * D * element size, columns in whole pages."""
        return sum(chunk.kv_cache.numel() * self.dtype.itemsize for chunk in self.chunks)

    def reserve(self, needed: int, announced: int | None = None) -> None:
        """Make room for `needed` columns; `announced` is how many there will be at most."""
        have = self.capacity
        if needed <= have:
            return
        target = max(needed, 2 * have, FIRST_CHUNK)
        if announced is not None and announced >= needed:
            target = min(target, announced)
        pages = -(-(target - have) // self.page_size)
        if self.batch * pages * self.page_size > checks.INT32_MAX:
            raise ValueError(
                f"a chunk of the cache must have at most {checks.INT32_MAX} rows, got "
                f"{self.batch} sequences of {pages * self.page_size} tokens"
            )
        kv_cache = new_kv_cache(
            self.batch * pages,
            self.page_size,
            kv_lora_rank=self.kv_lora_rank,
            rope=self.rope,
            dtype=self.dtype,
            device=self.device,
        )
        table = torch.empty(self.batch, pages, dtype=torch.int32, device=self.device)
        chunk = Chunk(have, pages * self.page_size, kv_cache, table)
        table.copy_(chunk.home())
        self.chunks.append(chunk)

    def write(self, kv_c: Tensor, k_pe: Tensor, at: int | Tensor) -> None:
        """Put new tokens at columns `at` onwards. kv_c: [B, S, R], k_pe: [B, S, rope].

        at: a number, or a tensor (for graphs) where the pool has one chunk; columns behind its end
        are not written then.
        """
        if self.dtype in checks.FLOAT8 and self.kv_scale is None:
            self.kv_scale = measured_scale(kv_c, k_pe, self.dtype)
        count = kv_c.shape[1]
        if isinstance(at, Tensor):
            self._write(self.chunks[0], kv_c, k_pe, at)
            return
        for chunk in self.chunks:
            first, last = max(at, chunk.start), min(at + count, chunk.start + chunk.size)
            if first < last:
                part = slice(first - at, last - at)
                self._write(chunk, kv_c[:, part], k_pe[:, part], first - chunk.start)

    def _write(self, chunk: Chunk, kv_c: Tensor, k_pe: Tensor, at: int | Tensor) -> None:
        column = torch.arange(kv_c.shape[1], device=self.device) + at
        sequence = torch.arange(self.batch, device=self.device)
        slots = (sequence * chunk.size)[:, None] + column
        if isinstance(at, Tensor):
            slots = torch.where(column < chunk.size, slots, -1)
        write_kv_cache(
            kv_c.flatten(0, 1),
            k_pe.flatten(0, 1),
            chunk.kv_cache,
            slots.flatten(),
            self.kv_scale,
        )

    def decode(
        self,
        q: Tensor,
        length: int | Tensor,
        softmax_scale: float,
        *,
        columns: Tensor | None = None,
        return_lse: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the first `length` columns, the S query tokens' own included, or to those that
        `columns` names (see `columns.py`; [B, S, 1 + most]).

        q: [B, S, H, D]. Returns out [B, S, H, R] and, with return_lse, lse [B, S, H].
        """
        used = [
            chunk for chunk in self.chunks if isinstance(length, Tensor) or chunk.start < length
        ]
        batch, q_len = q.shape[:2]
        if columns is None and len(used) > 1 and length - q_len < used[-1].start:
            # The query tokens lie in two chunks: who sees what is said row by row.
            columns = columns_form.causal(batch, q_len, int(length), q.device)
        if columns is not None:
            q = q.flatten(0, 1)[:, None]
        out = lse = None
        for chunk in used:
            last = chunk is used[-1]
            kv_cache = chunk.kv_cache
            if columns is None:
                table = chunk.block_table
                lens = self._zeros + (length - chunk.start if last else chunk.size)
            else:
                table, lens = self._slots(chunk, columns, whole=len(used) == 1)
                kv_cache = kv_cache.view(-1, 1, kv_cache.shape[-1])
            result = decode(
                q,
                kv_cache,
                table,
                lens,
                softmax_scale,
                kv_lora_rank=self.kv_lora_rank,
                causal=last,
                kv_scale=self.kv_scale,
                return_lse=return_lse or len(used) > 1,
                backend=backend,
            )
            part, part_lse = result if isinstance(result, tuple) else (result, None)
            if out is None or lse is None or part_lse is None:
                out, lse = part, part_lse
            else:
                out, lse = merge_states(out, lse, part, part_lse)
        assert out is not None  # a decode follows a write
        if columns is not None:
            out = out.view(batch, q_len, *out.shape[2:])
            lse = None if lse is None else lse.view(batch, q_len, -1)
        return out, lse if return_lse else None

    def _slots(self, chunk: Chunk, columns: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
        """Return a table [B * S, most] of pages of one token, and how many there are [B * S]."""
        q_len = columns.shape[1]
        counts, names = columns_form.parts(columns)
        if not whole:
            counts, names = columns_form.between(counts, names, chunk.start, chunk.size)
        names = names.clamp(0, chunk.size - 1)  # what is behind the end
        pages = chunk.block_table.repeat_interleave(q_len, 0)
        page = pages.gather(1, (names // self.page_size).long())
        return page * self.page_size + names % self.page_size, counts

    def latents(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the first `length` columns as [B, length, R] and [B, length, rope] of dtype."""
        parts = []
        for chunk in self.chunks:
            count = min(length - chunk.start, chunk.size)
            if count > 0:
                pages = chunk.block_table[:, : -(-count // self.page_size)]
                rows = _pages(chunk.kv_cache, pages.flatten()).view(self.batch, -1, self.width)
                parts.append(rows[:, :count])
        rows = torch.cat(parts, 1)
        if self.kv_scale is not None:
            rows = rows.float() * self.kv_scale
        kv_c, k_pe = rows.to(dtype).split((self.kv_lora_rank, self.rope), -1)
        return kv_c, k_pe

    @property
    def width(self) -> int:
        """D."""
        return self.kv_lora_rank + self.rope

    def reorder(self, index: Tensor, length: int) -> None:
        """Let sequence b continue sequence index[b]; `length` columns are written."""
        for chunk in self.chunks:
            chunk.block_table.copy_(chunk.block_table[index.to(self.device)])
        self._shared = True
        self._settle(length)

    def crop(self, length: int) -> None:
        """Forget all columns but the first `length`."""
        if self._shared:
            self._settle(length)

    def _settle(self, length: int) -> None:
        for chunk in self.chunks:
            filled = length - chunk.start
            page = max(0, filled) // self.page_size
            if page >= chunk.block_table.shape[1]:
                continue
            home = chunk.home()
            if filled > 0 and filled % self.page_size:
                content = _pages(chunk.kv_cache, chunk.block_table[:, page])
                _bytes(chunk.kv_cache)[home[:, page].long()] = _bytes(content)
            chunk.block_table[:, page:] = home[:, page:]

    def select(self, index: Tensor) -> None:
        """Keep sequences index, of any number and repetition, in this order; copies them."""
        index = torch.arange(self.batch, device=self.device)[index.to(self.device)]
        self.batch = index.numel()
        self._zeros = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
        for chunk in self.chunks:
            pages = chunk.block_table[index]
            chunk.kv_cache = _pages(chunk.kv_cache, pages.flatten())
            chunk.block_table = pages
            chunk.block_table = chunk.home().contiguous()
        self._shared = False


def measured_scale(kv_c: Tensor, k_pe: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale for what is written first: HEADROOM times its largest magnitude fits."""
    most = torch.stack((kv_c.abs().amax(), k_pe.abs().amax())) if k_pe.numel() else kv_c.abs()
    scale = most.amax().float() * (HEADROOM / torch.finfo(dtype).max)
    return scale.clamp(min=torch.finfo(torch.float32).tiny).reshape(1)


def _bytes(tensor: Tensor) -> Tensor:
    """Return float8 as bytes, which every device can index."""
    return tensor.view(torch.uint8) if tensor.dtype in checks.FLOAT8 else tensor


def _pages(kv_cache: Tensor, pages: Tensor) -> Tensor:
    return _bytes(kv_cache).index_select(0, pages).view(kv_cache.dtype)
