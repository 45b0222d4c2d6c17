"""Small HIP kernels, compiled by ziglang's clang for both chips and executed: whole paths from
source to result.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from machine import same_floats

from build_tools.cdna.compiler import ARCHES, CompileError, compile_cached, compile_hip
from build_tools.cdna.decoder import Instruction, sweep
from build_tools.cdna.launch import launch
from build_tools.cdna.schedule import Lockstep, RoundRobin
from build_tools.cdna.state import Fault

HEADER = "#include <hip/hip_runtime.h>\n"
KERNEL = HEADER + 'extern "C" __global__ void '
both = pytest.mark.parametrize("arch", ARCHES)
GLOBAL = "unsigned i = blockIdx.x * blockDim.x + threadIdx.x;"


@both
def test_grid_tails_and_exact_division(arch: str) -> None:
    """blockDim comes from the hidden arguments; the last work-group is partly masked."""
    source = (
        KERNEL
        + f"""k(const float* x, float* y, float a, int n) {{
      {GLOBAL} if (i < n) y[i] = a * x[i] / y[i]; }}"""
    )
    random = np.random.default_rng(0)
    x, y = (random.standard_normal(10007).astype(np.float32) for _ in range(2))
    before = y.copy()
    launch(compile_cached(source, arch), "k", 10007 // 256 + 1, 256, x, y, np.float32(2.5), 10007)
    assert same_floats(y, np.float32(2.5) * x / before)


@both
@pytest.mark.parametrize("block", [64, 100, 256, 1024])
def test_grid_stride_reduction(arch: str, block: int) -> None:
    """Shuffles, LDS, a barrier, one atomic for a work-group; loops of different length. In a
    partial wave inactive lanes shuffle zeros in.
    """
    source = (
        KERNEL
        + f"""k(const float* x, float* out, int n) {{
      __shared__ float part[16];
      float v = 0;
      for ({GLOBAL[:-1]}; i < n; i += gridDim.x * blockDim.x) v += x[i];
      for (int m = 32; m; m >>= 1) v += __shfl_down(v, m);
      if (threadIdx.x % 64 == 0) part[threadIdx.x / 64] = v;
      __syncthreads();
      if (threadIdx.x == 0) {{
        float s = 0;
        for (int w = 0; w < (blockDim.x + 63) / 64; w++) s += part[w];
        atomicAdd(out, s);
      }}
    }}"""
    )
    x = (
        np.random.default_rng(0).integers(-8, 9, 5000).astype(np.float32)
    )  # sums are exact in any order
    out = np.zeros(1, np.float32)
    stats = launch(compile_cached(source, arch), "k", 5, block, x, out, 5000, find_races=True)
    assert out[0] == x.sum() and not stats.races


@both
def test_three_dimensional_grids(arch: str) -> None:
    source = (
        KERNEL
        + """k(int* out, int nx, int ny) {
      int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y,
          z = blockIdx.z * blockDim.z + threadIdx.z;
      int dims = gridDim.x * 100 + gridDim.y * 10 + gridDim.z;
      out[(z * ny + y) * nx + x] = x + 1000 * y + 1000000 * z + 7 * dims;
    }"""
    )
    nx, ny, nz = 3 * 8, 2 * 4, 5 * 2
    out = np.zeros((nz, ny, nx), np.int32)
    launch(compile_cached(source, arch), "k", (3, 2, 5), (8, 4, 2), out, nx, ny)
    z, y, x = np.indices(out.shape)
    np.testing.assert_array_equal(out, x + 1000 * y + 1000000 * z + 7 * 325)


@both
def test_scratch_and_dynamic_lds(arch: str) -> None:
    source = (
        HEADER
        + """extern __shared__ int pool[];
    extern "C" __global__ void k(const int* index, int* out, int n) {
      int table[37];
      for (int j = 0; j < 37; j++) table[j] = j * j + threadIdx.x;
      pool[threadIdx.x] = table[index[threadIdx.x]];
      __syncthreads();
      out[threadIdx.x] = pool[(threadIdx.x + 1) % n];
    }"""
    )
    index = np.random.default_rng(0).integers(0, 37, 128).astype(np.int32)
    out = np.zeros(128, np.int32)
    code = compile_cached(source, arch)
    assert code.kernel("k").scratch_bytes > 0 and code.kernel("k").lds_bytes == 0
    launch(code, "k", 1, 128, index, out, 128, dynamic_lds=512)
    np.testing.assert_array_equal(out, np.roll(index**2 + np.arange(128), -1))
    with pytest.raises(Fault, match="LDS access"):
        launch(code, "k", 1, 128, index, out, 128, dynamic_lds=508)


@both
def test_constant_tables_and_calls(arch: str) -> None:
    """Constants are read through s_getpc; a function that is not inlined is called through
    s_swappc.
    """
    source = (
        HEADER
        + """__constant__ float table[5] = {1.5f, -2.f, 3.25f, 8.f, 0.125f};
    __device__ __noinline__ float twice(float x, int n) {
      for (int i = 0; i < n; i++) x = x * 2 + i;
      return x;
    }
    extern "C" __global__ void k(const int* n, float* y) {
      int i = threadIdx.x;
      y[i] = twice(table[n[i] % 5], n[i]);
    }"""
    )
    n = np.random.default_rng(0).integers(0, 9, 64).astype(np.int32)
    y = np.zeros(64, np.float32)
    launch(compile_cached(source, arch), "k", 1, 64, n, y)
    expected = []
    for count in n:
        value = [1.5, -2, 3.25, 8, 0.125][count % 5]
        for i in range(count):
            value = value * 2 + i
        expected.append(value)
    np.testing.assert_array_equal(y, np.array(expected, np.float32))


CONVERSION = """k(const unsigned short* x, unsigned* y, float inverse, int n) {
  %s
  if (i * 4 >= n) return;
  float v[4];
  for (int j = 0; j < 4; j++) v[j] = __uint_as_float(unsigned(x[i * 4 + j]) << 16) * inverse;
  const float limit = %s;
  for (int j = 0; j < 4; j++)
    v[j] = v[j] != v[j] ? v[j] : __builtin_amdgcn_fmed3f(v[j], limit, -limit);
  int packed = __builtin_amdgcn_cvt_pk_fp8_f32(v[0], v[1], 0, false);
  y[i] = __builtin_amdgcn_cvt_pk_fp8_f32(v[2], v[3], packed, true);
}"""


@both
@pytest.mark.parametrize("inverse", [1.0, 0.37])
def test_bf16_to_fp8_for_all_patterns(arch: str, inverse: float) -> None:
    """Saturating, NaN kept: bit-equal to ml_dtypes after a clip, for all 65536 bf16 patterns."""
    dtype = ml_dtypes.float8_e4m3fnuz if arch == "gfx942" else ml_dtypes.float8_e4m3fn
    limit = float(ml_dtypes.finfo(dtype).max)
    x = np.arange(1 << 16, dtype=np.uint16)
    y = np.zeros(1 << 14, np.uint32)
    source = KERNEL + CONVERSION % (GLOBAL, f"{limit}f")
    launch(compile_cached(source, arch), "k", 64, 256, x, y, np.float32(inverse), 1 << 16)
    with np.errstate(all="ignore"):
        wide = x.view(ml_dtypes.bfloat16).astype(np.float32) * np.float32(inverse)
        expected = np.where(np.isnan(wide), wide, np.clip(wide, -limit, limit)).astype(dtype)
    got = y.view(np.uint8)
    nan = np.isnan(wide)
    np.testing.assert_array_equal(got[~nan], expected.view(np.uint8)[~nan])
    assert np.isnan(got.view(dtype).astype(np.float32)[nan]).all()


@both
def test_without_a_clamp_overflow_is_nan(arch: str) -> None:
    source = (
        KERNEL
        + """k(const float* x, unsigned* y) {
      int i = threadIdx.x;
      y[i] = __builtin_amdgcn_cvt_pk_fp8_f32(x[i], -x[i], 0, false);
    }"""
    )
    dtype = ml_dtypes.float8_e4m3fnuz if arch == "gfx942" else ml_dtypes.float8_e4m3fn
    x = np.geomspace(100, 1000, 64).astype(np.float32)
    y = np.zeros(64, np.uint32)
    launch(compile_cached(source, arch), "k", 1, 64, x, y)
    got = y.astype("<u4").view(np.uint8).reshape(64, 4)[:, :2].copy().view(dtype).astype(np.float32)
    assert same_floats(got, np.stack([x, -x], 1).astype(dtype).astype(np.float32))
    assert np.isnan(got).any() and not np.isnan(got).all()


@both
def test_raw_buffers(arch: str) -> None:
    """Loads beyond num_records give 0 and stores there are dropped; the neighbouring data is
    not zero.
    """
    source = (
        HEADER
        + """typedef int v4i __attribute__((ext_vector_type(4)));
    extern "C" __global__ void k(const int* x, int* y, int bytes) {
      auto in = __builtin_amdgcn_make_buffer_rsrc((void*)x, 0, bytes, 0x00027000);
      auto out = __builtin_amdgcn_make_buffer_rsrc((void*)y, 0, bytes, 0x00027000);
      v4i v = __builtin_amdgcn_raw_buffer_load_b128(in, threadIdx.x * 16, 4, 0);
      __builtin_amdgcn_raw_buffer_store_b128(v + 1, out, threadIdx.x * 16, 4, 0);
    }"""
    )
    x = np.arange(1000, 1400, dtype=np.int32)
    y = np.full(400, -7, np.int32)
    launch(compile_cached(source, arch), "k", 1, 64, x, y, 600)
    expected = np.full(400, -7, np.int32)
    for lane in range(64):
        for k in range(4):
            dword = lane * 4 + 1 + k
            if 4 * dword + 4 <= 600:
                expected[dword] = x[dword] + 1
    np.testing.assert_array_equal(y, expected)


@both
def test_24_bit_multiplication(arch: str) -> None:
    """Signed and unsigned 24-bit products, with negative factors and garbage in the upper byte."""
    source = (
        KERNEL
        + f"""k(const int* a, const int* b, int* s, unsigned* u, int n) {{
      {GLOBAL}
      if (i >= n) return;
      s[i] = __builtin_amdgcn_mul_i24(a[i], b[i]);
      u[i] = __builtin_amdgcn_mul_u24(a[i], b[i]);
    }}"""
    )
    random = np.random.default_rng(0)
    a, b = (random.integers(-(1 << 31), 1 << 31, 1000).astype(np.int32) for _ in range(2))
    s, u = np.zeros(1000, np.int32), np.zeros(1000, np.uint32)
    source = source.replace(
        "__builtin_amdgcn_mul_i24(a[i], b[i])", "((a[i] << 8) >> 8) * ((b[i] << 8) >> 8)"
    )
    source = source.replace(
        "__builtin_amdgcn_mul_u24(a[i], b[i])", "(a[i] & 0xffffffu) * (b[i] & 0xffffffu)"
    )
    code = compile_cached(source, arch)
    stats = launch(code, "k", 4, 256, a, b, s, u, 1000)
    assert stats.counts["v_mul_i32_i24"] and stats.counts["v_mul_u32_u24"]
    low = lambda x: x.astype(np.int64) & 0xFFFFFF  # noqa: E731
    signed = lambda x: low(x) - ((low(x) & 0x800000) << 1)  # noqa: E731
    np.testing.assert_array_equal(s, (signed(a) * signed(b)).astype(np.int32))
    np.testing.assert_array_equal(u, (low(a) * low(b) & 0xFFFFFFFF).astype(np.uint32))


@both
def test_divergent_branches(arch: str) -> None:
    """Nested conditions and loops that end lane by lane: EXEC is saved, narrowed and restored."""
    source = (
        KERNEL
        + f"""k(const int* x, int* y, int n) {{
      {GLOBAL}
      if (i >= n) return;
      int v = x[i], steps = 0;
      while (v != 1 && steps < 200) {{
        if (v & 1) {{ v = 3 * v + 1; if (v % 3 == 0) steps += 100; }} else v >>= 1;
        steps++;
      }}
      y[i] = steps;
    }}"""
    )
    x = np.arange(1, 701, dtype=np.int32)
    y = np.zeros(700, np.int32)

    def collatz(v: int) -> int:
        steps = 0
        while v != 1 and steps < 200:
            v = 3 * v + 1 if v & 1 else v >> 1
            steps += 1
        return steps

    for schedule in (Lockstep(), RoundRobin(5, seed=2)):
        y[:] = 0
        launch(compile_cached(source, arch), "k", 3, 256, x, y, 700, schedule=schedule)
        assert y.tolist() == [collatz(int(v)) for v in x]


FOLDED = """k(const float* x, float* y) {
  float a = x[threadIdx.x], b = x[threadIdx.x + 64];
  y[threadIdx.x] = (a + b) * 2.f;
  y[threadIdx.x + 64] = (a * b) * 0.5f;
  y[threadIdx.x + 128] = (fabsf(a) - b) * 4.f;
  y[threadIdx.x + 192] = __builtin_amdgcn_fmed3f(a * 2.f + b, 0.f, 1.f);
}"""
FLUSHING = (
    "-fgpu-flush-denormals-to-zero",
    "-mno-amdgpu-ieee",
    "-fno-honor-nans",
    "-fno-signed-zeros",
)


@both
@pytest.mark.parametrize("flags", [(), FLUSHING], ids=["kept", "flushed"])
def test_modifiers_that_clang_folds(arch: str, flags: tuple[str, ...]) -> None:
    """abs and clamp always; output multipliers where denormals are flushed and IEEE mode is off."""
    code = compile_cached(KERNEL + FOLDED, arch, flags)
    used = {
        field
        for inst in sweep(code.text)
        if isinstance(inst, Instruction) and inst.format == "VOP3"
        for field in ("abs", "clmp", "omod")
        if inst[field]
    }
    assert used == ({"abs", "clmp", "omod"} if flags else {"abs", "clmp"})
    x = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    y = np.zeros(256, np.float32)
    launch(code, "k", 1, 64, x, y)
    a, b = x[:64], x[64:]
    np.testing.assert_array_equal(y[:64], (a + b) * 2)
    np.testing.assert_array_equal(y[64:128], a * b / 2)
    np.testing.assert_array_equal(y[128:192], (np.abs(a) - b) * 4)
    np.testing.assert_array_equal(y[192:], np.clip(a * 2 + b, 0, 1))


MATRIX = (
    HEADER
    + """
