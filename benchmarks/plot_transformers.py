"""Draw what bench_transformers.py wrote: milliseconds and cache bytes against context.

    python benchmarks/plot_transformers.py benchmarks/results/cpu_transformers.csv

Writes an SVG beside the CSV. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mla_ops"  # the same drawing for the same numbers

from matplotlib import pyplot  # noqa: E402


def main(path: Path) -> None:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    panels = list(dict.fromkeys((row["model"], row["what"]) for row in rows))
    figure, axes = pyplot.subplots(1, len(panels) + 1, figsize=(4 * len(panels) + 4, 4))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    for axis, (model, what) in zip(axes, panels, strict=False):
        for provider in providers:
            here = [
                row
                for row in rows
                if (row["model"], row["what"], row["provider"]) == (model, what, provider)
            ]
            contexts = [int(row["context"]) for row in here]
            axis.plot(contexts, [float(row["milliseconds"]) for row in here], "o-", label=provider)
        axis.set(title=f"{model}: {what}", ylabel="milliseconds a token")
    for model in dict.fromkeys(model for model, _ in panels):
        for provider in ("sdpa", "mla_ops fp8"):
            sizes = {
                int(row["context"]): int(row["cache_bytes"]) / 1e6
                for row in rows
                if (row["model"], row["provider"]) == (model, provider)
            }
            axes[-1].plot(sizes.keys(), sizes.values(), "o-", label=f"{model}, {provider}")
    axes[-1].set(title="cache", ylabel="MB")
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="tokens of context")
        axis.legend()
    first = rows[0]
    figure.suptitle(
        f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}, "
        f"{first['dtype']}"
    )
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
