"""How things are timed.

The machine drifts (other tenants, clocks): contenders run in turn, and what is compared are medians
of one run. On a CPU a turn is a burst of calls, BURST seconds or one call: after anything else has
run, even a pause, the first call of a 0.5 ms contender takes half as long again, whoever's it is.
On a GPU it is a replay of a captured graph of back-to-back calls, so that what is timed is the
device and not Python; the launch gaps between the calls are inside.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

BURST = 0.02
MIN_TURNS = 5
WARM_TURNS = 3

Call = Callable[[int], object]  # given the number of the call, for those that rotate their inputs


class Times(NamedTuple):
    """Seconds of a call in each turn, and how it was called: "burst", "graph" or "stream"."""

    seconds: list[float]
    how: str

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def interleaved(
    contenders: Mapping[str, Call],
    turns: int,
    device: torch.device,
    *,
    rotation: int = 1,
    budget: float = float("inf"),
    step: Callable[[str], object] = lambda name: None,
) -> dict[str, Times]:
    """Time calls in turn.

    rotation: calls after which inputs repeat; a turn has at least so many on a GPU.
    budget: seconds for all; with slow contenders there are fewer turns, MIN_TURNS at least.
    """
    if device.type == "cuda":
        run = {name: _on_gpu(call, rotation, device) for name, call in contenders.items()}
    else:
        run = {name: _on_cpu(call) for name, call in contenders.items()}
    times = {name: Times([], how) for name, (_, how) in run.items()}
    begin = time.perf_counter()
    for turn in range(turns + WARM_TURNS):
        for name, (one_turn, _) in run.items():
            seconds = one_turn()
            # What the first turns warm up on a CPU, _on_cpu has.
            if turn >= WARM_TURNS or device.type != "cuda":
                times[name].seconds.append(seconds)
            step(name)
        done = len(next(iter(times.values())).seconds) if times else 0
        if done >= turns or (done >= MIN_TURNS and time.perf_counter() - begin > budget):
            break
    return times


def _on_cpu(call: Call) -> tuple[Callable[[], float], str]:
    turn = 0

    def burst(calls: int) -> float:
        nonlocal turn
        begin = time.perf_counter()
        for _ in range(calls):
            call(turn)
            turn += 1
        return (time.perf_counter() - begin) / calls

    burst(1)
    calls = max(1, round(BURST / burst(1)))
    return lambda: burst(calls), "burst"


def _on_gpu(call: Call, rotation: int, device: torch.device) -> tuple[Callable[[], float], str]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(run: Callable[[], object], calls: int) -> float:
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    def several(calls: int) -> None:
        for turn in range(calls):
            call(turn)

    several(2)
    once = timed(lambda: several(3), 3)
    calls = rotation * max(1, round(min(64.0, BURST / 4 / once) / rotation))
    try:
        graph = captured([lambda turn=turn: call(turn) for turn in range(calls)])  # type: ignore[misc]
    except Exception:
        # What cannot be captured (it synchronises, say) is timed on the stream, and said to be.
        torch.cuda.synchronize(device)
        return lambda: timed(lambda: several(calls), calls), "stream"
    return lambda: timed(graph.replay, calls), "graph"


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls, warmed up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph
