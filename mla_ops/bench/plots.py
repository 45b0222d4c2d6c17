"""The results of a CSV as pictures: bandwidth against context, time over the floor, roofline.

matplotlib is an extra: pip install 'mla_ops[bench]'.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mla_ops.bench.measure import FLOOR
from mla_ops.bench.table import Row

# Ours in blues, others in warm colours (distinguishable without red and green alone), the floor
# black. By what the name begins with; each next one of a kind takes the next colour.
OURS = ("#0b559f", "#2b7bba", "#6aaed6")
OTHERS = ("#d95f02", "#e6ab02", "#a6611a", "#7b3294", "#c994c7", "#e7298a", "#666666", "#999999")
MARKERS = "osD^vP*X<>"
INK = "#222222"

Style = dict[str, Any]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what the rows have, a picture for each kind, of the setup with the most rows; return the
    files. Raises ValueError where matplotlib is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    timed = _of_one_setup([row for row in rows if row.get("median_us")])
    styles = _styles(str(row["provider"]) for row in timed)
    found = []
    with matplotlib.rc_context(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": INK,
            "axes.grid": True,
            "grid.color": "#e5e5e5",
            "axes.axisbelow": True,
            "svg.hashsalt": "mla_ops",
        }
    ):
        for name, picture in (
            ("bandwidth", _bandwidth),
            ("over_floor", _over_floor),
            ("roofline", _roofline),
        ):
            figure = picture(pyplot, timed, styles)
            if figure is None:
                continue
            path = folder / f"{name}.png"
            # Without the date and version that matplotlib writes, equal results are equal files.
            figure.savefig(path, dpi=130, metadata={"Software": None})
            pyplot.close(figure)
            found.append(path)
    return found


def _of_one_setup(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the machine, instruction set and number of threads that has the most:
    others have other roofs."""
    if not rows:
        raise ValueError("plots must have at least one timed row, got none")
    setups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        setups[tuple(row.get(name) for name in ("machine", "isa", "threads"))].append(row)
    return max(setups.values(), key=len)


def _styles(names: Iterable[str]) -> dict[str, Style]:
    found: dict[str, Style] = {}
    for name in dict.fromkeys(names):
        ours = name.startswith("mla_ops ")
        kind = sum(other.startswith("mla_ops ") == ours for other in found if other != FLOOR)
        colour = (OURS if ours else OTHERS)[kind % len(OURS if ours else OTHERS)]
        found[name] = {
            "color": colour,
            "marker": MARKERS[len(found) % len(MARKERS)],
            "linewidth": 2.2 if ours else 1.3,
            "markersize": 6 if ours else 5,
            "zorder": 3 if ours else 2,
        }
    if FLOOR in found:
        found[FLOOR] = {"color": INK, "linestyle": "--", "linewidth": 1.2, "zorder": 1}
    return found


def _where(rows: Sequence[Row]) -> str:
    row = rows[0]
    words = {
        "machine": "{}",
        "isa": "{}",
        "threads": "{} threads",
        "torch": "torch {}",
        "mla_ops": "mla_ops {}",
        "date": "{}",
    }
    return ", ".join(word.format(row[name]) for name, word in words.items() if row.get(name))


def _number(row: Row, name: str) -> float:
    return float(str(row[name]))


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows into panels: one for each of heads, cache, query tokens and batch there is."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        words = [f"batch {row['batch']}", f"{row['heads']} heads", f"{row['cache']} cache"]
        if str(row["q_len"]) != "1":
            words.append(f"{row['q_len']} query tokens")
        if str(row["ragged"]) == "1":
            words.append("ragged")
        found[", ".join(words)].append(row)
    return found


