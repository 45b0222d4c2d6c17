"""The host side of plans: integers that travel beside the plan tensor, so that a plan made for
another problem is refused without reading the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NATIVE, AITER = 0, 1
KINDS = ("native", "aiter")


class PlanSpec(NamedTuple):
    """Of a plan for the native and torch backends; `csrc/plan_spec.h` reads the fields in this
    order."""

    kind: int
    batch: int
    q_len: int
    heads: int
    workers: int
    unit_tokens: int
    fixed_split: int
    unit_capacity: int


class AiterPlanSpec(NamedTuple):
    """Of a plan for aiter. `backends/aiter_plan.py` says what the tensor holds."""

    kind: int
    batch: int
    q_len: int
    heads: int
    workers: int  # work-groups that share the work, one on each compute unit
    granularity: int  # tokens; sequences are cut at multiples of it
    max_splits: int  # pieces for each sequence, as a budget of the whole batch; -1: no limit
    pitch: int  # token indices that each sequence has room for
    page_size: int
    page_rows: int  # rows of the cache from one page to the next; page_size where it has no gaps
    q_dtype: int  # index into checks.DTYPES
    cache_dtype: int
    lse: int
    group_heads: int  # of the kernel; each group of so many is planned as a sequence

    @property
    def groups(self) -> int:
        return -(-self.heads // self.group_heads)

    @property
    def tiles(self) -> int:
        """Sequences as aiter sees them, each of a group of heads."""
        return self.batch * self.groups

    @property
    def kernel_q_len(self) -> int:
        """Query tokens as aiter sees them. Three are served as four: with three, all get the result
        of the first (ROCm/aiter#2720)."""
        return 4 if self.q_len == 3 else self.q_len

    @property
    def works(self) -> int:
        """Most pieces there can be: each worker ends inside at most one sequence."""
        return max(0, self.tiles + self.workers - 1)

    @property
    def partials(self) -> int:
        """Most pieces of sequences that are cut. As ROCm/aiter#5559 bounds it for a budget."""
        least = min(self.works, 2 * (self.workers - 1))
        if self.max_splits < 0:
            return least
        return max(least, self.tiles + min(self.workers, self.max_splits * self.tiles))

    def sections(self) -> dict[str, int]:
        """Return the parts of the plan tensor in order, with their sizes."""
        return {
            "kv_indptr": self.tiles + 1,
            "qo_indptr": self.tiles + 1,
            "ones": self.tiles,
            "work_indptr": self.workers + 1,
            "work_info": 8 * self.works,
            "reduce_indptr": self.tiles + 1,
            "reduce_final_map": 2 * self.tiles,
            "reduce_partial_map": self.partials,
            "token_indices": self.batch * self.pitch,
        }


ALIGNMENT = 16  # integers; sections begin at multiples of 64 bytes


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def numel(spec: Sequence[int]) -> int:
    """Return how many integers a plan holds."""
    if spec[0] == AITER:
        return sum(aligned(size) for size in AiterPlanSpec(*spec).sections().values())
    return spec[1] + 1
