// Kernels of the kinds this project writes, for test_hip_idioms.py.
#include <hip/hip_runtime.h>

typedef __bf16 bf8 __attribute__((ext_vector_type(8)));
#define KERNEL extern "C" __global__ __launch_bounds__(1024) void
#define INDEX                                                 \
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; \
  if (i >= n) return

KERNEL divide64(const int64_t* a, const int64_t* b, int64_t* q, int64_t* r, uint64_t* u,
                int64_t n) {
  INDEX;
  q[i] = a[i] / b[i];
  r[i] = a[i] % b[i];
  u[i] = (uint64_t)a[i] / (uint64_t)b[i];
}
KERNEL divide32(const int* a, const int* b, int* q, unsigned* r, int n) {
  INDEX;
  q[i] = a[i] / b[i];
  r[i] = (unsigned)a[i] % (unsigned)b[i];
}
KERNEL largest(const uint16_t* x, unsigned* out, int64_t n) {
  float m = 0;
  int64_t stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
    m = fmaxf(m, fabsf(__uint_as_float((unsigned)x[i] << 16)));
  for (int k = 32; k; k >>= 1) m = fmaxf(m, __shfl_xor(m, k));
  if ((threadIdx.x & 63) == 0) atomicMax(out, __float_as_uint(m));
}
KERNEL merge(const bf8* a, const float* la, const bf8* b, const float* lb, bf8* out, float* lse,
             int n) {
  INDEX;
  float x = la[i / 8], y = lb[i / 8], m = fmaxf(x, y);
  bool empty = m == -__builtin_inff();
  float wa = empty ? 0 : expf(x - m), wb = empty ? 0 : expf(y - m), s = wa + wb;
  bf8 r;
  for (int j = 0; j < 8; j++) {
    float sum = (float)a[i][j] * wa + (float)b[i][j] * wb;
    r[j] = (__bf16)(empty ? 0.f : sum / s);
  }
  out[i] = r;
  if (i % 8 == 0) lse[i / 8] = empty ? -__builtin_inff() : m + logf(s);
}
KERNEL scan(const int* x, int* y, int n) {
  __shared__ int s[1024];
  int t = threadIdx.x;
  s[t] = t < n ? x[t] : 0;
  for (int d = 1; d < 1024; d *= 2) {
    __syncthreads();
    int v = t >= d ? s[t - d] : 0;
    __syncthreads();
    s[t] += v;
  }
  if (t < n) y[t] = s[t];
}
KERNEL functions(const float* x, float* y, int n) {
  INDEX;
  float v = x[i];
  y[i] = sqrtf(fabsf(v)) + exp2f(v) * log2f(fabsf(v)) + rintf(v * 3) + __builtin_floorf(v) +
         (isinf(v) ? 1.f : 0.f);
}
KERNEL doubles(const double* x, double* y, int n) {
  INDEX;
  y[i] = x[i] / (x[i] + 3.0) + (double)(int)x[i];
}
KERNEL halves(const _Float16* x, _Float16* y, int n) {
  INDEX;
  y[i] = (_Float16)0.5f / (x[i] + (_Float16)3.f);
}
KERNEL bits(const int* x, uint64_t* y, int n) {
  INDEX;
  y[i] = __ballot(x[i] > 3) + __popc(x[i]) + __clz(x[i]) + __ffs(x[i]);
}
KERNEL atomics(unsigned* p, float* f, int n) {
  INDEX;
  unsigned old = atomicCAS(p, threadIdx.x, threadIdx.x + 1);
  atomicAdd(f, (float)old);
  atomicExch(p + 1, old);
  atomicMin(p + 2, old);
}
template <int D>
__global__ void write_cache(const uint16_t* c, const uint16_t* pe, uint16_t* cache,
                            const int64_t* slots, int n) {
  int64_t slot = slots[blockIdx.x];
  if (slot < 0) return;
  for (int i = threadIdx.x; i < D; i += blockDim.x)
    cache[slot * D + i] =
        i < 512 ? c[(int64_t)blockIdx.x * 512 + i] : pe[(int64_t)blockIdx.x * (D - 512) + i - 512];
}
extern "C" int launch(const uint16_t* c, uint16_t* cache, const int64_t* slots, int n,
                      void* stream) {
  hipLaunchKernelGGL(HIP_KERNEL_NAME(write_cache<576>), dim3(n), dim3(256), 0, (hipStream_t)stream,
                     c, c, cache, slots, n);
  return hipGetLastError();
}
