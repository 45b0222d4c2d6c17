"""What `doctor` looks at. Each probe runs in a process of its own making (`doctor.py`), for it may
raise, hang or kill it: a compiled module of another torch, a driver, aiter.

Standard library at the top: torch is one of the things looked at.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mapped = dict[str, Any]

INSTALL_TORCH = (
    "pip install torch    (for ROCm or CUDA see https://pytorch.org/get-started/locally)"
)
OLDEST_TORCH = (2, 11)


class Ill(Exception):
    """What is wrong, the command that mends it, and what was found all the same."""

    def __init__(self, what: str, fix: str, found: Mapped | None = None) -> None:
        super().__init__(what)
        self.fix, self.found = fix, found or {}


def torch_() -> Mapped:
    """Say which torch there is."""
    if importlib.util.find_spec("torch") is None:
        raise Ill("torch is not installed", INSTALL_TORCH)
    try:
        import torch
    except Exception as error:
        raise Ill(
            f"torch cannot be imported: {type(error).__name__}: {error}",
            "pip install --force-reinstall torch",
        ) from error
    found = {
        "version": torch.__version__,
        "built_for": "ROCm " + torch.version.hip
        if torch.version.hip
        else "CUDA " + torch.version.cuda
        if torch.version.cuda
        else "CPU",
        "path": str(Path(torch.__file__).parent),
        "threads": torch.get_num_threads(),
    }
    parts = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if parts < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise Ill(
            f"torch must be {oldest} or newer, got {torch.__version__}",
            f"pip install 'torch>={oldest}'",
            found,
        )
    return found


def devices() -> Mapped:
    """Say on what decode can run: the GPUs that torch sees, and the CPU."""
    import torch

    from mla_ops import capability

    found: list[Mapped] = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        found.append(
            {
                "device": str(device),
                "name": properties.name,
                "arch": capability.arch_of(device),
                "float8": _name(capability.float8_dtype(device)),
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    from mla_ops.machine import cpu_name

    cpu = torch.device("cpu")
    found.append(
        {
            "device": "cpu",
            "name": cpu_name(),
            "arch": "cpu",
            "float8": _name(capability.float8_dtype(cpu)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "multiprocessors": os.cpu_count(),
        }
    )
    result = {"devices": found}
    if torch.cuda.device_count() == 0:
        _unseen_gpu(result)
    return result


def _unseen_gpu(found: Mapped) -> None:
    """Raise if the system has a GPU that torch does not see."""
    import torch

    node = next((path for path in ("/dev/kfd", "/dev/nvidia0") if os.path.exists(path)), None)
    if node is None:
        return
    if torch.version.hip is None and torch.version.cuda is None:
        raise Ill(
            f"there is a GPU ({node}), and this torch is one for CPUs",
            "pip uninstall torch, then the command of https://pytorch.org/get-started/locally",
            found,
        )
    if not os.access(node, os.R_OK | os.W_OK):
        raise Ill(f"this user may not open {node}", "sudo usermod -aG render,video $USER", found)
    hidden = [
        name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in os.environ
    ]
    raise Ill(
        f"there is a GPU ({node}), and torch sees none"
        + "".join(f"; {name} is {os.environ[name]!r}" for name in hidden),
        " ".join(["unset", *hidden]) if hidden else "rocm-smi or nvidia-smi: does the driver work?",
        found,
    )


def compiled() -> Mapped:
    """Say what was compiled, with what and for which architectures."""
    import torch

    from mla_ops import _compiled, capability

    module = _compiled.load()
    if module is None:
        missing = str(_compiled.missing)
        made = "make build" if "make build" in missing else _compiled.REBUILD
        raise Ill(missing, made)
    info = dict(module.build_info()) | {"cpu_isa": module.cpu_isa(), "path": module.__file__}
    if info["torch"] != torch.__version__:
        raise Ill(
            f"the compiled module was built with torch {info['torch']}, and {torch.__version__} "
            "is installed",
            _compiled.REBUILD,
            info,
        )
    archs = {capability.arch_of(torch.device("cuda", i)) for i in range(torch.cuda.device_count())}
    for arch in sorted(archs):
        if not _compiled_for(arch, info["gpu_architectures"]):
            variable = "PYTORCH_ROCM_ARCH" if arch.startswith("gfx") else "TORCH_CUDA_ARCH_LIST"
            value = arch if arch.startswith("gfx") else f"{arch[3:-1]}.{arch[-1]}"
            raise Ill(
                f"no kernel was compiled for {arch}, only for "
                f"{', '.join(info['gpu_architectures']) or 'CPUs'}",
                f"{variable}={value} {_compiled.REBUILD}",
                info,
            )
    return info


def _compiled_for(arch: str, names: list[str]) -> bool:
    """sm_90 is served by sm_90 and sm_90a, by sm_8x of its own generation below, and by PTX
    (compute_...) of what is older."""
    if not arch.startswith("sm_"):
        return arch in (name.partition(":")[0] for name in names)
    wanted = int(arch[3:])
    for name in names:
        kind, _, number = name.partition("_")
        have = int(number.rstrip("af"))
        exact = number[-1:] in "af"
        if have == wanted or (not exact and have <= wanted and kind == "compute"):
            return True
        if not exact and kind == "sm" and have // 10 == wanted // 10 and have <= wanted:
            return True
    return False


def aiter() -> Mapped:
    """Say which aiter there is, and whether its signatures are known; does not import it."""
    if importlib.util.find_spec("aiter") is None:
        return {"installed": False}
    spec = importlib.util.find_spec("aiter")
    version = None
    for name in ("amd-aiter", "aiter"):
        try:
            version = version or importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    from mla_ops.backends import aiter_release

    return {
        "installed": True,
        "version": version,
        "path": spec.origin if spec else None,
        "unusable": aiter_release.missing(),
        "notes": aiter_release.notes(),
    }


def backends() -> Mapped:
    """Say for each device and backend whether it can serve DeepSeek's sizes, or why not."""
    import torch

    import mla_ops.ops  # noqa: F401  (finds out whether there are compiled kernels)
    from mla_ops import capability

    rows: list[Mapped] = []
    kinds = ["cuda:0", "cpu"] if torch.cuda.is_available() else ["cpu"]
    for device in kinds:
        where = torch.device(device)
        for verdict in capability.verdicts(
            arch=capability.arch_of(where), cache_dtype=capability.float8_dtype(where)
        ):
            rows.append({"device": device, **verdict._asdict()})
    return {"backends": rows}


