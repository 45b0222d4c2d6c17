"""Checks of csrc/hip/quantize.hip in the executor, against mla_ops.reference.quantize_fp8.

Each takes the kernels to look at, so that the tests of mistakes can hand in wrong ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from project import FLOAT8, HARDWARE, LANES, THREADS, WIDE, Device, Kernels, assert_same, patterns
from torch import Tensor

from mla_ops.reference import quantize_fp8

RUN, SHORT_RUN = 16, 4  # kRun and kShortRun of vectors.h: numbers that a thread takes at once
MEGABYTE = 1 << 20
# Multiplied by a reciprocal and mended; by true division (outside of 2^-60 to 2^60).
FAST, SLOW = (1.0, 0.37), (2.0**-70, 1e-39, 1e38)


def rows_of(x: Tensor, per_row: bool = False) -> tuple[np.int64, ...]:
    """MlaRows of a view of at most five dimensions, written out dimension by dimension."""
    if x.numel() == 0 or (x.is_contiguous() and not per_row):
        values = [x.shape[:-1].numel() if per_row else 1, x.shape[-1] if per_row else x.numel()]
        values += [1] * 4 + [0] * 4
    else:
        rows = x if x.shape[-1] > 1 and x.stride(-1) == 1 else x.unsqueeze(-1)
        size, stride = list(rows.shape[:-1]), list(rows.stride()[:-1])
        missing = 4 - len(size)
        values = [int(np.prod(size)), rows.shape[-1]]
        values += [1] * missing + size + [0] * missing + stride
    return tuple(np.int64(value) for value in values)


class Given:
    """One launch: what csrc/hip/quantize.hip's launcher does, with a chosen grid."""

    def __init__(self, kernels: Kernels, x: Tensor, **where: Any) -> None:
        storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        self.device = Device(kernels, "quantize", 2 + 6 * storage.nbytes // MEGABYTE)
        self.x, self.groups = x, where.get("groups", 3)
        self.offset, self.out_offset = where.get("offset", 0), where.get("out_offset", 0)
        at = self.device.put(storage, self.offset)
        self.address = at + x.storage_offset() * x.element_size()

    def run(
        self, to: torch.dtype, scale: Tensor | None, per_row: bool = False, length: int = RUN
    ) -> tuple[Tensor, Tensor]:
        """The float8 numbers and the scale or scales; by runs of `length`."""
        device, x, rows = self.device, self.x, rows_of(self.x, per_row)
        types = (x.dtype, to)
        count = x.shape[:-1].numel() if per_row else 1
        given = 0 if scale is None else device.put(scale)
        scale_out = device.full(count + (scale is None and not per_row), torch.float32)
        out = device.full(x.numel(), to, self.out_offset)
        common = (self.address, rows, out)
        if per_row:
            device.call("quantize_rows", types, self.groups, *common, given, scale_out)
        else:
            top = 0
            if scale is None:
                top = scale_out + 4
                device.memory.bytes[top - device.memory.BASE :][:4] = 0  # hipMemsetAsync
                device.call("find_largest", types[:1], self.groups, self.address, rows, top)
            arguments = (*common, given, top, scale_out)
            device.call("quantize", types, self.groups, *arguments, number=length)
        return device.get(out, x.numel(), to), device.get(scale_out, count, torch.float32)


def check(
    kernels: Kernels,
    x: Tensor,
    to: torch.dtype,
    scales: Sequence[float | Tensor | None] = (None,),
    per_row: bool = False,
    lengths: Sequence[int] = (RUN,),
    **where: Any,
) -> None:
    """x divided by each scale, or by the one that is found, is what the oracle says, to the bit."""
    given = Given(kernels, x, **where)
    for value in scales:
        scale = torch.tensor([value]) if isinstance(value, float) else value
        want, want_scale = quantize_fp8(x.contiguous(), scale, to, per_row)
        for length in lengths:
            got, used = given.run(to, scale, per_row, length)
            assert_same(used, want_scale.reshape(used.shape))
            assert_same(got, want.reshape(-1))


def hostile(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes with infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-12, 9, shape, generator=generator).float())
    x = torch.randn(shape, generator=generator) * size
    where = torch.randint(0, 41, shape, generator=generator)
    for i, value in enumerate((float("inf"), -float("inf"), float("nan"), 0.0, -0.0)):
        x[where == i] = value
    return x.to(dtype)


def float32_samples(to: torch.dtype, scale: float) -> Tensor:
    """What `scale` divides to every number of the float8 type and every tie between two, and the
    float32 neighbours of those: a quotient off by one place shows.
    """
    codes = torch.arange(0x7F, dtype=torch.uint8).view(to).float()
    edges = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([464.0, 480.0, 248.0])])
    edges = (edges.double() * torch.tensor(scale)).float()
    down, up = (torch.nextafter(edges, torch.tensor(v)) for v in (-torch.inf, torch.inf))
    odd = torch.tensor([torch.inf, torch.nan, 3.4e38, 1e-38, 1e-40, 1e-45])
    positive = torch.cat([edges, down, up, odd])
    return torch.cat([positive, -positive])


