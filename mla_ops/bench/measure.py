"""One case measured: every provider's result checked, then those that are right timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mla_ops import checks, workload
from mla_ops.bench import floor, providers
from mla_ops.bench.providers import Provider, Refused, Run
from mla_ops.bench.timing import interleaved
from mla_ops.console import RESERVE, memory_free, size
from mla_ops.workload import SHORT_OF, Case, Workload

FLOOR = "read floor"
ROTATED = 512 << 20  # bytes: beyond an L2, and beyond the 256 MB Infinity Cache of an MI300X
MOST_SETS = 512

Row = dict[str, object]


@dataclass(frozen=True)
class Settings:
    """turns: timed turns of each. budget: seconds for a case, with fewer turns. rotated: bytes of
    cache that calls go through before they come to the first again; 0: always the same."""

    device: torch.device
    turns: int = 15
    budget: float = 60.0
    rotated: int = ROTATED


class DoesNotFit(Exception):
    """Why a case is left out."""


def sets_for(case: Case, settings: Settings, free: int, copies: bool) -> int:
    """Return how many caches to rotate through, as many as memory has room for. Raises DoesNotFit
    where it has not for one. `copies`: torch's providers need contiguous ones too."""
    each = case.cache_bytes
    if copies:
        wide = torch.bfloat16 if case.q_dtype in checks.FLOAT8 else case.q_dtype
        each += 2 * case.batch * max(case.lengths) * case.width * wide.itemsize
    if each > free:
        raise DoesNotFit(f"its cache needs {size(each)}, {size(free)} of memory is free")
    wanted = max(2, -(-settings.rotated // case.cache_bytes)) if settings.rotated else 1
    return int(min(wanted, max(1, free // each), 64))


def measure(
    case: Case,
    contenders: Sequence[Provider],
    settings: Settings,
    say: Callable[[str], object] = lambda name: None,
) -> list[Row]:
    """Return a row per provider, and one for the floor."""
    copies = any(one in contenders for one in providers.TORCH)
    free = max(0, memory_free(settings.device) - RESERVE)
    made = workload.make(case, settings.device, sets_for(case, settings, free, copies))
    try:
        return _rows(made, contenders, settings, say)
    finally:
        providers.forget()


def _rows(
    made: Workload,
    contenders: Sequence[Provider],
    settings: Settings,
    say: Callable[[str], object],
) -> list[Row]:
    runs: dict[str, Run] = {}
    rows: dict[str, Row] = {}
    for provider in contenders:
        say(provider.name)
        rows[provider.name] = {"provider": provider.name, "version": provider.version()}
        verdict, error, run = checked(provider, made)
        rows[provider.name] |= {
            "verdict": verdict,
            "relative_error": "" if error is None else f"{error:.2e}",
        }
        if run is not None:
            runs[provider.name] = run
    rows[FLOOR] = {"provider": FLOOR, "version": torch.__version__, "verdict": "floor"}
    readers = floor.readers(made)
    times = interleaved(
        runs | readers,
        settings.turns,
        settings.device,
        rotation=len(made.caches),
        budget=settings.budget,
        step=say,
    )
    quickest = min(readers, key=lambda name: times[name].median)
    times[FLOOR] = times[quickest]
    least = times[FLOOR].median
    is_ours = {provider.name: provider.ours for provider in contenders}
    others = [times[name].median for name in runs if not is_ours[name]]
    case = made.case
    for name, row in rows.items():
        if name not in times:
            continue
        median = times[name].median
        low, high = times[name].quartiles
        row |= {
            "median_us": f"{median * 1e6:.3f}",
            "quarter_us": f"{low * 1e6:.3f}",
            "three_quarters_us": f"{high * 1e6:.3f}",
            "turns": len(times[name].seconds),
            "timed_by": times[name].how,
            "gb_per_s": f"{case.useful_bytes / median / 1e9:.4g}",
            "gflop_per_s": "" if name == FLOOR else f"{case.flop / median / 1e9:.4g}",
            "percent_of_floor": f"{100 * least / median:.4g}",
            "best_other_over_it": f"{min(others) / median:.4g}"
            if others and is_ours.get(name)
            else "",
        }
    about = describe(case) | {"caches_rotated": len(made.caches)}
    return [about | row for row in rows.values()]


def checked(provider: Provider, made: Workload) -> tuple[str, float | None, Run | None]:
    """Return the verdict on a provider's result ("right", "WRONG", "refused: ...", "failed: ..."),
    its error, and what to time where it is right."""
    try:
        run = provider.prepare(made)
        # The last cache: one that only reads the first is found out.
        turn = len(made.caches) - 1
        error = workload.error(made, run(turn), turn)
    except Refused as reason:
        return f"refused: {reason}", None, None
    except Exception as failure:  # another library's: the others are still of interest
        first = (str(failure).splitlines() or [""])[0][:200]
        return f"failed: {type(failure).__name__}: {first}", None, None
    return ("right", error, run) if error <= provider.bar(made) else ("WRONG", error, None)


def describe(case: Case) -> Row:
    """Return the columns of a case."""
    return {
        "case": str(case),
        "batch": case.batch,
        "q_len": case.q_len,
        "context": case.context,
        "heads": case.heads,
        "q": SHORT_OF[case.q_dtype],
        "cache": SHORT_OF[case.cache_dtype],
        "page_size": case.page_size,
        "ragged": int(case.ragged),
        "useful_bytes": case.useful_bytes,
        "flop": case.flop,
    }
