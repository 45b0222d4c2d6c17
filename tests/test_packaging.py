"""Wheels and source distributions hold what they should; a build that cannot be says what to do.

Every failure here is provoked in a copy of the tree; only the wheel with kernels is built in the
tree itself, where the objects are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MENDS = "pip install --no-build-isolation ."


def in_git() -> bool:
    return (ROOT / ".git").exists() and shutil.which("git") is not None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not in_git(), reason="needs a git checkout"),
    pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="sanitizers are for the module"),
]


def git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MLA_OPS_")}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def pip_wheel(
    tree: Path, out: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir"]
    return run(*pip, *options, "-w", out, tree, cwd=out, **environment)


def only_wheel(done: subprocess.CompletedProcess[str], out: Path) -> Path:
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree as it would be committed, never built."""
    copy = tmp_path / "tree"
    for name in git("ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that has no torch."""
    package = tmp_path / "no_torch" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    return {"PYTHONPATH": str(package.parent)}


def test_wheel_with_kernels_runs_elsewhere_and_leaves_the_tree_clean(tmp_path: Path) -> None:
    before = git("status", "--porcelain")
    wheel = only_wheel(pip_wheel(ROOT, tmp_path, "--no-build-isolation"), tmp_path)
    assert git("status", "--porcelain") == before

    names = zipfile.ZipFile(wheel).namelist()
    outside = [n for n in names if not n.startswith(("mla_ops/", "mla_ops-0"))]
    assert not outside
    assert any(n.startswith("mla_ops/_C.") and n.endswith(".so") for n in names)
    assert "mla_ops/py.typed" in names

    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = "import mla_ops; from mla_ops import _C; print(_C.__file__, _C.build_info())"
    done = run(sys.executable, "-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))


def test_pure_wheel_needs_neither_torch_nor_compiler(
    tree: Path, tmp_path: Path, no_torch: dict[str, str]
) -> None:
    # A module left in the folder by an editable install must not slip into the wheel.
    (tree / "mla_ops" / "_C.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    done = pip_wheel(
        tree,
        tmp_path,
        "--no-build-isolation",
        **no_torch,
        MLA_OPS_SKIP_BUILD="1",
        CXX="/nonexistent/c++",
    )
    wheel = only_wheel(done, tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_without_torch_the_error_names_the_command(
    tree: Path, tmp_path: Path, no_torch: dict[str, str]
) -> None:
    done = pip_wheel(tree, tmp_path, "--no-build-isolation", **no_torch)
    assert done.returncode != 0
    assert MENDS in done.stderr
    assert "MLA_OPS_SKIP_BUILD=1" in done.stderr


def test_isolated_build_names_the_command(tree: Path, tmp_path: Path) -> None:
    """Plain `pip install .` hides torch: it must not end in a wheel without kernels."""
    done = pip_wheel(tree, tmp_path)
    if "No matching distribution" in done.stderr:
        pytest.skip("no package index to make an isolated build environment from")
    assert done.returncode != 0
    assert MENDS in done.stderr


def test_missing_compiler_names_the_command(tree: Path, tmp_path: Path) -> None:
    done = pip_wheel(tree, tmp_path, "--no-build-isolation", CXX="/nonexistent/c++")
    assert done.returncode != 0
    assert "/nonexistent/c++" in done.stderr
    assert "apt-get install g++" in done.stderr


def test_failed_compile_shows_the_error_and_names_commands(tree: Path, tmp_path: Path) -> None:
    source = sorted((tree / "csrc" / "cpu" / "isa").glob("*.cpp"))[0]
    source.write_text(source.read_text() + "\n#error planted by the test\n")
    done = pip_wheel(tree, tmp_path, "--no-build-isolation")
    assert done.returncode != 0
    assert "planted by the test" in done.stderr
    assert "CXX=" in done.stderr and MENDS in done.stderr


def test_unknown_sanitizer_is_refused(tree: Path, tmp_path: Path) -> None:
    done = pip_wheel(tree, tmp_path, "--no-build-isolation", MLA_OPS_SANITIZE="adress")
    assert done.returncode != 0
    assert "MLA_OPS_SANITIZE=address,undefined" in done.stderr


def test_source_distribution_can_be_built_from(
    tree: Path, tmp_path: Path, no_torch: dict[str, str]
) -> None:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = run(sys.executable, "-c", code, tmp_path, cwd=tree, **no_torch)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    folders = ("csrc", "build_tools", "mla_ops", "tests")
    needed = {name for name in git("ls-files", *folders) if (ROOT / name).is_file()}
    needed |= {"setup.py", "pyproject.toml", "LICENSE", "README.md"}
    assert not needed - held
