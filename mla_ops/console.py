"""What the commands share: options, memory, a progress bar, numbers as people read them."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESERVE = 768 << 20  # bytes for the oracle, torch and the backends' workspaces


class Progress:
    """One bar over all steps on stderr, where tqdm is installed and stderr is a terminal."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        self.say: Callable[[str], object] = print
        try:
            tqdm = importlib.import_module("tqdm").tqdm
        except ImportError:
            return
        # disable=None: no bar where stderr is not a terminal.
        self._bar, self.say = tqdm(total=total, disable=None, leave=False), tqdm.write

    def step(self, what: str) -> None:
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def device(text: str) -> torch.device:
    """Return the device that an option names."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"expected one of the {torch.cuda.device_count()} GPUs that torch sees, got {text!r}"
        )
    return device


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option that `chosen_device` reads."""
    parser.add_argument(
        "--device",
        type=device,
        help="cpu, cuda or cuda:N (default: a GPU where torch sees one, else cpu)",
    )


def chosen_device(arguments: argparse.Namespace) -> torch.device:
    """Return the device asked for, or a GPU where torch sees one."""
    default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device: torch.device = arguments.device or default
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # for graphs and events, which take the current one
    return device


def memory_free(device: torch.device) -> int:
    """Return the bytes that can still be allocated, as far as the system says so."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
    except OSError:
        pass
    try:  # a container's own limit; "max" is none
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    except (OSError, ValueError):
        pass
    return free


def size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def seconds(number: float) -> str:
    if number >= 1:
        return f"{number:.2f} s"
    return f"{number * 1e3:.2f} ms" if number >= 1e-3 else f"{number * 1e6:.1f} us"


def rate(bytes_per_second: float) -> str:
    value = bytes_per_second / 1e9
    return f"{value:.2f} GB/s" if value < 10 else f"{value:.0f} GB/s"