# ---- the checks


def check_patterns(kernels: Kernels, dtype: torch.dtype, to: torch.dtype) -> None:
    """All 65,536 patterns of bf16 or fp16: 16 at a time, 4 at a time, by true division, and one at
    a time.
    """
    x = patterns(dtype)
    check(kernels, x, to, FAST + SLOW[:1], groups=4, lengths=(RUN, SHORT_RUN))
    check(kernels, x[1:], to, FAST[1:], groups=4)
    check(kernels, x[:4099], to, FAST[1:], out_offset=3)  # the result alone is unaligned


def check_float32(kernels: Kernels, to: torch.dtype) -> None:
    """Ties and their neighbours, and random bits; scales that are no powers of two."""
    for scale in (*FAST, 3.7, 1e-3 / 3, *SLOW):
        check(kernels, float32_samples(to, scale), to, (scale,))
    check(kernels, float32_samples(to, 0.37), to, (0.37,), offset=1)
    bits = torch.randint(
        -(2**31), 2**31, (8192,), generator=torch.Generator().manual_seed(1), dtype=torch.int64
    )
    check(kernels, bits.to(torch.int32).view(torch.float32), to, (0.3, 1e-3 / 3, 3.7e19, None))


def check_counts(kernels: Kernels, dtype: torch.dtype, to: torch.dtype) -> None:
    """Nothing, less than a run, a run and a bit, more than the grid takes at once; in memory that
    ends where the numbers end.
    """
    for count in (0, 1, 3, 5, 16, 31, 2 * THREADS * RUN + 3):
        check(kernels, hostile(dtype, count), to, (0.37, None), groups=1, lengths=(RUN, SHORT_RUN))


def check_found_scale(kernels: Kernels, dtype: torch.dtype, to: torch.dtype) -> None:
    """Infinities and NaN do not count; the largest is found wherever it is; 0 gives 1."""
    x = hostile(dtype, 5003)
    check(kernels, x, to, offset=0)
    for where in (0, 2600, 4999, 5002):
        peak = x.nan_to_num(0, 0, 0).clamp(-9, 9)
        peak[where] = -4321.0
        check(kernels, peak, to)
    check(kernels, x[1:], to)
    check(kernels, torch.zeros(100, dtype=dtype), to)
    check(kernels, torch.tensor([torch.nan, torch.inf, -torch.inf] * 11, dtype=dtype), to)
    check(kernels, patterns(dtype) if dtype.itemsize == 2 else x * 1e30, to)


def check_strides(kernels: Kernels, dtype: torch.dtype, to: torch.dtype) -> None:
    """Rows in up to four outer dimensions, aligned and not, with gaps that are not to be read."""
    x = hostile(dtype, 2, 6, 5, 48)
    views = [
        x.transpose(0, 2),
        x[:, 1:5, ::2, 16:32],
        x[1:, :, 1:, 3:37].permute(2, 0, 1, 3),
        x[:, :2, :, ::3],
        x.reshape(60, 48)[:, :32],
        x.reshape(60, 48)[5:6, :40].expand(7, 40),
    ]
    for view in views:
        check(kernels, view, to, (0.37, None), groups=2)


def check_rows(kernels: Kernels, dtype: torch.dtype, to: torch.dtype) -> None:
    """A scale for each row, given and found; more rows than waves; rows of 0 and of NaN alone."""
    for columns, room in ((64, 64), (37, 37), (576, 592), (33, 40)):
        x = hostile(dtype, 13, room)[:, :columns]
        x[2], x[7] = 0, torch.nan
        scales = torch.logspace(-3, 2, 13)
        scales[5] = 2.0**-70
        check(kernels, x, to, (scales, None), per_row=True, groups=2)
    check(kernels, hostile(dtype, 2, 3, 4, 32).transpose(0, 2), to, per_row=True)
    check(kernels, torch.empty(5, 0, dtype=dtype), to, (torch.ones(5), None), per_row=True)


def check_instructions(kernels: Kernels) -> None:
    """What ran: the float8 instruction where the family is the hardware's and nowhere else, and
    16 bytes at a time where addresses allow it.
    """
    count = 4 * LANES * RUN
    for dtype, to, offset in itertools.product(WIDE, FLOAT8, (0, 1)):
        given = Given(kernels, hostile(dtype, count), groups=1, offset=offset)
        given.run(to, torch.tensor([0.37]))
        executed = given.device.executed
        loads, stores = (executed[f"global_{kind}_dwordx4"] for kind in ("load", "store"))
        assert stores * LANES * 16 == (0 if offset else count), (dtype, to, stores)
        assert loads * LANES * 16 == (0 if offset else count * dtype.itemsize), (dtype, to, loads)
        assert (executed["v_cvt_pk_fp8_f32"] > 0) == (to == HARDWARE[kernels.arch]), (dtype, to)
