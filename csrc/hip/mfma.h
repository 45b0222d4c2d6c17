// Matrix instructions of AMD (gfx942, gfx950) and what feeds them. The tile is 16x16: lane l of a
// wave has row l % 16 of A, column l % 16 of B and of the result, and there the rows 4 * (l / 16)
// to that + 3. Of the dimension summed over, lanes of one l / 16 have the same part: which numbers
// these are does not matter, as long as A and B agree.
#pragma once

#include "fp8.h"

namespace mla::gpu {

using Sum4 = float __attribute__((ext_vector_type(4)));
using Word2 = uint32_t __attribute__((ext_vector_type(2)));
using Word4 = uint32_t __attribute__((ext_vector_type(4)));
using Half4 = _Float16 __attribute__((ext_vector_type(4)));
using Short4 = short __attribute__((ext_vector_type(4)));

// 16 bytes of global memory that may begin anywhere. The compiler cannot always see by itself that
// a pointer is no one of shared memory, and would take loads that wait for both.
__device__ __forceinline__ Word4 load_anywhere(const char* from) {
  struct __attribute__((packed)) Unaligned {
    Word4 words;
  };
  return ((const __attribute__((address_space(1))) Unaligned*)from)->words;
}

// sum + a b, with 8 bytes of the dimension summed over in every lane.
template <class Kind>
__device__ __forceinline__ Sum4 multiply(Word2 a, Word2 b, Sum4 sum) {
  if constexpr (kSame<Kind, BFloat16>) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Short4, a),
                                                     __builtin_bit_cast(Short4, b), sum, 0, 0, 0);
  } else if constexpr (kSame<Kind, Float16>) {
    return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Half4, a),
                                                 __builtin_bit_cast(Half4, b), sum, 0, 0, 0);
  } else {
#if defined(MLA_GFX942) || defined(MLA_GFX950)
    return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, a),
                                                      __builtin_bit_cast(long, b), sum, 0, 0, 0);
#else
    return sum;
#endif
  }
}

// The same with 16 bytes.
template <class Kind>
__device__ __forceinline__ Sum4 multiply(Word4 a, Word4 b, Sum4 sum) {
#if defined(MLA_GFX950)
  if constexpr (kSame<Kind, BFloat16>) {
    using Bf8 = __bf16 __attribute__((ext_vector_type(8)));
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(Bf8, a),
                                                   __builtin_bit_cast(Bf8, b), sum, 0, 0, 0);
  }
  if constexpr (kSame<Kind, Float16>) {
    using Half8 = _Float16 __attribute__((ext_vector_type(8)));
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(__builtin_bit_cast(Half8, a),
                                                  __builtin_bit_cast(Half8, b), sum, 0, 0, 0);
  }
#endif
  return multiply<Kind>(a.zw, b.zw, multiply<Kind>(a.xy, b.xy, sum));
}

// Two words' upper and lower halves, `low` first.
__device__ __forceinline__ uint32_t upper_halves(uint32_t high, uint32_t low) {
  return __builtin_amdgcn_perm(high, low, 0x07060302);
}
__device__ __forceinline__ uint32_t lower_halves(uint32_t high, uint32_t low) {
  return __builtin_amdgcn_perm(high, low, 0x05040100);
}
// Their bytes 0, 1 and 2, 3 in turns.
__device__ __forceinline__ uint32_t lower_bytes(uint32_t high, uint32_t low) {
  return __builtin_amdgcn_perm(high, low, 0x05010400);
}
__device__ __forceinline__ uint32_t upper_bytes(uint32_t high, uint32_t low) {
  return __builtin_amdgcn_perm(high, low, 0x07030602);
}

