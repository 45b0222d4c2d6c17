"""The suite can fail: wrong decodes are rejected, and by each group of cases."""

from __future__ import annotations

import pytest
import torch
from cases import CORNER, CORRECTNESS, FN, FNUZ, LARGE, Case
from mutants import MUTANTS, Mutant, rejects, right, split_and_merged
from running import solved

# Each mutant has to be rejected on each of these that it applies to. Sequences have different
# lengths, at and beside the edges of pages.
EVERY_TIME = [
    Case(lengths=(200, 64, 2, 129)),
    Case(lengths=(200, 64, 9, 129), q_len=3, heads=5, cache_dtype=FN),
    Case(lengths=(200, 64, 9, 129), q_len=2, causal=False, cache_dtype=FNUZ, q_dtype=FN),
    Case(lengths=(100, 33), page_size=7, cache_dtype=FN),
    Case(lengths=(1000, 900), page_size=16, q_dtype=torch.float32, cache_dtype=torch.float32),
    Case(lengths=(40, 0, 2, 7), q_len=4, page_size=8),
]

DESIGN = {
    "first_token_of_each_page",
    "first_eighth",
    "zeros",
    "q_over_24",
    "reduce_skipped",
    "one_split_dropped",
    "neighbours_page",
}

# Every fourth of the common cases, to keep the time down.
GROUPS = {"CORRECTNESS": CORRECTNESS[::4], "CORNER": CORNER, "LARGE": LARGE[:1]}

# Mistakes in what a group does not have.
NOT_IN = {
    "LARGE": {
        "sees_one_token_more",
        "mask_forgotten_or_added",
        "lse_of_the_unseeing_is_0",
        "rows_of_the_unseeing_left_as_they_were",
        "q_without_its_scale",
    },
    "CORNER": {"q_without_its_scale"},
}


def name_of(mutant: Mutant) -> str:
    return mutant.name


def test_the_mutants_of_the_design_are_there() -> None:
    assert DESIGN <= {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("case", EVERY_TIME, ids=str)
def test_the_right_decode_passes(case: Case) -> None:
    assert not rejects(case, right, *solved(case))
    assert not rejects(case, split_and_merged, *solved(case))


@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_is_rejected_every_time(mutant: Mutant) -> None:
    applicable = [case for case in EVERY_TIME if mutant.applies(case)]
    assert applicable
    passed = [str(case) for case in applicable if not rejects(case, mutant.decode, *solved(case))]
    assert not passed, f"{mutant.name} passes for right on {passed}"


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_each_group_catches_each(group: str) -> None:
    """A table of mutants by group: how many cases of those it applies to catch it."""
    caught = {mutant.name: 0 for mutant in MUTANTS}
    tried = dict(caught)
    for case in GROUPS[group]:
        problem = solved(case)
        assert not rejects(case, right, *problem), f"the right decode is rejected on {case}"
        for mutant in MUTANTS:
            if mutant.applies(case):
                tried[mutant.name] += 1
                caught[mutant.name] += rejects(case, mutant.decode, *problem)
    table = "\n".join(f"{name:42} {caught[name]:3} of {tried[name]}" for name in caught)
    print(f"\n{group}\n{table}")
    missed = {name for name in caught if caught[name] == 0} - NOT_IN.get(group, set())
    assert not missed, f"{group} catches none of {sorted(missed)}:\n{table}"
    surprises = {name for name in NOT_IN.get(group, ()) if tried[name]}
    assert not surprises, f"{group} does have cases for {sorted(surprises)}"
    for name in DESIGN:
        assert caught[name] >= 0.9 * tried[name], f"{name} passes too often:\n{table}"