def _bandwidth(pyplot: Any, rows: Sequence[Row], styles: dict[str, Style]) -> Any:
    """Useful GB/s against context, a panel for each kind and batch, a line for each provider."""
    panels = {
        title: group
        for title, group in _panels(rows).items()
        if len({row["context"] for row in group}) > 1
    }
    if not panels:
        return None
    figure, axes = _grid(pyplot, len(panels))
    top = max(_number(row, "gb_per_s") for group in panels.values() for row in group) * 1.3
    low = min(_number(row, "gb_per_s") for group in panels.values() for row in group) / 1.3
    for axis, (title, group) in zip(axes, panels.items(), strict=False):
        for name, style in styles.items():
            points = sorted(
                (_number(row, "context"), _number(row, "gb_per_s"))
                for row in group
                if row["provider"] == name
            )
            if points:
                axis.plot(*zip(*points, strict=True), **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_ylim(low, top)
        _plain(axis.yaxis)
        contexts = sorted({_number(row, "context") for row in group})
        axis.set_xticks(contexts, [_tokens(one) for one in contexts])
        axis.set_xlabel("context, tokens")
        axis.set_ylabel("useful GB/s")
        axis.set_title(title, fontsize=9, loc="left")
    _legend(figure, styles, "Useful bytes over time", rows)
    return figure


def _tokens(count: float) -> str:
    return f"{count / 1024:g}k" if count >= 1024 else f"{count:g}"


def _over_floor(pyplot: Any, rows: Sequence[Row], styles: dict[str, Style]) -> Any:
    """Time over the read floor, a line for each case, a dot for each provider."""
    rows = [row for row in rows if row["provider"] != FLOOR and row.get("percent_of_floor")]
    if not rows:
        return None
    labels = list(dict.fromkeys(str(row["case"]) for row in rows))
    names = [name for name in styles if any(row["provider"] == name for row in rows)]
    size = (9, 0.34 * len(labels) + 2.0)
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    for name in names:
        mine = [row for row in rows if row["provider"] == name]
        axis.scatter(
            [100 / _number(row, "percent_of_floor") for row in mine],
            [labels.index(str(row["case"])) for row in mine],
            **_dots(name, styles[name]),
        )
    axis.axvline(1, **styles.get(FLOOR, {"color": INK}))
    axis.set_xscale("log")
    _plain(axis.xaxis)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_xlabel("time over the time that reading the useful bytes takes (1 is the floor)")
    shown = {name: styles[name] | {"linestyle": "none"} for name in names}
    _legend(figure, shown, "Time over the read floor", rows)
    return figure


def _dots(name: str, style: Style) -> Style:
    """A provider's style, for dots."""
    return {
        "color": style["color"],
        "marker": style.get("marker", "o"),
        "s": 52 if name.startswith("mla_ops ") else 26,
        "alpha": 0.85,
        "zorder": style["zorder"],
    }


def _roofline(pyplot: Any, rows: Sequence[Row], styles: dict[str, Style]) -> Any:
    """GFLOP/s against FLOP a useful byte, under the measured roofs of reading and multiplying."""
    points = [row for row in rows if row.get("gflop_per_s")]
    if not points or not points[0].get("matmul_gflop_per_s"):
        return None
    figure, axis = pyplot.subplots(figsize=(8, 5.2), layout="constrained")
    intensity = {
        str(row["case"]): _number(row, "flop") / _number(row, "useful_bytes") for row in points
    }
    peak = max(_number(row, "matmul_gflop_per_s") for row in points)
    floors = [_number(row, "gb_per_s") for row in rows if row["provider"] == FLOOR]
    low, high = min(intensity.values()) / 2, max(intensity.values()) * 2
    xs = [low, high]
    if floors:
        reading = max(floors)
        xs = sorted({low, peak / reading, high})
        axis.text(low * 1.15, low * reading, f"reading {reading:.0f} GB/s", fontsize=8, va="top")
    roof = [min(peak, x * reading) if floors else peak for x in xs]
    axis.plot(xs, roof, color=INK, linewidth=1.4)
    axis.text(high, peak * 1.06, f"matmul {peak:.0f} GFLOP/s", ha="right", fontsize=8)
    for name, style in styles.items():
        mine = [row for row in points if row["provider"] == name]
        axis.scatter(
            [intensity[str(row["case"])] for row in mine],
            [_number(row, "gflop_per_s") for row in mine],
            **_dots(name, style),
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    _plain(axis.xaxis)
    _plain(axis.yaxis)
    axis.set_xlabel("FLOP for each useful byte")
    axis.set_ylabel("GFLOP/s")
    shown = {name: style | {"linestyle": "none"} for name, style in styles.items() if name != FLOOR}
    _legend(figure, shown, "Roofline: what was measured, under what the machine can do", rows)
    return figure


def _grid(pyplot: Any, count: int) -> tuple[Any, list[Any]]:
    columns = min(2 if count < 5 else 4, count)
    lines = -(-count // columns)
    width = 5.4 if columns < 3 else 3.6
    size = (width * columns + (1 if columns == 1 else 0), 3.4 * lines + 1.2)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=size, squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_visible(False)
    return figure, flat


def _legend(figure: Any, styles: dict[str, Style], title: str, rows: Sequence[Row]) -> None:
    lines = importlib.import_module("matplotlib.lines")
    handles = [lines.Line2D([], [], label=name, **style) for name, style in styles.items()]
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    legend = figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=5,
        frameon=False,
        fontsize=8,
        title=_where(rows),
        title_fontsize=7,
        alignment="left",
    )
    legend.get_title().set_color("#777777")


def _plain(axis: Any) -> None:
    """Numbers as 0.5, 20, 1000 on a logarithmic axis."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
