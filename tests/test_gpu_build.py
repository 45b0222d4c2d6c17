"""The GPU part of the build: which architectures, and whole builds for a CUDA and a ROCm torch with
stand-in compilers that write down how they are called."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from build_tools import gpu, gpu_arch, layout, toolchain  # noqa: E402

NVCC_13 = "".join(f"compute_{n}\n" for n in (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121))
NVCC_12 = "".join(f"compute_{n}\n" for n in (50, 70, 75, 80, 86, 89, 90))


def names(environment: dict[str, str], listed: str = NVCC_13) -> list[str]:
    return [target.name for target in gpu_arch.cuda_targets(environment, listed, "x.y")]


def test_default_is_what_the_compiler_knows() -> None:
    assert names({}) == ["sm_80", "sm_90a", "sm_100a", "compute_100"]
    assert names({}, NVCC_12) == ["sm_80", "sm_90a", "compute_90"]
    assert names({}, "compute_70\ncompute_80\n") == ["sm_80", "compute_80"]
    with pytest.raises(toolchain.BuildError, match="It knows\n +7.0"):
        names({}, "compute_70\n")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("8.0;9.0a+PTX", ["sm_80", "sm_90a", "compute_90"]),
        ("8.6 12.0", ["sm_86", "sm_120"]),
        ("10.0f", ["sm_100f"]),
        ("9.0+PTX", ["sm_90", "compute_90"]),
        ("Ampere;8.0", ["sm_80", "sm_86", "compute_86"]),
    ],
)
def test_torchs_variable_overrides(asked: str, expected: list[str]) -> None:
    assert names({"TORCH_CUDA_ARCH_LIST": asked}) == expected


@pytest.mark.parametrize("asked", ["10.0", "9.0b", "sm_90", "8.0a", "9.0f", "8.0;13.7"])
def test_what_cannot_be_is_an_error_that_says_what_can(asked: str) -> None:
    with pytest.raises(toolchain.BuildError, match=r"It knows\n +5\.0 7\.0 .* 9\.0\n"):
        names({"TORCH_CUDA_ARCH_LIST": asked}, NVCC_12)


def test_flags_are_nvccs() -> None:
    flags = [
        t.flag for t in gpu_arch.cuda_targets({"TORCH_CUDA_ARCH_LIST": "9.0a+PTX"}, NVCC_13, "")
    ]
    assert flags == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_rocm_architectures() -> None:
    assert list(gpu_arch.rocm_architectures({})) == ["gfx942", "gfx950"]
    asked = {"PYTORCH_ROCM_ARCH": "gfx90a;gfx942:sramecc+:xnack-"}
    assert list(gpu_arch.rocm_architectures(asked)) == ["gfx90a", "gfx942:sramecc+:xnack-"]
    for wrong in ("942", "gfx1100"):
        with pytest.raises(toolchain.BuildError, match=wrong):
            gpu_arch.rocm_architectures({"PYTORCH_ROCM_ARCH": wrong})


def test_torch_decides_and_the_variable_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_OPS_GPU", raising=False)
    assert not gpu.wanted(None, None)
    assert gpu.wanted("13.0", None) and gpu.wanted(None, "7.1")
    monkeypatch.setenv("MLA_OPS_GPU", "0")
    assert not gpu.wanted("13.0", None)
    monkeypatch.setenv("MLA_OPS_GPU", "1")
    with pytest.raises(toolchain.BuildError, match="for CPUs"):
        gpu.wanted(None, None)
    monkeypatch.setenv("MLA_OPS_GPU", "rocm")
    with pytest.raises(toolchain.BuildError, match="takes 0 or 1"):
        gpu.wanted(None, "7.1")


# A compiler that writes down its command line, makes the files that ninja and the linker want, and
# hands questions (--version, probes of instruction sets) to the real one where there is one.
STAND_IN = """\
#!{python}
import json, os, sys
words = sys.argv[1:]
name = os.path.basename(sys.argv[0])
with open({log!r}, "a") as log:
    log.write(json.dumps([name, *words]) + "\\n")
if "--list-gpu-arch" in words:
    print("compute_80\\ncompute_90\\ncompute_100")
elif "--dryrun" in words:
    print("#$ TOP=" + os.path.dirname(os.path.abspath(sys.argv[0])) + "/../toolkit")
elif "--version" in words and name == "nvcc":
    print("Cuda compilation tools, release {nvcc}, V{nvcc}.1")
elif "--version" in words and name == "hipcc":
    print("HIP version: 7.1.25424-4179531dcd")
