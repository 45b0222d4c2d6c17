"""Find the best way to cut batches on this machine, and keep it for `mla_ops.plan`.

For each class of shapes every candidate's result is checked against the float64 oracle first; those
that are right then take turns. What does not beat the default beyond the noise is not chosen. Each
class is kept as soon as it is done: a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mla_ops import capability, machine, tuned, workload
from mla_ops.backends import aiter_choice
from mla_ops.bench import grammar
from mla_ops.bench.measure import DoesNotFit, Settings, sets_for
from mla_ops.bench.timing import Call, Times, interleaved
from mla_ops.console import RESERVE, Progress, add_device, chosen_device, memory_free, seconds
from mla_ops.plan import DecodePlan, default_workers
from mla_ops.workload import Case, Workload

GAIN = 1.02  # times quicker than the default, at least, to be chosen

SHAPES = {"cuda": "1,4,16,64,256q1s1k,4k,16k-fp8", "cpu": "1,4,16q1s1k,4k-fp8"}

Choice = Mapping[str, int]


class Knob(NamedTuple):
    """What there is to choose for a backend beside the default, and the plan a choice makes."""

    candidates: Callable[[Case, torch.device], list[Choice]]
    plan: Callable[[Workload, Choice], DecodePlan]


def _default_workers(case: Case, device: torch.device) -> int:
    return default_workers(device, case.batch, case.q_len * case.heads)


def _workers(case: Case, device: torch.device) -> list[Choice]:
    default = _default_workers(case, device)
    numbers = (max(1, int(factor * default)) for factor in (0.5, 0.75, 1.5, 2, 3, 4, 8))
    return [{"workers": number} for number in sorted({*numbers} - {default})]


def _plan_of_workers(made: Workload, choice: Choice) -> DecodePlan:
    return made.plan(choice.get("workers", _default_workers(made.case, made.q.device)))


def _granularities(case: Case, device: torch.device) -> list[Choice]:
    default = aiter_choice.DEFAULT.granularity
    return [{"granularity": tokens} for tokens in (16, 32, 64, 128) if tokens != default]


def _plan_of_granularity(made: Workload, choice: Choice) -> DecodePlan:
    before = aiter_choice.tuned
    aiter_choice.tuned = lambda shape: aiter_choice.DEFAULT._replace(**choice)
    try:
        return made.plan(backend="aiter")
    finally:
        aiter_choice.tuned = before


# A backend without an entry has nothing to tune.
KNOBS = {
    "aiter": Knob(_granularities, _plan_of_granularity),
    "native": Knob(_workers, _plan_of_workers),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = grammar.__doc__
    parser.add_argument("cases", nargs="*", help="shapes, in the grammar below (default: a grid)")
    add_device(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="say what would be tried")
    what.add_argument("--show", action="store_true", help="what was found, and the file")
    what.add_argument("--reset", action="store_true", help="forget what was found, here and now")
    parser.add_argument("--again", action="store_true", help="also what was tuned before")
    parser.add_argument("--turns", type=int, default=15, help="timed turns of each (15)")
    parser.add_argument(
        "--budget", type=float, default=20.0, metavar="SECONDS", help="for a class (20)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Tune, or do what the options say; return 0, 1 where a result was wrong, 2 for what cannot be
    done."""
    try:
        if arguments.show:
            return _show()
        if arguments.reset:
            return _reset()
        return _tune(arguments)
    except (ValueError, OSError) as error:
        print(f"mla_ops tune: {error}")
        return 2


def _show() -> int:
    print(f"{tuned.path() or 'MLA_OPS_TUNED is 0: nothing is kept or used'}")
    for entry in tuned.entries():
        print(_line(entry))
    return 0


def _reset() -> int:
    file = tuned.path()
    if file is not None:
        file.unlink(missing_ok=True)
        tuned.forget()
    print(f"forgotten: {file}")
    return 0


def _line(entry: Mapping[str, Any]) -> str:
    choice = ", ".join(f"{name} {value}" for name, value in entry["choice"].items())
    shape = " ".join(f"{name} {entry[name]}" for name in tuned.ShapeClass._fields)
    return (
        f"{entry['backend']:7} {shape}: {choice or 'the default'}, {entry['speedup']:.2f}x the "
        f"default ({entry['machine']}, mla_ops {entry['mla_ops']}, {entry['date']})"
    )


