// The element types of q, cache and output, as plain data that crosses from ATen to the kernels.
#pragma once

#include <stdint.h>

// Always inlined: the CPU files compiled per instruction set must not share a symbol, not even a
// weak one. csrc/hip/platform.h adds __host__ __device__.
#ifndef MLA_INLINE
#define MLA_INLINE inline __attribute__((always_inline))
#endif

namespace mla {

enum class Type : int32_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3FN, kFloat8E4M3FNUZ };

MLA_INLINE int64_t size_of(Type type) {
  return type == Type::kFloat32 ? 4 : type == Type::kFloat16 || type == Type::kBFloat16 ? 2 : 1;
}

}  // namespace mla
