"""The command line: `python -m mla_ops COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from mla_ops import __version__

# Each is a module with `add_arguments(parser)` and `main(arguments) -> exit code`; the first line
# of its docstring is its help.
COMMANDS = ("doctor", "demo", "selftest", "bench", "tune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m mla_ops", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mla_ops {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # The one that is asked for alone: doctor's must not need what the others import.
    asked = tuple(name for name in argv[:1] if name in COMMANDS)
    for name in asked or COMMANDS:
        module = importlib.import_module(f"mla_ops.{name}")
        about = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=about, description=about)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    arguments = parser.parse_args(argv)
    return int(arguments.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
