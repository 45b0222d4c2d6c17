"""The GPU kernels of quantize_fp8, write_kv_cache and merge_states on a card, against the oracle
and the CPU kernels. Bits are compared wherever the result is defined to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_ops
from mla_ops import _C, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.skipif(
        not _C.build_info()["gpu_architectures"], reason="built without GPU kernels (torch's kind)"
    ),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FLOAT8 = [FN, FNUZ]
DEVICE = "cuda"


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal bits; NaN equal to NaN."""
    got, want = got.cpu(), want.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    wrong = (got.view(raw) != want.view(raw)) & ~nan
    assert not wrong.any(), f"{int(wrong.sum())} differ, the first at {wrong.nonzero()[0].tolist()}"


def check(x: Tensor, scale: Tensor | None, to: torch.dtype, per_row: bool = False) -> None:
    """quantize_fp8 of a tensor on the card against the oracle."""
    codes, scales = mla_ops.quantize_fp8(x, scale, to, per_row)
    of = None if scale is None else scale.cpu()
    want, want_scales = reference.quantize_fp8(x.cpu(), of, to, per_row)
    assert codes.is_contiguous() and codes.shape == x.shape
    assert_same(scales, want_scales.reshape(scales.shape))
    assert_same(codes, want)


def patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(dtype).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype).to(DEVICE)


def one(value: float) -> Tensor:
    return torch.tensor([value], device=DEVICE)


# The last three are outside of what the fast division takes.
SCALES = [1.0, 0.037, 3.7, 2.0**-20, 1e-3 / 3, 2.0**-70, 2.0**70, 1e-40]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("to", FLOAT8)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_pattern_with_a_given_scale(
    dtype: torch.dtype, to: torch.dtype, scale: float
) -> None:
    check(patterns(dtype), one(scale), to)
    check(patterns(dtype)[1:], one(scale), to)  # one number at a time


@pytest.mark.parametrize("to", FLOAT8)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_pattern_with_a_found_scale(dtype: torch.dtype, to: torch.dtype) -> None:
    check(patterns(dtype), None, to)
    check(patterns(dtype).reshape(256, 256), None, to, per_row=True)


@pytest.mark.parametrize("to", FLOAT8)
def test_float32_of_every_size(to: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator, dtype=torch.int64)
    x = bits.to(torch.int32).view(FP32).to(DEVICE)
    for scale in (None, one(1.0), one(0.3)):
        check(x, scale, to)
    # Near the values where rounding turns over.
    x = torch.linspace(-500, 500, 1 << 18).to(DEVICE)
    check(x, one(1.0), to)


@pytest.mark.parametrize("scale", [None, 0.11])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 15, 16, 17, 31, 33, 255, 4095, 4097, 100003])
def test_odd_sizes(count: int, scale: float | None) -> None:
    for dtype in (BF16, FP32):
        check(normal(count, dtype=dtype), None if scale is None else one(scale), FN)


