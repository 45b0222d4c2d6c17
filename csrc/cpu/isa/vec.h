// Vectors of float32 at the width of the instruction set this file is compiled for, in the
// compiler's own vector extension, and the few functions that decode needs on them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mla::MLA_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));

inline constexpr float kInfinity = __builtin_inff();

inline Vec load(const float* from) {
  Vec value;
  memcpy(&value, from, sizeof(Vec));
  return value;
}

inline void store(float* to, Vec value) { memcpy(to, &value, sizeof(Vec)); }

inline Vec splat(float value) { return Vec{} + value; }

// A NaN in `a` is dropped and one in `b` kept.
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// 2^x within 2 ulp for x <= 0, exactly 0 below 2^-126 (and for -inf), NaN kept. Coefficients:
// Taylor of 2^f in f ln 2, |f| <= 1/2, whose first dropped term is (ln 2 / 2)^7 / 7! = 1.2e-7.
inline Vec exp2(Vec x) {
  const Vec lowest = splat(-126.0f);
  const Vec clamped = x < lowest ? lowest : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = clamped + magic;
  const Vec f = clamped - (shifted - magic);
  Vec y = splat(1.5403530e-4f);
  y = y * f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  IntVec bits, exponent;
  memcpy(&exponent, &shifted, sizeof(Vec));
  memcpy(&bits, &y, sizeof(Vec));
  bits += exponent << 23;
  memcpy(&y, &bits, sizeof(Vec));
  // The bits of a NaN were added to as well.
  return x == x ? (x < lowest ? Vec{} : y) : x;
}

}  // namespace mla::MLA_ISA
