"""A package called aiter, for machines without one: its functions have the signatures of a release
(tests/data/aiter/signatures.json) and do what that release's do. Stage 1 is aiter's own machine
code, out of the pinned wheel, executed by build_tools/cdna; planner and reduce follow the sources.

Where the real one would abort the process, `Aborted` is raised, which no `except Exception` stops.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import stand_in_planner
import torch
from aiter_wheel import code_object_path
from torch import Tensor

from build_tools.cdna.code_object import CodeObject, parse
from build_tools.cdna.launch import run_kernel
from build_tools.cdna.state import Memory
from mla_ops import capability
from mla_ops.backends import aiter_release

DATA = Path(__file__).parents[1] / "data" / "aiter"
RELEASES = json.loads((DATA / "signatures.json").read_text())
WHEEL, NEWEST = "wheel", "main 2026-08-22"
FLOAT8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}

# The wheel's persistent kernels, by bits of q and cache and most query tokens.
KERNELS = {
    ("a8w8", 1): "mla_a8w8_qh16_qseqlen1_gqaratio16_ps",
    ("a8w8", 2): "mla_a8w8_qh16_qseqlen2_gqaratio16_ps",
    ("a8w8", 4): "mla_a8w8_qh16_qseqlen4_gqaratio16_ps",
    ("a16w8", 4): "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps",
    ("a16w16", 4): "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps",
}
FOR_128_HEADS = "mla_a8w8_qh128_m32x4_n16x2_msk0_ps"

# Those of 2026-08, as csrc/py_itfs_cu/asm_mla.cu chooses them, where a checkout is at hand.
CHECKOUT = os.environ.get("MLA_OPS_AITER_CHECKOUT")
NEWER = {
    ("gfx942", "a8w8", 4): "mla_a8w8_qh64_qseqlen4_gqaratio16_ps",
    ("gfx950", "a8w8", 4): "mla_a8w8_qh16_qseqlen4_gqaratio16_v3_ps",
    ("gfx950", "a16w16", 4): "mla_a16w16_qh64_qseqlen1_gqaratio64_v3_ps",
    ("gfx950", "128 heads", 1): "mla_a8w8_qh32_qseqlen4_gqaratio32_ps",
}
HEADS_ALONE = {name for (arch, *_), name in NEWER.items() if arch == "gfx950"}

# What the compiled function below takes by position, where the wheel's declaration says otherwise.
SWAPPED = {"work_indptr": "work_info_set", "work_info": "work_indptr"}


class Aborted(BaseException):
    """The real aiter ends the process here."""


@dataclass
class StandIn:
    """The state of the package, and what was asked of it."""

    arch: str
    release: str
    workers: int = 8
    calls: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Called with the arguments before a function runs: a test may spoil something here.
    spoil: dict[str, Callable[[dict[str, Any]], None]] = field(default_factory=dict)
    skip: set[str] = field(default_factory=set)

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        if self.release == WHEEL and function == "get_mla_metadata_v1":
            arguments = {SWAPPED.get(name, name): value for name, value in arguments.items()}
        if "work_metadata" in arguments:
            arguments["work_meta_data"] = arguments.pop("work_metadata")
        self.calls[function] += 1
        self.last[function] = arguments
        if function in self.spoil:
            self.spoil[function](arguments)
        if function not in self.skip:
            return getattr(self, function)(**arguments)

    def get_mla_metadata_info_v1(
        self,
        batch_size: int,
        max_seqlen_qo: int,
        num_head_qo: int,
        fast_mode: bool,
        num_kv_splits: int = 32,
        intra_batch_mode: bool = False,
        max_split_per_batch: int = -1,
        **_: Any,
    ) -> list[tuple[Any, torch.dtype]]:
        assert (num_head_qo == 16 and max_seqlen_qo <= 4) or (num_head_qo, max_seqlen_qo) == (
            128,
            1,
        )
        assert fast_mode
        sizes = stand_in_planner.info(
            batch_size, self.workers, max_split_per_batch, intra_batch_mode, num_kv_splits
        )
        return [(shape, getattr(torch, dtype)) for shape, dtype in sizes]

    def get_mla_metadata_v1(
        self,
        seqlens_kv_indptr: Tensor,
        num_heads_per_head_k: int,
        num_heads_k: int,
        is_causal: bool,
        work_info_set: Tensor,
        work_indptr: Tensor,
        work_metadata_ptrs: Tensor,
        reduce_indptr: Tensor,
        reduce_final_map: Tensor,
        reduce_partial_map: Tensor,
        kv_granularity: int,
        uni_seqlen_qo: int,
        max_seqlen_qo: int,
        fast_mode: bool,
        max_split_per_batch: int,
        page_size: int = 1,
        **more: Any,
    ) -> None:
        if seqlens_kv_indptr.dtype != torch.int32 or kv_granularity & (kv_granularity - 1):
            raise Aborted("metadata: int32, and a power of two")
        assert num_heads_per_head_k in (16, 128) and num_heads_k == 1 and is_causal and fast_mode
        assert uni_seqlen_qo == max_seqlen_qo
        made = stand_in_planner.schedule(
            seqlens_kv_indptr.diff().tolist(),
            kv_granularity,
            self.workers,
            uni_seqlen_qo,
            max_split_per_batch,
            "lse=None" in RELEASES[self.release]["functions"]["mla_decode_stage1_asm_fwd"].split(),
        )
        write(work_indptr, made.work_indptr)
        write(work_info_set, made.works)
        made.reduce_indptr += [len(made.partial_map)] * (
            len(reduce_indptr) - len(made.reduce_indptr)
        )
        write(reduce_indptr, made.reduce_indptr)
        write(reduce_partial_map, made.partial_map)
        for tile, queries in made.final_map.items():
            reduce_final_map[tile] = torch.tensor(queries, dtype=torch.int32)
        addresses = [work_indptr.data_ptr(), work_info_set.data_ptr()]
        write(work_metadata_ptrs.view(torch.int64), addresses)

    def mla_decode_stage1_asm_fwd(self, **given: Any) -> None:
        q, kv = given["Q"], given["KV"]
        kind = f"a{8 * q.element_size()}w{8 * kv.element_size()}"
        most = given["max_seqlen_q"] if kind == "a8w8" else 4
        if given["num_kv_splits_indptr"] is not None:
            raise Aborted("no such kernel here: not persistent")
        heads = q.shape[1]
        known = (kind, most) in KERNELS if heads == 16 else (heads, kind, most) == (128, "a8w8", 1)
        if not q.is_contiguous() or not known:
            raise Aborted(f"no kernel for {kind}, {list(q.shape)}, {most} query tokens")
        for tensor in (q, kv):
            if tensor.element_size() == 1 and tensor.dtype != FLOAT8[self.arch]:
                raise Aborted(f"{tensor.dtype} on {self.arch}")
        if "8" in kind[:2] and None in (given["q_scale"], given["kv_scale"]):
            raise Aborted("a8w8 without scales")
        name = KERNELS[kind, most] if heads == 16 else FOR_128_HEADS
        if CHECKOUT:
            key = (self.arch, kind if heads == 16 else "128 heads", most)
            name = NEWER.get(key, name)
        self.kernels[name] += 1
        launch(self.arch, name, given)

    def mla_reduce_v1(
        self,
        partial_output: Tensor,
        partial_lse: Tensor,
        reduce_indptr: Tensor,
        reduce_final_map: Tensor,
        reduce_partial_map: Tensor,
        final_output: Tensor,
        final_lse: Tensor | None,
        max_seqlen_q: int = 1,
        num_kv_splits: int = 0,
    ) -> None:
        shape = tuple(partial_output.shape[-2:])
        if partial_output.dtype != torch.float32 or shape not in ((16, 512), (128, 512)):
            raise Aborted("reduce: float32 [.., 16 or 128, 512]")
        bounds = reduce_indptr.tolist()
        for tile, (first, behind) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if behind - first < 2:
                continue
            start, stop = reduce_final_map[tile].tolist()
            for i, row in enumerate(range(start, stop)):
                rows = reduce_partial_map[first:behind].long() + i
                lse, parts = partial_lse[rows, 0, :, 0], partial_output[rows, 0]
                top = lse.amax(0)
                weight = (lse - top).exp()
                total = weight.sum(0)
                merged = (weight[..., None] * parts).sum(0) / total[:, None]
                final_output[row] = merged.to(final_output.dtype)
                if final_lse is not None:
                    whole = top + total.log()
                    final_lse[row] = torch.where(total > 0, whole, torch.inf)


def write(tensor: Tensor, values: list[Any]) -> None:
    """As a kernel would, but for what does not fit."""
    if len(values) > len(tensor):
        raise AssertionError(f"{len(values)} written to {len(tensor)}: memory that is not ours")
    if values:
        tensor[: len(values)] = torch.tensor(values, dtype=tensor.dtype)


@cache
def code_object(arch: str, name: str) -> CodeObject:
    file = f"{arch}/mla/{name}.co"
    return parse((Path(CHECKOUT, "hsa", file) if CHECKOUT else code_object_path(file)).read_bytes())


def memory_of(tensor: Tensor) -> np.ndarray:
    """The bytes from a tensor's first number to its last."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    begin = tensor.storage_offset() * tensor.element_size()
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return raw[begin : begin + (steps + 1) * tensor.element_size()]


