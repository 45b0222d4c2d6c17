"""Where nothing was compiled, or what was does not load, all works on the torch backend, and what
to do about it is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mla_ops
from mla_ops import _C

TESTS = Path(__file__).resolve().parent
REBUILD = "pip install --no-build-isolation ."

IMPORT = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
import torch, mla_ops
print(mla_ops.__file__)
x = mla_ops.quantize_fp8(torch.ones(3))
print(mla_ops.explain(arch="cpu"))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package without the compiled module; returns the folder that it is in."""
    folder = tmp_path / "without-kernels"
    source = Path(mla_ops.__file__).parent
    shutil.copytree(
        source, folder / "mla_ops", ignore=shutil.ignore_patterns("_C*.so", "__pycache__")
    )
    # The hook of an editable install would find mla_ops._C in the source tree.
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "named = [(finder, getattr(finder, '__name__', '')) for finder in sys.meta_path]\n"
        "sys.meta_path = [finder for finder, name in named if 'Editable' not in name]\n"
    )
    return folder


def python(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package)}
    environment.pop("MLA_OPS_BACKEND", None)
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(
        command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False
    )


def test_import_says_at_info_why_there_are_no_kernels(package: Path) -> None:
    result = python(package, "-c", IMPORT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(package))
    lines = [line for line in result.stderr.splitlines() if "compiled kernels" in line]
    assert lines == [
        f"INFO mla_ops mla_ops was installed without compiled kernels; to build them: {REBUILD}"
    ]
    assert "Warning" not in result.stderr


def test_everything_works_there(package: Path) -> None:
    suite = TESTS / "without_kernels.py"
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    result = python(package, "-m", "pytest", *options, str(suite))
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]
    assert " passed" in result.stdout


@pytest.mark.parametrize("content", (b"", b"not a shared object", "truncated"), ids=str)
def test_a_broken_module_is_a_warning_that_names_the_command(
    package: Path, content: bytes | str
) -> None:
    real = Path(_C.__file__)
    # Cut within the header: dlopen() maps what is cut later, and dies of it for any module.
    broken = real.read_bytes()[:40] if content == "truncated" else content
    (package / "mla_ops" / real.name).write_bytes(broken)
    result = python(package, "-c", IMPORT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(package))
    assert "RuntimeWarning: the compiled kernels cannot be loaded (" in result.stderr
    assert REBUILD in result.stderr
    assert "SERVES: plain torch" in result.stdout


def test_a_module_of_another_abi_is_a_warning(package: Path) -> None:
    """A symbol that this torch does not have: what another torch's build looks like."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler")
    source = package / "broken.cpp"
    source.write_text('extern "C" void gone_in_this_torch();\nextern "C" void* PyInit__C() '
                      "{ gone_in_this_torch(); return 0; }\n")  # fmt: skip
    target = package / "mla_ops" / Path(_C.__file__).name
    command = [compiler, "-shared", "-fPIC", "-Wl,-z,now", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    result = python(package, "-c", IMPORT)
    assert result.returncode == 0, result.stderr
    assert "gone_in_this_torch" in result.stderr
    assert REBUILD in result.stderr