def smoke(device: str, backend: str) -> Mapped:
    """Decode two small problems on a backend and compare with the oracle."""
    import torch

    import mla_ops.ops  # noqa: F401
    from mla_ops import capability, workload

    where = torch.device(device)
    errors, bars = {}, []
    for cache_dtype in (torch.bfloat16, capability.float8_dtype(where)):
        case = workload.Case(batch=5, context=200, cache_dtype=cache_dtype, ragged=True)
        if not capability.supports(**case.question(where, backend)):
            continue
        made = workload.make(case, where)
        errors[_name(cache_dtype)] = workload.error(made, made.decode(backend=backend))
        bars.append(workload.bar_of(case, where, backend))
    bar = max(bars, default=0.0)
    found: Mapped = {"errors": errors, "bar": bar}
    wrong = {name: error for name, error in errors.items() if not error <= bar}
    if wrong:
        raise Ill(
            f"backend {backend} on {device} is wrong: relative error "
            + ", ".join(f"{error:.1e} with a {name} cache" for name, error in wrong.items())
            + f", expected at most {bar:.0e}",
            "MLA_OPS_BACKEND=torch until it is mended; please report it with `doctor --json`",
            found,
        )
    return found


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


PROBES: dict[str, Callable[..., Mapped]] = {
    "torch": torch_,
    "devices": devices,
    "compiled": compiled,
    "aiter": aiter,
    "backends": backends,
    "smoke": smoke,
}
