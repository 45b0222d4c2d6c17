"""The instruction sets the CPU kernels are compiled for, and which of them a compiler knows.

Never -march=native: a wheel has to import, and be right, on machines older than the one it was
built on. The kernels are compiled once per row of this table and chosen at run time.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class InstructionSet:
    """One way to compile csrc/cpu/isa; `probe` is code that only a compiler that knows it takes."""

    name: str
    flags: tuple[str, ...]
    probe: str

    @property
    def macro(self) -> str:
        """The macro the dispatcher is compiled with where this instruction set was compiled."""
        return "MLA_HAVE_" + self.name.upper()


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vbmi")

BASELINE = InstructionSet("baseline", (), "int main() { return 0; }\n")

# An intrinsic each, not the flags alone: a compiler may know a flag its assembler does not.
X86_64 = (
    BASELINE,
    InstructionSet(
        "avx2",
        _AVX2,
        "#include <immintrin.h>\n"
        "__m256 f(__m128i h, __m256 a) { return _mm256_fmadd_ps(_mm256_cvtph_ps(h), a, a); }\n",
    ),
    InstructionSet(
        "avx512",
        _AVX512,
        "#include <immintrin.h>\n"
        "__m512i f(__m512i a, __mmask32 k) { return _mm512_maskz_mov_epi16(k, a); }\n",
    ),
    InstructionSet(
        "avx512_bf16",
        _AVX512_BF16,
        "#include <immintrin.h>\n"
        "__m512 f(__m512 a, __m512bh b) { return _mm512_dpbf16_ps(a, b, b); }\n"
        "__m512i g(__m512i i, __m512i a) { return _mm512_permutexvar_epi8(i, a); }\n",
    ),
)


def candidates(machine: str | None = None) -> tuple[InstructionSet, ...]:
    """Return the instruction sets of a machine (default: this one), least first."""
    if (machine or platform.machine()).lower() in ("x86_64", "amd64"):
        return X86_64
    return (BASELINE,)


def reason_against(compiler: list[str], isa: InstructionSet) -> str | None:
    """Return why `compiler` cannot compile for `isa`: its first error; None where it can."""
    with tempfile.TemporaryDirectory(prefix="mla_ops-probe-") as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(isa.probe)
        command = [*compiler, *isa.flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines()
    errors = [line for line in lines if "error" in line.lower()] or lines
    return errors[0].strip() if errors else f"exit status {done.returncode}"


def divide(
    compiler: list[str], machine: str | None = None
) -> tuple[list[InstructionSet], dict[str, str]]:
    """Return the instruction sets `compiler` can compile for, and why it cannot for the others.

    The baseline is never divided off: without it there is nothing to build.
    """
    compiled: list[InstructionSet] = [BASELINE]
    left_out: dict[str, str] = {}
    for isa in candidates(machine)[1:]:
        reason = reason_against(compiler, isa)
        if reason is None:
            compiled.append(isa)
        else:
            left_out[isa.name] = reason
    return compiled, left_out