typedef float f4 __attribute__((ext_vector_type(4)));
extern "C" __global__ void k(const long* a, const long* b, float* d, int tiles) {
  int lane = threadIdx.x, row = lane % 16, group = lane / 16;
  f4 acc = {0, 0, 0, 0};
  for (int t = 0; t < tiles; t++) {
    int at = (row * tiles + t) * 4 + group;
    acc = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a[at], b[at], acc, 0, 0, 0);
  }
  for (int r = 0; r < 4; r++) d[(4 * group + r) * 16 + row] = acc[r];
}"""
)


@both
def test_fp8_matrix_product(arch: str) -> None:
    dtype = ml_dtypes.float8_e4m3fnuz if arch == "gfx942" else ml_dtypes.float8_e4m3fn
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((16, 160)).astype(dtype) for _ in range(2))
    d = np.zeros((16, 16), np.float32)
    stats = launch(
        compile_cached(MATRIX, arch), "k", 1, 64, a.view(np.uint8), b.view(np.uint8), d, 5
    )
    assert stats.counts["v_mfma_f32_16x16x32_fp8_fp8"] == 5
    np.testing.assert_allclose(
        d, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5, atol=1e-5
    )


@both
def test_out_of_bounds_access_is_found(arch: str) -> None:
    source = KERNEL + "k(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x + 1]; }"
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(Fault, match=r"global_load_dword.*array argument 0 \(256 bytes\)"):
        launch(compile_cached(source, arch), "k", 1, 64, x, y)


def test_structs_and_wrong_arguments() -> None:
    source = (
        HEADER
        + """struct A { const int* x; int* y; float f; long n; short s; };
    extern "C" __global__ void k(A a, int more) {
      a.y[threadIdx.x] = a.x[threadIdx.x] * int(a.f) + a.n + a.s + more;
    }"""
    )
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    code = compile_cached(source, "gfx942")
    launch(code, "k", 1, 64, (x, y, np.float32(3), np.int64(-5), np.int16(7)), 100)
    np.testing.assert_array_equal(y, 3 * x - 5 + 7 + 100)
    with pytest.raises(ValueError, match="takes 2 arguments, got 1"):
        launch(code, "k", 1, 64, 5)
    with pytest.raises(KeyError, match="no kernel 'j'; there are"):
        launch(code, "j", 1, 64)


def test_compiler_errors_are_reported() -> None:
    with pytest.raises(CompileError, match="undeclared identifier 'nonsense'"):
        compile_hip(KERNEL + "k() { nonsense; }", "gfx942")
    with pytest.raises(ValueError, match="gfx90a"):
        compile_hip(KERNEL + "k() {}", "gfx90a")
