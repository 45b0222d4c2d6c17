// Exact conversions between float32 and the narrow types, branch-free so that the compiler
// vectorizes loops of them. Integer arithmetic on the bits: right whatever the processor's
// flush-to-zero setting.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace mla::MLA_ISA {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline float widen_bf16(uint16_t code) { return float_of(static_cast<uint32_t>(code) << 16); }

inline uint16_t narrow_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40 : rounded);
}

// A small float of kMantissa mantissa bits and exponent bias kBias whose magnitude bits are
// `magnitude`.
template <int kMantissa, int kBias>
inline float widen_magnitude(uint32_t magnitude) {
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
inline uint32_t narrow_magnitude(float value) {
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

inline float widen_f16(uint16_t code) {
  const uint32_t magnitude = code & 0x7fffu, sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  const uint32_t finite = bits_of(widen_magnitude<10, 15>(magnitude));
  return float_of(sign | (magnitude >= 0x7c00 ? 0x7f800000u | (magnitude << 13) : finite));
}

inline uint16_t narrow_f16(float value) {
  const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
  // 65520 and more round to infinity.
  const uint32_t code = magnitude >= 65520.0f ? 0x7c00u : narrow_magnitude<10, 15>(magnitude);
  return static_cast<uint16_t>(sign | (value != value ? 0x7e00u : code));
}

// OCP float8 e4m3fn: bias 7, no infinity, NaN is S.1111.111, largest 448.
inline float widen_e4m3fn(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
  return float_of(sign |
                  (magnitude == 0x7f ? 0x7fc00000u : bits_of(widen_magnitude<3, 7>(magnitude))));
}

inline uint8_t narrow_e4m3fn(float value) {
  const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
  const uint32_t sign = (bits_of(value) >> 24) & 0x80u;
  const uint32_t code = narrow_magnitude<3, 7>(magnitude > 448.0f ? 448.0f : magnitude);
  return static_cast<uint8_t>(sign | (value != value ? 0x7fu : code));
}

// AMD's float8 e4m3fnuz: bias 8, no infinity, no negative zero, NaN is 0x80, largest 240.
inline float widen_e4m3fnuz(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
  return float_of(code == 0x80 ? 0x7fc00000u : sign | bits_of(widen_magnitude<3, 8>(magnitude)));
}

inline uint8_t narrow_e4m3fnuz(float value) {
  const float magnitude = float_of(bits_of(value) & 0x7fffffffu);
  const uint32_t code = narrow_magnitude<3, 8>(magnitude > 240.0f ? 240.0f : magnitude);
  const uint32_t sign = code == 0 ? 0 : (bits_of(value) >> 24) & 0x80u;
  return static_cast<uint8_t>(value != value ? 0x80u : sign | code);
}

// Calls body with the reader and the writer of a type: body(kind) where kind::Code is the stored
// integer.
struct Float32 {
  using Code = uint32_t;
  static float widen(Code code) { return float_of(code); }
  static Code narrow(float value) { return bits_of(value); }
};
struct Float16 {
  using Code = uint16_t;
  static float widen(Code code) { return widen_f16(code); }
  static Code narrow(float value) { return narrow_f16(value); }
};
struct BFloat16 {
  using Code = uint16_t;
  static float widen(Code code) { return widen_bf16(code); }
  static Code narrow(float value) { return narrow_bf16(value); }
};
struct Float8E4M3FN {
  using Code = uint8_t;
  static float widen(Code code) { return widen_e4m3fn(code); }
  static Code narrow(float value) { return narrow_e4m3fn(value); }
};
struct Float8E4M3FNUZ {
  using Code = uint8_t;
  static float widen(Code code) { return widen_e4m3fnuz(code); }
  static Code narrow(float value) { return narrow_e4m3fnuz(value); }
};

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

// to[i] = from[i] as float32.
inline void widen(const void* from, Type type, float* to, int64_t count) {
  with_type(type, [&](auto kind) {
    using Kind = decltype(kind);
    const auto* codes = static_cast<const typename Kind::Code*>(from);
    for (int64_t i = 0; i < count; ++i) to[i] = Kind::widen(codes[i]);
  });
}

// to[i] = from[i] rounded to `type`.
inline void narrow(const float* from, void* to, Type type, int64_t count) {
  with_type(type, [&](auto kind) {
    using Kind = decltype(kind);
    auto* codes = static_cast<typename Kind::Code*>(to);
    for (int64_t i = 0; i < count; ++i) codes[i] = Kind::narrow(from[i]);
  });
}

}  // namespace mla::MLA_ISA
