"""The command line: `python -m mla_ops COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from mla_ops import __version__, demo, selftest

# Each module has `add_arguments(parser)` and `main(arguments) -> exit code`; the first line of its
# docstring is its help.
COMMANDS: dict[str, ModuleType] = {"demo": demo, "selftest": selftest}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m mla_ops", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mla_ops {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        about = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=about, description=about)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    arguments = parser.parse_args(argv)
    return int(arguments.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
