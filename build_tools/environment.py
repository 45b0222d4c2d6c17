"""The Makefile's virtual environment: tools, torch, and nothing of it outside the folder.

Run by whatever python3 the machine has, before anything is installed: standard library only.

With --python alone the torch of another environment is built on without touching that one: a
`.pth` file names its package folders. (`venv --system-site-packages` shows a venv's base
installation, not the venv itself.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = "mla_ops-environment.json"
DEFAULT_TORCH = "torch==2.13.0"
MIN_PYTHON = (3, 11)

# Installed after the base environment is in sight, and only where it has none: what is compiled
# there was compiled against its own.
TAKEN_FROM_BASE = ("numpy",)

LIST_PACKAGE_FOLDERS = """
import sys, sysconfig
import torch
standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
print(*[p for p in sys.path if p and p not in standard and not p.endswith((".zip", "lib-dynload"))],
      sep="\\n")
"""


def run(*command: str | Path) -> None:
    """Run a command, telling which; stop where it fails."""
    print("+", *command, flush=True)
    done = subprocess.run([str(word) for word in command], check=False)
    if done.returncode:
        sys.exit(f"mla_ops: the command above failed ({done.returncode})")


def requirements() -> tuple[list[str], list[str]]:
    """Return what pyproject.toml asks for: tools, and what the base environment's is taken of."""
    import tomllib  # here: a Python without it is told so by check_python

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = project["build-system"]["requires"] + project["project"]["optional-dependencies"]["dev"]
    unique = list(dict.fromkeys(named))
    late = [one for one in unique if re.split(r"[^\w-]", one)[0] in TAKEN_FROM_BASE]
    return [one for one in unique if one not in late], late


def check_python() -> None:
    """Refuse a Python that is too old, or one that cannot make virtual environments."""
    if sys.version_info < MIN_PYTHON:
        minimum = ".".join(map(str, MIN_PYTHON))
        sys.exit(
            f"mla_ops needs Python {minimum} or newer, and {sys.executable} is "
            f"{sys.version.split()[0]}. Run, for instance:\n"
            f"    make demo PYTHON=python{minimum} TORCH={DEFAULT_TORCH}"
        )
    try:
        import ensurepip  # noqa: F401  (Debian packages it apart)
        import venv  # noqa: F401
    except ImportError:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"mla_ops: {sys.executable} cannot make a virtual environment. Run:\n"
            f"    apt-get install {version}-venv"
        )


def has_module(python: Path, module: str) -> bool:
    """Whether an interpreter can import a module."""
    if not python.exists():
        return False
    done = subprocess.run([str(python), "-c", f"import {module}"], capture_output=True, check=False)
    return done.returncode == 0


def package_folders(python: str) -> list[str]:
    """Return the folders in which an interpreter finds torch and all else that is installed."""
    done = subprocess.run(
        [python, "-c", LIST_PACKAGE_FOLDERS], capture_output=True, text=True, check=False, cwd="/"
    )
    if done.returncode:
        sys.exit(
            f"mla_ops: PYTHON={python} has no torch that can be imported:\n{done.stderr}\n"
            "Install one there, or have one installed into .venv:\n"
            f"    make demo PYTHON={python} TORCH={DEFAULT_TORCH}"
        )
    return done.stdout.split("\n")[:-1]


def wanted_state(python: str, torch: str, old: dict[str, str]) -> dict[str, str]:
    """Return what the environment is to be; it stays what it is where nothing is asked for.

    A Python without a torch to install is one to take torch from.
    """
    files = [ROOT / "pyproject.toml", Path(__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    if not (python or torch):
        python, torch = old.get("python", ""), old.get("torch", DEFAULT_TORCH)
    return {"python": python, "torch": torch, "inputs": digest}


def make(folder: Path, state: dict[str, str], old: dict[str, str]) -> None:
    """Make the environment, anew where another Python or torch is asked for."""
    folders = [] if state["torch"] else package_folders(state["python"])
    python = folder / "bin" / "python"
    changed = any(old.get(key, state[key]) != state[key] for key in ("python", "torch"))
    if changed or not has_module(python, "pip"):
        run(sys.executable, "-m", "venv", "--clear", folder)
    pth = next(folder.glob("lib/python*/site-packages")) / "zz_mla_ops_base.pth"
    pth.unlink(missing_ok=True)  # pip has to see the tools as missing, and install them here
    tools, late = requirements()
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, *tools)
    if folders:
        pth.write_text("\n".join(folders) + "\n")
    elif not has_module(python, "torch"):
        run(*pip, state["torch"])
    for requirement in late:
        if not has_module(python, re.split(r"[^\w-]", requirement)[0]):
            run(*pip, requirement)


def main() -> None:
    """Bring the environment to what is asked for; do nothing where it is that already."""
    check_python()
    parser = argparse.ArgumentParser(description="Make the Makefile's virtual environment.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="", help="take torch from it, or run on it")
    parser.add_argument("--torch", default="", help="what to install; without: the Python's own")
    arguments = parser.parse_args()

    state_file = arguments.folder / STATE
    old = json.loads(state_file.read_text()) if state_file.exists() else {}
    state = wanted_state(arguments.python, arguments.torch, old)
    if state == old:
        return
    os.environ.pop("PYTHONPATH", None)
    state_file.unlink(missing_ok=True)
    make(arguments.folder, state, old)
    state_file.write_text(json.dumps(state, indent=1) + "\n")


if __name__ == "__main__":
    main()