def _tune(arguments: argparse.Namespace) -> int:
    device = chosen_device(arguments)
    words = arguments.cases or [SHAPES[device.type]]
    todo = _todo([case for word in words for case in grammar.parse(word, device)], device)
    done = {} if arguments.again else _known(device)
    left = {key: case for key, case in todo.items() if key not in done}
    if len(left) < len(todo):
        print(f"{len(todo) - len(left)} of {len(todo)} are tuned already (--again: once more)")
    if arguments.dry_run:
        for (backend, _), case in left.items():
            print(f"{backend} {case}: {', '.join(map(_text, candidates(backend, case, device)))}")
        return 0
    if tuned.path() is None:
        raise ValueError("MLA_OPS_TUNED must name a file for tune, got '0'")
    settings = Settings(device, arguments.turns, arguments.budget)
    count = sum(len(candidates(backend, case, device)) for (backend, _), case in left.items())
    turns = (settings.turns + 1) * count
    progress, wrong = Progress(turns), False
    try:
        for (backend, shape), case in left.items():
            say = functools.partial(_step, progress, f"{backend} {case}")
            try:
                entry, mistakes = search(backend, case, settings, say)
            except DoesNotFit as reason:
                progress.say(f"{case} is left out: {reason}")
                continue
            for mistake in mistakes:
                progress.say(f"WRONG: {backend} {case} with {mistake}")
                wrong = True
            if entry is None:
                continue
            entry = entry | shape._asdict()
            keep(entry)
            progress.say(_line(entry))
    finally:
        progress.close()
    print(f"kept in {tuned.path()}")
    return 1 if wrong else 0


def _step(progress: Progress, what: str, name: str) -> None:
    progress.step(f"{what} {name}")


def _todo(cases: Sequence[Case], device: torch.device) -> dict[tuple[str, tuned.ShapeClass], Case]:
    """Return the classes to tune, each with the case that stands for it: the first."""
    found: dict[tuple[str, tuned.ShapeClass], Case] = {}
    for case in cases:
        shape = tuned.shape_class(case.batch, max(case.lengths), case.heads, case.q_len)
        for backend in KNOBS:
            if capability.supports(**case.question(device, backend)):
                found.setdefault((backend, shape), case)
    if not found:
        raise ValueError(
            f"there must be a backend with something to tune ({', '.join(KNOBS)}) that serves the "
            f"cases on {capability.arch_of(device)}, got none"
        )
    return found


def _known(device: torch.device) -> dict[tuple[str, tuned.ShapeClass], Mapping[str, Any]]:
    """Return what was tuned on this machine with this build."""
    here = machine.facts(device)["mla_ops"]
    return {
        (entry["backend"], tuned.ShapeClass(*(entry[name] for name in tuned.ShapeClass._fields))): (
            entry
        )
        for entry in tuned.entries()
        if entry["machine"] == tuned.machine(device) and entry["mla_ops"] == here
    }


def candidates(backend: str, case: Case, device: torch.device) -> list[Choice]:
    """Return what is tried: the default, which is no choice, first."""
    return [{}, *KNOBS[backend].candidates(case, device)]


def search(
    backend: str, case: Case, settings: Settings, say: Callable[[str], object]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the entry for a case, without its class, and what was wrong, for people. There is no
    entry where the default itself is wrong."""
    device = settings.device
    free = max(0, memory_free(device) - RESERVE)
    made = workload.make(case, device, sets_for(case, settings, free, copies=False))
    calls: dict[str, Call] = {}
    choices: dict[str, Choice] = {}
    mistakes = []
    for choice in candidates(backend, case, device):
        name = _text(choice)
        call = _call(backend, made, choice)
        say(name)
        error = workload.error(made, call(0))  # type: ignore[arg-type]
        if error > workload.bar_of(case, device, backend):
            mistakes.append(f"{name}: relative error {error:.1e}")
        else:
            calls[name], choices[name] = call, choice
    if _text({}) not in calls:
        return None, mistakes
    times = interleaved(
        calls,
        settings.turns,
        device,
        rotation=len(made.caches),
        budget=settings.budget,
        step=say,
    )
    best = best_of(times)
    default = times[_text({})].median
    facts = machine.facts(device)
    return {
        "machine": tuned.machine(device),
        "arch": facts["arch"],
        "backend": backend,
        "choice": dict(choices[best]),
        "speedup": round(default / times[best].median, 4),
        "medians": {name: seconds(one.median) for name, one in times.items()},
        "measured_on": str(case),
        "date": facts["date"],
        "torch": facts["torch"],
        "mla_ops": facts["mla_ops"],
    }, mistakes


def _call(backend: str, made: Workload, choice: Choice) -> Call:
    plan = KNOBS[backend].plan(made, choice)
    return lambda turn: made.decode(turn, backend=backend, with_plan=plan)


def best_of(times: Mapping[str, Times]) -> str:
    """Return the quickest, or the default where nothing beats it by GAIN and beyond the noise."""
    default = times[_text({})]
    best = min(times, key=lambda name: times[name].median)
    gains = default.median > GAIN * times[best].median
    apart = times[best].quartiles[1] < default.quartiles[0]
    return best if gains and apart else _text({})


def _text(choice: Choice) -> str:
    return ", ".join(f"{name} {value}" for name, value in choice.items()) or "default"


def keep(entry: Mapping[str, Any]) -> None:
    """Put an entry in the file, in place of the one for the same class and machine."""
    names = ("machine", "backend", *tuned.ShapeClass._fields)
    key = [entry[name] for name in names]
    others = [one for one in tuned.entries() if [one[name] for name in names] != key]
    tuned.write([*others, entry])
