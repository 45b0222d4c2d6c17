"""quantize_fp8 on a GPU against the copy bandwidth and against torch, in one run.

    python benchmarks/bench_elementwise.py

Inputs rotate through sets of at least 512 MiB, so that no cache holds them. Times are medians of
replays of a captured graph of back-to-back calls, per call: the launch gaps are inside. Contenders
replay in turn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import mla_ops
from mla_ops.bench.table import markdown, write_csv
from mla_ops.bench.timing import Call, interleaved

FN = torch.float8_e4m3fn
MIB = 1 << 20
ROTATED = 512 * MIB
LARGEST = torch.finfo(FN).max


def to_float8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-LARGEST, LARGEST).to(FN)


def measure(count: int, repeats: int) -> list[dict[str, object]]:
    """Return a row per contender for tensors of `count` bfloat16 numbers."""
    sets = max(2, -(-ROTATED // (count * 3)))
    inputs = [torch.randn(count, device="cuda").bfloat16() for _ in range(min(sets, 64))]
    scale = torch.tensor([0.02], device="cuda")
    # As many bytes read and written as quantising does: 2 and 1 a number.
    sources = [x.view(torch.uint8)[: count * 3 // 2] for x in inputs]
    targets = [torch.empty_like(source) for source in sources]
    compiled = torch.compile(to_float8)
    compiled(inputs[0], scale)
    contenders: dict[str, Call] = {
        "copy": lambda i: targets[i % len(inputs)].copy_(sources[i % len(inputs)]),
        "given scale": lambda i: mla_ops.quantize_fp8(inputs[i % len(inputs)], scale, FN),
        "dynamic scale": lambda i: mla_ops.quantize_fp8(inputs[i % len(inputs)], None, FN),
        "torch compiled": lambda i: compiled(inputs[i % len(inputs)], scale),
        "torch eager": lambda i: to_float8(inputs[i % len(inputs)], scale),
    }
    timed = interleaved(contenders, repeats, scale.device, rotation=len(inputs))
    times = {name: one.median * 1e6 for name, one in timed.items()}
    return [
        {
            "numbers": count,
            "mib_bf16": round(count * 2 / MIB, 3),
            "contender": name,
            "us": round(us, 3),
            "gb_per_s": round(count * 3 / us / 1e3, 1),
            "of_copy": round(times["copy"] / us, 3),
        }
        for name, us in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument(
        "--csv", type=Path, default=Path(__file__).parent / "results/h200_elementwise.csv"
    )
    arguments = parser.parse_args()
    from mla_ops import _C

    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "mla_ops": _C.build_info()["git_revision"],
    }
    rows: list[dict[str, object]] = []
    for batch in (4, 32, 64, 256):
        rows += measure(batch * 16 * 576, arguments.repeats)
    for mib in (1, 16, 64, 256, 1024):
        rows += measure(mib * MIB // 2, arguments.repeats)
    write_csv(arguments.csv, [facts | row for row in rows])
    table = [(r["mib_bf16"], r["contender"], r["us"], r["gb_per_s"], r["of_copy"]) for r in rows]
    print(facts)
    print(markdown(("MiB of bf16", "contender", "us", "GB/s", "copy time / time"), table))


if __name__ == "__main__":
    main()
