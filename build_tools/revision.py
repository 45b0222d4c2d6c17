"""The git revision that goes into the module."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .layout import ROOT


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_revision(root: Path = ROOT) -> str:
    """Return the tree's revision, with "+dirty" where it has changes; "unknown" without git."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # An unpacked source distribution may lie inside somebody else's repository.
    if top is None or Path(top).resolve() != root.resolve():
        return "unknown"
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return head + "+dirty" if _git(root, "status", "--porcelain") else head
