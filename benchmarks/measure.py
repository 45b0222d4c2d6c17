"""How things are timed and written down, for every benchmark here.

The machine drifts (other tenants, clocks): contenders run in turn, and what is compared are medians
of one run. A turn is a burst of calls, BURST seconds or one call: after anything else has run, even
a pause, the first call of a 0.5 ms contender takes half as long again, whoever's it is.
"""

from __future__ import annotations

import csv
import datetime
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

BURST = 0.02


def _time(run: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls


def interleaved(
    contenders: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of a call in each turn of each contender."""
    calls: dict[str, int] = {}
    for name, run in contenders.items():
        run()
        calls[name] = max(1, round(BURST / _time(run, 1)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            seconds[name].append(_time(run, calls[name]))
    return seconds


def median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)


def cpu_name() -> str:
    """Return the processor's name as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine_facts() -> dict[str, str]:
    """Return what every row of a result says of where it was measured."""
    from mla_ops import _C

    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "isa": _C.cpu_isa(),
        "mla_ops": _C.build_info()["git_revision"],
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows in long format, with the columns of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
