"""The core of the suite in one process: what an old processor and the sanitizers have to survive.

Run under qemu-user, where pytest would take minutes, by build_tools/qemu_check.sh.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

import mla_ops  # noqa: F401
from mla_ops import _C


def check_build(expected_isa: str | None) -> None:
    """Check that the module meant is the one that is loaded, and runs what it should."""
    info = _C.build_info()
    wanted = [word for word in os.environ.get("MLA_OPS_EXPECT_SANITIZERS", "").split(",") if word]
    assert info["sanitizers"] == wanted, f"sanitizers: expected {wanted}, got {info['sanitizers']}"
    chosen = _C.cpu_isa()
    assert chosen in info["cpu_isas"], f"{chosen} is not among the compiled {info['cpu_isas']}"
    if expected_isa is not None:
        assert chosen == expected_isa, f"instruction set: expected {expected_isa}, got {chosen}"
    assert _C.threads_used() >= 1


def check_ops() -> None:
    """Check one op against its reference."""
    x = torch.arange(1000, dtype=torch.float32)
    expected = x * 2
    torch.ops.mla_standin.double_(x)
    assert torch.equal(x, expected)
    try:
        torch.ops.mla_standin.double_(torch.zeros(3, dtype=torch.int32))
    except ValueError as error:
        assert "float32" in str(error)
    else:
        raise AssertionError("an int32 tensor was taken")


def main() -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--expect", metavar="ISA", help="the instruction set that must be chosen")
    arguments = parser.parse_args()
    check_build(arguments.expect)
    check_ops()
    print(f"core: passed on {_C.cpu_isa()} with torch {torch.__version__}", file=sys.stderr)


if __name__ == "__main__":
    main()
