// Conversions of a few numbers at a time, with hardware instructions where the architecture has the
// right ones and the integer arithmetic of numbers.h elsewhere. All round to nearest even, saturate
// at a float8 type's largest number and keep NaN; -0 keeps its sign where the type has one.
//
// float8 in hardware: gfx942 converts to e4m3fnuz, gfx950 and sm_89 and newer to OCP e4m3fn, and
// none to the other family.
#pragma once

#include "platform.h"
// platform.h says how numbers.h is compiled.
#include "../numbers.h"

namespace mla::gpu {

#if defined(MLA_GFX942)
using HardwareFloat8 = Float8E4M3FNUZ;
#elif defined(MLA_GFX950) || defined(MLA_SM89)
using HardwareFloat8 = Float8E4M3FN;
#else
using HardwareFloat8 = void;
#endif

template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;

template <class Kind>
inline constexpr float kLargest = 0.0f;
template <>
inline constexpr float kLargest<Float8E4M3FN> = 448.0f;
template <>
inline constexpr float kLargest<Float8E4M3FNUZ> = 240.0f;
template <class Kind>
inline constexpr bool kIsFloat8 = kLargest<Kind> != 0.0f;

// Four numbers to four float8 codes, the first in the lowest byte.
__device__ __forceinline__ uint32_t hardware_float8(const float* value) {
#if defined(MLA_GFX942) || defined(MLA_GFX950)
  float in[4];
  for (int i = 0; i < 4; ++i) {
    // The conversion does not saturate, and the clamp alone would make a number of NaN.
    constexpr float kBound = kLargest<HardwareFloat8>;
    const float clamped = __builtin_amdgcn_fmed3f(value[i], -kBound, kBound);
    in[i] = value[i] != value[i] ? value[i] : clamped;
  }
  const int low = __builtin_amdgcn_cvt_pk_fp8_f32(in[0], in[1], 0, false);
  return static_cast<uint32_t>(__builtin_amdgcn_cvt_pk_fp8_f32(in[2], in[3], low, true));
#elif defined(MLA_SM89)
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(value[1]), "f"(value[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(value[3]), "f"(value[2]));
  return static_cast<uint32_t>(high) << 16 | low;
#else
  (void)value;
  return 0;
#endif
}

// N numbers of a type as they lie in memory, in pieces of at most 16 bytes.
template <class Kind, int N>
struct alignas(N * sizeof(typename Kind::Code) < 16 ? N * sizeof(typename Kind::Code) : 16) Run {
  typename Kind::Code code[N];
};

template <class Kind, int N>
__device__ __forceinline__ void widen(const Run<Kind, N>& from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = Kind::widen(from.code[i]);
}

template <class Kind, int N>
__device__ __forceinline__ void narrow(const float (&from)[N], Run<Kind, N>& to) {
  if constexpr (kSame<Kind, HardwareFloat8> && N % 4 == 0) {
    uint32_t words[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) words[i] = hardware_float8(from + 4 * i);
    __builtin_memcpy(&to, words, N);
  } else if constexpr (kSame<Kind, HardwareFloat8>) {
    for (int i = 0; i < N; ++i) {
      const float padded[4] = {from[i], 0.0f, 0.0f, 0.0f};
      to.code[i] = static_cast<uint8_t>(hardware_float8(padded));
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to.code[i] = Kind::narrow(from[i]);
  }
}

// x / scale, correctly rounded: a product with the reciprocal, mended by its remainder (Markstein,
// IBM J. Res. Dev. 34(1), 1990), at three operations instead of a division's ten. That holds while
// nothing overflows or loses bits: for the scales of `is_fast()`. For others there is only
// divide_slowly().
class Divisor {
 public:
  __device__ __forceinline__ explicit Divisor(float scale)
      : scale_(scale), reciprocal_(1.0f / scale) {}

  __device__ __forceinline__ bool is_fast() const { return scale_ > 0x1p-60f && scale_ < 0x1p60f; }

  __device__ __forceinline__ float divide(float value) const {
    const float quotient = value * reciprocal_;
    const float remainder = fmaf(-quotient, scale_, value);
    const float mended = fmaf(remainder, reciprocal_, quotient);
    // Infinity has no remainder, and 0 would lose its sign; what is as small as this rounds to 0 in
    // every float8 type.
    const float size = fabsf(quotient);
    return size < 0x1p60f && size > 0x1p-60f ? mended : quotient;
  }

  __device__ __forceinline__ float divide_slowly(float value) const { return value / scale_; }

 private:
  float scale_, reciprocal_;
};

// For a copy that only converts.
struct NoDivisor {
  __device__ __forceinline__ bool is_fast() const { return true; }
  __device__ __forceinline__ float divide(float value) const { return value; }
  __device__ __forceinline__ float divide_slowly(float value) const { return value; }
};

}  // namespace mla::gpu
