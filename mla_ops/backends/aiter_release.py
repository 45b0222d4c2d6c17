"""Which aiter is installed, and how its functions want to be called.

aiter's signatures changed incompatibly five times in a year, twice so that a call by position goes
wrong without a word. So each release is called by what its own source says: its
`ops/attention.py` is parsed, not imported (what it exports are wrappers without signatures), once.
A parameter that is not known here is a reason to leave that release alone, and is named.

Required arguments are passed by position, in the release's own order, for the compiled functions
have other names than their declarations (`work_metadata` is `work_meta_data` below); optional ones
by keyword.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch._subclasses.fake_tensor import unset_fake_temporarily

logger = logging.getLogger("mla_ops")

SOURCE = Path("ops", "attention.py")


class Known(NamedTuple):
    """What is known of a function: the parameters that a call may be given, those among them that
    every release has, and those whose default is what we want."""

    required: frozenset[str]
    given: frozenset[str]
    left: frozenset[str]


def _known(required: str, given: str = "", left: str = "") -> Known:
    must = frozenset(required.split())
    return Known(must, must | frozenset(given.split()), frozenset(left.split()))


FUNCTIONS = {
    "get_mla_metadata_info_v1": _known(
        "batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype is_sparse fast_mode",
        "intra_batch_mode max_split_per_batch",
        "num_kv_splits",
    ),
    "get_mla_metadata_v1": _known(
        "seqlens_qo_indptr seqlens_kv_indptr num_heads_per_head_k num_heads_k is_causal "
        "work_metadata_ptrs work_info_set work_indptr reduce_indptr reduce_final_map "
        "reduce_partial_map kv_granularity max_seqlen_qo uni_seqlen_qo fast_mode "
        "max_split_per_batch",
        "kv_last_page_lens page_size intra_batch_mode dtype_q dtype_kv dtype_q_nope dtype_q_rope "
        "dtype_kv_nope dtype_kv_rope",
        "topk is_cp_round_robin mla_version",
    ),
    "mla_decode_stage1_asm_fwd": _known(
        "Q KV qo_indptr kv_indptr kv_page_indices kv_last_page_lens num_kv_splits_indptr "
        "work_meta_data work_indptr work_info_set max_seqlen_q softmax_scale splitData splitLse "
        "output q_scale kv_scale",
        "page_size nhead_kv causal",
        "lse g_kv_indptr cp_world_size cp_rank valid_split_count use_valid_split_count_reduce",
    ),
    "mla_reduce_v1": _known(
        "partial_output partial_lse reduce_indptr reduce_final_map reduce_partial_map "
        "final_output final_lse",
        "max_seqlen_q num_kv_splits",
    ),
}


class Parameter(NamedTuple):
    name: str
    optional: bool


Signature = list[Parameter]


class Unsupported(Exception):
    """An aiter that cannot be used; the text says why."""


def read_signatures(source: str) -> dict[str, Signature]:
    """Return the signatures of the functions that are called, from the text of attention.py."""
    found: dict[str, Signature] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            first_default = len(positional) - len(arguments.defaults)
            found[node.name] = [
                Parameter(argument.arg, i >= first_default) for i, argument in enumerate(positional)
            ]
            found[node.name] += [
                Parameter(argument.arg, default is not None)
                for argument, default in zip(
                    arguments.kwonlyargs, arguments.kw_defaults, strict=True
                )
            ]
    return found


# Declared names that differ from today's.
_RENAMED = {"work_metadata": "work_meta_data"}


def _names_today(function: str, signature: Signature) -> list[str]:
    names = [_RENAMED.get(parameter.name, parameter.name) for parameter in signature]
    if function == "get_mla_metadata_v1" and "work_info" in names:
        # Until ROCm/aiter#1609 (2025-12) the declaration had these two the wrong way round: what
        # is compiled below it has always taken work_info_set first.
        at = names.index("work_info")
        names[at - 1 : at + 1] = ["work_info_set", "work_indptr"]
    return names


class Call:
    """One of aiter's functions, called by today's names whatever the release calls them."""

    def __init__(self, function: str, signature: Signature) -> None:
        known = FUNCTIONS[function]
        names = _names_today(function, signature)
        new = [name for name in names if name not in known.given | known.left]
        gone = sorted(known.required - set(names))
        if new or gone:
            what = [f"has the new parameter {name}" for name in new]
            what += [f"lacks the parameter {name}" for name in gone]
            raise Unsupported(f"its {function} {' and '.join(what)}")
        self.function = function
        self.accepts = frozenset(names) & known.given
        self.plain_dtypes = "dtype_q" in names  # and its four halves need not be said
        pairs = list(zip(names, signature, strict=True))
        self.positional = [name for name, parameter in pairs if not parameter.optional]
        self.optional = [
            (name, parameter.name)
            for name, parameter in pairs
            if parameter.optional and name in known.given
        ]
        self.implementation: Callable[..., Any] | None = None

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments by position and by keyword; what the release has not is left out."""
        by_keyword = {declared: values[name] for name, declared in self.optional if name in values}
        return [values[name] for name in self.positional], by_keyword

    def __call__(self, **values: Any) -> Any:
        assert self.implementation is not None, "bound by Release.load"
        positional, by_keyword = self.arguments(values)
        return self.implementation(*positional, **by_keyword)


