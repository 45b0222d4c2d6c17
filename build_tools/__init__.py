"""How mla_ops is built: one idea per file.

layout.py       where sources, objects and generated files lie
toolchain.py    what a build needs, and errors that name the command that mends them
isa.py          the instruction sets of the CPU kernels, and which of them a compiler knows
flags.py        compiler and linker flags
gpu.py          csrc/hip: which compiler, from the torch that is there
gpu_arch.py     the GPU architectures, and which of them a compiler knows
hip_fat_check.py  full HIP compiles of csrc/hip without ROCm
revision.py     the git revision that goes into the module
summary.py      what was built, printed after the Makefile's build
info_header.py  the generated header that `mla_ops._C.build_info()` reads its facts from
extension.py    the setuptools side: extension, build command, what setup.py passes on
environment.py  the Makefile's virtual environment
sanitized.py    a Python command on a build with sanitizers
qemu_check.sh   the core of the suite on emulated old processors

Only extension.py and gpu.py import torch, and only inside functions: metadata, source distributions
and the pure-Python wheel need no torch.
"""
