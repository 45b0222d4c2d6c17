"""Each release is called as its own source wants it, and what would go wrong is seen before."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stand_in
from cases import Case
from compare import errors
from machines import BARS, KINDS, Install, decode, make, of_kind
from running import oracle
from stand_in import NEWEST, RELEASES, WHEEL

import mla_ops
from mla_ops import capability
from mla_ops.backends import aiter_release
from mla_ops.backends.aiter_release import FUNCTIONS, Call, Release, Unsupported

STAGE1, METADATA = "mla_decode_stage1_asm_fwd", "get_mla_metadata_v1"


def declaration(function: str, parameters: str) -> str:
    return f"def {function}({', '.join(parameters.split())}): ..."


def call_of(function: str, parameters: str) -> Call:
    source = declaration(function, parameters)
    return Call(function, aiter_release.read_signatures(source)[function])


def values_of(function: str) -> dict[str, Any]:
    """A value for each name that we may give, which says what it is."""
    return {name: f"<{name}>" for name in FUNCTIONS[function].given}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_accepts_our_call(release: str, function: str) -> None:
    """Bound to the real signature, each argument arrives where it belongs."""
    parameters = RELEASES[release]["functions"][function]
    positional, by_keyword = call_of(function, parameters).arguments(values_of(function))
    scope: dict[str, Any] = {}
    exec(declaration(function, parameters), scope)
    bound = inspect.signature(scope[function]).bind(*positional, **by_keyword).arguments
    for name, value in bound.items():
        today = {"work_metadata": "work_meta_data"}.get(name, name)
        if release == WHEEL and function == METADATA:
            today = stand_in.SWAPPED.get(today, today)
        assert value == f"<{today}>", f"{name} got {value}"
    given = set(bound) | {stand_in.SWAPPED.get(name, name) for name in bound}
    for needed in FUNCTIONS[function].required - {"work_meta_data"}:
        assert needed in given, f"{needed} is left to a default"


def test_the_wheels_declaration_and_what_is_compiled_differ() -> None:
    """ROCm/aiter#1609 renamed the declaration alone: the compiled function took work_info_set first
    before as well, so a call by the declared names would have given it the one for the other."""
    call = call_of(METADATA, RELEASES[WHEEL]["functions"][METADATA])
    positional, _ = call.arguments(values_of(METADATA))
    assert positional[6:8] == ["<work_info_set>", "<work_indptr>"]
    newer = call_of(METADATA, RELEASES["v0.1.9"]["functions"][METADATA])
    assert newer.arguments(values_of(METADATA))[0][6:8] == positional[6:8]


def bound_as(release: str, function: str, *arguments: Any) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(declaration(function, RELEASES[release]["functions"][function]), scope)
    return dict(inspect.signature(scope[function]).bind(*arguments).arguments)


def positional_call(release: str, function: str) -> list[Any]:
    """As somebody writes it who looks at one release."""
    names = [
        parameter.split("=")[0] for parameter in RELEASES[release]["functions"][function].split()
    ]
    return [f"<{name}>" for name in names]


@pytest.mark.parametrize(
    ("function", "written_for", "run_on", "lands", "value"),
    [
        # aiter#1609: no error, and indptr and work items swapped.
        (METADATA, WHEEL, "v0.1.9", "work_info_set", "<work_indptr>"),
        # aiter#1950: the last page lengths come third.
        (METADATA, "v0.1.9", "v0.1.10.post2", "kv_last_page_lens", "<num_heads_per_head_k>"),
        # aiter#2144: q_scale lands in lse, and kv_scale in q_scale.
        (STAGE1, "v0.1.10.post2", "v0.1.12", "lse", "<q_scale>"),
        # aiter#3391: the output lands in num_kv_splits.
        ("mla_reduce_v1", "v0.1.15", "v0.1.16", "num_kv_splits", "<final_output>"),
    ],
)
def test_each_historical_break_would_be_silent_or_late_by_position(
    function: str, written_for: str, run_on: str, lands: str, value: str
) -> None:
    try:
        bound = bound_as(run_on, function, *positional_call(written_for, function))
    except TypeError:
        arguments = positional_call(written_for, function)
        bound = bound_as(run_on, function, *arguments, *["<more>"])
    assert bound[lands] == value, "by position it goes wrong"
    ours = call_of(function, RELEASES[run_on]["functions"][function])
    positional, by_keyword = ours.arguments(values_of(function))
    scope: dict[str, Any] = {}
    exec(declaration(function, RELEASES[run_on]["functions"][function]), scope)
    right = inspect.signature(scope[function]).bind(*positional, **by_keyword).arguments
    assert right.get(lands, f"<{lands}>") == f"<{lands}>", "by our call it does not"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("{} window=None", f"its {STAGE1} has the new parameter window"),
        ("window {}", f"its {STAGE1} has the new parameter window"),
        ("-kv_scale=None", f"its {STAGE1} lacks the parameter kv_scale"),
    ],
)
def test_an_unknown_release_is_refused_by_what_is_new(parameters: str, message: str) -> None:
    now = RELEASES[NEWEST]["functions"][STAGE1]
    text = now.replace(" " + parameters[1:], "") if parameters[0] == "-" else parameters.format(now)
    with pytest.raises(Unsupported, match=message):
        call_of(STAGE1, text)


def package(folder: Path, attention: str | None, init: str = "") -> None:
    (folder / "aiter" / "ops").mkdir(parents=True)
    (folder / "aiter" / "__init__.py").write_text(init)
    if attention is not None:
        (folder / "aiter" / "ops" / "attention.py").write_text(attention)


@pytest.fixture
def a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(attention: str | None, init: str = "") -> None:
        package(tmp_path, attention, init)
        monkeypatch.syspath_prepend(str(tmp_path))
        stand_in.forget()

    yield make
    monkeypatch.undo()
    stand_in.forget()


WHOLE = "\n".join(declaration(*item) for item in RELEASES[NEWEST]["functions"].items())


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (None, "it has no ops/attention.py"),
        ("", "does not declare get_mla_metadata_info_v1, get_mla_metadata_v1, mla_decode_stage1"),
        ("def broken(:", "invalid syntax"),
        (WHOLE.replace("causal=True", "causal=True, sink=None"), "has the new parameter sink"),
    ],
)
def test_what_cannot_be_used_is_said_and_another_serves(
    attention: str | None, message: str, a_package: Any
) -> None:
    a_package(attention)
    text = mla_ops.explain(arch="gfx942")
    assert "the aiter in " in text and message in text
    assert "SERVES: " in text
    assert "aiter" not in sys.modules, "asked without importing it"


def test_an_import_that_fails_is_survived(a_package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm/aiter#416: on a machine without ROCm the import raises RuntimeError."""
    import torch

    a_package(WHOLE, "raise RuntimeError('ROCm version file not found')")
    monkeypatch.setattr(capability, "arch_of", lambda device: "gfx942")
    q = torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16)
    cache = mla_ops.new_kv_cache(2, 64)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    assert mla_ops.supports(arch="gfx942", backend="aiter"), "nothing is known against it yet"
    out = torch.ops.mla.decode(q, cache, table, lengths, 0.1)
    assert torch.equal(out, torch.zeros_like(out))
    assert "importing it failed: RuntimeError: ROCm version file not found" in mla_ops.explain(
        arch="gfx942"
    )
    with pytest.raises(ValueError, match="backend 'aiter' cannot serve .*ROCm version file not"):
        torch.ops.mla.decode(q, cache, table, lengths, 0.1, backend="aiter")
    with pytest.raises(RuntimeError, match="expected an aiter that can be used"):
        aiter_release.get()


