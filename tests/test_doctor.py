"""`python -m mla_ops doctor` works on installs that are broken in every way, and says what mends
them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_ops
from mla_ops import _C, doctor, probes, variables

# Where nothing of torch is: what a broken install is imitated with.
BARE = (sys.executable, "-S", "-P", "-m", "mla_ops", "doctor")


def run(
    path: list[Path], *options: str, bare: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = BARE if bare else (sys.executable, "-P", "-m", "mla_ops", "doctor")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLA_OPS_")}
    return subprocess.run(
        [*command, *options],
        env={**kept, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package with its compiled module; returns the folder that it is in."""
    folder = tmp_path / "copy"
    source = Path(mla_ops.__file__).parent
    shutil.copytree(source, folder / "mla_ops", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def stand_in(folder: Path, name: str, source: str) -> Path:
    """A package of that name, which only has this source."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    return folder


def problems(result: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    return json.loads(result.stdout)["problems"]


def test_a_sound_install(package: Path) -> None:
    result = run([package], "--json")
    report = json.loads(result.stdout)
    assert (report["problems"], result.returncode) == ([], 0), result.stderr
    assert report["torch"]["version"] == torch.__version__
    assert report["mla_ops"]["path"] == str(package / "mla_ops")
    info = _C.build_info()
    assert {name: report["compiled"][name] for name in info} == info
    assert report["aiter"] == {"installed": False}
    devices = {row["device"]: row for row in report["devices"]["devices"]}
    assert devices["cpu"]["float8"] == "float8_e4m3fn"
    rows = {row["backend"]: row for row in report["backends"]["backends"] if row["device"] == "cpu"}
    assert [rows[name]["verdict"] for name in ("aiter", "native", "torch")] == [
        *("no", "SERVES", "could too")
    ]
    for backend in ("native", "torch"):
        errors = report["smoke"][f"smoke cpu {backend}"]["errors"]
        assert set(errors) == {"bfloat16", "float8_e4m3fn"}
        assert all(0 < error < 3e-3 for error in errors.values())
    shown = doctor.text(report)
    assert "nothing is wrong" in shown and str(report["torch"]["version"]) in shown


def test_no_torch(package: Path) -> None:
    result = run([package], bare=True)
    assert result.returncode == 1 and result.stderr == ""
    assert "WRONG: torch is not installed\n       mend it: pip install torch" in result.stdout


def test_a_torch_that_does_not_load(package: Path, tmp_path: Path) -> None:
    broken = stand_in(tmp_path / "broken", "torch", "raise ImportError('libc10.so: gone')")
    (problem,) = problems(run([package, broken], "--json", bare=True))
    assert "libc10.so: gone" in problem["what"]
    assert problem["fix"] == "pip install --force-reinstall torch"


@pytest.mark.parametrize("signal", ("SIGSEGV", "SIGABRT"))
def test_a_torch_that_kills_its_process(package: Path, tmp_path: Path, signal: str) -> None:
    source = f"import os, signal\nos.kill(os.getpid(), signal.{signal})"
    broken = stand_in(tmp_path / "broken", "torch", source)
    (problem,) = problems(run([package, broken], "--json", bare=True))
    assert problem["what"] == f"torch: the process was killed by {signal}"
    assert problem["fix"]


def test_a_torch_that_hangs(package: Path, tmp_path: Path) -> None:
    broken = stand_in(tmp_path / "broken", "torch", "import time\ntime.sleep(60)")
    (problem,) = problems(run([package, broken], "--json", "--timeout", "1", bare=True))
    assert problem["what"] == "torch: the process had not ended after 1 s"


def test_an_old_torch(package: Path, tmp_path: Path) -> None:
    source = (
        "__version__ = '2.5.1'\nclass version: hip = cuda = None\n"
        "get_num_threads = lambda: 1\nclass cuda: device_count = lambda: 0"
    )
    old = stand_in(tmp_path / "old", "torch", source)
    result = run([package, old], "--json", bare=True)
    first = problems(result)[0]
    assert first["what"] == "torch must be 2.11 or newer, got 2.5.1"
    assert first["fix"] == "pip install 'torch>=2.11'"
    assert json.loads(result.stdout)["torch"]["version"] == "2.5.1"


def test_a_compiled_module_that_does_not_load(package: Path) -> None:
    module = package / "mla_ops" / Path(_C.__file__).name
    module.write_bytes(module.read_bytes()[:40])
    result = run([package], "--json")
    report = json.loads(result.stdout)
    (problem,) = report["problems"]
    assert "cannot be loaded" in problem["what"]
    assert problem["fix"] == "pip install --no-build-isolation ."
    # What works all the same is checked all the same.
    assert list(report["smoke"]) == ["smoke cpu torch"]


def test_a_backend_that_is_wrong(package: Path) -> None:
    """Scores are off by 1 %, and so is the result."""
    source = package / "mla_ops/backends/torch.py"
    text = source.read_text()
    assert text.count("q.new_full((), softmax_scale") == 1
    source.write_text(
        text.replace("q.new_full((), softmax_scale", "q.new_full((), softmax_scale * 1.01")
    )
    result = run([package], "--json")
    (problem,) = problems(result)
    assert problem["what"].startswith("backend torch on cpu is wrong: relative error ")
    assert result.returncode == 1
    shown = doctor.text(json.loads(result.stdout))
    assert "cpu torch        FAILED" in shown and "cpu native       right" in shown


def test_a_backend_that_kills_its_process(package: Path) -> None:
    source = package / "mla_ops/backends/torch.py"
    aborts = "\ndef _decode(*args, **kwargs):\n    import os\n    os.abort()\n"
    source.write_text(source.read_text().replace("def _decode(", "def _was(", 1) + aborts)
    report = json.loads(run([package], "--json").stdout)
    (problem,) = report["problems"]
    assert problem["what"] == "smoke cpu torch: the process was killed by SIGABRT"
    assert "smoke cpu native" in report["smoke"]


def test_variables_in_force_and_mistakes(package: Path) -> None:
    given = {"MLA_OPS_ISA": "avx2", "MLA_OPS_VALIDTE": "1", "MLA_OPS_BACKEND": "fast"}
    report = json.loads(run([package], "--json", **given).stdout)
    assert report["environment"] == given
    assert report["compiled"]["cpu_isa"] == "avx2"
    assert [problem["what"] for problem in report["problems"]] == [
        "MLA_OPS_BACKEND must be one of auto, aiter, native, torch, got 'fast'",
        "MLA_OPS_VALIDTE is no variable of mla_ops; MLA_OPS_VALIDATE is one",
    ]


def test_variables_of_the_build_and_free_text_are_no_mistakes() -> None:
    given = {"MLA_OPS_GPU": "0", "MLA_OPS_TUNED": "/x/y.json", "MLA_OPS_BACKEND": "", "HOME": "/"}
    assert variables.mistakes(given) == []


@pytest.mark.parametrize(
    ("arch", "names", "served"),
    [
        ("gfx942", ["gfx942", "gfx950"], True),
        ("gfx942", ["gfx942:sramecc+"], True),
        ("gfx90a", ["gfx942"], False),
        ("sm_90", ["sm_80", "sm_90a"], True),
        ("sm_86", ["sm_80"], True),
        ("sm_90", ["sm_80"], False),
        ("sm_90", ["sm_80", "compute_80"], True),
        ("sm_120", ["sm_100a", "compute_100"], True),
        ("sm_120", ["sm_100a"], False),
        ("sm_80", ["compute_90", "sm_90a"], False),
        ("sm_103", ["sm_100a", "compute_100a"], False),
        ("sm_90", [], False),
    ],
)
def test_what_a_card_can_run(arch: str, names: list[str], served: bool) -> None:
    assert probes._compiled_for(arch, names) is served


class Card:
    name, total_memory, multi_processor_count = "a card", 1 << 37, 132
    major, minor = 9, 0
    gcnArchName = "gfx942:sramecc+"


@pytest.mark.parametrize("hip", (None, "7.1"))
def test_a_card_without_kernels_is_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch, hip: str | None
) -> None:
    from mla_ops import capability

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    capability.arch_of.cache_clear()
    try:
        found: list[dict[str, Any]] = probes.devices()["devices"]
        with pytest.raises(probes.Ill) as caught:
            probes.compiled()
    finally:
        capability.arch_of.cache_clear()
    arch, float8 = ("sm_90", "float8_e4m3fn") if hip is None else ("gfx942", "float8_e4m3fnuz")
    assert (found[0]["arch"], found[0]["float8"]) == (arch, float8)
    assert str(caught.value).startswith(f"no kernel was compiled for {arch}, only for CPUs")
    variable = "TORCH_CUDA_ARCH_LIST=9.0" if hip is None else "PYTORCH_ROCM_ARCH=gfx942"
    assert caught.value.fix == f"{variable} pip install --no-build-isolation ."


@pytest.mark.parametrize(
    ("node", "hip", "allowed", "told"),
    [
        ("/dev/kfd", None, True, "this torch is one for CPUs"),
        ("/dev/nvidia0", None, True, "this torch is one for CPUs"),
        ("/dev/kfd", "7.1", False, "this user may not open /dev/kfd"),
        ("/dev/kfd", "7.1", True, "torch sees none; HIP_VISIBLE_DEVICES is ''"),
    ],
)
def test_a_card_that_torch_does_not_see(
    monkeypatch: pytest.MonkeyPatch, node: str, hip: str | None, allowed: bool, told: str
) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path == node)
    monkeypatch.setattr(os, "access", lambda path, mode: allowed)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    with pytest.raises(probes.Ill, match=told) as caught:
        probes._unseen_gpu({})
    assert caught.value.fix
