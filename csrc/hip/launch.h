// Helpers of the launchers: from run-time types to template arguments.
#pragma once

#include "fp8.h"

#if defined(MLA_LAUNCHERS)

namespace mla::gpu {

// The message of a launch that failed, or null.
inline const char* launch_error() {
  const auto error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

// Calls body(kind) for the types that tensors of activations have; others launch nothing.
template <class Body>
void with_wide(Type type, Body&& body) {
  if (type == Type::kFloat32) body(Float32{});
  if (type == Type::kFloat16) body(Float16{});
  if (type == Type::kBFloat16) body(BFloat16{});
}

template <class Body>
void with_float8(Type type, Body&& body) {
  if (type == Type::kFloat8E4M3FN) body(Float8E4M3FN{});
  if (type == Type::kFloat8E4M3FNUZ) body(Float8E4M3FNUZ{});
}

}  // namespace mla::gpu

#endif
