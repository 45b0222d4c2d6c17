"""Draw the pictures of docs/concepts.md and docs/cache-formats.md (matplotlib).

make docs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"

INK, GREY = "#222222", "#888888"
QUERY, CACHE, ROPE, OUT, PLAIN = "#fdd9b5", "#cfe3f4", "#9cc4e4", "#d5ecd0", "#f2f2f2"
SEQUENCES = ("#2b7bba", "#d95f02", "#5aae61")


def canvas(width: float, height: float, title: str) -> Any:
    """Return axes in units of 0.1 inch, without anything on them."""
    figure, axis = pyplot.subplots(figsize=(width / 10, height / 10))
    figure.subplots_adjust(0, 0, 1, 1)
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    axis.text(2, height - 3, title, fontsize=12, fontweight="bold", va="center", color=INK)
    return axis


def box(
    axis: Any, x: float, y: float, width: float, height: float, text: str, colour: str, **more: Any
) -> None:
    """Draw a labelled box."""
    axis.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=INK, linewidth=0.9))
    options = {"fontsize": 9, "ha": "center", "va": "center", "color": INK} | more
    axis.text(x + width / 2, y + height / 2, text, **options)


def arrow(axis: Any, begin: tuple[float, float], end: tuple[float, float], **more: Any) -> None:
    """Draw an arrow."""
    options: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.0}
    options |= {"color": INK} | more
    axis.add_patch(FancyArrowPatch(begin, end, shrinkA=0, shrinkB=0, **options))


def note(axis: Any, x: float, y: float, text: str, **more: Any) -> None:
    """Write a remark."""
    options = {"fontsize": 8, "color": GREY, "va": "center", "ha": "left"} | more
    axis.text(x, y, text, **options)


def save(axis: Any, name: str) -> Path:
    """Write a picture; the same picture is the same file."""
    path = PICTURES / f"{name}.png"
    axis.figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(axis.figure)
    return path


def absorbed() -> Path:
    """What is cached, what is computed, and where the projections went."""
    axis = canvas(96, 60, "Absorbed Multi-head Latent Attention, one query token, H heads")
    note(axis, 2, 52, "before the op (the model's)", fontweight="bold")
    box(axis, 2, 42, 14, 6, "q_nope  [H, 128]", PLAIN)
    box(axis, 22, 42, 10, 6, "× W_UK", PLAIN, fontstyle="italic")
    box(axis, 2, 33, 14, 6, "q_pe  [H, 64]", PLAIN)
    arrow(axis, (16, 45), (22, 45))
    box(axis, 38, 42, 22, 6, "latent part, R = 512", QUERY)
    box(axis, 60, 42, 9, 6, "64", QUERY)
    note(axis, 71, 45, "q  [H, D = 576]", color=INK, fontsize=9)
    arrow(axis, (32, 45), (38, 45))
    arrow(axis, (16, 36), (64.5, 42), connectionstyle="arc3,rad=0.12")

    note(axis, 2, 28.5, "the op, mla::decode", fontweight="bold")
    for i in range(5):
        y = 6 + 4 * i
        box(axis, 38, y, 22, 3.4, "latent" if i == 4 else "", CACHE, fontsize=8)
        box(axis, 60, y, 9, 3.4, "rope" if i == 4 else "", ROPE, fontsize=8)
    note(axis, 38, 3.4, "cache: one row of D numbers a token, shared by all heads", fontsize=8)
    arrow(axis, (53, 42), (53, 26), color=SEQUENCES[0])
    note(axis, 54.2, 32.5, "keys: q · row, all D numbers", color=SEQUENCES[0])
    box(axis, 2, 14, 17, 7, "softmax over tokens\n× softmax_scale", PLAIN, fontsize=8.5)
    arrow(axis, (38, 20), (19, 18.5), color=SEQUENCES[0])
    arrow(axis, (19, 16), (38, 13), color=SEQUENCES[1])
    note(axis, 20, 10.8, "weights", color=SEQUENCES[1])
    axis.plot([36.9, 36.9, 61, 61, 36.9], [5.2, 26.2, 26.2, 5.2, 5.2], "--", color=SEQUENCES[1])
    note(axis, 71, 23, "values: the first R\nnumbers of the\nsame rows", color=SEQUENCES[1])
    box(axis, 76, 10, 18, 6, "out  [H, R]", OUT)
    arrow(axis, (61, 13), (76, 13), color=SEQUENCES[1])
    note(axis, 76, 6.5, "after the op: × W_UV")
    return save(axis, "absorbed")


def paging() -> Path:
    """A block table, and the pages it names in the pool."""
    axis = canvas(
        96, 50, "Paging: kv_cache [P, page_size, D], block_table [B, pages], seq_lens [B]"
    )
    table = ((7, 2, 5), (1, 6, None), (4, None, None))
    lengths, size = (150, 100, 20), 64
    note(axis, 2, 42, "seq_lens", color=INK, fontsize=9)
    note(axis, 13, 42, "block_table", color=INK, fontsize=9)
    for b, (row, length) in enumerate(zip(table, lengths, strict=True)):
        y = 34 - 7 * b
        box(axis, 2, y, 8, 5, str(length), SEQUENCES[b] + "55")
        for i, page in enumerate(row):
            text = "?" if page is None else str(page)
            colour = PLAIN if page is None else SEQUENCES[b] + "55"
            box(axis, 13 + 6 * i, y, 6, 5, text, colour, color=GREY if page is None else INK)
    note(axis, 2, 15.5, "?: behind a sequence's end,\nnever read, may hold anything")
    owner = {page: (b, i) for b, row in enumerate(table) for i, page in enumerate(row) if page}
    for page in range(8):
        x, y = 42 + 27 * (page // 4), 34 - 9 * (page % 4)
        axis.add_patch(Rectangle((x, y), 20, 5, facecolor="white", edgecolor=INK, linewidth=0.9))
        note(axis, x - 1, y + 2.5, str(page), ha="right", color=INK, fontsize=9)
        if page not in owner:
            note(axis, x + 10, y + 2.5, "free", ha="center")
            continue
        b, i = owner[page]
        used = min(size, lengths[b] - i * size)
        axis.add_patch(
            Rectangle((x, y), 20 * used / size, 5, facecolor=SEQUENCES[b] + "88", edgecolor=INK)
        )
        first = i * size
        label = f"{first} to {first + used - 1}"
        inside = used > 30
        note(
            axis,
            x + (1 if inside else 20 * used / size + 1),
            y + 2.5,
            label,
            color=INK,
            fontsize=8,
        )
    note(
        axis,
        42,
        42,
        "kv_cache: pages of 64 rows, and whose tokens they hold",
        color=INK,
        fontsize=9,
    )
    note(
        axis,
        2,
        3,
        "token t of sequence b is row t % page_size of page block_table[b, t // page_size]; "
        "its slot is page × page_size + row",
        color=INK,
    )
    return save(axis, "paging")


def row_bytes() -> Path:
    """A cache row, to the byte."""
    axis = canvas(96, 34, "A row of the cache, D = 576 numbers, to the byte")
    for y, name, itemsize in ((20, "bfloat16, float16", 2), (10, "float8 e4m3", 1)):
        scale = 66 / 1152
        latent, rope = 512 * itemsize * scale, 64 * itemsize * scale
        note(axis, 2, y + 2.5, name, color=INK, fontsize=9)
        box(axis, 22, y, latent, 5, f"latent: bytes 0 to {512 * itemsize - 1}", CACHE, fontsize=8.5)
        box(axis, 22 + latent, y, rope, 5, "rope" if itemsize == 2 else "", ROPE, fontsize=8)
        end = f"to {576 * itemsize - 1}"
        note(axis, 22 + latent + rope + 1, y + 2.5, end, color=INK, fontsize=8.5)
    note(
        axis,
        2,
        4,
        "float32: as bfloat16, 4 bytes a number. The rope part follows the latent without a gap; "
        "nothing else is in a row.",
    )
    return save(axis, "row")


def main() -> None:
    """Draw them all."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for draw in (absorbed, paging, row_bytes):
        print(f"drew {draw()}")


if __name__ == "__main__":
    main()
