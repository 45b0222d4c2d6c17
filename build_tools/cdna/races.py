"""Races on LDS: two waves of a work-group touch one byte between two barriers, and at least one of
them writes.

Only barriers order waves. A kernel that is right because hardware happens to run its waves in step
has a race.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .decoder import Instruction
from .state import Array

if TYPE_CHECKING:
    from .state import Batch, Group


@dataclass(frozen=True, order=True)
class Race:
    """One pair of instructions; `kind` names the order in which they were seen."""

    kind: str  # "write-after-read", "read-after-write" or "write-after-write"
    first: int  # pc
    second: int  # pc

    def __str__(self) -> str:
        return f"{self.kind}: {self.first:#x}, then {self.second:#x} in another wave"


class RaceFinder:
    """Remembers who read and wrote each byte of LDS since the last barrier."""

    def __init__(self, batch: Batch) -> None:
        size = batch.lds.size
        self.waves = batch.waves_per_group
        if self.waves > 32:
            raise ValueError("at most 32 waves in a work-group")
        self.stride = batch.lds_stride
        self.readers: Array = np.zeros(size, np.uint32)  # bit per wave of the work-group
        self.writers: Array = np.zeros(size, np.uint32)
        self.read_pc: Array = np.zeros(size, np.int32)  # last reader and writer, for the message
        self.write_pc: Array = np.zeros(size, np.int32)
        self.races: Counter[Race] = Counter()

    def record(
        self, g: Group, address: Array, nbytes: int, is_write: bool, inst: Instruction
    ) -> None:
        """An access by the active lanes of all waves of `g` at LDS addresses [waves, 64]."""
        bytes_of = (address + g.lds_base)[..., None] + np.arange(nbytes)
        for row in range(g.n):
            lanes = bytes_of[row] if g.mask is None else bytes_of[row][g.mask[row]]
            self._one_wave(
                np.unique(lanes), np.uint32(1 << (g.first + row) % self.waves), is_write, inst.pc
            )

    def _one_wave(self, at: Array, me: np.uint32, is_write: bool, pc: int) -> None:
        written = (self.writers[at] & ~me) != 0
        kind = "write-after-write" if is_write else "read-after-write"
        self._note(kind, self.write_pc[at[written]], pc)
        if is_write:
            read = (self.readers[at] & ~me) != 0
            self._note("write-after-read", self.read_pc[at[read]], pc)
            self.writers[at] |= me
            self.write_pc[at] = pc
        else:
            self.readers[at] |= me
            self.read_pc[at] = pc

    def _note(self, kind: str, others: Array, pc: int) -> None:
        if others.size:
            for other, count in zip(*np.unique(others, return_counts=True), strict=True):
                self.races[Race(kind, int(other), pc)] += int(count)

    def barrier(self, work_groups: Array) -> None:
        """These work-groups (bool) passed a barrier: what came before is ordered."""
        for index in np.flatnonzero(work_groups):
            part = slice(index * self.stride, (index + 1) * self.stride)
            self.readers[part] = 0
            self.writers[part] = 0
