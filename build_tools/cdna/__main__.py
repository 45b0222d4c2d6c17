"""python -m build_tools.cdna report FILE.hip [-D...] [--arch gfx942]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .code_object import load
from .compiler import ARCHES, CompileError
from .report import describe, render, report


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.cdna", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "report", help="registers, LDS, spills, instruction mix and occupancy"
    )
    command.add_argument("file", type=Path, help="a HIP source, or a code object (.co)")
    command.add_argument("--arch", choices=ARCHES, action="append", help="default: both")
    command.add_argument("--top", type=int, default=12, help="how many opcodes to list")
    options, flags = parser.parse_known_args(arguments)
    try:
        if options.file.suffix == ".co":
            entries = describe(load(options.file))
        else:
            entries = report(options.file, tuple(flags), tuple(options.arch or ARCHES))
    except (CompileError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(render(entries, options.top), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
