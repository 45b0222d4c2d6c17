"""In which order waves execute.

Waves that stand at one place execute together (`Lockstep`): the group at the lowest address goes
first, so that waves which took different branches meet again, but no wave gets more than `window`
instructions ahead of another. `RoundRobin` keeps every wave alone and gives each a turn of some
instructions, for tests of ordering. Both are orders that hardware could take; a kernel without
races gives the same result in all of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from .program import Program
from .state import Array, Batch, Fault, Group, Where


@dataclass(frozen=True)
class Lockstep:
    """`window`: a group goes on while it is at most so many instructions ahead of the slowest one.

    With blocks of up to 16 instructions the lead stays below window + 16. aiter's a8w8 kernels have
    a race on LDS that a lead of 40 does not bring out and one of 48 does (isa-notes 5.11).
    """

    window: int = 8


@dataclass(frozen=True)
class RoundRobin:
    """Turns of `quantum` instructions, or of a random number up to it, in random order, if `seed`
    is given.
    """

    quantum: int = 1
    seed: int | None = None


Schedule = Lockstep | RoundRobin


class Scheduler:
    """Runs a batch of work-groups from a start position to the end."""

    def __init__(
        self, program: Program, batch: Batch, start: Where, limit: int = 1_000_000_000
    ) -> None:
        self.program, self.batch, self.limit = program, batch, limit
        self.positions: list[Where] = [start] * batch.waves  # of waves that wait at a barrier
        self.active: list[Group] = []

    def run(self, schedule: Schedule) -> None:
        if isinstance(schedule, Lockstep):
            self._activate(0, self.batch.waves, self.positions[0], 0)
            while self.active:
                self._advance(self._lowest(schedule.window), True)
        else:
            for wave in range(self.batch.waves):
                self._activate(wave, wave + 1, self.positions[wave], 0)
            self._take_turns(schedule)
        if not self.batch.done.all():
            raise Fault(
                "deadlock: waves wait at a barrier that others of their work-group never reach"
            )

    def _take_turns(self, schedule: RoundRobin) -> None:
        chance = random.Random(schedule.seed)
        while self.active:
            order = list(self.active)
            if schedule.seed is not None:
                chance.shuffle(order)
            for group in order:
                turn = (
                    schedule.quantum
                    if schedule.seed is None
                    else chance.randint(1, schedule.quantum)
                )
                for _ in range(turn):
                    if not self._advance(group, False):
                        break

    def _activate(self, first: int, last: int, where: Where, count: int) -> Group:
        group = self.batch.group(first, last)
        group.where, group.count = where, count
        group.refresh()
        self.active.append(group)
        return group

    def _lowest(self, window: int) -> Group:
        if len(self.active) == 1:
            return self.active[0]
        slowest = min(group.count for group in self.active)
        ready = [group for group in self.active if group.count - slowest <= window]
        return min(ready, key=lambda group: group.where.pc)

    def _advance(self, group: Group, join: bool) -> bool:
        """One block for a group; False if it does not go on as it was."""
        self.program.execute(group)
        if self.program.executed > self.limit:
            raise Fault(f"still running after {self.limit} instructions, at {group.where.pc:#x}")
        batch = self.batch
        if batch.waiting[group.first] or batch.done[group.first]:
            self.active.remove(group)
            assert isinstance(group.next, Where)
            self.positions[group.first : group.last] = [group.next] * group.n
            self._release(group, join)
            return False
        if isinstance(group.next, list):
            places = group.next
            if len(set(places)) > 1:
                self.active.remove(group)
                self._activate_runs(range(group.first, group.last), places, group.count, join)
                return False
            group.where = places[0]
        else:
            group.where = group.next
        if join and len(self.active) > 1:
            self._join(group)
        return True

    def _activate_runs(self, waves: range, places: list[Where], count: int, join: bool) -> None:
        """Activate waves in runs of neighbours at one place."""
        first = 0
        for k in range(1, len(places) + 1):
            if k == len(places) or places[k] != places[first] or not join:
                self._activate(waves[first], waves[k - 1] + 1, places[first], count)
                first = k

    def _join(self, group: Group) -> None:
        """Unite a group with neighbours that stand at its place."""
        for other in self.active:
            if other.where == group.where and (
                other.last == group.first or other.first == group.last
            ):
                self.active.remove(group)
                self.active.remove(other)
                first, last = min(group.first, other.first), max(group.last, other.last)
                self._join(self._activate(first, last, group.where, max(group.count, other.count)))
                return

    def _release(self, group: Group, join: bool) -> None:
        """Let work-groups go on whose live waves all wait at a barrier."""
        batch, size = self.batch, self.batch.waves_per_group
        if not batch.waiting.any():
            return
        stopped: Array = np.all((batch.waiting | batch.done).reshape(-1, size), axis=1)
        ready: Array = stopped & np.any(batch.waiting.reshape(-1, size), axis=1)
        if not ready.any():
            return
        if batch.races is not None:
            batch.races.barrier(ready)
        free = batch.waiting & ready.repeat(size)
        batch.waiting &= ~free
        wave = 0
        while wave < batch.waves:
            last = wave
            while last < batch.waves and free[last]:
                last += 1
            if last > wave:
                self._activate_runs(range(wave, last), self.positions[wave:last], group.count, join)
            wave = last + 1
