"""Rebuild the launch that a golden vector records, run it, and compare the outputs."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiter_wheel import ROOT, code_object_path

from build_tools.cdna.code_object import CodeObject, parse
from build_tools.cdna.launch import Statistics, run_kernel
from build_tools.cdna.state import Memory

VECTORS = Path(os.environ.get("MLA_OPS_CDNA_VECTORS", ROOT / "tests" / "data" / "cdna"))
OUTPUTS = ("out_split", "out_lse", "out_final_bf16")
PREFILL = {"out_split": np.nan, "out_lse": np.nan, "out_final_bf16": 0x40E0}  # 7.0


@dataclass
class Replay:
    info: dict[str, Any]
    expected: dict[str, np.ndarray]
    got: dict[str, np.ndarray]
    statistics: Statistics


@functools.lru_cache(maxsize=4)
def load_code(source: str, sha256: str) -> CodeObject:
    name = source.split("hsa/")[1]
    if source.startswith("wheel"):
        path = code_object_path(name)
    else:
        path = Path(os.environ["MLA_OPS_AITER_CHECKOUT"]) / "hsa" / name
    blob = path.read_bytes()
    assert hashlib.sha256(blob).hexdigest() == sha256, (
        f"{path} is not the file the vector was made with"
    )
    return parse(blob)


def replay(path: Path, **options: Any) -> Replay:
    """Run the launch of one vector; options go to run_kernel."""
    with np.load(path) as data:
        arrays = dict(data)
    info = json.loads(str(arrays.pop("info_json")))
    code = load_code(info["co"], info["sha256"])
    memory = Memory(16 << 20)
    pointers = {"null": 0}
    for name, array in arrays.items():
        if array.dtype.kind in "fiub":
            pointers[name] = memory.put(
                np.full_like(array, PREFILL[name]) if name in PREFILL else array, name
            )
    pointers["out_split0"] = memory.put(np.full_like(arrays["out_split"], np.nan), "out_split0")
    if "work_info" in arrays:
        table = [pointers["work_indptr"], pointers["work_info"]] + [0] * 8
        pointers["meta"] = memory.put(np.array(table, np.uint64), "meta")
    kernarg = bytearray(info["kernarg_bytes"])
    for argument in info["args"]:
        value = argument["value"]
        if isinstance(value, str):
            value = pointers["meta" if value.startswith("meta") else value]
        struct.pack_into("<" + argument["fmt"], kernarg, argument["offset"], value)
    at = memory.put(np.frombuffer(bytes(kernarg), np.uint8), "kernel arguments")
    statistics = run_kernel(code, code.kernel(), info["grid"], info["block"], at, memory, **options)
    got = {name: memory.get(pointers[name], arrays[name]) for name in OUTPUTS}
    return Replay(info, {name: arrays[name] for name in OUTPUTS}, got, statistics)


def holds_bf16(replayed: Replay, name: str) -> bool:
    """The final output is bf16, and so is the split output of an fp8 kernel that has one split
    only.
    """
    return (
        name == "out_final_bf16"
        or name == "out_split"
        and "reinterpreted" in replayed.info.get("final_in", "")
    )


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    """Largest distance of bf16 patterns on the line of bf16 values; NaN must meet NaN."""

    def ordered(bits: np.ndarray) -> np.ndarray:
        wide = bits.astype(np.int64)
        return np.where(wide & 0x8000, 0x8000 - wide, wide)

    def nan(bits: np.ndarray) -> np.ndarray:
        return (bits & 0x7FFF) > 0x7F80

    assert np.array_equal(nan(a), nan(b))
    return int(np.abs(ordered(a) - ordered(b))[~nan(a)].max(initial=0))


def differences(replayed: Replay) -> list[str]:
    """What is further off than one bf16 ulp, or 1e-6 in float32; empty if all is well."""
    out = []
    for name in OUTPUTS:
        got, expected = replayed.got[name], replayed.expected[name]
        if holds_bf16(replayed, name):
            distance = ulps(got.view(np.uint16), expected.view(np.uint16))
            if distance > 1:
                out.append(f"{name}: {distance} ulp")
        elif not np.array_equal(np.isnan(got), np.isnan(expected)):
            out.append(f"{name}: NaN in other places")
        else:
            off = float(
                np.nanmax(np.abs(got - expected) / np.maximum(1, np.abs(expected)), initial=0)
            )
            if off > 1e-6:
                out.append(f"{name}: off by {off:.3g}")
    return out
