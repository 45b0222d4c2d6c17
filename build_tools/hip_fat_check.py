"""Compile csrc/hip the way hipcc does, without ROCm: host and device passes, every architecture in
one fat object.

    python build_tools/hip_fat_check.py            compile all of csrc/hip, say what came out
    python build_tools/hip_fat_check.py --fetch    first get the headers, if they are not there

It takes Debian's compiler (apt-get install clang-22 lld-22 clang-tools-22; $CLANG names another)
and the HIP headers and device libraries in PyPI's triton, which are kept in build/hip-check. This
checks what a compile of the device side alone cannot see: the launchers, the runtime's names and
types, and the registration of the kernels. It links nothing and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("MLA_OPS_BUILD_DIR") or ROOT / "build") / "hip-check"
TRITON = "triton==3.6.0"
ARCHITECTURES = ("gfx942", "gfx950")
IN_WHEEL = "triton/backends/amd/"

# What ROCm's oclc_abi_version_600.bc holds, which triton leaves out.
OCLC = """#ifdef __HIP_DEVICE_COMPILE__
extern "C" __attribute__((device, weak, visibility("hidden"))) const int __oclc_ABI_version = 600;
#endif
"""


def clang() -> str | None:
    """Return the compiler's path, if it is there."""
    return shutil.which(os.environ.get("CLANG") or "clang-22")


def headers() -> Path | None:
    """Return the folder of triton's AMD backend: the installed one, or the one in the cache."""
    kept = CACHE / IN_WHEEL
    candidates = [kept, *(Path(entry) / IN_WHEEL for entry in sys.path if entry)]
    for folder in candidates:
        if (folder / "include/hip/hip_runtime.h").exists() and (folder / "lib/ockl.bc").exists():
            return folder
    return None


def missing() -> str | None:
    """Return why the check cannot be made, or None where it can."""
    compiler = clang()
    if compiler is None:
        return "no clang-22: apt-get install clang-22 lld-22 clang-tools-22"
    lacking = [tool for tool in ("lld", "clang-offload-bundler") if not _beside(compiler, tool)]
    if lacking:
        return f"no {' and no '.join(lacking)}: apt-get install lld-22 clang-tools-22"
    if headers() is None:
        return "no HIP headers: python build_tools/hip_fat_check.py --fetch"
    return None


def _beside(compiler: str, tool: str) -> bool:
    told = subprocess.run(
        [compiler, f"-print-prog-name={tool}"], capture_output=True, text=True, check=False
    )
    return Path(told.stdout.strip()).is_absolute()


def fetch() -> None:
    """Get triton's wheel and keep the headers and device libraries out of it."""
    if headers() is not None:
        return
    wheels = CACHE / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(wheels), TRITON], check=True, cwd=ROOT
    )
    (wheel,) = wheels.glob("triton-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = [
            name
            for name in archive.namelist()
            if name.startswith((IN_WHEEL + "include/", IN_WHEEL + "lib/"))
        ]
        archive.extractall(CACHE, wanted)
    shutil.rmtree(wheels)


def _rocm(folder: Path) -> Path:
    """Make a folder that clang takes for an installation of ROCm."""
    rocm = CACHE / "rocm"
    (rocm / "share/hip").mkdir(parents=True, exist_ok=True)
    (rocm / "share/hip/version").write_text(
        "HIP_VERSION_MAJOR=7\nHIP_VERSION_MINOR=1\nHIP_VERSION_PATCH=0\n"
    )
    include = rocm / "include"
    include.unlink(missing_ok=True)
    include.symlink_to((folder / "include").resolve())
    (rocm / "oclc.h").write_text(OCLC)
    return rocm


def compile_fat(
    source: Path, out: Path, architectures: Sequence[str] = ARCHITECTURES, *extra: str
) -> subprocess.CompletedProcess[str]:
    """Compile one .hip file into a fat object; the caller looks at the exit code."""
    compiler, folder = clang(), headers()
    assert compiler is not None and folder is not None, missing()
    rocm = _rocm(folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(compiler, "-x", "hip", *(f"--offload-arch={name}" for name in architectures)),
        *(f"--rocm-path={rocm}", f"--hip-device-lib-path={folder / 'lib'}"),
        *("--hip-device-lib=ockl.bc", "--hip-device-lib=ocml.bc"),
        *("-D__HIP_PLATFORM_AMD__=1", "-include", str(rocm / "oclc.h")),
        *("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-gpu-rdc"),
        *("-Wall", "-Wextra", "-Werror", "-Wno-unused-command-line-argument"),
        *("-I", str(ROOT / "csrc"), *extra, "-c", str(source), "-o", str(out)),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def bundles(fat: Path) -> dict[str, int]:
    """Return the architectures in a fat object and the bytes of their code."""
    data = fat.read_bytes()
    begin = data.find(b"__CLANG_OFFLOAD_BUNDLE__")
    if begin < 0:
        return {}
    position = begin + 24
    count = int.from_bytes(data[position : position + 8], "little")
    position += 8
    found: dict[str, int] = {}
    for _ in range(count):
        _, size, length = (
            int.from_bytes(data[position + i : position + i + 8], "little") for i in (0, 8, 16)
        )
        name = data[position + 24 : position + 24 + length].decode()
        position += 24 + length
        if not name.startswith("host"):
            found[name.rpartition("--")[2]] = size
    return found


def main() -> None:
    """Compile everything; exit code 1 where something does not compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fetch", action="store_true", help="get what is missing from PyPI")
    parser.add_argument("--or-skip", action="store_true", help="no error where it cannot be done")
    arguments = parser.parse_args()
    if arguments.fetch:
        try:
            fetch()
        except subprocess.CalledProcessError as error:
            print(f"no {TRITON}: {error}", file=sys.stderr)
    if reason := missing():
        print(f"mla_ops: SKIPPED, cannot compile HIP here: {reason}", file=sys.stderr)
        sys.exit(not arguments.or_skip)
    failed = False
    for source in sorted((ROOT / "csrc/hip").glob("*.hip")):
        out = CACHE / "objects" / f"{source.stem}.o"
        begin = time.monotonic()
        done = compile_fat(source, out)
        seconds = time.monotonic() - begin
        failed |= done.returncode != 0
        made = bundles(out) if done.returncode == 0 else {}
        sizes = " ".join(f"{name}:{size}" for name, size in made.items()) or "no device code"
        state = "FAILED" if done.returncode else "ok"
        print(f"{source.name:16} {state:6} {seconds:5.1f} s  {sizes}", flush=True)
        print(done.stderr, end="", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
