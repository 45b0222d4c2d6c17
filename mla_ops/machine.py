"""What a result says of where it was measured."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import torch

from mla_ops import __version__, _compiled, capability


def cpu_name() -> str:
    """Return the processor's name as the kernel tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def facts(device: torch.device) -> dict[str, str]:
    """Return date, machine and versions."""
    compiled = _compiled.load()
    revision = __version__ if compiled is None else compiled.build_info()["git_revision"]
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "arch": capability.arch_of(device),
        "isa": "" if on_gpu or compiled is None else compiled.cpu_isa(),
        "threads": "" if on_gpu else str(torch.get_num_threads()),
        "torch": torch.__version__,
        "runtime": str(torch.version.hip or torch.version.cuda or ""),
        "mla_ops": revision,
    }