class Release:
    """An installed aiter."""

    def __init__(self, package: Path) -> None:
        self.package = package
        source = package / SOURCE
        if not source.exists():
            raise Unsupported(f"it has no {SOURCE}")
        found = read_signatures(source.read_text())
        if absent := sorted(set(FUNCTIONS) - set(found)):
            raise Unsupported(f"its {SOURCE} does not declare {', '.join(absent)}")
        calls = {name: Call(name, found[name]) for name in FUNCTIONS}
        self.info = calls["get_mla_metadata_info_v1"]
        self.metadata = calls["get_mla_metadata_v1"]
        self.stage1 = calls["mla_decode_stage1_asm_fwd"]
        self.reduce = calls["mla_reduce_v1"]
        # Until 2026-03 the last piece of a sequence could be shorter than the query tokens: the
        # first of them see nothing of it, and with four the kernels get them wrong by a tenth, or
        # NaN (ROCm/aiter#2106, #2319). The planner that leaves no such tail came with the releases
        # that have `lse`.
        declared = {parameter.name for parameter in found["mla_decode_stage1_asm_fwd"]}
        self.keeps_tails_whole = "lse" in declared

    def load(self) -> None:
        """Import aiter. Raises Unsupported with what came of it."""
        try:
            # Imported while torch.compile traces, it would make fake tensors and keep them.
            with unset_fake_temporarily():
                module = importlib.import_module("aiter")
            for call in (self.info, self.metadata, self.stage1, self.reduce):
                call.implementation = getattr(module, call.function)
        except Exception as error:  # RuntimeError where ROCm is not there, and anything else
            raise Unsupported(
                f"importing it failed: {type(error).__name__}: {error} (after an upgrade, what an "
                "older one compiled may be in the way: empty AITER_JIT_DIR, or ~/.aiter)"
            ) from error


class _State(NamedTuple):
    release: Release | None
    reason: str | None


@functools.cache
def _found() -> _State:
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError) as error:
        return _State(None, f"aiter cannot be looked for: {error}")
    # A folder that happens to be called aiter has no origin.
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return _State(None, "aiter is not installed")
    package = Path(next(iter(spec.submodule_search_locations)))
    try:
        return _State(Release(package), None)
    except (Unsupported, OSError, SyntaxError) as error:
        return _State(None, f"the aiter in {package} cannot be used: {error}")


@functools.cache
def _loaded() -> _State:
    state = _found()
    if state.release is None:
        return state
    try:
        state.release.load()
    except Unsupported as error:
        logger.warning("the aiter in %s cannot be used: %s", state.release.package, error)
        return _State(None, f"the aiter in {state.release.package} cannot be used: {error}")
    return state


def missing() -> str | None:
    """Return why aiter is not there, or None; does not import it."""
    if _loaded.cache_info().currsize:
        return _loaded().reason
    return _found().reason


def missing_for_several_tokens() -> str | None:
    """The same for more than one query token in a sequence."""
    reason = missing()
    if reason is not None:
        return reason
    release = _found().release
    assert release is not None
    if release.keeps_tails_whole:
        return None
    return (
        f"the aiter in {release.package} cuts sequences so that some query tokens see nothing of a "
        "piece, and come out wrong (ROCm/aiter#2106): it serves one query token only"
    )


def importing() -> str | None:
    """Import aiter where that has not been tried; return why it cannot be, or None."""
    return _loaded().reason


def get() -> Release:
    """Return the installed aiter, imported. Raises RuntimeError where there is none to use."""
    state = _loaded()
    if state.release is None:
        raise RuntimeError(f"expected an aiter that can be used: {state.reason}")
    return state.release


def notes() -> list[str]:
    """Return what was found, and what of its surroundings costs time, for `explain`."""
    release = _found().release
    if release is None:
        return []
    state = "imported" if _loaded.cache_info().currsize else "not imported yet"
    notes = [f"aiter in {release.package}, {state}"]
    if os.environ.get("HIP_FORCE_DEV_KERNARG") != "1":
        # It is read when HIP starts, so setting it here would be too late, or behind one's back.
        notes.append(
            "HIP_FORCE_DEV_KERNARG must be 1 in the environment before Python starts for kernel "
            f"arguments in device memory, got {os.environ.get('HIP_FORCE_DEV_KERNARG')!r}"
        )
    return notes


def forget() -> None:
    """Look for aiter again at the next call."""
    _found.cache_clear()
    _loaded.cache_clear()