@pytest.mark.parametrize("columns", [1, 3, 16, 64, 100, 576, 7168])
@pytest.mark.parametrize("to", FLOAT8)
def test_rows(columns: int, to: torch.dtype) -> None:
    x = normal(37, columns) * torch.logspace(-3, 3, 37, device=DEVICE)[:, None].to(BF16)
    check(x, None, to, per_row=True)
    check(x, torch.logspace(-4, 2, 37, device=DEVICE)[:, None], to, per_row=True)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "last transposed": lambda x: x.transpose(1, 2),
    "every third": lambda x: x[..., ::3],
    "every second row, sliced": lambda x: x[:, ::2, 3:50],
    "unaligned": lambda x: x.reshape(-1)[1:],
    "unaligned rows": lambda x: x.reshape(-1)[1:2305].reshape(4, 576),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1),
    "one number, expanded": lambda x: x[0, 0, :1].expand(100),
    "five dimensions": lambda x: x.reshape(2, 2, 3, 2, 10, 12)[..., 1:].permute(4, 0, 2, 1, 3, 5),
    "a slice of q": lambda x: x.reshape(24, 120)[:, 8:72],
    "a scalar in a row": lambda x: x[0, 0, 0].reshape(1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("per_row", [False, True])
def test_strides(view: str, per_row: bool) -> None:
    x = VIEWS[view](normal(4, 6, 120))
    for to in FLOAT8:
        check(x, None, to, per_row)
    check(x, None if per_row else one(0.2), FN, per_row)


@pytest.mark.parametrize("shape", [(0,), (0, 6), (3, 0), (2, 0, 4), ()])
def test_nothing_to_convert(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=BF16, device=DEVICE)
    for per_row in (False, True)[: 2 if shape else 1]:
        codes, scales = mla_ops.quantize_fp8(x, None, FN, per_row)
        assert codes.shape == shape
        want = torch.full_like(scales, 1.0 if x.numel() == 0 else 1 / 448)
        assert torch.equal(scales, want)
    assert_same(mla_ops.quantize_fp8(x, one(2.0), FN)[1], torch.tensor([2.0]))


def has_memory(gigabytes: float) -> bool:
    return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > gigabytes * 2**30


@pytest.mark.slow
@pytest.mark.skipif(not has_memory(30), reason="needs 30 GiB of GPU memory")
def test_more_than_two_to_the_31_elements() -> None:
    period = 65537
    count = (1 << 31) + 5 * period + 11
    tile = torch.linspace(-100, 100, period).to(BF16).to(DEVICE)
    x = tile.repeat(-(-count // period))[:count]
    want = mla_ops.quantize_fp8(tile, one(0.5), FN)[0].view(torch.uint8)
    got = mla_ops.quantize_fp8(x, one(0.5), FN)[0].view(torch.uint8)
    whole = count // period
    assert bool((got[: whole * period].view(whole, period) == want).all())
    assert torch.equal(got[whole * period :], want[: count - whole * period])
    del got
    x[-1] = 448.0  # the largest is the last
    codes, scale = mla_ops.quantize_fp8(x, None, FN)
    assert float(scale) == 1.0 and float(codes[-1]) == 448.0
    want = mla_ops.quantize_fp8(tile, one(1.0), FN)[0].view(torch.uint8)
    assert torch.equal(codes.view(torch.uint8)[period : 2 * period], want)
    del codes
    rows = x[: (count // 4096) * 4096].view(-1, 4096)
    codes, scales = mla_ops.quantize_fp8(rows, None, FN, per_row=True)
    alone, scale = mla_ops.quantize_fp8(rows[-1].clone(), None, FN)
    assert torch.equal(scales[-1], scale)
    assert torch.equal(codes[-1].view(torch.uint8), alone.view(torch.uint8))
    # Strides beyond 2^31 elements, and few of them.
    far = x.as_strided((2, 1000), (1 << 31, 1))
    check(far, None, FN, per_row=True)


# writing into the cache


def slots_for(tokens: int, capacity: int, kind: str, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "duplicates":
        slots = torch.randint(0, min(capacity, tokens // 3 + 1), (tokens,), generator=generator)
    else:
        slots = torch.randperm(capacity, generator=generator)[:tokens]
    if kind != "all":
        slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    return slots


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", ["all", "skipped", "duplicates"])
@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("to", [BF16, FP16, FP32, FN, FNUZ])
def test_cache_is_as_the_cpu_writes_it(
    to: torch.dtype, tokens: int, kind: str, slot_dtype: torch.dtype
) -> None:
    for dtype, latent, rope in ((BF16, 512, 64), (FP32, 37, 3), (FP16, 16, 0)):
        kv = normal(tokens, latent + rope + 5, dtype=dtype).cpu()
        kv_c, k_pe = kv[:, :latent], kv[:, latent + 2 : latent + 2 + rope]
        cache = torch.full((50, 7, latent + rope), 3.0).to(to)
        slots = slots_for(tokens, 350, kind).to(slot_dtype)
        scale = torch.tensor([0.13]) if to in FLOAT8 else None
        on_card = cache.to(DEVICE)
        moved = kv.to(DEVICE)
        mla_ops.write_kv_cache(
            moved[:, :latent],
            moved[:, latent + 2 : latent + 2 + rope],
            on_card,
            slots.to(DEVICE),
            None if scale is None else scale.to(DEVICE),
        )
        mla_ops.write_kv_cache(kv_c, k_pe, cache, slots, scale)
        assert_same(on_card, cache)


def test_the_last_of_many_tokens_for_one_slot_stays() -> None:
    tokens = 5000
    kv_c = torch.arange(tokens, device=DEVICE, dtype=FP32)[:, None].expand(-1, 32).contiguous()
    k_pe = torch.empty(tokens, 0, device=DEVICE)
    cache = torch.zeros(4, 2, 32, device=DEVICE)
    slots = torch.arange(tokens, device=DEVICE) % 3
    for _ in range(20):
        cache.zero_()
        mla_ops.write_kv_cache(kv_c, k_pe, cache, slots)
        assert cache.view(8, 32)[:3, 0].tolist() == [4998.0, 4999.0, 4997.0]


def test_no_tokens_and_an_outer_stride() -> None:
    pool = torch.zeros(5, 2, 4, 24, device=DEVICE, dtype=BF16)
    cache = pool[:, 1]
    empty = torch.empty(0, 16, device=DEVICE, dtype=BF16)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    mla_ops.write_kv_cache(empty, empty[:, :8], cache, none)
    assert not pool.any()
    kv = normal(3, 24)
    mla_ops.write_kv_cache(kv[:, :16], kv[:, 16:], cache, torch.tensor([19, 0, 6], device=DEVICE))
    assert_same(cache[[4, 0, 1], [3, 0, 2]], kv)
    assert not pool[:, 0].any()


@pytest.mark.slow
@pytest.mark.skipif(not has_memory(12), reason="needs 12 GiB of GPU memory")
def test_a_cache_beyond_four_gib() -> None:
    pages = (5 << 30) // (64 * 576 * 2)
    cache = torch.zeros(pages, 64, 576, dtype=BF16, device=DEVICE)
    kv = normal(3, 576)
    slots = torch.tensor([pages * 64 - 1, 0, pages * 32 + 5], device=DEVICE)
    mla_ops.write_kv_cache(kv[:, :512], kv[:, 512:], cache, slots)
    assert_same(cache.view(-1, 576)[slots], kv)
    assert int(cache.count_nonzero()) == int(kv.count_nonzero())


# merging


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [1, 8, 100, 512])
def test_merging(dtype: torch.dtype, width: int) -> None:
    inf = float("inf")
    a, b = normal(40, width, dtype=dtype), normal(40, width, dtype=dtype, seed=5)
    lse_a, lse_b = normal(40, dtype=FP32, seed=6), normal(40, dtype=FP32, seed=7)
    lse_a[0], a[0] = -inf, torch.nan
    lse_b[1], b[1] = -inf, torch.nan
    lse_a[2], lse_b[2], a[2], b[2] = -inf, -inf, torch.nan, torch.nan
    lse_a[3], a[3] = inf, torch.nan  # FlashMLA's mark of an empty row
    lse_a[4], lse_b[4], b[4] = 500.0, -500.0, torch.inf
    a[5, 0] = torch.nan  # a real one is kept
    out, lse = mla_ops.merge_states(a, lse_a, b, lse_b)
    want, want_lse = mla_ops.merge_states(*(x.cpu() for x in (a, lse_a, b, lse_b)))
    error = {BF16: 2**-7, FP16: 2**-10, FP32: 1e-6}[dtype]
    close = {"rtol": error, "atol": error, "equal_nan": True}
    torch.testing.assert_close(out.cpu(), want, **close)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-6, atol=1e-6)
    assert not out[2].any() and float(lse[2]) == -inf
    assert_same(out[0], b[0])
    assert_same(out[1], a[1])
    assert bool(out[5, 0].isnan())


def test_merging_nothing_and_strided() -> None:
    a, lse = torch.empty(0, 4, 8, device=DEVICE), torch.empty(0, 4, device=DEVICE)
    assert mla_ops.merge_states(a, lse, a, lse)[0].shape == (0, 4, 8)
    a, b = normal(6, 4, 33).transpose(0, 1), normal(4, 6, 70)[..., 1:67:2]
    lse_a, lse_b = normal(6, 4, dtype=FP32).T, normal(4, 6, dtype=FP32)
    got = mla_ops.merge_states(a, lse_a, b, lse_b)
    want = mla_ops.merge_states(a.contiguous(), lse_a.contiguous(), b.contiguous(), lse_b)
    for x, y in zip(got, want, strict=True):
        assert_same(x, y)


# streams, graphs, compilation


class Step:
    """One of each op on tensors that are kept."""

    def __init__(self, seed: int = 1) -> None:
        self.x = normal(33, 576, seed=seed)
        self.slots = slots_for(33, 80, "duplicates", seed).to(DEVICE)
        self.cache = torch.zeros(5, 16, 576, device=DEVICE).to(FN)
        self.lse = normal(33, dtype=FP32, seed=seed + 1)

    def run(self) -> list[Tensor]:
        codes, scale = mla_ops.quantize_fp8(self.x, None, FN)
        rows, scales = mla_ops.quantize_fp8(self.x, None, FN, per_row=True)
        mla_ops.write_kv_cache(
            self.x[:, :512], self.x[:, 512:], self.cache, self.slots, scale.clone()
        )
        out, lse = mla_ops.merge_states(self.x, self.lse, self.x * 2, self.lse + 1)
        return [codes, scale, rows, scales, out, lse]

    def change(self, seed: int) -> None:
        other = Step(seed)
        for name in ("x", "slots", "lse"):
            getattr(self, name).copy_(getattr(other, name))
        self.cache.zero_()


def test_capture_on_a_side_stream_and_replay_with_other_inputs() -> None:
    step = Step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step.run()
    for seed in (10, 20):
        step.change(seed)
        # What the graph leaves must come from the graph.
        for tensor in captured:
            tensor.view(torch.uint8).zero_()
        graph.replay()
        cache = step.cache.clone()
        step.cache.zero_()
        for got, want in zip([*captured, cache], [*step.run(), step.cache], strict=True):
            assert_same(got, want)


def test_two_streams_at_once() -> None:
    """The found scales must not be shared between calls in flight."""
    steps = [Step(seed) for seed in (1, 100)]
    big = [normal(1 << 22, seed=seed) * factor for seed, factor in ((3, 1), (4, 50))]
    want = [[t.cpu() for t in (*steps[i].run(), *mla_ops.quantize_fp8(big[i]))] for i in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    kept: list[tuple[int, list[Tensor]]] = []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                kept.append((i, [*steps[i].run(), *mla_ops.quantize_fp8(big[i])]))
    torch.cuda.synchronize()
    for i, results in kept:
        for got, expected in zip(results, want[i], strict=True):
            assert_same(got, expected)


def test_work_is_ordered_on_the_current_stream() -> None:
    """On another stream than torch's this reads x before it is there."""
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 20, dtype=BF16, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(3.0)
        codes, _ = mla_ops.quantize_fp8(x, one(1.0), FN)
    torch.cuda.synchronize()
    assert bool((codes.float() == 3.0).all())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    @torch.compile(fullgraph=True, mode=mode)
    def step(x: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        codes, scale = mla_ops.quantize_fp8(x * 2, None, FN)
        rows, scales = mla_ops.quantize_fp8(x * 2, None, FN, per_row=True)
        out, merged = mla_ops.merge_states(x, lse, x * 2, lse + 1)
        return codes, scale, rows, scales, out, merged

    for seed in (1, 2, 3):
        x, lse = normal(33, 576, seed=seed), normal(33, dtype=FP32, seed=seed)
        got = [t.clone() for t in step(x, lse)]
        want = [
            *mla_ops.quantize_fp8(x * 2, None, FN),
            *mla_ops.quantize_fp8(x * 2, None, FN, per_row=True),
            *mla_ops.merge_states(x, lse, x * 2, lse + 1),
        ]
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)


def test_opcheck() -> None:
    check = torch.library.opcheck
    for per_row in (False, True):
        check(torch.ops.mla.quantize_fp8.default, (normal(4, 6), None, FN, per_row))
    x, lse = normal(4, 6), normal(4, dtype=FP32)
    check(torch.ops.mla.merge_states.default, (x, lse, x, lse))


def test_no_call_waits_for_the_device() -> None:
    step = Step()
    step.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_than_the_current_one() -> None:
    x = normal(100, 64).to("cuda:1")
    codes, scale = mla_ops.quantize_fp8(x, None, FN)
    assert codes.device == x.device
    want, want_scale = reference.quantize_fp8(x.cpu(), None, FN)
    assert_same(codes, want)
    assert_same(scale, want_scale)
