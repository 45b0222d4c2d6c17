// Device-only stand-in for <hip/hip_runtime.h>: what kernels of csrc/hip and of the tests need when
// PyPI's clang compiles them without ROCm. blockDim and gridDim come from the hidden kernel
// arguments, as with ROCm.
#pragma once

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
// With one argument the compiler may assume at most that many work-items; clang knows the attribute
// by this name.
#define __HIP_LAUNCH_BOUNDS_1(n) __attribute__((amdgpu_flat_work_group_size(1, n)))
#define __HIP_LAUNCH_BOUNDS_2(n, w) \
  __attribute__((amdgpu_flat_work_group_size(1, n), amdgpu_waves_per_eu(w)))
#define __HIP_SELECT(_1, _2, name, ...) name
#define __launch_bounds__(...) \
  __HIP_SELECT(__VA_ARGS__, __HIP_LAUNCH_BOUNDS_2, __HIP_LAUNCH_BOUNDS_1, )(__VA_ARGS__)

typedef __SIZE_TYPE__ size_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;

struct __attribute__((aligned(8))) uint2 {
  unsigned x, y;
};
struct __attribute__((aligned(16))) uint4 {
  unsigned x, y, z, w;
};
struct __attribute__((aligned(8))) int2 {
  int x, y;
};
struct __attribute__((aligned(16))) int4 {
  int x, y, z, w;
};
struct __attribute__((aligned(8))) float2 {
  float x, y;
};
struct __attribute__((aligned(16))) float4 {
  float x, y, z, w;
};

