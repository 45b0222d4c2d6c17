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
    """Draw what the rows have, a picture for each kind and group; return the files. Raises
    ValueError where matplotlib is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    timed = [dict(row) for row in rows if row.get("median_us")]
    if not timed:
        raise ValueError("plots must have at least one timed row, got none")
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
    words = {"machine": "", "isa": "", "torch": "torch ", "mla_ops": "mla_ops ", "date": ""}
    return ", ".join(word + str(row[name]) for name, word in words.items() if row.get(name))


def _number(row: Row, name: str) -> float:
    return float(str(row[name]))


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows into panels: one for each of heads, cache, query tokens and threads there is."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        words = [f"{row['heads']} heads", f"{row['cache']} cache"]
        if str(row["q_len"]) != "1":
            words.append(f"{row['q_len']} query tokens")
        if str(row.get("threads", "")):
            words.append(f"{row['threads']} threads")
        if str(row["ragged"]) == "1":
            words.append("ragged")
        found[", ".join(words)].append(row)
    return found


def _bandwidth(pyplot: Any, rows: Sequence[Row], styles: dict[str, Style]) -> Any:
    """Useful GB/s against context, a panel for each kind, a line for each provider and batch."""
    panels = {
        title: group
        for title, group in _panels(rows).items()
        if len({row["context"] for row in group}) > 1
    }
    if not panels:
        return None
    figure, axes = _grid(pyplot, len(panels))
    for axis, (title, group) in zip(axes, panels.items(), strict=False):
        lines: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for row in group:
            key = (str(row["provider"]), int(str(row["batch"])))
            lines[key].append((_number(row, "context"), _number(row, "gb_per_s")))
        batches = sorted({batch for _, batch in lines})
        for (name, batch), points in sorted(lines.items(), key=lambda item: item[0][1]):
            # Of several batches the larger the stronger.
            alpha = 0.35 + 0.65 * (batches.index(batch) + 1) / len(batches)
            xs, ys = zip(*sorted(points), strict=True)
            axis.plot(xs, ys, alpha=alpha, **styles[name])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        _plain(axis.yaxis)
        contexts = sorted({_number(row, "context") for row in group})
        axis.set_xticks(contexts, [_tokens(one) for one in contexts])
        axis.set_xlabel("context, tokens")
        axis.set_ylabel("useful GB/s")
        note = f" (batch {', '.join(map(str, batches))}, the larger the darker)"
        axis.set_title(title + note, fontsize=9, loc="left")
    _legend(figure, styles, "Useful bytes over time", rows)
    return figure


def _tokens(count: float) -> str:
    return f"{count / 1024:g}k" if count >= 1024 else f"{count:g}"


def _over_floor(pyplot: Any, rows: Sequence[Row], styles: dict[str, Style]) -> Any:
    """Time over the read floor of each case, as bars on a logarithmic scale."""
    rows = [row for row in rows if row["provider"] != FLOOR]
    labels = {
        (row["case"], str(row.get("threads", ""))): f"{row['case']}"
        + (f", {row['threads']} threads" if row.get("threads") else "")
        for row in rows
    }
    names = [name for name in styles if name != FLOOR]
    height = 0.16 * len(labels) * (len(names) + 1.5) + 1.6
    figure, axis = pyplot.subplots(figsize=(9, max(3.2, height)), layout="constrained")
    place = {label: i * (len(names) + 1.5) for i, label in enumerate(labels)}
    for i, name in enumerate(names):
        mine = [row for row in rows if row["provider"] == name]
        at = [place[row["case"], str(row.get("threads", ""))] + i for row in mine]
        over = [100 / _number(row, "percent_of_floor") for row in mine]
        axis.barh(at, over, height=0.85, left=0, color=styles[name]["color"], label=name)
        for y, value in zip(at, over, strict=True):
            axis.text(value * 1.03, y, f"{value:.1f}", va="center", fontsize=7, color=INK)
    axis.set_xscale("log")
    _plain(axis.xaxis)
    axis.set_xlim(1, axis.get_xlim()[1] * 1.4)
    axis.set_yticks([start + (len(names) - 1) / 2 for start in place.values()], labels.values())
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.set_xlabel("time over the time that reading the useful bytes takes (1 is the floor)")
    bars = {
        name: {"color": styles[name]["color"], "marker": "s", "linestyle": "none"} for name in names
    }
    _legend(figure, bars, "Time over the read floor", rows)
    return figure


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
    reading = max(_number(row, "gb_per_s") for row in rows if row["provider"] == FLOOR)
    low, high = min(intensity.values()) / 2, max(*intensity.values(), peak / reading) * 2
    xs = [low, peak / reading, high]
    roof = [min(peak, x * reading) for x in xs]
    axis.plot(xs, roof, color=INK, linewidth=1.4)
    axis.text(high, peak * 1.06, f"matmul {peak:.0f} GFLOP/s", ha="right", fontsize=8)
    axis.text(low * 1.15, low * reading, f"reading {reading:.0f} GB/s", fontsize=8, va="top")
    for name, style in styles.items():
        mine = [row for row in points if row["provider"] == name]
        axis.scatter(
            [intensity[str(row["case"])] for row in mine],
            [_number(row, "gflop_per_s") for row in mine],
            color=style["color"],
            marker=style.get("marker", "o"),
            s=36 if name.startswith("mla_ops ") else 24,
            alpha=0.85,
            zorder=style["zorder"],
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
    columns = min(2, count)
    lines = -(-count // columns)
    size = (5.4 * columns + (1 if columns == 1 else 0), 3.4 * lines + 1.2)
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
        ncols=4,
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
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
