"""The core of the suite in one process: what an old processor and the sanitizers have to survive.

Run under qemu-user, where pytest would take minutes, by build_tools/qemu_check.sh; and by
test_isa.py with `--cases all` on every instruction set that this processor has. MLA_OPS_ISA is read
once per process, so an instruction set takes a process of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

import mla_ops  # noqa: F401
from mla_ops import _C, reference

# python -P leaves the script's folder out.
sys.path.append(str(Path(__file__).resolve().parent))

from cases import BF16, CORNER, CORRECTNESS, FLOAT8, FN, FNUZ, FP16, FP32, LARGE, Case  # noqa: E402
from compare import check  # noqa: E402
from running import run, same_bits, solved  # noqa: E402

# One for each way through the kernels that is small enough for an emulator: engines and narrow
# types, lanes (heads * q_len of 1, 16, 17, 32, 33, 160), tiles and pages, splits. Narrow rows are
# "shifted": see compare.py.
_CORE: list[Case] = [
    Case(lengths=(70, 3)),
    *(
        Case(lengths=(33, 1), heads=3, q_dtype=q, cache_dtype=c, rank=64, rope=16)
        for q, c in ((BF16, FN), (BF16, FNUZ), (FN, FN), (FNUZ, BF16), (FP16, FP16), (FP32, FP32))
    ),
    *(
        Case(lengths=(65, 17), heads=h, q_len=s, rank=64, rope=32, page_size=16)
        for h, s in ((1, 1), (17, 1), (16, 2), (11, 3), (20, 8))
    ),
    *(Case(lengths=(40, 9), page_size=p, cache_dtype=FN, rank=96, rope=40) for p in (1, 7, 64)),
    Case(lengths=(20, 30), rank=33, rope=7, heads=5, cache_dtype=FNUZ),
    Case(lengths=(20, 30), rank=9, rope=0, heads=2, q_dtype=FP32, cache_dtype=FP32),
    Case(lengths=(0, 1, 15, 16, 17, 63, 64, 65), rank=64, rope=16, heads=4),
    Case(lengths=(5, 2, 1, 0, 8), q_len=8, rank=64, rope=16, heads=2),
    Case(lengths=(5, 2, 1, 0, 8), q_len=8, causal=False, rank=64, rope=16, heads=2),
    Case(lengths=(130, 129, 70), data="needles", rank=128, rope=32, heads=8, cache_dtype=FN),
    Case(lengths=(300,), heads=2, rank=64, rope=0),  # cut where there are two threads
    Case(lengths=()),
]
CORE = [c if c.rank >= 256 or c.data != "normal" else replace(c, data="shifted") for c in _CORE]


def check_build(expected_isa: str | None) -> None:
    """Check that the module meant is the one that is loaded, and runs what it should."""
    info = _C.build_info()
    wanted = [word for word in os.environ.get("MLA_OPS_EXPECT_SANITIZERS", "").split(",") if word]
    assert info["sanitizers"] == wanted, f"sanitizers: expected {wanted}, got {info['sanitizers']}"
    chosen = _C.cpu_isa()
    assert chosen in info["cpu_isas"], f"{chosen} is not among the compiled {info['cpu_isas']}"
    if expected_isa is not None:
        assert chosen == expected_isa, f"instruction set: expected {expected_isa}, got {chosen}"
    assert _C.threads_used() >= 1


def check_decode(cases: list[Case]) -> None:
    """Check decode against the oracle; uncut, cut in three, and cut every 48 tokens."""
    for case in cases:
        problem, want, want_lse = solved(case)
        sizes = {"page_size": case.page_size, "num_heads": case.heads, "q_len": case.q_len}
        of = (problem.seq_lens, problem.block_table)
        plans = [
            None,
            mla_ops.plan(*of, **sizes, workers=3),
            mla_ops.plan(*of, **sizes, batch_invariant=True, split_tokens=48),
        ]
        for plan in plans:
            try:
                out, lse = run(problem, plan=plan)
                check(case, out, want, lse, want_lse)
            except Exception as error:
                split = None if plan is None else plan.spec
                raise AssertionError(f"{case}, plan {split}: {error}") from error


def check_quantize(step: int) -> None:
    """Check every step-th bfloat16 and float16 pattern, and random float32, bit by bit."""
    patterns = torch.arange(-0x8000, 0x8000, step, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(2000, generator=generator) * torch.logspace(-4, 4, 2000)
    for x in (patterns.view(BF16), patterns.view(FP16), wide):
        for dtype in FLOAT8:
            for scale in (None, torch.ones(1), torch.tensor([0.037])):
                got, got_scale = mla_ops.quantize_fp8(x, scale, dtype)
                want, want_scale = reference.quantize_fp8(x, scale, dtype)
                assert same_bits(got, want), f"quantize_fp8 {x.dtype} {dtype} {scale}"
                assert same_bits(got_scale, want_scale.reshape(1))


def check_write() -> None:
    """Check that tokens land where they belong, converted, and nothing else changes."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(9, 72, generator=generator) * 30
    slots = torch.tensor([3, -1, 0, 14, 3, 7, -1, 8, 20])
    for source in (BF16, FP16, FP32):
        for dtype in (BF16, FP16, FP32, *FLOAT8):
            scale = torch.tensor([0.11]) if dtype in FLOAT8 else None
            cache = torch.zeros(3, 7, 72).to(dtype)
            want = cache.clone()
            x = rows.to(source)
            new = x.to(dtype) if scale is None else reference.quantize_fp8(x, scale, dtype)[0]
            for t, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    want[slot // 7, slot % 7] = new[t]
            mla_ops.write_kv_cache(x[:, :64], x[:, 64:], cache, slots, scale)
            assert same_bits(cache, want), f"write_kv_cache {source} to {dtype}"


def check_merge() -> None:
    """Check the merging of states against float64, with a side that saw nothing."""
    generator = torch.Generator().manual_seed(7)
    a, b = torch.randn(2, 5, 300, generator=generator)
    lse_a, lse_b = torch.randn(2, 5, generator=generator) * 3
    lse_a[0], lse_b[1], a[0] = -torch.inf, torch.inf, torch.nan
    out, lse = mla_ops.merge_states(a, lse_a, b, lse_b)
    lse_b[1] = -torch.inf
    want_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    parts = [
        (x.double() * (side.double() - want_lse).exp()[:, None]).nan_to_num(0.0)
        for x, side in ((a, lse_a), (b, lse_b))
    ]
    torch.testing.assert_close(out.double(), sum(parts), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def check_ops() -> None:
    """Check each op against its reference on small problems."""
    check_decode(CORE)
    check_quantize(step=17)
    check_write()
    check_merge()


def main() -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--expect", metavar="ISA", help="the instruction set that must be chosen")
    parser.add_argument("--cases", choices=("core", "all"), default="core")
    arguments = parser.parse_args()
    check_build(arguments.expect)
    check_ops()
    if arguments.cases == "all":
        check_decode(CORRECTNESS + CORNER + LARGE)
        check_quantize(step=1)
    print(f"core: passed on {_C.cpu_isa()} with torch {torch.__version__}", file=sys.stderr)


if __name__ == "__main__":
    main()
