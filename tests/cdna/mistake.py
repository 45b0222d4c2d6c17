"""A mistake in a copy of csrc, which a check of our kernels has to notice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from project import CSRC, Kernels

from build_tools.cdna.state import Fault

Check = Callable[[Kernels], None]


@dataclass(frozen=True)
class Mistake:
    """`old` becomes `new`, and `check` notices."""

    name: str
    file: str
    old: str
    new: str
    check: Check
    arch: str = "gfx942"

    def put_into(self, folder: Path) -> None:
        """Make the copy in `folder`."""
        shutil.copytree(CSRC / "hip", folder / "hip")
        for header in CSRC.glob("*.h"):
            shutil.copy(header, folder)
        path = folder / self.file
        text = path.read_text()
        assert self.old in text, "the source has changed: this mistake is no longer one"
        path.write_text(text.replace(self.old, self.new))

    def assert_noticed(self, folder: Path) -> None:
        with pytest.raises((AssertionError, Fault)) as found:
            self.check(Kernels(self.arch, folder))
        print(f"{self.name}: {str(found.value)[:200]}")
