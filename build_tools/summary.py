"""Print what was built: pip keeps to itself what the build said."""

from __future__ import annotations

import mla_ops._C


def main() -> None:
    """Print the build's facts, one a line, and loudly what is missing."""
    info = mla_ops._C.build_info()
    for name, value in info.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        print(f"    {name:18} {shown}")
    for reason in info["cpu_isas_left_out"]:
        print(f"*** NOT COMPILED FOR {reason}")
        print("*** a newer compiler (CXX=) compiles for all of them")


if __name__ == "__main__":
    main()