namespace hip_shim {

// Offsets in the implicit argument block, code object version 5 (LLVM AMDGPUUsage, "Hidden kernel
// arguments").
__device__ inline unsigned block_count(int axis) {
  return (
      (const __attribute__((address_space(4))) unsigned*)__builtin_amdgcn_implicitarg_ptr())[axis];
}
__device__ inline unsigned group_size(int axis) {
  return ((const __attribute__((
      address_space(4))) unsigned short*)__builtin_amdgcn_implicitarg_ptr())[6 + axis];
}

// Plain unsigned values, as in ROCm's header.
#define HIP_SHIM_AXIS(axis, expression)                 \
  __declspec(property(get = get_##axis)) unsigned axis; \
  __device__ unsigned get_##axis() const { return expression; }
struct Thread {
  HIP_SHIM_AXIS(x, __builtin_amdgcn_workitem_id_x())
  HIP_SHIM_AXIS(y, __builtin_amdgcn_workitem_id_y())
  HIP_SHIM_AXIS(z, __builtin_amdgcn_workitem_id_z())
};
struct Block {
  HIP_SHIM_AXIS(x, __builtin_amdgcn_workgroup_id_x())
  HIP_SHIM_AXIS(y, __builtin_amdgcn_workgroup_id_y())
  HIP_SHIM_AXIS(z, __builtin_amdgcn_workgroup_id_z())
};
struct BlockDim {
  HIP_SHIM_AXIS(x, group_size(0))
  HIP_SHIM_AXIS(y, group_size(1))
  HIP_SHIM_AXIS(z, group_size(2))
};
struct GridDim {
  HIP_SHIM_AXIS(x, block_count(0))
  HIP_SHIM_AXIS(y, block_count(1))
  HIP_SHIM_AXIS(z, block_count(2))
};
#undef HIP_SHIM_AXIS

}  // namespace hip_shim

static const __device__ hip_shim::Thread threadIdx{};
static const __device__ hip_shim::Block blockIdx{};
static const __device__ hip_shim::BlockDim blockDim{};
static const __device__ hip_shim::GridDim gridDim{};
#define warpSize 64

__device__ inline void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

__device__ inline unsigned __lane_id() {
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
}

template <class T>
__device__ inline T __shfl(T value, int lane, int width = 64) {
  static_assert(sizeof(T) == 4, "shuffles of the shim move 32-bit values");
  int source = (int(__lane_id()) & ~(width - 1)) + (lane & (width - 1));
  return __builtin_bit_cast(
      T, __builtin_amdgcn_ds_bpermute(source << 2, __builtin_bit_cast(int, value)));
}
template <class T>
__device__ inline T __shfl_xor(T value, int mask, int width = 64) {
  return __shfl(value, int(__lane_id()) ^ mask, width);
}
template <class T>
__device__ inline T __shfl_down(T value, unsigned delta, int width = 64) {
  int lane = int(__lane_id());
  return __shfl(value, (lane & (width - 1)) + int(delta) < width ? lane + int(delta) : lane, width);
}
__device__ inline unsigned long __ballot(int predicate) {
  return __builtin_amdgcn_uicmp(predicate, 0, 33);
}

template <class T>
__device__ inline T atomicAdd(T* address, T value) {
  return __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
__device__ inline T atomicMax(T* address, T value) {
  return __hip_atomic_fetch_max(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
__device__ inline T atomicMin(T* address, T value) {
  return __hip_atomic_fetch_min(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
__device__ inline T atomicExch(T* address, T value) {
  return __hip_atomic_exchange(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
__device__ inline T atomicCAS(T* address, T expected, T value) {
  __hip_atomic_compare_exchange_strong(address, &expected, value, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}

__device__ inline unsigned __float_as_uint(float value) {
  return __builtin_bit_cast(unsigned, value);
}
__device__ inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
__device__ inline float __uint_as_float(unsigned value) { return __builtin_bit_cast(float, value); }
__device__ inline float __int_as_float(int value) { return __builtin_bit_cast(float, value); }
__device__ inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
__device__ inline float fabsf(float a) { return __builtin_fabsf(a); }
__device__ inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ inline float sqrtf(float a) { return __builtin_sqrtf(a); }
__device__ inline float rintf(float a) { return __builtin_rintf(a); }
__device__ inline float exp2f(float a) { return __builtin_exp2f(a); }
__device__ inline float log2f(float a) { return __builtin_log2f(a); }
__device__ inline float expf(float a) { return __builtin_expf(a); }
__device__ inline float logf(float a) { return __builtin_logf(a); }
__device__ inline float __expf(float a) {
  return __builtin_amdgcn_exp2f(a * 1.44269504088896340736f);
}
__device__ inline float __logf(float a) {
  return __builtin_amdgcn_logf(a) * 0.69314718055994530942f;
}
__device__ inline bool isnan(float a) { return __builtin_isnan(a); }
__device__ inline bool isinf(float a) { return __builtin_isinf(a); }
__device__ inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long)a * b >> 32; }
__device__ inline int __popc(unsigned a) { return __builtin_popcount(a); }
__device__ inline int __popcll(unsigned long a) { return __builtin_popcountll(a); }
__device__ inline int __clz(int a) { return a ? __builtin_clz(a) : 32; }
__device__ inline int __ffs(int a) { return __builtin_ffs(a); }
template <class T>
__device__ inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
__device__ inline T max(T a, T b) {
  return a < b ? b : a;
}

// Host side: enough for launchers to be parsed; nothing of it is compiled for the device.
typedef struct ihipStream_t* hipStream_t;
enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1 };
struct dim3 {
  unsigned x, y, z;
  constexpr __host__ __device__ dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)
      : x(x), y(y), z(z) {}
};
extern "C" {
hipError_t hipConfigureCall(dim3 grid, dim3 block, size_t shared = 0, hipStream_t stream = 0);
hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared = 0,
                                      hipStream_t stream = 0);
hipError_t hipLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                           size_t shared, hipStream_t stream);
hipError_t hipGetLastError();
hipError_t hipPeekAtLastError();
hipError_t hipMemsetAsync(void* destination, int value, size_t bytes, hipStream_t stream);
const char* hipGetErrorString(hipError_t error);
}
#define HIP_KERNEL_NAME(...) __VA_ARGS__
#define hipLaunchKernelGGL(kernel, grid, block, shared, stream, ...) \
  kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