elif "-o" in words and not any("probe.cpp" in word for word in words):
    open(words[words.index("-o") + 1], "wb").close()
    source = next((w for w in words if w.endswith((".cpp", ".hip", ".cu"))), None)
    if "-MF" in words and source:
        with open(words[words.index("-MF") + 1], "w") as deps:
            deps.write(words[words.index("-o") + 1] + ": " + source + "\\n")
else:
    os.execvp("c++", ["c++", *words])
"""

# torch as it is where a GPU's torch is installed, as far as builds look at it.
SETUP = """\
import os, runpy, sys
import torch
vendor, version = sys.argv[1:3]
torch.version.cuda = version if vendor == "cuda" else None
torch.version.hip = version if vendor == "hip" else None
torch.cuda._is_compiled = lambda: True
torch.cuda.is_available = lambda: False
sys.argv = ["setup.py", "build_ext", "--build-lib", sys.argv[3]]
runpy.run_path("setup.py", run_name="__main__")
"""


def content(tree: Path) -> dict[str, str]:
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


class Build:
    """setup.py build_ext in a copy of the tree, under a torch that says it is for a GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree, self.log = folder, folder / "tree", folder / "log"
        for part in ("csrc", "build_tools", "mla_ops"):
            shutil.copytree(
                ROOT / part, self.tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(ROOT / name, self.tree / name)
        self.home = folder / "home"
        (self.home / "bin").mkdir(parents=True)
        # nvcc's own toolkit is elsewhere, as with /usr/local/bin/nvcc.
        (self.home / "toolkit" / "lib").mkdir(parents=True)
        self.nvcc_version = "13.0"
        self.install("c++")

    def install(self, name: str) -> None:
        text = STAND_IN.format(python=sys.executable, log=str(self.log), nvcc=self.nvcc_version)
        path = self.home / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(
        self, vendor: str, version: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        compiler = str(self.home / "bin" / "c++")
        dropped = ("MLA_OPS_", "CUDA_", "ROCM_", "TORCH_CUDA", "PYTORCH_ROCM", "CFLAGS", "LD_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        # Another toolkit on PATH must not be found.
        path = [p for p in kept["PATH"].split(os.pathsep) if not (Path(p) / "nvcc").exists()]
        folders = [*path, str(Path(sys.executable).parent)]
        for tool in ("ninja", "git", "c++", "ld"):
            if (found := shutil.which(tool)) and str(Path(found).parent) not in folders:
                folders.append(str(Path(found).parent))
        self.log.unlink(missing_ok=True)
        return subprocess.run(
            [sys.executable, "-c", SETUP, vendor, version, str(self.folder / "out")],
            cwd=self.tree,
            env={
                **kept,
                "PATH": os.pathsep.join(folders),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p.endswith("-packages")),
                "MLA_OPS_BUILD_DIR": str(self.folder / "build"),
                "CC": compiler,
                "CXX": compiler,
                "CUDA_HOME": str(self.home),
                "ROCM_HOME": str(self.home),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def commands(self, tool: str, having: str) -> list[list[str]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [json.loads(line) for line in lines]
        return [c[1:] for c in found if c[0] == tool and any(having in word for word in c)]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


def linked(build: Build) -> list[str]:
    (command,) = build.commands("c++", "-shared")
    return command


HIP_NAMES = sorted(path.stem for path in layout.hip_sources())


@pytest.mark.slow
def test_rocm_build_calls_hipcc_on_our_files_and_leaves_the_tree_clean(build: Build) -> None:
    build.install("hipcc")
    before = content(build.tree)
    done = build.run("hip", "7.1.25424")
    assert done.returncode == 0, done.stdout + done.stderr
    assert content(build.tree) == before

    compiles = build.commands("hipcc", ".hip")
    sources = [next(w for w in words if w.endswith(".hip")) for words in compiles]
    assert sorted(Path(source).stem for source in sources) == HIP_NAMES
    assert all(Path(source).is_relative_to(build.tree / "csrc" / "hip") for source in sources)
    for words in compiles:
        assert [w for w in words if w.startswith("--offload-arch")] == [
            "--offload-arch=gfx942",
            "--offload-arch=gfx950",
        ]
        assert {"-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-gpu-rdc"} <= set(words)
        assert "-D__HIP_PLATFORM_AMD__=1" in words
        assert "-I" + str(build.home / "include") in words
        assert not [w for w in words if w.startswith("-gencode")]
    assert not build.commands("nvcc", "")

    (bindings,) = build.commands("c++", "bindings.cpp")
    assert "-DMLA_HAVE_GPU=1" in bindings
    assert build.commands("c++", "csrc/gpu/elementwise.cpp")
    words = linked(build)
    assert {"-lamdhip64", "-lc10_hip", "-ltorch_hip"} <= set(words)
    assert {f"{name}.o" for name in HIP_NAMES} <= {Path(word).name for word in words}
    (facts,) = (build.folder / "build").rglob("mla_build_facts.h")
    assert '#define MLA_BUILD_GPU_ARCHITECTURES "gfx942", "gfx950"\n' in facts.read_text()
    assert '#define MLA_BUILD_GPU_COMPILER "hipcc 7.1.25424-4179531dcd"\n' in facts.read_text()

    # A second build compiles what changed, and for the architectures that are asked for.
    done = build.run("hip", "7.1.25424", PYTORCH_ROCM_ARCH="gfx942")
    assert done.returncode == 0, done.stderr
    again = build.commands("hipcc", ".hip")
    assert len(again) == len(HIP_NAMES)
    assert not [w for words in again for w in words if "gfx950" in w]
    assert content(build.tree) == before
    source = build.tree / "csrc" / "hip" / f"{HIP_NAMES[0]}.hip"
    source.write_text(source.read_text() + "\n")
    done = build.run("hip", "7.1.25424", PYTORCH_ROCM_ARCH="gfx942")
    assert done.returncode == 0, done.stderr
    (only,) = build.commands("hipcc", ".hip")
    assert str(source) in only


@pytest.mark.slow
def test_cuda_build_calls_nvcc_on_generated_files(build: Build) -> None:
    build.install("nvcc")
    before = content(build.tree)
    done = build.run("cuda", "13.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert content(build.tree) == before

    compiles = build.commands("nvcc", ".cu")
    sources = [Path(next(w for w in words if w.endswith(".cu"))) for words in compiles]
    assert sorted(source.stem for source in sources) == HIP_NAMES
    for source in sources:
        assert source.is_relative_to(build.folder / "build")
        assert source.read_text() == f'#include "{build.tree}/csrc/hip/{source.stem}.hip"\n'
    for words in compiles:
        assert [w for w in words if w.startswith("-gencode")] == [
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_90a,code=sm_90a",
            "-gencode=arch=compute_100a,code=sm_100a",
            "-gencode=arch=compute_100,code=compute_100",
        ]
        assert {"-O3", "-std=c++20", "-fvisibility=hidden"} <= set(words)
        assert any("-fPIC" in word for word in words)
        assert not [w for w in words if w.startswith("-I") and "torch" in w]
    assert {"-lcudart", "-lc10_cuda", "-ltorch_cuda"} <= set(linked(build))
    assert f"-L{build.home}/toolkit/lib" in linked(build)

    done = build.run("cuda", "13.0", TORCH_CUDA_ARCH_LIST="8.9")
    assert done.returncode != 0
    assert "cannot compile for '8.9'" in done.stderr and "8.0 9.0 10.0" in done.stderr

    done = build.run("cuda", "13.0", MLA_OPS_GPU="0")
    assert done.returncode == 0, done.stderr
    assert not build.commands("nvcc", ".cu")
    assert not build.commands("c++", "csrc/gpu")
    (bindings,) = build.commands("c++", "bindings.cpp")
    assert "-DMLA_HAVE_GPU=1" not in bindings


@pytest.mark.parametrize(
    ("vendor", "version", "compiler"), [("cuda", "13.0", "nvcc"), ("hip", "7.1", "hipcc")]
)
@pytest.mark.slow
def test_missing_compiler_is_an_error_with_a_way_out(
    build: Build, vendor: str, version: str, compiler: str
) -> None:
    done = build.run(vendor, version)
    assert done.returncode != 0
    assert f"there is no {compiler}" in done.stderr
    assert "apt-get install" in done.stderr and "MLA_OPS_GPU=0 pip install" in done.stderr


@pytest.mark.slow
def test_compiler_of_another_cuda_is_refused(build: Build) -> None:
    build.nvcc_version = "12.8"
    build.install("nvcc")
    done = build.run("cuda", "13.0")
    assert done.returncode != 0
    assert "for CUDA 13.0" in done.stderr and "of CUDA 12.8" in done.stderr


def test_no_torch_header_in_hip_sources() -> None:
    """nvcc takes a minute for one with them, and compilers without ROCm cannot read it at all."""
    for path in sorted((ROOT / "csrc" / "hip").iterdir()):
        included = [line for line in path.read_text().splitlines() if line.startswith("#include")]
        assert not [
            line for line in included if "torch/" in line or "ATen" in line or "c10" in line
        ]


def test_hip_sources_use_what_hipify_leaves_alone() -> None:
    for path in layout.hip_sources():
        assert "<<<" not in path.read_text()
