"""Time decode on a GPU against what torch offers and against reading the cache alone.

    python benchmarks/bench_decode_gpu.py --csv FILE     all of it, on the card that is there

Every number is a median of replays of one CUDA graph of back-to-back calls, in microseconds a call,
the plan made outside it (its own kernel is a row apart), over sets of caches that together exceed
L2 many times. Contenders of a problem are compared within one run, each checked against the
float64 oracle before it is timed. "floor" reads the same bytes and does nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

import mla_ops
from mla_ops import _C, reference
from mla_ops.bench.table import write_csv

BF16, FN = torch.bfloat16, torch.float8_e4m3fn
BEYOND_L2 = 400_000_000  # bytes of cache that calls go through before they meet one again
REPLAYS = 15
DEVICE = "cuda"

SEED = [(b, n) for b in (4, 32, 64, 256) for n in (1024, 8192)]


@dataclass(frozen=True)
class Shape:
    """One problem; `lengths` of its sequences."""

    name: str
    lengths: tuple[int, ...]
    cache: torch.dtype
    heads: int = 16
    q_len: int = 1
    page: int = 64
    peers: bool = False
    width: int = 576
    rank: int = 512

    @property
    def bytes(self) -> int:
        return sum(self.lengths) * self.width * self.cache.itemsize


def even(batch: int, length: int, cache: torch.dtype, **more: object) -> Shape:
    return Shape(f"({batch},{length})", (length,) * batch, cache, **more)


@dataclass
class Data:
    """A shape's tensors, several caches of it."""

    shape: Shape
    q: Tensor = field(init=False)
    caches: list[Tensor] = field(default_factory=list)
    tables: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        generator = torch.Generator(device=DEVICE).manual_seed(7)
        batch = len(shape.lengths)
        self.q = torch.randn(
            batch, shape.q_len, shape.heads, shape.width, device=DEVICE, generator=generator
        ).to(BF16)
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=DEVICE)
        self.scale = None if shape.cache == BF16 else torch.tensor([0.7], device=DEVICE)
        pages = [-(-length // shape.page) for length in shape.lengths]
        for _ in range(max(2, math.ceil(BEYOND_L2 / shape.bytes))):
            pool = torch.empty(
                sum(pages), shape.page, shape.width, device=DEVICE, dtype=BF16
            ).normal_(generator=generator)
            order = torch.randperm(sum(pages), generator=generator, device=DEVICE).int()
            table = torch.zeros(batch, max(pages), dtype=torch.int32, device=DEVICE)
            taken = 0
            for b, count in enumerate(pages):
                table[b, :count] = order[taken : taken + count]
                taken += count
            self.caches.append(pool.to(shape.cache))
            self.tables.append(table)

    softmax_scale = 576**-0.5

    @cached_property
    def plan(self) -> mla_ops.DecodePlan:
        return self.make_plan()

    def make_plan(self) -> mla_ops.DecodePlan:
        shape = self.shape
        sizes = {"page_size": shape.page, "num_heads": shape.heads, "q_len": shape.q_len}
        return mla_ops.plan(self.lengths, self.tables[0], **sizes)

    def native(self, i: int, **more: object) -> Tensor:
        return mla_ops.decode(
            self.q,
            self.caches[i],
            self.tables[i],
            self.lengths,
            self.softmax_scale,
            kv_scale=self.scale,
            backend="native",
            **more,
        )

    def rows(self, i: int) -> Tensor:
        """[B, tokens, width] bfloat16, gathered: what torch's own attention needs first."""
        cache = self.caches[i].view(torch.uint8) if self.scale is not None else self.caches[i]
        rows = cache[self.tables[i].long()].flatten(1, 2)
        if self.scale is None:
            return rows
        return rows.view(FN).to(BF16) * self.scale.to(BF16)

    def bmm(self, i: int) -> Tensor:
        rows = self.rows(i)
        q = self.q.flatten(1, 2)
        weights = (q @ rows.mT * self.softmax_scale).float().softmax(-1).to(BF16)
        return (weights @ rows[..., : self.shape.rank]).view_as(self.q[..., : self.shape.rank])

    def sdpa(self, i: int) -> Tensor:
        rows = self.rows(i)[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            self.q.transpose(1, 2),
            rows.expand(-1, self.shape.heads, -1, -1),
            rows[..., : self.shape.rank].expand(-1, self.shape.heads, -1, -1),
            scale=self.softmax_scale,
        )
        return out.transpose(1, 2)

    def error(self, call: Callable[[int], Tensor]) -> float:
        """Relative L2 error over a few sequences."""
        out = call(0)
        some = sorted({0, len(self.shape.lengths) // 2, len(self.shape.lengths) - 1})
        pages = self.tables[0][some]
        want, _ = reference.decode(
            self.q[some].cpu(),
            self.caches[0][pages.flatten().long()].cpu(),
            torch.arange(pages.numel(), dtype=torch.int32).view_as(pages),
            self.lengths[some].cpu(),
            self.softmax_scale,
            kv_scale=None if self.scale is None else self.scale.cpu(),
        )
        got = out[some].cpu().double()
        return float((got - want).norm() / want.norm())


def timed(call: Callable[[int], object], sets: int, estimate: float) -> tuple[float, float]:
    """Microseconds a call: median, and the spread of the middle half."""
    count = min(256, max(sets, int(2000 / estimate)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(sets, 3)):
            call(i)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                call(i % sets)
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / count)
    times.sort()
    return statistics.median(times), times[len(times) * 3 // 4] - times[len(times) // 4]


class Floor:
    """The reading kernel, compiled here."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp()
        source = Path(__file__).with_name("read_floor.cu")
        command = ["nvcc", "-O3", "-arch=native", "-Xcompiler", "-fPIC", "-shared"]
        subprocess.run([*command, str(source), "-o", f"{folder}/floor.so"], check=True)
        self.library = ctypes.CDLL(f"{folder}/floor.so")
        self.sink = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def __call__(self, data: Tensor, grid: tuple[int, int]) -> None:
        self.library.read_floor(
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_int64(data.numel() * data.itemsize),
            ctypes.c_void_p(self.sink.data_ptr()),
            *grid,
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )


def shapes() -> list[Shape]:
    found = [even(b, n, cache, peers=True) for cache in (FN, BF16) for b, n in SEED]
    generator = torch.Generator().manual_seed(3)
    spread = torch.rand(64, generator=generator) * math.log(32768 / 128) + math.log(128)
    ragged = tuple(int(x) for x in spread.exp())
    mean = sum(ragged) // 64
    for cache in (FN, BF16):
        found += [even(64, 8192, cache, page=page) for page in (16, 1)]
        found += [Shape("ragged", ragged, cache), Shape("as even", (mean,) * 64, cache)]
        found += [even(64, 8192, cache, q_len=s) for s in (2, 4, 8)]
        found += [even(64, 8192, cache, heads=h) for h in (8, 32, 64)]
        found += [even(32, 8192, cache, heads=128), even(128, 4096, cache, heads=128)]
        found += [Shape("one long", (131072,), cache)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--only", default="", help="of shapes whose name has this in it")
    chosen = parser.parse_args()
    facts = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "mla_ops": _C.build_info()["git_revision"],
    }
    floor = Floor()
    rows: list[dict[str, object]] = []
    for shape in shapes():
        if chosen.only not in shape.name:
            continue
        data = Data(shape)
        sets = len(data.caches)
        contenders: dict[str, Callable[[int], object]] = {
            "native": lambda i, data=data: data.native(i, plan=data.plan),
        }
        if shape.peers and shape.bytes < 700e6:
            contenders |= {"bmm": data.bmm, "sdpa": data.sdpa}
        estimate = max(3.0, shape.bytes / 3e6)
        label = f"{shape.name:12} {str(shape.cache)[6:]:14} H{shape.heads} S{shape.q_len}"
        line = f"{label} page {shape.page}:"
        floors = [
            timed(lambda i, g=g, data=data: floor(data.caches[i], g), sets, estimate)
            for g in ((1056, 256), (264, 1024))
        ]
        results = {"floor": (*min(floors), 0.0)}
        for name, call in contenders.items():
            error = data.error(call)
            assert error < 3e-3 or name != "native", f"{label}: {name} is wrong by {error:.1e}"
            results[name] = (*timed(call, sets, estimate), error)
        for name, (us, spread, error) in results.items():
            line += f"  {name} {us:.1f}" + (f" ({error:.1e})" if error else "")
            rows.append(
                {
                    "shape": shape.name,
                    "cache": str(shape.cache)[6:],
                    "heads": shape.heads,
                    "q_len": shape.q_len,
                    "page_size": shape.page,
                    "tokens": sum(shape.lengths),
                    "contender": name,
                    "us": f"{us:.2f}",
                    "spread_us": f"{spread:.2f}",
                    "GB/s": f"{shape.bytes / us / 1000:.0f}",
                    "error": f"{error:.2e}",
                    **facts,
                }
            )
        print(line, flush=True)
        del data, contenders, results
        torch.cuda.empty_cache()
    data = Data(even(256, 1024, FN))
    plan = data.plan
    us, _ = timed(lambda i: plan.update_(data.lengths, data.tables[0]), 1, 3.0)
    data.native(0, plan=plan)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(200):
        data.native(0, plan=plan)
    host = (time.perf_counter() - begin) / 200 * 1e6
    torch.cuda.synchronize()
    print(f"plan kernel, 256 sequences: {us:.1f} us; an eager call (256,1024): {host:.1f} us")
    small = Data(even(1, 64, FN))
    small.native(0, plan=small.plan)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(50):
        small.native(0, plan=small.plan)
    print(f"host time of an eager call: {(time.perf_counter() - begin) / 50 * 1e6:.1f} us")
    if chosen.csv:
        write_csv(chosen.csv, rows)


if __name__ == "__main__":
    main()
