"""Checks of csrc/hip/kv_cache.hip in the executor: the cache afterwards, to the bit, and nothing of
it touched that was not named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from project import FLOAT8, HARDWARE, RAW, TYPES, WIDE, Device, Kernels, assert_same
from project_quantize import hostile
from torch import Tensor

from build_tools.cdna.schedule import Lockstep, RoundRobin
from mla_ops.reference import quantize_fp8

TOKENS_OF_A_BLOCK = 16
KINDS = list(TYPES.values())  # in the order of mla::Type
POISON = 0x7F  # bytes of NaN in every type but e4m3fnuz, where it is a number; all are compared

# Skipped, beyond the capacity of 4 pages of 6 rows, and 7, 3 and 11 several times: within a block,
# in different blocks, and as the first and the last token.
SLOTS = [7, 0, -1, 7, 3, 23, -9, 24, 12, 1 << 20, 3, 11, 5, 7, 22, 8]
SLOTS += [11, 20, 7, 2, -1, 21, 3, 9, 10, 13, 14, 15, 16, 17, 3, 18]
SLOTS += [4, 19, 11, 7]


@dataclass(frozen=True)
class Write:
    """A call of write_kv_cache."""

    source: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16
    scale: float | None = None
    slots: tuple[int, ...] = tuple(SLOTS)
    slot_type: torch.dtype = torch.int64
    slot_stride: int = 1
    latent: int = 80
    rope: int = 32
    gap: int = 16  # numbers between the rows of the cache, and of the sources
    pages: int = 4
    page_size: int = 6

    @property
    def row(self) -> int:
        return self.latent + self.rope + self.gap

    @property
    def page(self) -> int:
        return self.page_size * self.row + self.gap

    def sources(self) -> tuple[Tensor, Tensor]:
        """kv_c and k_pe with the gaps between their rows, which hold NaN."""
        out = []
        for seed, width in enumerate((self.latent, self.rope)):
            x = hostile(self.source, len(self.slots), width + self.gap, seed=seed)
            x[:, width:] = torch.nan
            out.append(x)
        return out[0], out[1]

    def poison(self) -> Tensor:
        raw = torch.full((self.pages * self.page * self.cache.itemsize,), POISON, dtype=torch.uint8)
        return raw.view(self.cache)

    def expected(self) -> Tensor:
        """Token by token, in order."""
        cache = self.poison()
        kv_c, k_pe = self.sources()
        x = torch.cat([kv_c[:, : self.latent], k_pe[:, : self.rope]], 1)
        if self.scale is not None:
            rows = quantize_fp8(x, torch.tensor([self.scale]), self.cache)[0]
        elif self.cache in FLOAT8:
            rows = quantize_fp8(x, torch.ones(1), self.cache)[0]
        else:
            rows = x.to(self.cache)
        width = self.latent + self.rope
        raw, raw_rows = cache.view(RAW[self.cache.itemsize]), rows.view(RAW[self.cache.itemsize])
        for token, slot in enumerate(self.slots):
            if 0 <= slot < self.pages * self.page_size:
                at = slot // self.page_size * self.page + slot % self.page_size * self.row
                raw[at : at + width] = raw_rows[token]
        return cache


def run(kernels: Kernels, write: Write, **options: Any) -> Tensor:
    """The cache after the launch."""
    device = Device(kernels, "kv_cache")
    kv_c, k_pe = write.sources()
    slots = torch.full((len(write.slots), write.slot_stride), 1, dtype=write.slot_type)
    slots[:, 0] = torch.tensor(write.slots)
    cache = device.put(write.poison())
    count = len(write.slots)
    pointer, number, kind = np.uint64, np.int64, np.int32
    members = (
        pointer(device.put(kv_c)),
        pointer(device.put(k_pe)),
        number(kv_c.stride(0)),
        number(k_pe.stride(0)),
        number(write.latent),
        number(write.rope),
        number(count),
        pointer(device.put(slots)),
        kind(write.slot_type == torch.int32),
        number(write.slot_stride),
        pointer(cache),
        number(write.page_size),
        number(write.page),
        number(write.row),
        number(write.pages * write.page_size),
        pointer(0 if write.scale is None else device.put(torch.tensor([write.scale]))),
        kind(KINDS.index(write.source)),
        kind(KINDS.index(write.cache)),
    )
    groups = (count + TOKENS_OF_A_BLOCK - 1) // TOKENS_OF_A_BLOCK
    device.call("write_kv_cache", (write.source, write.cache), groups, members, **options)
    return device.get(cache, write.pages * write.page, write.cache)


def check(kernels: Kernels, write: Write, **options: Any) -> None:
    got, want = run(kernels, write, **options), write.expected()
    assert_same(got, want)
    untouched = want.view(torch.uint8) == POISON
    assert (got.view(torch.uint8)[untouched] == POISON).all(), "written beside the rows"


# ---- the checks


def check_types(kernels: Kernels) -> None:
    """All pairs of types, by runs; float8 also with scales, fast and slow."""
    for source in WIDE:
        for cache in KINDS:
            check(kernels, Write(source, cache))
            if cache in FLOAT8:
                check(kernels, Write(source, cache, 0.37))
                check(kernels, Write(source, cache, 2.0**-70))


def check_layouts(kernels: Kernels) -> None:
    """Odd widths and strides (number by number), slots of both types and with a stride, one row to
    a page, one token.
    """
    base = Write(torch.bfloat16, HARDWARE[kernels.arch], 0.37)
    for write in (
        replace(base, latent=37, rope=5, gap=1),
        replace(base, latent=512, rope=64, gap=0, slots=base.slots[:7]),
        replace(base, gap=0, slot_type=torch.int32),
        replace(base, slot_type=torch.int32, slot_stride=3),
        replace(base, slot_stride=2),
        replace(base, pages=24, page_size=1),
        replace(base, slots=(17,)),
        replace(base, slots=(-1,)),
    ):
        check(kernels, write)


def check_duplicates(kernels: Kernels) -> None:
    """Of tokens for one slot the last one stays, in any order of waves and work-groups."""
    write = Write(torch.float32, torch.float32, latent=16, rope=16)
    orders = [RoundRobin(100_000, seed) for seed in range(4)]  # a wave's whole way in one turn
    for schedule in [Lockstep(), RoundRobin(40, 1), *orders]:
        check(kernels, write, schedule=schedule)
    # More later tokens than a work-group has threads.
    many = tuple(i % 23 for i in range(300))
    check(kernels, replace(write, slots=many))
