"""The schedule of ragged batches, for each release's rules: every token once, nothing written
beside the plan, no piece that aiter's kernels stop at."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import stand_in
import stand_in_planner
import torch
from machines import Install

from mla_ops.backends import aiter_choice, aiter_plan, aiter_release
from mla_ops.plan_spec import AITER, AiterPlanSpec, numel

BATCHES = 2000
FILLER = -0x5A5A5A5B


def draw(rng: random.Random) -> tuple[AiterPlanSpec, list[int]]:
    """A plan's host side and lengths: up to 600 sequences, some or most of them empty."""
    batch = rng.choice((1, 2, 3, 8, 30, 100, rng.randint(1, 600)))
    page_size = rng.choice((1, 7, 16, 64))
    columns = -(-rng.choice((1, 70, 500, 3000)) // page_size)
    most = columns * page_size
    empty = rng.choice((0.0, 0.2, 0.9))
    long = rng.choice((1.0, 0.1))
    lengths = [
        0 if rng.random() < empty else rng.randint(1, max(1, int(most * long)))
        for _ in range(batch)
    ]
    lengths[rng.randrange(batch)] = most
    spec = AiterPlanSpec(
        kind=AITER,
        batch=batch,
        q_len=rng.choice((1, 1, 2, 3, 4)),
        heads=rng.choice((5, 16, 16, 40)),
        workers=rng.choice((1, 2, 7, 80, 256, 304)),
        granularity=rng.choice((16, 32, 64, 128)),
        max_splits=rng.choice((-1, -1, 1, 4)),
        pitch=-(-most // aiter_plan.PITCH) * aiter_plan.PITCH,
        page_size=page_size,
        page_rows=page_size + rng.choice((0, 3)),
        q_dtype=0,
        cache_dtype=0,
        lse=rng.randrange(2),
        group_heads=16,
    )
    return spec, lengths


def check_pieces(
    spec: AiterPlanSpec, lengths: list[int], parts: aiter_plan.Parts, whole_tails: bool
) -> None:
    bounds = parts.work_indptr.numpy()
    assert bounds[0] == 0 and (np.diff(bounds) >= 0).all() and bounds[-1] <= spec.works
    works = parts.work_info.numpy()[: bounds[-1]]
    tile, row, q_start, q_end, start, stop = works[:, :6].T
    assert (stop > start).all(), "aiter's kernels stop a work-group at an empty piece"
    assert (q_start == tile * spec.kernel_q_len).all()
    assert (q_end == q_start + spec.kernel_q_len).all()
    planned = np.maximum(lengths, 1)[tile // spec.groups]
    begin = tile // spec.groups * spec.pitch
    # In order, each piece begins where the one before ended: so every token is there once.
    same = np.diff(tile) == 0
    assert ((np.diff(tile) == 0) | (np.diff(tile) == 1)).all()
    assert tile[0] == 0 and tile[-1] == spec.tiles - 1
    assert (start[1:] == np.where(same, stop[:-1], begin[1:])).all() and start[0] == 0
    last = np.append(~same, True)
    assert (stop[last] == (begin + planned)[last]).all() and (stop <= begin + planned).all()
    if whole_tails:
        assert (stop - start >= np.minimum(planned, spec.kernel_q_len)).all()
    # Partial results have rows of their own, within the buffers.
    written = row[row >= 0]
    assert len(set(written)) == len(written) and (written % spec.kernel_q_len == 0).all()
    assert (written + spec.kernel_q_len <= aiter_plan.partial_rows(spec)).all()
    cut = np.bincount(tile, minlength=spec.tiles) > 1
    assert (row[cut[tile]] >= 0).all() and ((row[~cut[tile]] >= 0) == bool(spec.lse)).all()
    # The reduction merges the pieces of each, and of the cut ones alone.
    groups = parts.reduce_indptr.numpy()
    assert groups[-1] <= spec.partials
    assert (np.diff(groups) == np.where(cut, np.bincount(tile, minlength=spec.tiles), 0)).all()
    merged = parts.reduce_partial_map.numpy()[: groups[-1]]
    assert (merged == row[cut[tile]]).all()
    final = parts.reduce_final_map.numpy()[cut]
    assert (final[:, 0] == np.flatnonzero(cut) * spec.kernel_q_len).all()


def check_indices(
    spec: AiterPlanSpec, lengths: list[int], table: np.ndarray, parts: aiter_plan.Parts
) -> None:
    indices = parts.token_indices.numpy().reshape(spec.batch, spec.pitch)
    token = np.arange(spec.pitch)
    column = np.minimum(token // spec.page_size, table.shape[1] - 1)
    rows = table[:, column] * spec.page_rows + token % spec.page_size
    assert (indices == np.where(token < np.array(lengths)[:, None], rows, 0)).all()


@pytest.mark.parametrize(
    "release", [stand_in.WHEEL, "v0.1.10.post2", "v0.1.15", "v0.1.16", stand_in.NEWEST]
)
def test_ragged_batches(release: str, install: Install) -> None:
    """2,000 in all, each with a plan of its own: 400 for each release's rules."""
    there = install("gfx942", release)
    rng = random.Random(release)
    whole_tails = aiter_release.get().keeps_tails_whole
    for _ in range(BATCHES // 5):
        spec, lengths = draw(rng)
        there.workers = spec.workers
        columns = -(-max(lengths) // spec.page_size)
        table = np.random.default_rng(0).integers(0, 1000, (spec.batch, columns), np.int32)
        wide = torch.full((numel(spec) + 256,), FILLER, dtype=torch.int32)
        plan = wide[128:-128]
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        aiter_plan.fill(seq_lens, torch.from_numpy(table), spec, plan)
        parts = aiter_plan.Parts(plan, spec)
        check_pieces(spec, lengths, parts, whole_tails)
        check_indices(spec, lengths, table, parts)
        assert (wide[:128] == FILLER).all() and (wide[-128:] == FILLER).all()


def test_the_seeds_sizes_overflow() -> None:
    """Sized for `intra_batch_mode` and planned in fast mode, as the seed does: ragged batches write
    beyond the buffers, where ours cannot."""
    rng = random.Random(1)
    overflows = {}
    for batch, splits in ((32, 1), (64, 1), (64, 2), (8, 4), (4, 8)):
        count = 0
        for _ in range(50):
            lengths = [rng.randint(1, 8192) for _ in range(batch)]
            made = stand_in_planner.schedule(lengths, 64, 256, max_splits=splits)
            room = stand_in_planner.info(batch, 256, splits, True, splits)
            count += len(made.works) > room[2][0][0]  # type: ignore[index]
            ours = stand_in_planner.info(batch, 256, splits)
            assert len(made.works) <= ours[2][0][0]  # type: ignore[index]
            assert len(made.partial_map) <= ours[5][0]  # type: ignore[operator]
        overflows[batch, splits] = count
    assert overflows[32, 1] == overflows[64, 1] == 50, overflows
    assert overflows[4, 8] == 0, "and not always, which is why it was not noticed"


def test_a_mistake_in_the_schedule_is_noticed(install: Install) -> None:
    there = install("gfx942")
    rng = random.Random(3)

    def refused() -> bool:
        spec, lengths = draw(rng)
        spec = spec._replace(lse=0, workers=80, q_len=1)
        there.workers = 80
        columns = -(-max(lengths) // spec.page_size)
        plan = torch.empty(numel(spec), dtype=torch.int32)
        table = torch.zeros(spec.batch, columns, dtype=torch.int32)
        try:
            aiter_plan.fill(torch.tensor(lengths, dtype=torch.int32), table, spec, plan)
            check_pieces(spec, lengths, aiter_plan.Parts(plan, spec), True)
        except (AssertionError, RuntimeError):
            return True
        return False

    assert not refused()
    real = stand_in_planner.schedule

    def spoilt(*args: int, **kwargs: int) -> stand_in_planner.Schedule:
        made = real(*args, **kwargs)  # type: ignore[arg-type]
        first = made.works[0]
        made.works[0] = (*first[:5], first[5] - 1, *first[6:])
        return made

    stand_in_planner.schedule = spoilt  # type: ignore[assignment]
    try:
        assert refused()
    finally:
        stand_in_planner.schedule = real
    assert Path(stand_in_planner.__file__).exists()


def test_the_table_of_the_cost_model() -> None:
    """docs/scheduling.md holds what the model gives, and the default is what it says."""
    text = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
    rows = re.findall(r"^\| \((\d+), (\d+)\) \|(.*)\|$", text, re.M)
    assert len(rows) == 8
    for batch, context, cells in rows:
        want = [
            stand_in_planner.model(int(batch), int(context), granularity, workers, 576)
            for workers in (304, 256)
            for granularity in (16, 32, 64, 128)
        ]
        assert [int(cell) for cell in cells.split("|")] == want
    assert f"The default is **{aiter_choice.DEFAULT.granularity}**" in text
    # Two pieces at most for each unit but the last.
    spec = AiterPlanSpec(AITER, 512, 1, 16, 304, 32, -1, 8192, 64, 64, 0, 3, 0, 16)
    assert round(aiter_plan.partial_rows(spec) * stand_in_planner.PARTIAL_BYTES / 2**20) == 19