def launch(arch: str, name: str, given: dict[str, Any]) -> None:
    """Execute a persistent kernel; the layout of its arguments is that of the wheel's
    csrc/py_itfs_cu/asm_mla.cu, to which later releases have added."""
    code = code_object(arch, name)
    q, kv = given["Q"], given["KV"]
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    size = sum(value.numel() * value.element_size() + 3 * 4096 for value in tensors.values())
    memory = Memory(size + kv.shape[0] * kv.stride(0) * kv.element_size() + (4 << 20))
    at = {key: memory.put(memory_of(value), key) for key, value in tensors.items()}
    known = {tensors[key].data_ptr(): at[key] for key in ("work_indptr", "work_info_set")}
    table = given["work_meta_data"].tolist()
    if not set(table) <= set(known):
        raise AssertionError(f"memory fault: the kernel follows {table}, there are {known}")
    table_at = memory.put(np.array([known[address] for address in table], np.uint64), "table")
    kernarg = bytearray(0x170)
    tokens = given["max_seqlen_q"]
    rows = q.shape[1] * (1 if name in HEADS_ALONE else tokens)
    fields: list[tuple[int, str, Any]] = [
        (0x00, "Q", at["splitData"]),
        (0x10, "Q", at["splitLse"]),
        (0x20, "Q", at["Q"]),
        (0x30, "Q", at["KV"]),
        (0x40, "Q", at["kv_indptr"]),
        (0x50, "Q", at["kv_page_indices"]),
        (0x60, "Q", at["kv_last_page_lens"]),
        (0x70, "f", given["softmax_scale"]),
        (0x80, "I", rows),
        (0x90, "I", given["splitData"].shape[1]),
        (0xA0, "I", q.stride(0) * q.element_size() * tokens),
        (0xB0, "I", kv.stride(0) * kv.element_size()),
        (0xC0, "I", int(math.log2(given.get("page_size", kv.shape[1])))),
        (0xD0, "Q", at["qo_indptr"]),
        (0xE0, "Q", table_at),
        (0xF0, "Q", at["output"]),
        (0x100, "Q", at.get("q_scale", 0)),
        (0x110, "Q", at.get("kv_scale", 0)),
        (0x120, "I", given["splitData"].shape[1]),
    ]
    for offset, form, value in fields:
        struct.pack_into("<" + form, kernarg, offset, value)
    arguments = memory.put(np.frombuffer(bytes(kernarg), np.uint8), "kernel arguments")
    grid = len(given["work_indptr"]) - 1
    run_kernel(code, code.kernel(), (grid, 1, 1), (256, 1, 1), arguments, memory)
    for key in ("splitData", "splitLse", "output"):
        there = memory_of(given[key])
        there[:] = memory.get(at[key], there)


