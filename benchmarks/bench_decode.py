"""Decode on a CPU against what torch offers, and against the machine's own matmul rate, in one
run.

python benchmarks/bench_decode.py --device cpu

The peers read a contiguous cache of the same numbers ([B, L, D]; no paging), in bfloat16. Their
fastest counts. The matmul rate (a 2048 cube, bfloat16; float32 for the AVX2 path) is measured
in turn with the op.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure import interleaved, machine_facts, markdown, median, write_csv
from torch import Tensor

import mla_ops
from mla_ops import reference

RANK, ROPE, PAGE = 512, 64, 64
WIDTH = RANK + ROPE
SCALE = 1.0 / 192**0.5
SHAPES = ((4, 1024), (4, 8192), (32, 1024), (32, 8192))
CUBE = 2048


@dataclass
class Setup:
    """A batch with its cache as pages (shuffled) and as a contiguous tensor."""

    batch: int
    length: int
    heads: int
    q: Tensor = field(init=False)
    contiguous: Tensor = field(init=False)
    table: Tensor = field(init=False)
    lengths: Tensor = field(init=False)
    caches: dict[str, tuple[Tensor, Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        pages = self.batch * self.length // PAGE
        cache = torch.empty(pages, PAGE, WIDTH, dtype=torch.bfloat16)
        for part in cache.split(1024):
            part.copy_(torch.randn(part.shape, generator=generator))
        order = torch.randperm(pages, generator=generator)
        self.table = order.to(torch.int32).view(self.batch, -1)
        self.contiguous = cache[order].view(self.batch, self.length, WIDTH)
        self.lengths = torch.full((self.batch,), self.length, dtype=torch.int32)
        shape = (self.batch, 1, self.heads, WIDTH)
        self.q = torch.randn(shape, generator=generator).to(torch.bfloat16)
        scale = torch.tensor([0.02])
        fp8 = torch.empty(cache.shape, dtype=torch.float8_e4m3fn)
        for part, source in zip(fp8.split(1024), cache.split(1024), strict=True):
            part.copy_(mla_ops.quantize_fp8(source, scale)[0])
        self.caches = {"bf16": (cache, None), "fp8": (fp8, scale)}

    @property
    def flop(self) -> int:
        return 2 * self.batch * self.length * self.heads * (WIDTH + RANK)

    def ours(self, cache: str) -> Callable[[], Tensor]:
        kv_cache, scale = self.caches[cache]
        arguments = (self.q, kv_cache, self.table, self.lengths, SCALE)
        return lambda: torch.ops.mla.decode(*arguments, kv_scale=scale, backend="native")

    def peers(self) -> dict[str, Callable[[], Tensor]]:
        q, kv = self.q[:, 0], self.contiguous
        keys, values = kv.mT, kv[..., :RANK]

        def bmm() -> Tensor:
            return torch.bmm(torch.softmax(torch.bmm(q, keys) * SCALE, -1), values)

        def per_sequence() -> Tensor:
            return torch.stack(
                [
                    torch.softmax(one @ k * SCALE, -1) @ v
                    for one, k, v in zip(q, keys, values, strict=True)
                ]
            )

        def sdpa() -> Tensor:
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q[:, None], kv[:, None], values[:, None], scale=SCALE)[:, 0]

        return {"bmm": bmm, "per_sequence": per_sequence, "sdpa": sdpa}

    def check(self, cache: str) -> float:
        """Return the relative L2 error of the first and last sequence against the oracle."""
        kv_cache, scale = self.caches[cache]
        out = self.ours(cache)()
        some = torch.tensor(sorted({0, self.batch - 1}))
        problem = (self.q[some], kv_cache, self.table[some], self.lengths[some], SCALE)
        want, _ = reference.decode(*problem, kv_scale=scale)
        return float((out[some].double() - want).norm() / want.norm())


def matmul(dtype: torch.dtype) -> Callable[[], Tensor]:
    a, b = (torch.randn(CUBE, CUBE).to(dtype) for _ in range(2))
    return lambda: a @ b


def measure(
    shape: tuple[int, int], heads: int, repeats: int, peers: bool
) -> list[dict[str, object]]:
    """Return a row per provider for one shape."""
    setup = Setup(*shape, heads)
    wide = "float32" if mla_ops._C.cpu_isa() in ("avx2", "baseline", "avx512") else "bfloat16"
    contenders: dict[str, Callable[[], object]] = {
        "ours bf16": setup.ours("bf16"),
        f"matmul {wide}": matmul(getattr(torch, wide)),
        "ours fp8": setup.ours("fp8"),
    }
    if peers:
        contenders |= setup.peers()
    errors = {f"ours {cache}": setup.check(cache) for cache in setup.caches}
    seconds = interleaved(contenders, repeats)
    rows = []
    for name, times in seconds.items():
        is_matmul = name.startswith("matmul")
        flop = 2 * CUBE**3 if is_matmul else setup.flop
        element = 1 if name == "ours fp8" else 2
        read = setup.batch * setup.length * WIDTH * element
        rows.append(
            {
                "batch": setup.batch,
                "length": setup.length,
                "heads": heads,
                "threads": torch.get_num_threads(),
                "provider": name,
                "median_ms": round(median(times) * 1e3, 4),
                "min_ms": round(min(times) * 1e3, 4),
                "max_ms": round(max(times) * 1e3, 4),
                "gflop_per_s": round(flop / median(times) / 1e9, 1),
                "cache_gb_per_s": "" if is_matmul else round(read / median(times) / 1e9, 2),
                "relative_error": f"{errors[name]:.2e}" if name in errors else "",
            }
        )
    return rows


def extra_memory(shape: tuple[int, int], heads: int) -> float:
    """Return by how many MiB the process grew at most during one call."""
    setup = Setup(*shape, heads)
    run = setup.ours("bf16")

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    run()
    return (status("VmHWM") - before) / 1024


def summary(rows: list[dict[str, object]]) -> str:
    """Return the Markdown table of ratios."""
    lines = []
    keys = dict.fromkeys(
        (row["batch"], row["length"], row["heads"], row["threads"]) for row in rows
    )
    for key in keys:
        group = {
            str(row["provider"]): row
            for row in rows
            if (row["batch"], row["length"], row["heads"], row["threads"]) == key
        }
        ours, fp8 = group["ours bf16"], group["ours fp8"]
        rate = next(row for name, row in group.items() if name.startswith("matmul"))
        peers = [row for name, row in group.items() if name in ("bmm", "per_sequence", "sdpa")]
        best = min(peers, key=lambda row: float(str(row["median_ms"])), default=None)
        number = lambda row, column: float(str(row[column]))  # noqa: E731
        lines.append(
            (
                f"({key[0]}, {key[1]})",
                key[2],
                key[3],
                ours["median_ms"],
                fp8["median_ms"],
                f"{number(fp8, 'median_ms') / number(ours, 'median_ms'):.2f}",
                f"{100 * number(ours, 'gflop_per_s') / number(rate, 'gflop_per_s'):.0f} %",
                ours["cache_gb_per_s"],
                "" if best is None else f"{best['median_ms']} ({best['provider']})",
                ""
                if best is None
                else f"{number(best, 'median_ms') / number(ours, 'median_ms'):.1f}x",
                f"{ours['relative_error']} / {fp8['relative_error']}",
            )
        )
    header = (
        "(batch, context)",
        "heads",
        "threads",
        "bf16 ms",
        "fp8 ms",
        "fp8 / bf16",
        "of matmul rate",
        "GB/s",
        "best peer ms",
        "faster",
        "error bf16 / fp8",
    )
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--csv", type=Path, default=Path(__file__).parent / "results/cpu_decode.csv"
    )
    parser.add_argument("--part", choices=["avx2", "memory"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    threads = torch.get_num_threads()

    if arguments.part == "memory":
        print(f"{extra_memory((32, 8192), 16):.1f}")
        return
    rows: list[dict[str, object]] = []
    if arguments.part == "avx2":
        rows += measure((4, 1024), 16, arguments.repeats, peers=False)
    else:
        for shape in SHAPES:
            rows += measure(shape, 16, arguments.repeats, peers=True)
        rows += measure((4, 8192), 128, arguments.repeats, peers=True)
        torch.set_num_threads(1)
        rows += measure((4, 8192), 16, arguments.repeats, peers=False)
        rows += measure((32, 8192), 16, arguments.repeats, peers=False)
        torch.set_num_threads(threads)
    facts = machine_facts()
    csv_path = arguments.csv
    if arguments.part == "avx2":
        csv_path = csv_path.with_stem(csv_path.stem + "_avx2")
    write_csv(csv_path, [facts | row for row in rows])
    print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n")
    print(summary(rows), end="\n\n", flush=True)
    if arguments.part is None:
        again = [sys.executable, __file__, "--csv", str(arguments.csv)]
        memory = subprocess.run(
            [*again, "--part", "memory"], capture_output=True, text=True, check=True
        )
        print(f"extra memory at (32, 8192): {memory.stdout.strip()} MiB", end="\n\n", flush=True)
        environment = os.environ | {"MLA_OPS_ISA": "avx2"}
        subprocess.run([*again, "--part", "avx2"], env=environment, check=True)


if __name__ == "__main__":
    main()
