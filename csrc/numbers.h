// Exact conversions between float32 and the narrow types in integer arithmetic, without branches:
// compilers vectorize loops of them, GPUs do not diverge, and a flush-to-zero mode changes nothing.
// Shared by the CPU files, in the namespace of each instruction set, and by csrc/hip, where fp8.h
// puts hardware instructions in place of some.
#pragma once

#include "types.h"

namespace mla::MLA_ISA {

MLA_INLINE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
MLA_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

MLA_INLINE float widen_bf16(uint16_t code) { return float_of(static_cast<uint32_t>(code) << 16); }

MLA_INLINE uint16_t narrow_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40 : rounded);
}

// A small float of kMantissa mantissa bits and exponent bias kBias whose magnitude bits are
// `magnitude`.
template <int kMantissa, int kBias>
MLA_INLINE float widen_magnitude(uint32_t magnitude) {
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  const uint32_t bits = (magnitude << (23 - kMantissa)) + kRebias;
  // Below the smallest normal number the exponent field counts one too low: read it one up and take
  // that one off.
  const float subnormal = float_of(bits + (1u << 23)) - float_of(kRebias + (1u << 23));
  return magnitude < (1u << kMantissa) ? subnormal : float_of(bits);
}

// The magnitude bits of `value` >= 0 rounded to nearest even. The caller bounds `value` by the
// largest number.
template <int kMantissa, int kBias>
MLA_INLINE uint32_t narrow_magnitude(float value) {
  constexpr int kShift = 23 - kMantissa;
  const uint32_t bits = bits_of(value);
  const uint32_t normal = ((bits + (1u << (kShift - 1)) - 1 + ((bits >> kShift) & 1)) >> kShift) -
                          (static_cast<uint32_t>(127 - kBias) << kMantissa);
  // Subnormal numbers are multiples of 2^(1 - kBias - kMantissa): the last place of this power of
  // two.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 1 - kBias - kMantissa + 23) << 23;
  const uint32_t subnormal = bits_of(value + float_of(kMagic)) - kMagic;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(127 + 1 - kBias) << 23;
  return bits < kSmallestNormal ? subnormal : normal;
}

MLA_INLINE float widen_f16(uint16_t code) {
  const uint32_t magnitude = code & 0x7fffu, sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  const uint32_t finite = bits_of(widen_magnitude<10, 15>(magnitude));
  return float_of(sign | (magnitude >= 0x7c00 ? 0x7f800000u | (magnitude << 13) : finite));
}

MLA_INLINE uint16_t narrow_f16(float value) {
  const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
  // 65520 and more round to infinity.
  const uint32_t code = magnitude >= 65520.0f ? 0x7c00u : narrow_magnitude<10, 15>(magnitude);
  return static_cast<uint16_t>(sign | (value != value ? 0x7e00u : code));
}

// OCP float8 e4m3fn: bias 7, no infinity, NaN is S.1111.111, largest 448.
MLA_INLINE float widen_e4m3fn(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
  return float_of(sign |
                  (magnitude == 0x7f ? 0x7fc00000u : bits_of(widen_magnitude<3, 7>(magnitude))));
}

MLA_INLINE uint8_t narrow_e4m3fn(float value) {
  const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
  const uint32_t sign = (bits_of(value) >> 24) & 0x80u;
  const uint32_t code = narrow_magnitude<3, 7>(magnitude > 448.0f ? 448.0f : magnitude);
  return static_cast<uint8_t>(sign | (value != value ? 0x7fu : code));
}

// AMD's float8 e4m3fnuz: bias 8, no infinity, no negative zero, NaN is 0x80, largest 240.
MLA_INLINE float widen_e4m3fnuz(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
  return float_of(code == 0x80 ? 0x7fc00000u : sign | bits_of(widen_magnitude<3, 8>(magnitude)));
}

MLA_INLINE uint8_t narrow_e4m3fnuz(float value) {
  const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
  const uint32_t code = narrow_magnitude<3, 8>(magnitude > 240.0f ? 240.0f : magnitude);
  const uint32_t sign = code == 0 ? 0 : (bits_of(value) >> 24) & 0x80u;
  return static_cast<uint8_t>(value != value ? 0x80u : sign | code);
}

// The types by name: the stored integer, reading and writing.
struct Float32 {
  using Code = uint32_t;
  MLA_INLINE static float widen(Code code) { return float_of(code); }
  MLA_INLINE static Code narrow(float value) { return bits_of(value); }
};
struct Float16 {
  using Code = uint16_t;
  MLA_INLINE static float widen(Code code) { return widen_f16(code); }
  MLA_INLINE static Code narrow(float value) { return narrow_f16(value); }
};
struct BFloat16 {
  using Code = uint16_t;
  MLA_INLINE static float widen(Code code) { return widen_bf16(code); }
  MLA_INLINE static Code narrow(float value) { return narrow_bf16(value); }
};
struct Float8E4M3FN {
  using Code = uint8_t;
  MLA_INLINE static float widen(Code code) { return widen_e4m3fn(code); }
  MLA_INLINE static Code narrow(float value) { return narrow_e4m3fn(value); }
};
struct Float8E4M3FNUZ {
  using Code = uint8_t;
  MLA_INLINE static float widen(Code code) { return widen_e4m3fnuz(code); }
  MLA_INLINE static Code narrow(float value) { return narrow_e4m3fnuz(value); }
};

// Calls body(kind) with the type as numbers.h names it.
template <class Body>
inline void with_type(Type type, Body&& body) {
  switch (type) {
    case Type::kFloat32:
      return body(Float32{});
    case Type::kFloat16:
      return body(Float16{});
    case Type::kBFloat16:
      return body(BFloat16{});
    case Type::kFloat8E4M3FN:
      return body(Float8E4M3FN{});
    case Type::kFloat8E4M3FNUZ:
      return body(Float8E4M3FNUZ{});
  }
}

}  // namespace mla::MLA_ISA
