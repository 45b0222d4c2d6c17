// Matrix instructions of NVIDIA (sm_80 and newer) and what feeds them. The tile is m16n8k16: thread
// t of a warp has row t / 4 and that + 8 of A and of the result, column t / 4 of B, and of the
// dimension summed over, and of the result's columns, the pairs that begin at 2 * (t % 4).
#pragma once

#include "fp8.h"

namespace mla::gpu {

// What the matrix unit multiplies for a cache type: bfloat16 for itself, float16 for the others.
// float8 is exact in float16, and converted two numbers at a time.
template <class Cache>
inline constexpr bool kMultipliesBf16 = kSame<Cache, BFloat16>;

// sum += a b
template <bool BF16>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4& a, uint32_t b0,
                                         uint32_t b1) {
  if constexpr (BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  }
}

// Two floats as the matrix unit takes them, the first in the low half.
template <bool BF16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <bool BF16>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (BF16) return {float_of(packed << 16), float_of(packed & 0xffff0000u)};
  float2 value;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(value.x), "=f"(value.y)
      : "r"(packed));
  return value;
}

// Four float8 numbers as two pairs of float16, exactly.
template <class Cache>
__device__ __forceinline__ void widen_float8(uint32_t codes, uint32_t& low, uint32_t& high) {
#if defined(MLA_SM89)
  if constexpr (kSame<Cache, Float8E4M3FN>) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
        "cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
    return;
  }
#endif
  // The exponent and mantissa moved to float16's places make the number times 2^-8 (2^-7 for
  // e4m3fnuz, whose bias is one more); subnormal numbers come out right too.
  constexpr bool kFnuz = kSame<Cache, Float8E4M3FNUZ>;
  constexpr uint32_t kUp = kFnuz ? 0x58005800u : 0x5c005c00u;
  const auto pair = [](uint32_t spread) {
    const uint32_t moved = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
    uint32_t value;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(value) : "r"(moved), "r"(kUp));
    // NaN is the code of -0 in e4m3fnuz, and of 480 in e4m3fn.
    const uint32_t nan =
        kFnuz ? __vcmpeq2(moved, 0x80008000u) : __vcmpeq2(moved & 0x7fff7fffu, 0x3f803f80u);
    return value | nan;
  };
  low = pair(__byte_perm(codes, 0, 0x1404));
  high = pair(__byte_perm(codes, 0, 0x3424));
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// `bytes`, 16 or 0, from global to shared memory, and zeros up to 16; asynchronous.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// Copies begun since the last call are a group; wait_for_copies waits until at most PENDING groups
// are on their way.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit numbers, transposed; lane l has the address of row l % 8 of matrix
// l / 8.
__device__ __forceinline__ uint4 load_transposed(uint32_t from) {
  uint4 to;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "r"(from));
  return to;
}

// 2^x to about 2 ulp; 0 for -infinity.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace mla::gpu
