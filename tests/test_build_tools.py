"""The build's own logic, without building."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from build_tools import environment, flags, info_header, isa, revision, toolchain  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def old_compiler(tmp_path: Path) -> list[str]:
    """A compiler that does not know AVX512-BF16."""
    script = tmp_path / "old-c++"
    script.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do if [ "$word" = -mavx512bf16 ]; then\n'
        '  echo "error: unrecognized option $word" >&2; exit 1\n'
        'fi; done\nexec c++ "$@"\n'
    )
    script.chmod(0o755)
    return [str(script)]


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_an_older_compiler_leaves_out_what_it_does_not_know(old_compiler: list[str]) -> None:
    compiled, left_out = isa.divide(old_compiler, "x86_64")
    assert [one.name for one in compiled] == ["baseline", "avx2", "avx512"]
    assert left_out == {"avx512_bf16": "error: unrecognized option -mavx512bf16"}


def test_other_machines_have_the_baseline_only() -> None:
    assert [one.name for one in isa.candidates("aarch64")] == ["baseline"]


def test_no_flag_makes_a_wheel_for_this_machine_only_or_loses_nans() -> None:
    every = [*flags.common(), *flags.link()]
    for one in isa.X86_64:
        every += flags.per_isa(one)
    assert not [flag for flag in every if re.match(r"-march|-mtune|-ffast-math|-Ofast", flag)]


def test_instruction_sets_contain_the_ones_before() -> None:
    for smaller, larger in zip(isa.X86_64, isa.X86_64[1:], strict=False):
        assert set(smaller.flags) < set(larger.flags)


def test_sanitizers_come_with_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_OPS_SANITIZE", "undefined, address")
    assert {"-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"} <= set(
        flags.common()
    )
    assert "-fsanitize=address,undefined" in flags.link()


def test_debug_information_is_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_OPS_SANITIZE", raising=False)
    monkeypatch.delenv("CFLAGS", raising=False)
    assert "-g0" in flags.common()
    monkeypatch.setenv("CFLAGS", "-O0 -ggdb")
    assert "-g0" not in flags.common()


def test_oldest_torch_is_the_same_for_pip_and_for_the_build() -> None:
    (requirement,) = PROJECT["project"]["dependencies"]
    assert re.match(r"torch>=(\d+)\.(\d+)", requirement).groups() == tuple(
        str(part) for part in toolchain.MIN_TORCH
    )


def test_torch_is_no_build_requirement() -> None:
    assert not [one for one in PROJECT["build-system"]["requires"] if one.startswith("torch")]


def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.10.1+cpu")
    with pytest.raises(toolchain.BuildError, match=r"needs torch 2\.11.*2\.10\.1\+cpu"):
        toolchain.require_torch()
    monkeypatch.setattr("torch.__version__", "2.12.0a0+git1c57644")
    assert toolchain.require_torch() == "2.12.0a0+git1c57644"


def test_compiler_with_arguments_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache c++ -pipe '-DA=b c'")
    monkeypatch.setenv("CFLAGS", "-g1")
    toolchain.settle_cxx()
    assert toolchain.cxx() == ["c++", "-pipe", "-DA=b c", "-g1"]
    assert toolchain.require_compiler()


def test_compiler_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(toolchain.BuildError, match="false compiles no C"):
        toolchain.require_compiler()


def test_revision_follows_the_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    assert revision.git_revision(tree) == "unknown"
    git(tree, "init", "-q")
    (tree / "file").write_text("1")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "one")
    clean = revision.git_revision(tree)
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (tree / "file").write_text("2")
    assert revision.git_revision(tree) == clean + "+dirty"


def test_revision_of_a_surrounding_repository_is_not_ours(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "somebody else's")
    unpacked = tmp_path / "mla_ops-0.1.0"
    unpacked.mkdir()
    assert revision.git_revision(unpacked) == "unknown"


def test_no_git_program_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert revision.git_revision() == "unknown"


def test_header_quotes_and_keeps_its_date(tmp_path: Path) -> None:
    isas = ["baseline", "avx2"]
    facts = info_header.Facts("2.13", 'g++ "x"\\\n', isas, [], "none", [], [], "unknown")
    info_header.write(tmp_path, facts)
    path = tmp_path / info_header.NAME
    text = path.read_text()
    assert '#define MLA_BUILD_COMPILER "g++ \\"x\\"\\\\?"\n' in text
    assert '#define MLA_BUILD_ISAS "baseline", "avx2"\n' in text
    assert "#define MLA_BUILD_ISAS_LEFT_OUT\n" in text
    before = path.stat().st_mtime_ns
    info_header.write(tmp_path, facts)
    assert path.stat().st_mtime_ns == before


def test_environment_keeps_what_it_was_made_with() -> None:
    """`make test` after `make demo PYTHON=...` must not throw that environment away."""
    made = environment.wanted_state("/opt/venv/bin/python", "", {})
    assert (made["python"], made["torch"]) == ("/opt/venv/bin/python", "")
    assert environment.wanted_state("", "", made) == made
    fresh = environment.wanted_state("", "", {})
    assert (fresh["python"], fresh["torch"]) == ("", environment.DEFAULT_TORCH)


def test_environment_on_a_python_without_torch_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no torch"):
        environment.package_folders("false")


def test_compiled_dependencies_are_taken_from_the_base_environment() -> None:
    tools, late = environment.requirements()
    assert late == ["numpy"]
    assert "wheel" in tools and "numpy" not in tools
