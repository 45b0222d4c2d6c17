"""Results written down: CSV in long format, Markdown, and a comparison with earlier ones."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mla_ops import console

Row = Mapping[str, object]
Cells = Sequence[object]

NOISE = 0.2


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows with the columns of them all, in the order in which they come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(names), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read rows of `write_csv`. Raises ValueError for another kind of file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"case", "provider", "median_us"} <= set(rows[0]):
        raise ValueError(f"{path} must be a CSV of `python -m mla_ops bench`, got another file")
    return rows


def markdown(header: Sequence[str], rows: Iterable[Cells]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Return the Markdown table of a run."""
    header = (
        "case",
        "provider",
        "median",
        "middle half",
        "useful GB/s",
        "GFLOP/s",
        "of the floor",
        "best other / it",
        "error",
        "verdict",
    )
    cells = []
    for row in rows:
        one = {name: str(value) for name, value in row.items()}
        if not one.get("median_us"):
            empty = [""] * 6
            cells.append([one["case"], one["provider"], *empty, _error(one), one["verdict"]])
            continue
        low, high = (_time(str(number)) for number in _middle(row))
        ratio = one["best_other_over_it"]
        cells.append(
            [
                one["case"],
                one["provider"],
                _time(one["median_us"]),
                f"{low} to {high}",
                one["gb_per_s"],
                one["gflop_per_s"],
                f"{one['percent_of_floor']} %" if one["percent_of_floor"] else "",
                f"{ratio}x" if ratio else "",
                _error(one),
                one["verdict"],
            ]
        )
    return markdown(header, cells) + _noise(rows)


def _noise(rows: Sequence[Row]) -> str:
    """Return a warning where a middle half is wider than NOISE of its median."""
    timed = [row for row in rows if row.get("median_us")]
    wide = [
        row
        for row in timed
        if _middle(row)[1] - _middle(row)[0] > NOISE * _number(row, "median_us")
    ]
    if not wide:
        return ""
    return (
        f"\n\nNOISY: in {len(wide)} of {len(timed)} rows the middle half of the turns spreads over "
        f"more than {NOISE:.0%} of the median: something else was running"
    )


def _error(row: Mapping[str, str]) -> str:
    return row.get("relative_error", "")


def _time(microseconds: str) -> str:
    return console.seconds(float(microseconds) / 1e6)


def compare(old: Sequence[Row], new: Sequence[Row], tolerance: float) -> tuple[str, int]:
    """Return the Markdown table of new against old, and how many are slower.

    Slower is one whose median grew by more than `tolerance` while its quartiles left the old ones
    behind: noise does the first alone. Raises ValueError where nothing can be compared: other
    machines, no case in common.
    """
    before, after = _by_key(old), _by_key(new)
    common = [key for key in after if key in before]
    if not common:
        machines = (sorted({str(row.get("machine")) for row in rows}) for rows in (old, new))
        raise ValueError(
            "the files must have a case of one provider on one machine in common, got none "
            "(machines: {} and {})".format(*(", ".join(names) for names in machines))
        )
    lines, slower = [], 0
    for key in common:
        was, now = before[key], after[key]
        ratio = _number(now, "median_us") / _number(was, "median_us")
        apart = _middle(now)[0] > _middle(was)[1]
        below = _middle(now)[1] < _middle(was)[0]
        word = ""
        if ratio > 1 + tolerance and apart:
            word, slower = "SLOWER", slower + 1
        elif ratio < 1 / (1 + tolerance) and below:
            word = "faster"
        medians = (_time(str(row["median_us"])) for row in (was, now))
        lines.append((*key[:2], *medians, f"{ratio:.2f}x", word))
    header = ("case", "provider", "before", "now", "now / before", "")
    left_out = len(after) - len(common)
    note = f"\n\n{left_out} of {len(after)} are new and have nothing to be compared with"
    return markdown(header, lines) + (note if left_out else ""), slower


def _by_key(rows: Sequence[Row]) -> dict[tuple[object, ...], Row]:
    # By the machine too, and the threads: other times there are no regression.
    names = ("case", "provider", "machine", "threads", "isa")
    return {tuple(row.get(name, "") for name in names): row for row in rows if row.get("median_us")}


def _number(row: Row, name: str) -> float:
    return float(str(row[name]))


def _middle(row: Row) -> tuple[float, float]:
    """Return the quartiles, or the median twice where a file has none."""
    low, high = (row.get(name) or row["median_us"] for name in ("quarter_us", "three_quarters_us"))
    return float(str(low)), float(str(high))
