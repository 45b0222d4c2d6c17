"""Time decode against the machine's read floor and against what else can be imported here.

Every result is checked against the float64 oracle before anything is timed; then all take turns.
BENCHMARKS.md says how to measure, and what the columns mean.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from mla_ops import checks, machine, workload
from mla_ops.bench import floor, grammar, measure, providers, table
from mla_ops.bench.peers import PEERS
from mla_ops.bench.providers import Provider
from mla_ops.console import Progress, add_device, chosen_device

ALL = (*map(providers.ours, checks.BACKENDS[1:]), *providers.TORCH, *PEERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = grammar.__doc__
    parser.add_argument(
        "cases", nargs="*", help="cases or presets (default: seed on a GPU, quick on a CPU)"
    )
    add_device(parser)
    parser.add_argument(
        "--providers",
        metavar="NAME,...",
        help="these only; part of a name will do (default: all that can be had)",
    )
    parser.add_argument("--turns", type=int, default=15, help="timed turns of each (15)")
    parser.add_argument(
        "--budget",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for a case; slow ones get fewer turns (60)",
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="always the same cache, so that the processor's caches may hold it",
    )
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--csv", type=Path, help="write the results there")
    parser.add_argument("--append", action="store_true", help="after what the CSV holds already")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw them (matplotlib)")
    parser.add_argument(
        "--read", type=Path, metavar="CSV", help="measure nothing, take the results of a file"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="OLD.csv",
        help="against earlier results; exit code 1 where ours are slower",
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="what --compare lets pass (0.05)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return 0, 1 where a result of ours is wrong or slower than in --compare,
    2 for what cannot be done."""
    try:
        rows = table.read_csv(arguments.read) if arguments.read else _measured(arguments)
        print(table.summary(rows))
        if arguments.csv and not arguments.read:
            kept = table.read_csv(arguments.csv) if arguments.append else []
            table.write_csv(arguments.csv, [*kept, *rows])
        if arguments.plots:
            from mla_ops.bench import plots

            for path in plots.draw(rows, arguments.plots):
                print(f"drew {path}")
        slower = 0
        if arguments.compare:
            ours = [row for row in rows if str(row["provider"]).startswith("mla_ops ")]
            text, slower = table.compare(
                table.read_csv(arguments.compare), ours, arguments.tolerance
            )
            print(f"\n{text}\n\n{slower} slower")
    except (ValueError, OSError) as error:
        print(f"mla_ops bench: {error}")
        return 2
    wrong = [
        row
        for row in rows
        if str(row["provider"]).startswith("mla_ops ")
        and str(row["verdict"]).startswith(("WRONG", "failed"))
    ]
    return 1 if wrong or slower else 0


def chosen(names: str | None, device: torch.device) -> tuple[list[Provider], dict[str, str]]:
    """Return who takes part, and why others that were not left out on purpose do not.

    Raises ValueError for a name that is nobody's.
    """
    words = None if names is None else names.split(",")
    known = ", ".join(provider.name for provider in ALL)
    for word in words or ():
        if not any(word.lower() in provider.name.lower() for provider in ALL):
            raise ValueError(f"a provider must be one of {known}, got {word!r}")
    here, missing = [], {}
    for provider in ALL:
        if words is not None and not any(word.lower() in provider.name.lower() for word in words):
            continue
        reason = provider.missing(device)
        if reason is None:
            here.append(provider)
        else:
            missing[provider.name] = reason
    return here, missing


def _measured(arguments: argparse.Namespace) -> Sequence[table.Row]:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = chosen_device(arguments)
    words = arguments.cases or [("seed" if device.type == "cuda" else "quick")]
    cases = dict.fromkeys(case for word in words for case in grammar.parse(word, device))
    here, missing = chosen(arguments.providers, device)
    facts = machine.facts(device) | {
        "matmul_gflop_per_s": f"{floor.matmul_flops(device) / 1e9:.1f}"
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value))
    for name, reason in missing.items():
        print(f"without {name}: {reason}")
    print(flush=True)
    rotated = 0 if arguments.warm else measure.ROTATED
    settings = measure.Settings(device, arguments.turns, arguments.budget, rotated)
    progress = Progress(len(cases) * (len(here) + 3) * (settings.turns + 1))
    rows: list[table.Row] = []
    try:
        for case in cases:
            say = functools.partial(_step, progress, case)
            try:
                rows += [facts | row for row in measure.measure(case, here, settings, say)]
            except measure.DoesNotFit as reason:
                progress.say(f"{case} is left out: {reason}")
    finally:
        progress.close()
    if not rows:
        raise ValueError("nothing was measured")
    return rows


def _step(progress: Progress, case: workload.Case, name: str) -> None:
    progress.step(f"{case} {name}")
