"""What aiter's planner (`fast_mode=True`) and its sizes are, from reading csrc/kernels/mla/metadata
of ROCm/aiter, the wheel's to main of 2026-08. In plain Python, one sequence after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OVERHEAD = 16  # blocks that a piece is charged for, at page size 1


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class Schedule:
    """Of sequences of 16 heads: (batch, row, q_start, q_end, kv_start, kv_end, kv_offset, 0)."""

    works: list[tuple[int, ...]] = field(default_factory=list)
    work_indptr: list[int] = field(default_factory=lambda: [0])
    reduce_indptr: list[int] = field(default_factory=lambda: [0])
    final_map: dict[int, tuple[int, int]] = field(default_factory=dict)  # of those that are cut
    partial_map: list[int] = field(default_factory=list)


def schedule(
    lengths: list[int],
    granularity: int,
    workers: int,
    q_len: int = 1,
    max_splits: int = -1,
    whole_tails: bool = True,
) -> Schedule:
    """`whole_tails`: from v0.1.12 on, no piece is shorter than the query tokens."""
    splits = workers if max_splits < 0 else min(workers, max_splits * len(lengths))
    payload = ceil(sum(ceil(n, granularity) + OVERHEAD for n in lengths), splits) + OVERHEAD
    out = Schedule()
    sequence = begin = block = pieces = row = 0
    tail_done = False
    for _ in range(workers):
        left = payload
        while sequence < len(lengths):
            end = begin + lengths[sequence]
            blocks = ceil(lengths[sequence], granularity) - block
            start = begin + block * granularity
            queries = (sequence * q_len, (sequence + 1) * q_len)
            if left >= blocks + OVERHEAD or tail_done:
                where = row if pieces else -1
                out.works.append((sequence, where, *queries, start, end, 0, 0))
                if pieces:
                    out.final_map[sequence] = queries
                    out.partial_map += [row - (pieces - i) * q_len for i in range(pieces + 1)]
                    row += q_len
                out.reduce_indptr.append(len(out.partial_map))
                left -= blocks + OVERHEAD
                sequence, begin, block, pieces, tail_done = sequence + 1, end, 0, 0, False
                continue
            if left > OVERHEAD:
                stop = min(start + (left - OVERHEAD) * granularity, end)
                tail_done = whole_tails and end - stop < q_len
                if tail_done:
                    continue  # the piece takes the rest as well
                out.works.append((sequence, row, *queries, start, stop, end - stop, 0))
                row += q_len
                block += left - OVERHEAD
                pieces += 1
            break
        out.work_indptr.append(len(out.works))
    return out


def info(
    batch: int,
    workers: int,
    max_splits: int = -1,
    intra_batch_mode: bool = False,
    num_kv_splits: int = 32,
) -> list[tuple[object, str]]:
    """Shapes of the six buffers for 16 heads and up to 8 query tokens, and their dtypes."""
    works = batch + workers - 1
    partials = min(works, 2 * (workers - 1))
    if max_splits > 0:
        partials = max(partials, batch + min(workers, max_splits * batch))
    if intra_batch_mode:
        works = partials = batch * num_kv_splits
    return [
        (2, "uint64"),
        (workers + 1, "int32"),
        ((works, 8), "int32"),
        (batch + 1, "int32"),
        ((batch, 2), "int32"),
        (partials, "int32"),
    ]


TILE = 64  # tokens that a kernel works on at a time
PARTIAL_BYTES = 16 * (512 + 1) * 4  # 16 heads, and their LSE, in float32


def model(batch: int, length: int, granularity: int, workers: int, token_bytes: int) -> int:
    """The cost of a batch of equal lengths by docs/scheduling.md, in tokens."""
    made = schedule([length] * batch, granularity, workers)
    partial = PARTIAL_BYTES / token_bytes
    busiest = 0.0
    for first, behind in zip(made.work_indptr, made.work_indptr[1:], strict=False):
        pieces = made.works[first:behind]
        cost = sum(ceil(stop - start, TILE) * TILE + TILE for *_, start, stop, _, _ in pieces)
        busiest = max(busiest, cost + partial * sum(piece[1] >= 0 for piece in pieces))
    groups = [b - a for a, b in zip(made.reduce_indptr, made.reduce_indptr[1:], strict=False)]
    return round(busiest + max(groups, default=0) * partial / 16)
