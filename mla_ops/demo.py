"""Decode eight cases, each checked against the float64 oracle, and let a model write.

The cases are those of the contest program that this project started from: batch 4, 32, 64, 256 and
context 1024, 8192, with 16 heads and a float8 cache. That program read one token of every eight and
passed its contest's check; so what its shortcut scores on the check made here is shown too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mla_ops import __version__, _compiled, capability, demo_model, draw, problems
from mla_ops.console import (
    RESERVE,
    Progress,
    add_device,
    chosen_device,
    memory_free,
    rate,
    size,
)
from mla_ops.console import seconds as as_seconds
from mla_ops.problems import BAR, HEADS, PAGE, RANK, ROPE, SHORTCUT, Case

CASES = tuple(Case(batch, context) for batch in (4, 32, 64, 256) for context in (1024, 8192))
QUICK = (Case(4, 1024), Case(4, 8192), Case(32, 1024))

RUNS, SECONDS = 7, 1.5  # timed runs of a case: so many, or fewer once so much time has gone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `demo`."""
    add_device(parser)
    parser.add_argument(
        "--cases", type=_cases, metavar="BxC,...", help="other cases, as in 4x1024,32x8192"
    )
    parser.add_argument("--quick", action="store_true", help="the three smallest cases only")
    parser.add_argument(
        "--model",
        action=argparse.BooleanOptionalAction,
        help="let a model of transformers write, too (default: unless --cases or --quick)",
    )


def _cases(text: str) -> tuple[Case, ...]:
    try:
        cases = tuple(Case(*map(int, word.split("x"))) for word in text.split(","))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"expected BATCHxCONTEXT,..., as in 4x1024,32x8192, got {text!r}"
        ) from None
    for case in cases:
        # A single token would leave the shortcut nothing to skip.
        if case.batch < 1 or case.context < 2:
            raise argparse.ArgumentTypeError(
                f"expected a batch of at least 1 and a context of at least 2, got "
                f"{case.batch}x{case.context}"
            )
    return cases


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 where every result is right and 1 where one is not."""
    device = chosen_device(arguments)
    free = max(0, memory_free(device) - RESERVE)
    cases: tuple[Case, ...] = arguments.cases or (QUICK if arguments.quick else CASES)
    fitting = {case: fit(case, free) for case in cases}
    largest = max(case.pool_bytes for case in (*filter(None, fitting.values()), Case(1, PAGE)))
    progress = Progress(-(-largest // draw.CHUNK) + len(cases) + 1)
    try:
        generator = torch.Generator(device).manual_seed(0)
        pool = problems.draw_pool(
            largest, device, generator, lambda: progress.step("drawing the cache")
        )
        failed = _run(fitting, free, pool, generator, progress)
    finally:
        progress.close()
    del pool
    wanted: bool | None = arguments.model
    if wanted is None:
        wanted = not (arguments.cases or arguments.quick)
    return int(not _model(device) or bool(failed)) if wanted else failed


def _model(device: torch.device) -> bool:
    """Let a model write; return whether it wrote what it writes without us."""
    obstacle = demo_model.is_possible()
    progress = Progress(3 * demo_model.TOKENS)
    try:
        if obstacle is None:
            return demo_model.run(device, progress)
        progress.say(f"\nno model writes: {obstacle}")
        return True
    finally:
        progress.close()


def _run(
    fitting: dict[Case, Case | None],
    free: int,
    pool: Tensor,
    generator: torch.Generator,
    progress: Progress,
) -> int:
    say = progress.say
    say(_setting(problems.make(Case(1, PAGE), pool, generator)))
    say(f"\n{'batch':>6}{'context':>9}{'cache':>11}{'time':>12}{'read':>14}{'error':>10}  verdict")
    errors, skipped = [], []
    for wanted, case in fitting.items():
        progress.step(f"{wanted.batch} x {wanted.context}")
        if case != wanted:
            what = "skipped" if case is None else f"sized down to batch {case.batch}"
            say(
                f"{wanted.batch:6}{wanted.context:9}  {what}: the cache needs "
                f"{size(wanted.pool_bytes)}, {size(free)} of memory is free"
            )
        if case is None:
            continue
        problem = problems.make(case, pool, generator)
        out, seconds = timed(problem.decode, pool.device)
        error, error_of_skipping = problems.check(problem, out)
        errors.append(error)
        skipped.append(error_of_skipping)
        say(
            f"{case.batch:6}{case.context:9}{size(case.bytes_read):>11}{as_seconds(seconds):>12}"
            f"{rate(case.bytes_read / seconds):>14}{error:10.1e}  {_verdict(error <= BAR)}"
        )
    if not errors:
        say("\nno case fits into memory: nothing was checked")
        return 1

    progress.step("needles")
    context = max(case.context for case in fitting.values() if case)
    needles = problems.find_needles(context, pool, generator)
    all_found = needles.found == len(needles.places) and needles.error <= BAR
    caught = min(skipped) > BAR
    right = all(error <= BAR for error in errors)
    places = ", ".join(map(str, needles.places))
    times = f"at least {min(skipped) / BAR:.0f} times the bar  caught" if caught else "NOT CAUGHT"
    say(
        f"\nneedles: a token that must win, at {places} of {context}:\n"
        f"  {needles.found} of {len(needles.places)} found, error {needles.error:.1e}  "
        f"{_verdict(all_found)}\n"
        f"the contest program's shortcut, the first row of each {SHORTCUT}-row page, checked alike:"
        f"\n  error {min(skipped):.1f} to {max(skipped):.1f}, {times}\n"
        f"error: relative L2 of a row against float64, the worst of all {HEADS} heads of a case's "
        f"first,\n  last and two random sequences; bar {BAR:.0e}: "
        + ("all right" if right and all_found else "NOT MET")
    )
    return 0 if right and all_found and caught else 1


def fit(case: Case, free: int) -> Case | None:
    """Return the case, its batch halved until its cache fits; None where no sequence does."""
    while case.pool_bytes > free and case.batch > 1:
        case = case._replace(batch=case.batch // 2)
    return case if case.pool_bytes <= free else None


def timed(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """Return what `call` returns and the median of its seconds, after one run to warm up."""
    out = call()
    seconds: list[float] = []
    while len(seconds) < RUNS and sum(seconds) < SECONDS:
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = call()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            out = call()
            seconds.append(time.perf_counter() - start)
    return out, sorted(seconds)[len(seconds) // 2]


def _setting(problem: problems.Problem) -> str:
    device = problem.q.device
    decision = capability.decide(problem.q, problem.kv_cache, RANK, True, False, "auto")
    threads = torch.get_num_threads()
    where = f"{device}, {threads} thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)} ({capability.arch_of(device)})"
    compiled = _compiled.load()
    if decision.backend == "native" and device.type == "cpu" and compiled is not None:
        where += f", instruction set {compiled.cpu_isa()}"
    return (
        f"mla_ops {__version__}, torch {torch.__version__}, {where}\n"
        f"backend {decision.backend}: {decision.reason} ({decision.kernel})\n"
        f"{HEADS} heads, q bfloat16, cache float8_e4m3fn with kv_scale, rank {RANK} + rope {ROPE}, "
        f"pages of {PAGE} tokens, shuffled"
    )


def _verdict(right: bool) -> str:
    return "right" if right else "WRONG"
