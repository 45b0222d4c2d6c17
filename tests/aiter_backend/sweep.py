"""Random decodes on aiter's machine code, for as long as you like: `make aiter-sweep`.

MLA_OPS_AITER_CHECKOUT=DIR takes the code objects of a ROCm/aiter checkout (of August 2026)
instead of the wheel's, and includes what the table does not trust.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [
    str(folder) for folder in (HERE, HERE.parent / "cdna", HERE.parent, HERE.parents[1])
]

import machines  # noqa: E402
import numpy as np  # noqa: E402
import stand_in  # noqa: E402
import torch  # noqa: E402
from cases import Case  # noqa: E402

from mla_ops import capability  # noqa: E402


def draw(rng: random.Random) -> Case:
    def length() -> int:
        """Any, or one at or beside an edge of a tile."""
        edge = 32 * rng.randint(1, 9) + rng.randint(-2, 3)
        return rng.choice((0, 1, 2, rng.randint(3, 300), edge, edge, edge, 900))

    return Case(
        lengths=tuple(length() for _ in range(rng.randint(1, 9))),
        heads=rng.choice((16, 16, rng.randint(1, 64))),
        q_len=rng.randint(1, 4),
        page_size=rng.choice((1, 7, 16, 64)),
        data=rng.choice(("normal", "needles", "shifted", "flat")),
        seed=rng.randrange(1000),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    torch.use_deterministic_algorithms(True)
    if stand_in.CHECKOUT:
        trusted = lambda row: replace(row, distrusted=lambda: None)  # noqa: E731
        capability.TABLE = tuple(
            row if "rounded" in row.reason else trusted(row) for row in capability.TABLE
        )
    tried: Counter[tuple[str, str, int]] = Counter()
    wrong: Counter[tuple[str, str, int]] = Counter()
    until = time.monotonic() + arguments.seconds
    while time.monotonic() < until:
        arch, kind, case = rng.choice(machines.ARCHES), rng.choice(machines.KINDS), draw(rng)
        served = stand_in.CHECKOUT or (arch, kind, case.q_len) not in machines.UNSERVED
        if not served or (kind == "a8w8" and case.data == "flat"):
            continue  # flat: float8 weights all round the same way
        what = (arch, kind, case.q_len)
        tried[what] += 1
        with (
            tempfile.TemporaryDirectory() as folder,
            np.errstate(all="ignore"),
            stand_in.installed(Path(folder), arch, workers=rng.choice((1, 4, 9, 24))),
        ):
            try:
                machines.run_and_judge(kind, arch, case)
            except AssertionError as error:
                wrong[what] += 1
                print(f"{arch} {kind} {case}: {error}", flush=True)
    for what in sorted(tried):
        print(*what, f"{tried[what]} tried, {wrong[what]} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