def test_the_pinned_wheel_is_the_fixture() -> None:
    """The signatures of the wheel that is executed, against the file in it."""
    import zipfile

    import aiter_wheel

    aiter_wheel.code_object_path("gfx942/mla/mla_a8w8_qh16_qseqlen1_gqaratio16_ps.co")
    cache = aiter_wheel.ROOT / "build" / "cdna-wheel"
    (wheel,) = cache.glob("amd_aiter-*.whl")
    source = zipfile.ZipFile(wheel).read("aiter/ops/attention.py").decode()
    found = aiter_release.read_signatures(source)
    for function, parameters in RELEASES[WHEEL]["functions"].items():
        declared = [(one.split("=")[0], "=" in one) for one in parameters.split()]
        assert [tuple(parameter) for parameter in found[function]] == declared
    compiled = zipfile.ZipFile(wheel).read("aiter_meta/csrc/include/rocm_ops.hpp").decode()
    at = compiled.index('m.def("get_mla_metadata_v1"')
    order = [compiled.index(f'py::arg("{name}")', at) for name in ("work_info_set", "work_indptr")]
    assert order == sorted(order), "compiled, work_info_set comes first"


def test_which_releases_serve_several_query_tokens(tmp_path: Path) -> None:
    serve = {}
    for i, release in enumerate(RELEASES):
        stand_in.write_package(tmp_path / str(i), release)
        serve[release] = Release(tmp_path / str(i) / "aiter").keeps_tails_whole
    older = {WHEEL, "v0.1.9", "v0.1.10.post2"}
    assert serve == {release: release not in older for release in RELEASES}


def test_where_only_one_query_token_is_served(install: Install) -> None:
    install("gfx942", "v0.1.10.post2")
    assert mla_ops.supports(backend="aiter")
    assert not mla_ops.supports(q_len=2, backend="aiter")
    assert "it serves one query token only" in mla_ops.explain(q_len=2)


@pytest.mark.parametrize("kind", KINDS)
def test_why_older_releases_serve_only_one(
    kind: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """642 tokens for 9 units: their planner leaves a piece of 2 tokens for 4 query tokens."""
    case = of_kind(Case(lengths=(642,), q_len=4, page_size=16), kind, "gfx942")
    problem = make(case)
    want, _ = oracle(problem)
    found = {}
    for release in ("v0.1.10.post2", "v0.1.12"):
        there = install("gfx942", release, workers=9)
        trust(monkeypatch)
        out = decode(problem)
        call = there.last["mla_decode_stage1_asm_fwd"]
        info = call["work_info_set"][: int(call["work_indptr"][-1])]
        found[release] = int((info[:, 5] - info[:, 4]).min()), errors(out, want)[0]
    assert found["v0.1.10.post2"][0] == 2 and found["v0.1.10.post2"][1] > 0.1
    assert found["v0.1.12"][0] >= 4 and found["v0.1.12"][1] < BARS[kind]


def trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the table use what is there."""
    rows = tuple(
        row if "rounded" in row.reason else replace(row, missing=aiter_release.missing)
        for row in capability.TABLE
    )
    monkeypatch.setattr(capability, "TABLE", rows)


def test_our_source_passes_nothing_by_position_to_aiter() -> None:
    """Calls of a release are by name, so that a new order cannot matter."""
    for name in ("aiter.py", "aiter_plan.py"):
        source = Path(aiter_release.__file__).with_name(name).read_text()
        calls = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("stage1", "reduce", "info")
        ]
        assert calls
        assert not any(call.args for call in calls)
