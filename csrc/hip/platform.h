// The only file that knows one compiler from another: hipcc (and clang -x hip), nvcc, and the
// tests' clang, which compiles the device side alone with the header in build_tools/cdna/hip_shim.
// Everything else in csrc/hip is written against HIP's names and those below.
#pragma once

#if defined(__HIP__)
#include <hip/hip_runtime.h>
#define MLA_SHUFFLE_XOR(value, mask) __shfl_xor(value, mask)
typedef unsigned short MlaPair __attribute__((ext_vector_type(2)));
#define MLA_MAX_PAIRS(a, b)                                                              \
  __builtin_bit_cast(uint32_t, __builtin_elementwise_max(__builtin_bit_cast(MlaPair, a), \
                                                         __builtin_bit_cast(MlaPair, b)))
#define MLA_PARAMETER
#define MLA_LOAD(pointer) (*(pointer))
// CDNA runs 64 lanes in step.
#define MLA_WAVE 64
// A kernel that wants no more than n waves on a SIMD, and the registers of those that are not
// there.
#define MLA_WAVES_PER_SIMD(n) __attribute__((amdgpu_waves_per_eu(n, n)))
// Before a short loop whose copies would each keep scalar registers: unrolled there are not enough.
// nvcc, which has no such registers, would put what such a loop indexes into local memory.
#define MLA_SHORT_LOOP _Pragma("unroll 1")
#if defined(__HIP_DEVICE_COMPILE__) && defined(__gfx942__)
#define MLA_GFX942 1
#elif defined(__HIP_DEVICE_COMPILE__) && defined(__gfx950__)
#define MLA_GFX950 1
#endif
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#define MLA_SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define MLA_MAX_PAIRS(a, b) __vmaxu2(a, b)
#define MLA_WAVE 32
#define MLA_SHORT_LOOP _Pragma("unroll")
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define MLA_SM89 1
#endif
// A kernel may begin before the one in front of it on the stream ends: sm_90 and newer, where it is
// launched by launch_overlapping(). Memory that other kernels write is touched after
// AFTER_PREDECESSOR alone; SUCCESSOR_MAY_BEGIN lets the next one take what room there is.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MLA_AFTER_PREDECESSOR() asm volatile("griddepcontrol.wait;" ::: "memory")
#define MLA_SUCCESSOR_MAY_BEGIN() asm volatile("griddepcontrol.launch_dependents;")
#endif
#define MLA_PARAMETER __grid_constant__
// Memory that nothing writes while the kernel runs.
#define MLA_LOAD(pointer) __ldg(pointer)
#define hipStream_t cudaStream_t
#define hipGetLastError cudaGetLastError
#define hipGetErrorString cudaGetErrorString
#define hipSuccess cudaSuccess
#define hipMemsetAsync cudaMemsetAsync
#define hipDeviceGetAttribute cudaDeviceGetAttribute
#define hipDeviceAttributeMultiprocessorCount cudaDevAttrMultiProcessorCount
#define hipDeviceAttributeMaxSharedMemoryPerBlock cudaDevAttrMaxSharedMemoryPerBlockOptin
#define hipLaunchKernelGGL(kernel, grid, block, shared, stream, ...) \
  kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#else
#error "csrc/hip is HIP source: compile it with hipcc, nvcc or clang -x hip"
#endif

#if !defined(MLA_AFTER_PREDECESSOR)
#define MLA_AFTER_PREDECESSOR()
#define MLA_SUCCESSOR_MAY_BEGIN()
#endif

// Host code, the launchers, is left out where the device side is compiled alone.
#if !defined(MLA_DEVICE_ONLY)
#define MLA_LAUNCHERS 1
#endif

// Where numbers.h and schedule.h put their functions, and how they are called from kernels.
#define MLA_ISA gpu
#define MLA_INLINE __host__ __device__ __forceinline__

#include <stdint.h>

namespace mla::gpu {

// A kernel's first argument, which AMD's compiler reads from memory again from here on. All of a
// large one would not fit into the scalar registers in which it is kept from the start otherwise.
template <class Argument>
__device__ __forceinline__ const Argument& argument_again(const Argument& argument) {
#if defined(__HIP__)
  (void)argument;
  using Constant = const __attribute__((address_space(4))) Argument;
  auto* at = (Constant*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(at));
  return *(const Argument*)at;
#else
  return argument;
#endif
}

}  // namespace mla::gpu
