"""`python -m mla_ops bench`: the grammar, the judgement, the timing, the tables."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mla_ops import bench, draw, reference, workload
from mla_ops.__main__ import main
from mla_ops.bench import floor, grammar, measure, peers, providers, table, timing
from mla_ops.bench.providers import Provider, Refused
from mla_ops.workload import SOFTMAX_SCALE, Case, Workload

CPU = torch.device("cpu")
FN, FNUZ, BF16 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16
QUICK = measure.Settings(CPU, turns=2, budget=0.0, rotated=0)


# the grammar


@pytest.mark.parametrize(
    ("text", "cases"),
    [
        ("64q1s8k", [Case(64, 8192)]),
        ("2q4s100-h128-fp8-page16-ragged", [Case(2, 100, 4, 128, BF16, FN, 16, True)]),
        ("4,8q1s1k", [Case(4, 1024), Case(8, 1024)]),
        ("1q1s1k..4k", [Case(1, 1024), Case(1, 2048), Case(1, 4096)]),
        ("1q1s96..224+64", [Case(1, 96), Case(1, 160), Case(1, 224)]),
        ("1q1s3..7", [Case(1, 3), Case(1, 6)]),
        ("1q1s64-h8,16", [Case(1, 64, heads=8), Case(1, 64, heads=16)]),
        ("1q1s64-bf16,fp8", [Case(1, 64), Case(1, 64, cache_dtype=FN)]),
        ("1q1s64-e4m3fnuz-qfp8", [Case(1, 64, q_dtype=FN, cache_dtype=FNUZ)]),
        ("1q1s64-rank256-rope32", [Case(1, 64, rank=256, rope=32)]),
        ("1q2s2", [Case(1, 2, 2)]),
    ],
)
def test_grammar(text: str, cases: list[Case]) -> None:
    assert grammar.parse(text, CPU) == cases
    for case in cases:
        assert grammar.parse(str(case), CPU) == [case]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("64", "must be a preset .* or like 64q1s8k, got '64'"),
        ("q1s8k", "got 'q1s8k'"),
        ("4q1s8z", "a number must be like .*, got '8z'"),
        ("4q1s8..2", "must go upwards"),
        ("0..4q1s8", "must go upwards"),
        ("4q1s64-h129", "heads of .* must be between 1 and 128, got 129"),
        ("4q9s64", "q_len of .* must be between 1 and 8, got 9"),
        ("4q4s2", "context of .* must be between 4 and"),
        ("0q1s2", "batch of .* must be between 1 and"),
        ("4q1s64-fp9", "an option must be .*, got 'fp9'"),
        ("4q1s64-page0", "page_size of .* must be between 1"),
    ],
)
def test_what_is_no_case_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        grammar.parse(text, CPU)


def test_presets_are_cases() -> None:
    sizes = {name: len(grammar.parse(name, CPU)) for name in grammar.PRESETS}
    assert sizes == {"seed": 8, "serving": 24, "long": 12, "mtp": 12, "quick": 4}


# problems


def test_what_must_be_read_and_computed() -> None:
    case = Case(2, 100, q_len=3, heads=5, cache_dtype=FN)
    assert case.useful_bytes == 2 * 100 * 576 + 2 * 3 * 5 * (576 + 512) * 2
    assert case.flop == 2 * sum((98, 99, 100)) * 2 * 5 * (576 + 512)
    ragged = replace(case, ragged=True, batch=400)
    assert sum(ragged.lengths) / 400 == pytest.approx(100, rel=0.1)
    assert 3 <= min(ragged.lengths) < 20 and 180 < max(ragged.lengths) <= 197


@pytest.mark.parametrize("dtype", draw.MASKS, ids=str)
def test_random_caches_are_finite_and_of_the_size_of_q(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = draw.cache((8, 16, 576), dtype, CPU, generator).float() * draw.SCALES.get(dtype, 1)
    assert numbers.isfinite().all()
    assert 0.7 < numbers.square().mean() < 1.1
    assert abs(numbers.mean()) < 0.02


def test_the_caches_of_a_workload_differ_and_each_is_judged() -> None:
    made = workload.make(Case(3, 100, ragged=True), CPU, sets=2)
    for turn in (0, 1, 2):
        out = made.decode(turn)
        assert workload.error(made, out, turn) < 3e-3 < workload.error(made, out, turn + 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda out: out * 1.01,
        torch.zeros_like,
        lambda out: out.index_fill(1, torch.tensor(0), torch.nan),
        lambda out: torch.cat((out[1:], out[:1])),
        lambda out: out[:, :, :-1],
    ],
    ids=["1 % off", "zeros", "NaN", "other sequence", "a head less"],
)
def test_a_wrong_result_is_not_timed(wrong: Callable[[Tensor], Tensor]) -> None:
    def prepare(made: Workload) -> providers.Run:
        return lambda turn: wrong(made.decode(turn))

    rows = measure.measure(
        Case(3, 100), [Provider("mla_ops wrong", True, prepare, bar=lambda made: 3e-3)], QUICK
    )
    assert rows[0]["verdict"] == "WRONG" and "median_us" not in rows[0]
    assert rows[-1]["verdict"] == "floor" and rows[-1]["median_us"]


def test_one_that_reads_the_first_cache_alone_is_found_out() -> None:
    cheat = Provider("peer", False, lambda made: lambda turn: made.decode(0))
    rows = measure.measure(Case(3, 100), [cheat], replace(QUICK, rotated=1 << 20))
    assert rows[0]["caches_rotated"] == 3 and rows[0]["verdict"] == "WRONG"


def test_one_that_fails_or_refuses_is_told_and_the_others_are_timed() -> None:
    def refuses(made: Workload) -> providers.Run:
        raise Refused("pages must be of 32 tokens, got 64")

    def fails(made: Workload) -> providers.Run:
        raise OSError("gone\nand more")

    contenders = [
        Provider("a", False, refuses),
        Provider("b", False, fails),
        providers.ours("native"),
    ]
    rows = {str(row["provider"]): row for row in measure.measure(Case(3, 100), contenders, QUICK)}
    assert rows["a"]["verdict"] == "refused: pages must be of 32 tokens, got 64"
    assert rows["b"]["verdict"] == "failed: OSError: gone"
    assert rows["mla_ops native"]["verdict"] == "right"


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 100),
        Case(3, 100, ragged=True),
        Case(2, 70, q_len=3, heads=5, cache_dtype=FN, page_size=16),
        Case(2, 70, q_len=2, ragged=True, q_dtype=FN, cache_dtype=FN),
        Case(2, 70, q_dtype=torch.float32, cache_dtype=torch.float32, rank=256, rope=32),
    ],
    ids=str,
)
def test_torch_is_asked_the_same(case: Case) -> None:
    """In float32 it is right to 1e-5: what it is asked is what we are asked."""
    made = workload.make(case, CPU, sets=2)
    for provider in providers.TORCH[:3]:
        assert workload.error(made, provider.prepare(made)(1), 1) < providers.PEER_BAR
    wide = replace(made, q=made.q.float() * (1 if made.q_scale is None else made.q_scale))
    wide = replace(wide, case=replace(case, q_dtype=torch.float32), q_scale=None)
    providers.forget()
    for provider in providers.TORCH[:3]:
        assert workload.error(wide, provider.prepare(wide)(1), 1) < 1e-5, provider.name
    providers.forget()


def test_ours_refuse_with_the_reason_of_the_table() -> None:
    with pytest.raises(Refused, match="arch must be gfx942, got cpu"):
        providers.ours("aiter").prepare(workload.make(Case(1, 64), CPU))
    here, missing = bench.chosen(None, CPU)
    assert [provider.name for provider in here][:2] == ["mla_ops native", "mla_ops torch"]
    assert missing["FlashMLA"] == "flash_mla is not installed"
    assert set(missing) == {"mla_ops aiter", "torch flex", *(one.name for one in peers.PEERS)}


def test_memory_bounds_the_caches() -> None:
    case = Case(4, 1024)
    each = case.cache_bytes
    settings = measure.Settings(CPU, rotated=10 * each)
    assert measure.sets_for(case, settings, 1 << 40, copies=False) == 10
    assert measure.sets_for(case, settings, 7 * each, copies=False) == 7
    assert measure.sets_for(case, settings, 9 * each, copies=True) == 3
    assert measure.sets_for(case, replace(settings, rotated=0), 1 << 40, copies=False) == 1
    assert measure.sets_for(case, replace(settings, rotated=1), 1 << 40, copies=False) == 2
    with pytest.raises(measure.DoesNotFit, match="its cache needs .* of memory is free"):
        measure.sets_for(case, settings, each - 1, copies=False)


# timing


def test_contenders_take_turns_with_rotating_inputs() -> None:
    calls: list[tuple[str, int]] = []

    def slow(name: str, seconds: float) -> timing.Call:
        def call(turn: int) -> None:
            calls.append((name, turn))
            time.sleep(seconds)

        return call

    times = timing.interleaved({"a": slow("a", 0.03), "b": slow("b", 0.06)}, 3, CPU)
    assert [name for name, _ in calls] == ["a", "a", "b", "b", *("a", "b") * 3]
    assert [turn for name, turn in calls if name == "b"] == [0, 1, 2, 3, 4]
    assert times["a"].how == "burst" and len(times["a"].seconds) == 3
    assert 0.03 <= times["a"].median < times["b"].median
    low, high = times["b"].quartiles
    assert low <= times["b"].median <= high


def test_a_budget_shortens_and_never_below_the_least() -> None:
    times = timing.interleaved({"a": lambda turn: time.sleep(0.03)}, 50, CPU, budget=0.0)
    assert len(times["a"].seconds) == timing.MIN_TURNS


def test_the_floor_reads_the_useful_bytes() -> None:
    for case in (Case(4, 1024, cache_dtype=FN), Case(4, 64, heads=128), Case(1, 9, rope=33)):
        made = workload.make(case, CPU)
        for call in floor.readers(made).values():
            assert torch.isfinite(call(0))  # type: ignore[arg-type]
        count = case.useful_bytes // 4
        assert floor._numbers(made.caches[0], count).numel() == count
    assert floor.matmul_flops(CPU) > 1e9


# tables


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.csv"
    options = ("--device", "cpu", "--providers", "native,bmm", "--turns", "2", "--warm")
    assert main(("bench", "3q1s100-bf16,fp8", *options, "--csv", str(path))) == 0
    shown = capsys.readouterr().out
    rows = table.read_csv(path)
    assert [row["provider"] for row in rows] == [
        *("mla_ops native", "torch bmm", measure.FLOOR) * 2
    ]
    for row in rows:
        assert row["machine"] and row["torch"] == torch.__version__ and row["mla_ops"]
        case = grammar.parse(row["case"], CPU)[0]
        by = float(row["median_us"]) * 1e3 * float(row["gb_per_s"])
        assert by == pytest.approx(case.useful_bytes, rel=0.01)
        assert row["case"] in shown
    ours, peer, least = rows[:3]
    assert float(ours["best_other_over_it"]) == pytest.approx(
        float(peer["median_us"]) / float(ours["median_us"]), rel=1e-3
    )
    share = float(least["median_us"]) / float(ours["median_us"])
    assert float(ours["percent_of_floor"]) == pytest.approx(100 * share, rel=1e-3)

    assert main(("bench", "--read", str(path), "--compare", str(path))) == 0
    assert "0 slower" in capsys.readouterr().out
    faster = [row | {"median_us": "1", "three_quarters_us": "1"} for row in rows]
    table.write_csv(tmp_path / "old.csv", faster)
    assert main(("bench", "--read", str(path), "--compare", str(tmp_path / "old.csv"))) == 1
    assert "2 slower" in capsys.readouterr().out  # ours; others may be as slow as they like


def test_a_wrong_backend_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Workload.decode
    monkeypatch.setattr(Workload, "decode", lambda self, *a, **k: right(self, *a, **k) * 1.01)
    options = ("--device", "cpu", "--providers", "native", "--turns", "2", "--warm")
    assert main(("bench", "3q1s100", *options)) == 1
    assert "| WRONG |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("4q1",), "a case must be"),
        (("quick", "--providers", "nobody"), "a provider must be one of mla_ops aiter, .*nobody"),
        (("--read", "/no/such/file"), "No such file"),
        (("--read", __file__), "must be a CSV of `python -m mla_ops bench`"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("bench", "--device", "cpu", *arguments)) == 2
    assert re.search(told, capsys.readouterr().out)


def row(median: float, spread: float = 0.01, **more: str) -> dict[str, object]:
    about = {"case": "1q1s1k", "provider": "mla_ops native", "machine": "m", **more}
    low, high = median * (1 - spread), median * (1 + spread)
    return {**about, "median_us": median, "quarter_us": low, "three_quarters_us": high}


def test_compare_tells_noise_from_change() -> None:
    assert table.compare([row(100)], [row(110)], 0.05)[1] == 1
    assert table.compare([row(100)], [row(104)], 0.05)[1] == 0
    assert table.compare([row(100)], [row(110, spread=0.2)], 0.05)[1] == 0
    text, slower = table.compare([row(100)], [row(80)], 0.05)
    assert slower == 0 and "faster" in text and "0.80x" in text
    text, _ = table.compare([row(100)], [row(100), row(5, case="2q1s1k")], 0.05)
    assert "1 of 2 are new" in text
    with pytest.raises(ValueError, match="in common, got none .machines: m and n"):
        table.compare([row(100)], [row(100, machine="n")], 0.05)


def test_noise_is_told() -> None:
    full = {
        name: "1"
        for name in ("gb_per_s", "gflop_per_s", "percent_of_floor", "best_other_over_it", "verdict")
    }
    assert "NOISY" not in table.summary([row(100) | full])
    assert "NOISY: in 1 of 2 rows" in table.summary([row(100) | full, row(9, spread=0.2) | full])


# other libraries, as stand-ins that take what theirs do: none is here


def decoded(made: Workload, rows_of: Callable[[int], Tensor]) -> Tensor:
    """The oracle on rows that a stand-in found the way its library would."""
    outs = [
        reference.decode(
            made.q[b : b + 1],
            rows_of(b)[None],
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([made.case.lengths[b]], dtype=torch.int32),
            SOFTMAX_SCALE,
            kv_scale=made.kv_scale,
        )[0]
        for b in range(made.case.batch)
    ]
    return torch.cat(outs).to(made.q.dtype)


def library(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:i]))
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    vars(module).update(functions)


def run_peer(index: int, made: Workload) -> float:
    return workload.error(made, peers.PEERS[index].prepare(made)(1), 1)


def test_flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    made = workload.make(Case(3, 100, ragged=True), CPU, sets=2)

    def decode(q, cache, table, lengths, rank, metadata, splits, softmax_scale, causal):  # noqa
        assert (metadata, splits, rank, causal) == ("m", "s", 512, True)
        assert cache.shape[1:] == (64, 1, 576)
        out, _ = reference.decode(q, cache[:, :, 0], table, lengths, softmax_scale)
        return out.to(q.dtype), None

    library(
        monkeypatch,
        "flash_mla",
        get_mla_metadata=lambda lengths, rows, kv_heads: ("m", "s"),
        flash_mla_with_kvcache=decode,
    )
    assert run_peer(0, made) < 3e-3
    for case in (Case(1, 64, cache_dtype=FN), Case(1, 64, page_size=32)):
        with pytest.raises(Refused):
            run_peer(0, workload.make(case, CPU, sets=2))


def test_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = workload.make(Case(3, 100, q_len=2, ragged=True), CPU, sets=2)

    class Wrapper:
        def __init__(self, workspace, backend):  # noqa
            assert workspace.dtype == torch.int8

        def plan(
            self, queries, begins, pages, lengths, heads, ckv, kpe, page, causal, scale, q, kv
        ):  # noqa
            assert (heads, ckv, kpe, page, causal) == (16, 512, 64, 64, True)
            assert queries.tolist() == [0, 2, 4, 6]
            self.begins, self.pages, self.lengths, self.scale = begins, pages, lengths, scale

        def run(self, nope, pe, ckv, kpe):  # noqa
            cache = torch.cat((ckv, kpe), -1)
            rows = lambda b: cache[self.pages[self.begins[b] : self.begins[b + 1]].long()].flatten(  # noqa
                0, 1
            )
            assert torch.equal(torch.cat((nope, pe), -1), made.q.flatten(0, 1))
            return decoded(made, rows).flatten(0, 1)

    library(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=Wrapper)
    assert run_peer(1, made) < 3e-3


@pytest.mark.parametrize("module", peers.VLLM)
def test_vllm(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    made = workload.make(Case(3, 100, cache_dtype=FN, ragged=True), CPU, sets=2)

    def forward(
        q,
        k,
        v,
        o,
        lse,
        table,
        lengths,
        parts,
        splits,
        scale,
        page_size=1,
        logit_cap=0.0,
        k_scale=None,
        v_scale=None,
    ):  # noqa
        assert parts.shape == (3, 16, splits, 513) and v.shape[-1] == 512 and page_size == 64
        assert k_scale is v_scale
        out, _ = reference.decode(q[:, None], k[:, :, 0], table, lengths, scale, kv_scale=k_scale)
        o.copy_(out[:, 0])

    library(monkeypatch, module, decode_attention_fwd=forward)
    assert run_peer(2, made) < 3e-3


def test_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    made = workload.make(Case(3, 100, cache_dtype=FN, ragged=True), CPU, sets=2)

    def forward(
        q, k, v, o, begins, rows, parts, lse, splits, max_splits, sm_scale, k_scale, v_scale
    ):  # noqa
        assert parts.shape == (3, 16, max_splits, 512) and k.shape[1:] == (1, 576)
        assert k_scale == v_scale == float(made.kv_scale)
        of = lambda b: k[rows[begins[b] : begins[b + 1]].long(), 0]  # noqa
        o.copy_(decoded(made, of)[:, 0])

    library(monkeypatch, peers.SGLANG[0], decode_attention_fwd=forward)
    assert run_peer(3, made) < 3e-3


def test_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = workload.make(Case(3, 100, q_len=2, ragged=True), CPU, sets=2)

    def forward(
        q,
        kv_buffer,
        o,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_last_page_lens,
        max_seqlen_q,
        sm_scale,
        q_scale,
        kv_scale,
    ):  # noqa
        assert kv_buffer.shape[1:] == (1, 1, 576) and kv_last_page_lens.tolist() == [1, 1, 1]
        assert qo_indptr.tolist() == [0, 2, 4, 6] and kv_indices.dtype == torch.int32
        of = lambda b: kv_buffer[kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long(), 0, 0]  # noqa
        o.copy_(decoded(made, of).flatten(0, 1))

    library(monkeypatch, "aiter.mla", mla_decode_fwd=forward)
    assert run_peer(4, made) < 3e-3
    with pytest.raises(Refused, match="heads must be 16 or 128, got 20"):
        run_peer(4, workload.make(Case(1, 64, heads=20), CPU, sets=2))


# pictures


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mla_ops.bench import plots

    cases = grammar.parse("2q1s64,128-bf16,fp8", CPU)
    facts = {"machine": "m", "matmul_gflop_per_s": "900", "threads": "2"}
    rows = [
        facts
        | measure.describe(case)
        | {"provider": name, "median_us": us, "gb_per_s": case.useful_bytes / us / 1e3}
        | {"percent_of_floor": 100 / over, "gflop_per_s": case.flop / us / 1e3}
        for case in cases
        for name, over in (("mla_ops native", 1.5), ("torch bmm", 4.0), (measure.FLOOR, 1.0))
        for us in (over * case.useful_bytes / 3e4,)
    ]
    found = plots.draw(rows, tmp_path / "one")
    assert [path.name for path in found] == ["bandwidth.png", "over_floor.png", "roofline.png"]
    again = plots.draw(rows, tmp_path / "two")
    for one, other in zip(found, again, strict=True):
        assert one.read_bytes().startswith(b"\x89PNG") and one.stat().st_size > 10_000
        assert one.read_bytes() == other.read_bytes()  # `make plots` changes nothing by itself
    with pytest.raises(ValueError, match="at least one timed row"):
        plots.draw([], tmp_path)


def test_plots_without_matplotlib_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mla_ops.bench import plots

    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        plots.draw([row(1.0)], tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("bench", "4q1s1k-bf16,fp8", "--device", "cuda", "--turns", "5")) == 0
    assert torch.cuda.get_device_name() in capsys.readouterr().out
