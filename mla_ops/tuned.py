"""What `python -m mla_ops tune` found, kept in a file of the user's cache folder and used by
`mla_ops.plan` from then on.

    {"version": 1, "entries": [{"machine": ..., "arch": ..., "batch": 32, "tokens": 8192, "heads":
    16, "q_len": 1, "backend": "native", "choice": {"workers": 264}, ...}]}

An entry is for a class of shapes on one kind of machine: batch and tokens (what a sequence has room
for) are powers of two that stand for all sizes above the half of them. `MLA_OPS_TUNED` names
another file, or `0` for none.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_ops import _compiled

logger = logging.getLogger("mla_ops")

VERSION = 1


class ShapeClass(NamedTuple):
    """Shapes that are tuned together."""

    batch: int
    tokens: int
    heads: int
    q_len: int


def shape_class(batch: int, tokens: int, heads: int, q_len: int) -> ShapeClass:
    """Return the class of a batch of sequences with room for `tokens` tokens each."""
    return ShapeClass(_power_of_two(batch), _power_of_two(tokens), heads, q_len)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def machine(device: torch.device) -> str:
    """Return what an entry is good for: the GPU's name and multiprocessors, or the CPU's threads
    and instruction set."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.multi_processor_count} multiprocessors"
    return f"{device.type}, {torch.get_num_threads()} threads, {_isa()}"


@functools.cache
def _isa() -> str:
    compiled = _compiled.load()
    return "nothing compiled" if compiled is None else str(compiled.cpu_isa())


def path() -> Path | None:
    """Return where entries are kept; None where MLA_OPS_TUNED is 0."""
    named = os.environ.get("MLA_OPS_TUNED")
    if named == "0":
        return None
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mla_ops" / "tuned.json"


@functools.cache
def entries() -> tuple[Mapping[str, Any], ...]:
    """Return what is kept. A file that cannot be read is a warning, and counts as empty."""
    file = path()
    try:
        if file is None or not file.exists():
            return ()
        content = json.loads(file.read_text())
        if content["version"] != VERSION:
            raise ValueError(f"version must be {VERSION}, got {content['version']!r}")
        return tuple(content["entries"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(
            "%s cannot be used (%s); to remove it: python -m mla_ops tune --reset", file, error
        )
        return ()


def forget() -> None:
    """Read the file again at the next question."""
    entries.cache_clear()
    _choices.cache_clear()


def write(kept: list[Mapping[str, Any]]) -> Path:
    """Replace the file, all at once. Raises ValueError where MLA_OPS_TUNED is 0."""
    file = path()
    if file is None:
        raise ValueError("MLA_OPS_TUNED must name a file for tune, got '0'")
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({"version": VERSION, "entries": kept}, indent=1) + "\n")
    new.replace(file)
    forget()
    return file


@functools.cache
def _choices(on: str) -> dict[tuple[str, ShapeClass], Mapping[str, int]]:
    """Return what is in force on a machine, by backend and class of shapes."""
    return {
        (entry["backend"], ShapeClass(*(entry[name] for name in ShapeClass._fields))): entry[
            "choice"
        ]
        for entry in entries()
        if entry["machine"] == on
    }


def choice(
    device: torch.device, backend: str, batch: int, tokens: int, heads: int, q_len: int
) -> Mapping[str, int]:
    """Return the parameters tuned for a shape; none where it was not tuned."""
    if not entries():
        return {}
    key = (backend, shape_class(batch, tokens, heads, q_len))
    return _choices(machine(device)).get(key, {})


def notes(arch: str, heads: int, q_len: int) -> list[str]:
    """Return a line for each entry in force for these, for `explain`."""
    return [
        f"tuned   {entry['backend']}, batch {entry['batch']}, room for {entry['tokens']} tokens: "
        + (", ".join(f"{k} {v}" for k, v in entry["choice"].items()) or "the default")
        + f" ({entry['speedup']:.2f}x the default on {entry['machine']}, {entry['date']})"
        for entry in entries()
        if (entry["arch"], entry["heads"], entry["q_len"]) == (arch, heads, q_len)
    ]
