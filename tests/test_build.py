"""What was compiled is what was meant to be: the module, its instruction sets, its threads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mla_ops  # noqa: F401
from mla_ops import _C

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for build_tools; at the end: mla_ops stays the installed one

from build_tools import isa, layout  # noqa: E402

INFO = _C.build_info()
SHIPPED = pytest.mark.skipif(
    bool(INFO["sanitizers"]), reason="about what is shipped, and builds with sanitizers are not"
)


def objects_of(name: str) -> list[Path]:
    """The objects of one instruction set, where this tree's build left them."""
    build = layout.build_dir(INFO["torch"])
    objects = layout.isa_objects(build, name)
    if not build.exists():
        pytest.skip(f"mla_ops was not built in this tree: no {build}")
    return objects


def defined_symbols(files: list[Path], *options: str) -> set[str]:
    """The symbols that object files define for others, weak ones included."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is missing: apt-get install binutils")
    command = [nm, "--defined-only", "--extern-only", "--format=posix", *options, *map(str, files)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in out.splitlines() if len(line.split()) > 1}


def test_build_info_is_about_this_torch() -> None:
    assert INFO["torch"] == torch.__version__
    assert INFO["compiler"]
    assert isinstance(INFO["gpu_architectures"], list)


def test_build_info_has_a_revision() -> None:
    assert re.fullmatch(r"([0-9a-f]{12}(\+dirty)?|unknown)", INFO["git_revision"])


def test_every_instruction_set_is_compiled_or_said_to_be_left_out() -> None:
    left_out = [entry.partition(":")[0] for entry in INFO["cpu_isas_left_out"]]
    assert sorted(INFO["cpu_isas"] + left_out) == sorted(one.name for one in isa.candidates())
    assert INFO["cpu_isas"][0] == "baseline"


def test_the_instruction_set_chosen_is_a_compiled_one() -> None:
    assert _C.cpu_isa() in INFO["cpu_isas"]


def test_the_build_under_test_is_the_one_asked_for() -> None:
    """`make sanitize` would pass on the normal build just as well."""
    asked = os.environ.get("MLA_OPS_EXPECT_SANITIZERS", "")
    assert INFO["sanitizers"] == [word for word in asked.split(",") if word]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor")
def test_parallel_for_uses_more_than_one_thread() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            assert _C.threads_used() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_thread_pool_is_torchs() -> None:
    """Two OpenMP runtimes in a process would be two pools fighting over the processors."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    runtimes = [path for path in mapped if re.search(r"lib(gomp|omp|iomp5)[-.]", path)]
    assert len(runtimes) == 1


@SHIPPED
@pytest.mark.parametrize("name", INFO["cpu_isas"])
def test_objects_define_names_of_their_instruction_set_only(name: str) -> None:
    """Anything else, such as an inlined std:: function, may be the copy that the linker keeps."""
    symbols = defined_symbols(objects_of(name))
    assert symbols
    own = re.compile(rf"_Z(T[VTIS]|GV|Z)?NK?3mla{len(name)}{name}")
    assert not sorted(symbol for symbol in symbols if not own.match(symbol))


@SHIPPED
def test_objects_of_two_instruction_sets_share_no_symbol() -> None:
    defined = {name: defined_symbols(objects_of(name)) for name in INFO["cpu_isas"]}
    for first in defined:
        for second in defined:
            if first < second:
                assert not defined[first] & defined[second], f"{first} and {second} share symbols"


@SHIPPED
def test_the_nm_test_can_fail(tmp_path: Path) -> None:
    """The same check, on two objects that do share a weak symbol."""
    source = tmp_path / "weak.cpp"
    source.write_text(
        "template <class T> T twice(T x) { return x + x; }\ntemplate int twice(int);\n"
    )
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler")
    objects = [tmp_path / "a.o", tmp_path / "b.o"]
    for path in objects:
        subprocess.run([compiler, "-O3", "-c", str(source), "-o", str(path)], check=True)
    assert defined_symbols(objects[:1]) & defined_symbols(objects[1:])


@SHIPPED
def test_the_module_exports_none_of_our_names() -> None:
    """Another module's mla::avx512 must not be taken for ours, nor the other way round."""
    exported = defined_symbols([Path(_C.__file__)], "--dynamic")
    assert "PyInit__C" in exported
    assert not sorted(symbol for symbol in exported if "3mla" in symbol)
