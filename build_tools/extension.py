"""The setuptools side: extension, build command, what setup.py passes on."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setuptools import Command, Extension
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info
from setuptools.command.editable_wheel import editable_wheel

from . import flags, gpu, info_header, isa, layout, toolchain
from .revision import git_revision

if TYPE_CHECKING:
    from torch.utils.cpp_extension import BuildExtension


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait for other builds in the same folder: two ninjas there would break each other's files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tell_left_out(left_out: dict[str, str]) -> None:
    for name, reason in left_out.items():
        print(f"mla_ops: *** NOT COMPILED FOR {name.upper()}: {reason} ***", file=sys.stderr)
    if left_out:
        print("mla_ops: *** a newer compiler (CXX=) compiles for all of them ***", file=sys.stderr)


@dataclass(frozen=True)
class Plan:
    """What a build makes, settled before it begins."""

    build_dir: Path
    gpu: gpu.Gpu | None


def compile_cpu(command: BuildExtension, extension: Extension, plan: Plan) -> None:
    """Compile csrc/cpu/isa once per instruction set and tell the other sources which there are."""
    compiled, left_out = isa.divide(toolchain.cxx())
    _tell_left_out(left_out)
    for one in compiled:
        extension.define_macros.append((one.macro, "1"))
        extension.extra_objects += command.compiler.compile(
            layout.isa_sources(),
            output_dir=str(layout.isa_dir(plan.build_dir, one.name)),
            include_dirs=[str(layout.CSRC)],
            macros=[("MLA_ISA", one.name)],
            extra_postargs={"cxx": flags.per_isa(one), "nvcc": [], "sycl": []},
        )
    facts = info_header.Facts(
        torch_version=toolchain.require_torch(),
        compiler=toolchain.require_compiler(),
        isas=[one.name for one in compiled],
        isas_left_out=[f"{name}: {reason}" for name, reason in left_out.items()],
        gpu_compiler=plan.gpu.compiler if plan.gpu else "none",
        gpu_architectures=plan.gpu.architectures if plan.gpu else [],
        sanitizers=[word for word in flags.sanitizers().split(",") if word],
        git_revision=git_revision(),
    )
    info_header.write(layout.generated_dir(plan.build_dir), facts)


def compile_gpu(command: BuildExtension, extension: Extension, plan: Plan) -> None:
    """Compile csrc/hip; csrc/gpu, its host side, is plain C++ among the extension's sources."""
    if plan.gpu is None:
        return
    extension.define_macros.append(("MLA_HAVE_GPU", "1"))
    extension.extra_objects += command.compiler.compile(
        plan.gpu.sources(plan.build_dir),
        output_dir=str(layout.gpu_dir(plan.build_dir)),
        include_dirs=[str(layout.CSRC), *plan.gpu.include_dirs],
        extra_postargs={"cxx": [], "nvcc": list(plan.gpu.flags), "sycl": []},
    )
    extension.library_dirs += plan.gpu.library_dirs
    extension.libraries += plan.gpu.libraries


# Each adds objects to the extension, before setuptools compiles its sources and links.
compile_steps: list[Callable[[BuildExtension, Extension, Plan], None]] = [compile_cpu, compile_gpu]


def _build_commands(plan: Plan) -> dict[str, type[Command]]:
    from torch.utils.cpp_extension import BuildExtension

    class Build(build):
        def initialize_options(self) -> None:
            super().initialize_options()
            self.build_base = str(plan.build_dir)

    class BuildKernels(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # An editable install builds in a temporary folder and would compile all every time.
            self.build_temp = str(plan.build_dir / "objects")
            # setuptools looks at the sources alone and would skip the build when a header or an
            # instruction set's file changed; ninja sees them all.
            self.force = True

        def build_extension(self, ext: Extension) -> None:
            with _alone_in(plan.build_dir):
                try:
                    for step in compile_steps:
                        step(self, ext, plan)
                    super().build_extension(ext)
                except Exception as error:
                    print(error, file=sys.stderr)
                    raise toolchain.failed_compile() from error

    return {"build": Build, "build_ext": BuildKernels}


def _refusing_commands(error: toolchain.BuildError) -> dict[str, type[Command]]:
    """Return commands that raise `error`.

    dist_info is pip's first: refusing there comes before pip downloads a torch for the dependency.
    sdist and egg_info still work.
    """

    def refuse(command: Command) -> None:
        raise error

    commands = (build, build_ext, dist_info, editable_wheel)
    return {cls.__name__: type(cls.__name__, (cls,), {"run": refuse}) for cls in commands}


def setup_arguments() -> dict[str, Any]:
    """Return what setup.py passes on to setuptools.setup."""
    if toolchain.skip_build():
        return {}
    toolchain.settle_cxx()
    try:
        toolchain.require_python_headers()
        toolchain.require_compiler()
        toolchain.require_ninja()
        torch_version = toolchain.require_torch()
        plan = Plan(layout.build_dir(torch_version, flags.sanitizers()), gpu.find())
    except toolchain.BuildError as error:
        return {"cmdclass": _refusing_commands(error)}

    from torch.utils.cpp_extension import CppExtension

    extension = CppExtension(
        "mla_ops._C",
        layout.common_sources(gpu=plan.gpu is not None),
        include_dirs=[str(layout.CSRC), str(layout.generated_dir(plan.build_dir))],
        extra_compile_args={"cxx": flags.common()},
        extra_link_args=flags.link(),
    )
    return {"ext_modules": [extension], "cmdclass": _build_commands(plan)}
