"""The environment variables that are read at run time, as `doctor` and the documents tell them.

Standard library only: `doctor` reads it where torch cannot be imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import NamedTuple

PREFIX = "MLA_OPS_"


class Variable(NamedTuple):
    """`values` is empty where anything goes, a path for instance."""

    name: str
    values: tuple[str, ...]
    default: str
    meaning: str


VARIABLES = (
    Variable(
        "MLA_OPS_BACKEND",
        ("auto", "aiter", "native", "torch"),
        "auto",
        "the backend where a call says `auto`; read in every call",
    ),
    Variable(
        "MLA_OPS_AITER_Q",
        ("bf16", "fp8"),
        "bf16",
        "`fp8`: on aiter, bfloat16 queries for a float8 cache are rounded to float8 (errors of 3 % "
        "instead of 0.3 %)",
    ),
    Variable(
        "MLA_OPS_VALIDATE",
        ("0", "1"),
        "0",
        "check lengths, tables and slots on GPUs too: reads the device, refused during graph "
        "capture",
    ),
    Variable(
        "MLA_OPS_LOG",
        ("debug", "info"),
        "none",
        "log to stderr: at `info` each new decision in a line, at `debug` also what was passed "
        "over, and why; read at import",
    ),
    Variable(
        "MLA_OPS_TUNED",
        (),
        "`~/.cache/mla_ops/tuned.json`",
        "the file of `tune`; `0`: none; read at its first use",
    ),
    Variable(
        "MLA_OPS_ISA",
        ("baseline", "avx2", "avx512", "avx512_bf16"),
        "the best there is",
        "instruction set of the CPU code; read at its first use",
    ),
)

# Read by setup.py and build_tools: set, they are no mistake.
OF_THE_BUILD = ("MLA_OPS_SKIP_BUILD", "MLA_OPS_GPU", "MLA_OPS_SANITIZE", "MLA_OPS_BUILD_DIR")


def mistakes(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (what is wrong, what mends it) for each variable that is unknown or has a value that
    is refused."""
    found = []
    known = {variable.name: variable for variable in VARIABLES}
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX) or name in OF_THE_BUILD:
            continue
        variable = known.get(name)
        if variable is None:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; {near[0]} is one" if near else ""
            found.append((f"{name} is no variable of mla_ops{hint}", f"unset {name}"))
        elif variable.values and value and value not in variable.values:
            wanted = ", ".join(variable.values)
            found.append((f"{name} must be one of {wanted}, got {value!r}", f"unset {name}"))
    return found
