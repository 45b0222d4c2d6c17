"""By how many MiB a process grows at most during one decode on a CPU.

    python benchmarks/extra_memory.py [CASE]      (32q1s8k, in the grammar of `mla_ops bench`)

In a process of its own: memory that something else had and gave back would hide it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from mla_ops import workload
from mla_ops.bench import grammar


def status(key: str) -> int:
    """Return a line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def main() -> None:
    cpu = torch.device("cpu")
    (case,) = grammar.parse(sys.argv[1] if len(sys.argv) > 1 else "32q1s8k", cpu)
    made = workload.make(case, cpu)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    made.decode()
    print(f"{case}: {(status('VmHWM') - before) / 1024:.1f} MiB")


if __name__ == "__main__":
    main()
