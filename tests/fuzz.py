"""Random calls of every public op, valid and not.

    python tests/fuzz.py --calls 10000 --seed 1 [--seconds 60]

A call that is valid must match the reference; one that is not must raise ValueError, TypeError or
RuntimeError with a message, and write nothing. Anything else is a finding, printed with the line
that reproduces it: call i of seed s draws from a generator of its own, so it can be run alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import mmap
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fuzz_calls  # noqa: E402

REFUSALS = (ValueError, TypeError, RuntimeError)
HANG_SECONDS = 60
FOUND = 10  # a child's exit status where calls did wrong


class Finding(Exception):
    """What a call did wrong."""


def memory_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """A copy of the memory behind the arguments, bit by bit."""
    copies = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            copies[name] = value.untyped_storage().clone()
    return copies


def check_untouched(arguments: dict[str, Any], before: dict[str, Any], but: set[str]) -> None:
    """Neighbours in the memory of what may be written are left out: their storage changes."""
    written = {arguments[name].untyped_storage().data_ptr() for name in but if name in before}
    for name, memory in before.items():
        storage = arguments[name].untyped_storage()
        if name in but or storage.data_ptr() in written:
            continue
        now, then = (torch.empty(0, dtype=torch.uint8).set_(x) for x in (storage, memory))
        if not torch.equal(now, then):
            raise Finding(f"{name} was written")


def run(seed: int, index: int) -> str:
    """Make and judge one call; returns its kind."""
    random_ = random.Random(f"{seed}/{index}")
    torch.manual_seed(random_.randrange(1 << 30))
    call = fuzz_calls.draw(random_)
    before = memory_of(call.arguments)
    try:
        result = call.run()
    except REFUSALS as error:
        check_untouched(call.arguments, before, set())
        if not str(error):
            raise Finding("an error without a message") from error
        if call.valid:
            raise Finding(f"a valid call was refused: {error}") from error
        return f"{call.op} refused"
    except Exception as error:
        raise Finding(f"{type(error).__name__} is no error for users: {error}") from error
    check_untouched(call.arguments, before, call.writes)
    if call.judge is not None and (complaint := call.judge(result, before)):
        raise Finding(complaint)
    return f"{call.op} {'right' if call.valid else 'taken'}"


def progress(begin: int, end: int) -> Iterable[int]:
    try:
        from tqdm import tqdm
    except ImportError:
        return range(begin, end)
    return tqdm(range(begin, end), unit="call", file=sys.stderr, mininterval=1.0)


def calls(options: argparse.Namespace, seed: int, at: mmap.mmap) -> int:
    """Run the calls from options.begin on; returns the number of findings."""
    kinds: Counter[str] = Counter()
    findings = 0
    began = time.monotonic()
    for i in progress(options.begin, options.calls):
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            break
        at[:8] = i.to_bytes(8, "little")
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            kinds[run(seed, i)] += 1
        except Finding as finding:
            findings += 1
            print(f"FINDING: {finding}\n  {again(seed, i)}", flush=True)
        finally:
            faulthandler.cancel_dump_traceback_later()
    for kind, count in sorted(kinds.items()):
        print(f"{count:8} {kind}")
    print(f"{sum(kinds.values()) + findings} calls, {findings} findings", flush=True)
    return findings


def again(seed: int, index: int) -> str:
    return f"reproduce: python -P tests/fuzz.py --seed {seed} --only {index}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, help="by default one of the clock's")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--only", type=int, metavar="I", help="call I alone, in this process")
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)  # where a child keeps its call's number
    return parser.parse_args()


def main() -> None:
    """Run the calls in a child, so that a crash is a finding; exit with 1 where there was one."""
    options = parse()
    seed = options.seed if options.seed is not None else int(time.time())
    if options.only is not None:
        print(f"call {options.only}: {run(seed, options.only)}")
        return
    if options.at is not None:
        with open(options.at, "r+b") as file, mmap.mmap(file.fileno(), 8) as at:
            sys.exit(FOUND if calls(options, seed, at) else 0)
    print(f"seed {seed}", flush=True)
    failed = False
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        command = [sys.executable, "-P", __file__, "--seed", str(seed), "--at", file.name]
        command += ["--calls", str(options.calls)]
        if options.seconds is not None:
            command += ["--seconds", str(options.seconds)]
        begin = 0
        while begin < options.calls:
            code = subprocess.run([*command, "--begin", str(begin)], check=False).returncode
            failed |= code != 0
            last = int.from_bytes(Path(file.name).read_bytes(), "little")
            if code in (0, FOUND):
                break
            print(f"FINDING: the process died ({code})\n  {again(seed, last)}", flush=True)
            begin = last + 1
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
