"""How far the seed's conversion of bf16 to float8 is off, beside ours: both executed on gfx950.

    python -m build_tools.cdna.seed_errors ../shared/seed/000_4d2c46036e4b8abe.txt

The seed is the program this project started from; it carries its kernel as a base64 ELF, which is
not ours to distribute. Prints the table of docs/amd.md.
"""

from __future__ import annotations

import argparse
import base64
import re
from pathlib import Path

import ml_dtypes
import numpy as np

from .code_object import parse
from .compiler import compile_hip
from .launch import launch
from .state import Array

CSRC = Path(__file__).resolve().parents[2] / "csrc"
OURS = re.compile(r"8quantizeINS0_8BFloat16ENS0_12Float8E4M3FNE(Li16E)?EEv")
THREADS = 256
NUMBERS = (0.01, 0.001, 1.12, 1.19, 255, 256, 300, 1000, np.inf, -np.inf, np.nan)


def seed_kernel(path: Path, x: Array) -> Array:
    """bf16_to_fp8(dst, src, n) of the seed."""
    (encoded,) = re.findall(r'_KERNEL_B64 = "([^"]+)"', path.read_text())
    code = parse(base64.b64decode(encoded))
    out = np.zeros(x.size, np.uint8)
    groups = (x.size + THREADS - 1) // THREADS
    launch(code, "bf16_to_fp8", groups, THREADS, out, x.view(np.uint16), np.int64(x.size))
    return out.view(ml_dtypes.float8_e4m3fn)


def our_kernel(x: Array) -> Array:
    """quantize<BFloat16, Float8E4M3FN> with scale 1."""
    code = compile_hip(CSRC / "hip" / "quantize.hip", "gfx950", ("-DMLA_DEVICE_ONLY",))
    (name,) = filter(OURS.search, code.kernels)
    out, scale_out = np.zeros(x.size, np.uint8), np.zeros(1, np.float32)
    rows = tuple(np.int64(v) for v in (1, x.size, 1, 1, 1, 1, 0, 0, 0, 0))
    launch(
        code, name, 4, THREADS, x.view(np.uint16), rows, out, np.ones(1, np.float32), 0, scale_out
    )
    return out.view(ml_dtypes.float8_e4m3fn)


def table(convert: Array, x: Array) -> list[tuple[str, str]]:
    """The rows of one kernel; x holds all bf16 patterns, then samples, and `convert` what became of
    them.
    """
    wide, got = x.astype(np.float64), convert.astype(np.float64)
    right = np.clip(wide, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    patterns, normal = slice(0, 1 << 16), slice(1 << 16, None)
    same = (right.view(np.uint8) == convert.view(np.uint8)) | (np.isnan(wide) & np.isnan(got))
    size = np.abs(wide[patterns])
    usual, small = (size >= 2.0**-6) & (size <= 240), (size > 2.0**-10) & (size < 2.0**-6)
    relative = got[patterns][usual] / wide[patterns][usual] - 1
    drawn, stored = wide[normal], got[normal]
    out = [
        ("codes wrong, of 65,536", f"{np.sum(~same[patterns]):,}"),
        ("mean relative error, 2^-6 to 240", f"{100 * relative.mean():+.2f} %"),
        ("largest relative error, 2^-6 to 240", f"{100 * np.abs(relative).max():.1f} %"),
        (
            "numbers between 2^-10 and 2^-6 that become 0",
            f"{100 * np.mean(got[patterns][small] == 0):.0f} %",
        ),
        (
            "standard normal: relative L2 error",
            f"{100 * np.linalg.norm(stored - drawn) / np.linalg.norm(drawn):.2f} %",
        ),
        (
            "standard normal: mean change of magnitude",
            f"{100 * (np.abs(stored).sum() / np.abs(drawn).sum() - 1):+.2f} %",
        ),
    ]
    for number in NUMBERS:
        as_bf16 = np.array([number], ml_dtypes.bfloat16)
        index = int(np.flatnonzero(x.view(np.uint16) == as_bf16.view(np.uint16))[0])
        out.append((f"{float(as_bf16[0]):.4g}", f"{got[index]:.4g}"))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seed", type=Path, help="the seed's file with _KERNEL_B64")
    path = parser.parse_args().seed
    samples = np.random.default_rng(0).standard_normal(1 << 16).astype(ml_dtypes.bfloat16)
    x = np.concatenate([np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16), samples])
    with np.errstate(all="ignore"):
        theirs, ours = table(seed_kernel(path, x), x), table(our_kernel(x), x)
    print("| | seed | `quantize_fp8` |\n|---|---|---|")
    for (what, first), (_, second) in zip(theirs, ours, strict=True):
        print(f"| {what} | {first} | {second} |")


if __name__ == "__main__":
    main()
