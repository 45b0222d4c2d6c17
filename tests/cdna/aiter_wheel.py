"""The code objects of the pinned aiter wheel: downloaded once into build/, shared by parallel test
workers.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

REQUIREMENT = "amd-aiter==0.1.7.post2.dev18"
ROOT = Path(__file__).parents[2]


class WheelUnavailable(Exception):
    pass


def code_object_path(name: str) -> Path:
    """`name`: path below hsa/ in the wheel, such as gfx942/mla/mla_a8w8_....co."""
    cache = ROOT / "build" / "cdna-wheel"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / "hsa" / name
    if target.exists():
        return target
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wheel = _wheel(cache)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(f".{os.getpid()}")
            partial.write_bytes(zipfile.ZipFile(wheel).read(f"aiter_meta/hsa/{name}"))
            partial.rename(target)
    return target


def _wheel(cache: Path) -> Path:
    found = list(cache.glob("amd_aiter-*.whl"))
    if found:
        return found[0]
    failed = cache / "failed"
    if failed.exists() and time.time() - failed.stat().st_mtime < 600:  # said by another worker
        raise WheelUnavailable(failed.read_text())
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(cache),
        REQUIREMENT,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(cache.glob("amd_aiter-*.whl"))
    if done.returncode or not found:
        reason = f"pip download {REQUIREMENT} failed: {done.stderr.strip()[-300:]}"
        failed.write_text(reason)
        raise WheelUnavailable(reason)
    return found[0]