# ---- as a package


def write_package(folder: Path, release: str) -> None:
    """The files that are looked at and imported."""
    package = folder / "aiter"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("from aiter.ops.attention import *\n")
    (package / "ops" / "__init__.py").write_text("")
    lines = ["import stand_in_now\n"]
    for name, parameters in RELEASES[release]["functions"].items():
        lines.append(f"def {name}({', '.join(parameters.split())}):")
        lines.append(f"    return stand_in_now.current.call({name!r}, locals())\n")
    source = "\n".join(lines)
    ast.parse(source)
    (package / "ops" / "attention.py").write_text(source)


def forget() -> None:
    """No aiter was imported or looked for; no decision was made."""
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    aiter_release.forget()
    capability._decisions.clear()


@contextmanager
def installed(
    folder: Path, arch: str, release: str = NEWEST, workers: int = 8
) -> Iterator[StandIn]:
    """A machine with that chip and that aiter, as far as mla_ops can see.

    This is the one way to have `_decode_aiter` run on CPU tensors: `capability.arch_of` is
    replaced, which no setting does.
    """
    stand_in = StandIn(arch, release, workers)
    now = type(sys)("stand_in_now")
    now.current = stand_in  # type: ignore[attr-defined]
    write_package(folder, release)
    arch_of, before = capability.arch_of, sys.modules.get("stand_in_now", now)
    sys.modules["stand_in_now"] = now
    sys.path.insert(0, str(folder))
    capability.arch_of = lambda device: arch  # type: ignore[assignment]
    forget()
    try:
        yield stand_in
    finally:
        capability.arch_of = arch_of
        sys.path.remove(str(folder))
        sys.modules["stand_in_now"] = before
        forget()
