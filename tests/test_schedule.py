"""The split schedule covers every token once and is balanced: csrc/schedule.h, compiled alone, and
the rule in Python from the plan tensor, which must say the same."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import mla_ops

ROOT = Path(__file__).resolve().parent.parent
UNIT = 64


class Piece(NamedTuple):
    worker: int
    sequence: int
    begin: int
    end: int


class Batch(NamedTuple):
    lengths: tuple[int, ...]
    workers: int
    unit_tokens: int = UNIT
    fixed_split: bool = False


def batches() -> list[Batch]:
    """Few and many sequences and workers, empty ones, and more workers than there is work."""
    chance = random.Random(11)
    found = [
        Batch((65,), 4),
        Batch((0,), 9),
        Batch((0, 0, 1), 2),
        Batch((64, 64), 2),
        Batch((1, 1, 1, 1000, 1), 3),
        Batch((1024 * 32,), 304),
        Batch(tuple(chance.randint(1, 32768) for _ in range(64)), 132),
    ]
    for _ in range(300):
        lengths = [chance.choice([0, 1, 63, 64, 65, chance.randint(0, 999)]) for _ in range(20)]
        batch = tuple(lengths[: chance.randint(1, 20)])
        unit_tokens = chance.choice([64, 64, 1, 48, 1024])
        found.append(Batch(batch, chance.randint(1, 70), unit_tokens, chance.random() < 0.4))
    return found


def plan_of(batch: Batch) -> mla_ops.DecodePlan:
    options = {"batch_invariant": True, "split_tokens": batch.unit_tokens}
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    table = torch.zeros(len(batch.lengths), max(batch.lengths) // UNIT + 1, dtype=torch.int32)
    more = options if batch.fixed_split else {}
    return mla_ops.plan(lengths, table, page_size=UNIT, num_heads=16, workers=batch.workers, **more)


def walk(first_unit: list[int], batch: Batch) -> list[Piece]:
    """The rule: the line of units, cut evenly for the workers that get any."""
    units = first_unit[-1]
    busy = min(batch.workers, units)
    pieces = []
    for worker in range(busy):
        unit, stop = units * worker // busy, units * (worker + 1) // busy
        while unit < stop:
            b = max(i for i in range(len(batch.lengths)) if first_unit[i] <= unit)
            after = unit + 1 if batch.fixed_split else min(stop, first_unit[b + 1])
            begin, end = ((u - first_unit[b]) * batch.unit_tokens for u in (unit, after))
            pieces.append(Piece(worker, b, begin, min(end, batch.lengths[b])))
            unit = after
    return pieces


def assert_covers(pieces: list[Piece], batch: Batch) -> None:
    """Each sequence from its first token to its last, in order, without gap or overlap."""
    at = defaultdict(int)
    touched = set()
    for piece in pieces:
        assert piece.begin == at[piece.sequence] and piece.end >= piece.begin
        at[piece.sequence] = piece.end
        touched.add(piece.sequence)
    assert [at[b] for b in range(len(batch.lengths))] == list(batch.lengths)
    assert touched == set(range(len(batch.lengths))), "a sequence whose output nobody writes"


def test_the_plan_covers_every_token_once() -> None:
    for batch in batches():
        if batch.fixed_split or batch.unit_tokens == UNIT:
            assert_covers(walk(plan_of(batch).tensor.tolist(), batch), batch)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler")
    program = tmp_path_factory.mktemp("schedule") / "walk"
    source = ROOT / "tests" / "schedule_walk.cpp"
    command = [compiler, "-std=c++20", "-O1", f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def test_the_compiled_schedule(compiled: Path) -> None:
    """Pieces as the rule says; as many as `pieces` promises; each in a slot of its own, those of a
    sequence one behind the other and within what is allocated."""
    tried = batches()
    asked = "\n".join(
        " ".join(
            map(str, (b.workers, b.unit_tokens, int(b.fixed_split), len(b.lengths), *b.lengths))
        )
        for b in tried
    )
    done = subprocess.run([compiled], input=asked, capture_output=True, text=True, check=True)
    answers = done.stdout.split("end\n")[:-1]
    assert len(answers) == len(tried)
    for batch, answer in zip(tried, answers, strict=True):
        promised, pieces, slots_of, room = [], [], defaultdict(list), 0
        for kind, *numbers in map(str.split, answer.splitlines()):
            values = [int(number) for number in numbers]
            if kind == "slots":
                room = values[0]
            elif kind == "sequence":
                promised.append(values)
            else:
                pieces.append(Piece(*values[:4]))
                slots_of[values[1]].append(values[4])
        assert_covers(pieces, batch)
        first_unit = [0]
        for length in batch.lengths:
            first_unit.append(first_unit[-1] + max(1, -(-length // batch.unit_tokens)))
        assert pieces == walk(first_unit, batch)
        for b, (count, first_slot) in enumerate(promised):
            assert slots_of[b] == list(range(first_slot, first_slot + count)), batch
        every = [slot for slots in slots_of.values() for slot in slots]
        assert len(set(every)) == len(every) and max(every) < room


@pytest.mark.parametrize("workers", [2, 8, 64, 132, 304])
def test_the_longest_share_is_within_10_percent_of_the_mean(workers: int) -> None:
    chance = random.Random(5)
    for _ in range(10):
        batch = Batch(tuple(chance.randint(1, 32768) for _ in range(64)), workers)
        share = [0] * workers
        for piece in walk(plan_of(batch).tensor.tolist(), batch):
            share[piece.worker] += piece.end - piece.begin
        assert max(share) <= 1.1 * sum(share) / workers