// Two floats as the matrix unit takes them, the first in the low half; and back.
template <class Kind>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (kSame<Kind, Float16>) {
    using Half2 = _Float16 __attribute__((ext_vector_type(2)));
    const Half2 pair = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
    return __builtin_bit_cast(uint32_t, pair);
  } else {
#if defined(MLA_GFX950)
    using Bf2 = __bf16 __attribute__((ext_vector_type(2)));
    const Bf2 pair = {static_cast<__bf16>(low), static_cast<__bf16>(high)};
    return __builtin_bit_cast(uint32_t, pair);
#else
    // No infinity or NaN comes here that would not stay one.
    const uint32_t a = bits_of(low), b = bits_of(high);
    return upper_halves(b + 0x7fff + (b >> 16 & 1), a + 0x7fff + (a >> 16 & 1));
#endif
  }
}

template <class Kind>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (kSame<Kind, Float16>) {
    using Half2 = _Float16 __attribute__((ext_vector_type(2)));
    const Half2 half = __builtin_bit_cast(Half2, pair);
    return {static_cast<float>(half.x), static_cast<float>(half.y)};
  }
  return {float_of(pair << 16), float_of(pair & 0xffff0000u)};
}

// Four floats as float8 of the hardware's family, e4m3 or (`WIDE`) e5m2; and back. They do not
// saturate: what is too large becomes NaN or infinity.
template <bool WIDE>
__device__ __forceinline__ uint32_t pack_float8(Sum4 value) {
#if defined(MLA_GFX942) || defined(MLA_GFX950)
  if constexpr (WIDE) {
    const int low = __builtin_amdgcn_cvt_pk_bf8_f32(value.x, value.y, 0, false);
    return __builtin_amdgcn_cvt_pk_bf8_f32(value.z, value.w, low, true);
  }
  const int low = __builtin_amdgcn_cvt_pk_fp8_f32(value.x, value.y, 0, false);
  return __builtin_amdgcn_cvt_pk_fp8_f32(value.z, value.w, low, true);
#else
  return static_cast<uint32_t>(value.x);
#endif
}

template <bool WIDE>
__device__ __forceinline__ Sum4 unpack_float8(uint32_t codes) {
#if defined(MLA_GFX942) || defined(MLA_GFX950)
  using Float2 = float __attribute__((ext_vector_type(2)));
  Float2 low, high;
  if constexpr (WIDE) {
    low = __builtin_amdgcn_cvt_pk_f32_bf8(codes, false);
    high = __builtin_amdgcn_cvt_pk_f32_bf8(codes, true);
  } else {
    low = __builtin_amdgcn_cvt_pk_f32_fp8(codes, false);
    high = __builtin_amdgcn_cvt_pk_f32_fp8(codes, true);
  }
  return {low.x, low.y, high.x, high.y};
#else
  return static_cast<float>(codes);
#endif
}

// sum + a b for a of e4m3 and b of e5m2.
__device__ __forceinline__ Sum4 multiply_wide([[maybe_unused]] Word2 a, [[maybe_unused]] Word2 b,
                                              Sum4 sum) {
#if defined(MLA_GFX942) || defined(MLA_GFX950)
  return __builtin_amdgcn_mfma_f32_16x16x32_fp8_bf8(__builtin_bit_cast(long, a),
                                                    __builtin_bit_cast(long, b), sum, 0, 0, 0);
#else
  return sum;
#endif
}

// 2^x to about 1 ulp; 0 for -infinity.
__device__ __forceinline__ float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }

// What `op` makes of the values of the four lanes with the same l % 16.
template <class Op>
__device__ __forceinline__ float over_groups(float value, Op op) {
  value = op(value, MLA_SHUFFLE_XOR(value, 32));
  return op(value, MLA_SHUFFLE_XOR(value, 16));
}

// Keeps LDS traffic of one wave in order for the compiler; the hardware does without being asked.
__device__ __forceinline__ void order_wave() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// Nothing is moved across this: the compiler would begin loads early and run out of registers.
__device__ __forceinline__ void order_schedule() { __builtin_amdgcn_sched_barrier(0); }

}  // namespace mla::gpu
