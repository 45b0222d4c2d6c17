// Conversion of whole rows between float32 and the narrow types.
#pragma once

#include <cstdint>

#include "../../numbers.h"
#include "kernels.h"

namespace mla::MLA_ISA {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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
