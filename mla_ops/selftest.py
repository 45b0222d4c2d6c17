"""Check every kernel that can be chosen on this machine against the float64 oracle.

What a user with a new GPU, or a new aiter, runs first. One line a kernel: the relative L2 error of
the worst row, of a ragged batch with empty sequences, of a token that must win, of long sequences,
and of a plan and decode captured in a graph and replayed with other lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from mla_ops import capability, checks
from mla_ops.console import add_device, chosen_device
from mla_ops.plan import plan
from mla_ops.subjects import PAGE, Subject, make, run, subjects

RAGGED = (0, 1, 63, 64, 65, 300, 1000, 0, 129)
LATER = (5, 0, 64, 1, 1000, 299, 0, 2, 128)  # what a replay finds in place of RAGGED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `selftest`."""
    add_device(parser)
    parser.add_argument(
        "--backend", choices=checks.BACKENDS[1:], help="this backend's kernels only"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the self-test; return 0 where all is right, 1 where something is not or nothing ran."""
    device = chosen_device(arguments)
    backends = (arguments.backend,) if arguments.backend else checks.BACKENDS[1:]
    arch = capability.arch_of(device)
    print(f"{device} ({arch}), torch {torch.__version__}: relative L2 error of the worst row")
    columns = "".join(f"{name:>10}" for name in CHECKS)
    print(f"{'backend':8}{'kernel':28}{'q':>17}{'cache':>17}{'S':>3}{'H':>5}{columns}  verdict")
    verdicts = []
    for backend in backends:
        found = list(subjects(device, backend))
        for subject in found:
            verdicts.append(_report(subject, device))
        if not found:
            text = capability.explain(arch=arch, backend=backend).splitlines()
            print(next(line.strip() for line in text if line.split()[0] == backend))
    print(f"{sum(verdicts)} of {len(verdicts)} right")
    return 0 if verdicts and all(verdicts) else 1


def _report(subject: Subject, device: torch.device) -> bool:
    errors = []
    for check in CHECKS.values():
        # A backend that fails is what this is for: the other kernels are still of interest.
        try:
            errors.append(f"{(error := check(subject, device)):10.1e}")
            right = error <= subject.bar
        except Exception as error:
            errors.append(f"{type(error).__name__:>10}")
            right = False
            print(f"{subject.kernel}: {error}")
        if not right:
            break
    q, cache = (str(x).removeprefix("torch.") for x in (subject.q_dtype, subject.cache_dtype))
    print(
        f"{subject.backend:8}{subject.kernel:28}{q:>17}{cache:>17}{subject.q_len:3}{subject.heads:5}"
        f"{''.join(errors)}  {'right' if right else f'WRONG (bar {subject.bar:.0e})'}"
    )
    return right


def _ragged(subject: Subject, device: torch.device) -> float:
    problem = make(subject, device, RAGGED)
    return problem.error(run(subject, problem))


def _needle(subject: Subject, device: torch.device) -> float:
    problem = make(subject, device, (300, 257, 64, 4, 1000), needles=True)
    return problem.error(run(subject, problem))


def _long(subject: Subject, device: torch.device) -> float:
    lengths = (32768, 8192, 8191, 1) if device.type == "cuda" else (3000, 1)
    problem = make(subject, device, lengths)
    return problem.error(run(subject, problem))


def _replay(subject: Subject, device: torch.device) -> float:
    """Capture a step, or on a CPU just repeat it, and let the lengths change in place."""
    problem = make(subject, device, RAGGED)
    made = plan(
        problem.seq_lens,
        problem.block_table,
        page_size=PAGE,
        num_heads=subject.heads,
        q_len=subject.q_len,
        kv_cache=problem.kv_cache,
        q_dtype=subject.q_dtype,
        backend=subject.backend,
    )

    def step() -> Tensor:
        made.update_(problem.seq_lens, problem.block_table)
        return run(subject, problem, made)

    again: Callable[[], object] = step
    out = step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        again = graph.replay
    problem.seq_lens.copy_(torch.tensor(LATER, dtype=torch.int32))
    result = again()
    return problem.error(out if result is None else result)  # type: ignore[arg-type]


CHECKS: dict[str, Callable[[Subject, torch.device], float]] = {
    "ragged": _ragged,
    "needle": _needle,
    "long": _long,
    "replay": _replay,
}
