// Helpers of the launchers: from run-time types to template arguments.
#pragma once

#include "fp8.h"
#include "launchers.h"

#if defined(MLA_LAUNCHERS)

namespace mla::gpu {

// The message of a launch that failed, or null.
inline const char* launch_error() {
  const auto error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

// Calls body(kind) for the types named; others launch nothing.
template <class Body>
void with_half(Type type, Body&& body) {
  if (type == Type::kFloat16) body(Float16{});
  if (type == Type::kBFloat16) body(BFloat16{});
}

template <class Body>
void with_wide(Type type, Body&& body) {
  if (type == Type::kFloat32) body(Float32{});
  with_half(type, body);
}

template <class Body>
void with_float8(Type type, Body&& body) {
  if (type == Type::kFloat8E4M3FN) body(Float8E4M3FN{});
  if (type == Type::kFloat8E4M3FNUZ) body(Float8E4M3FNUZ{});
}

// Launches a kernel that says itself, by MLA_AFTER_PREDECESSOR, when it needs the results of those
// before it.
template <class... Parameters, class... Arguments>
void launch_overlapping([[maybe_unused]] const MlaDevice& device, void (*kernel)(Parameters...),
                        dim3 grid, dim3 block, size_t shared, hipStream_t stream,
                        Arguments... arguments) {
#if defined(__CUDACC__)
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared;
  config.stream = stream, config.attrs = &overlap, config.numAttrs = device.can_overlap ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
#else
  hipLaunchKernelGGL(kernel, grid, block, shared, stream, static_cast<Parameters>(arguments)...);
#endif
}

}  // namespace mla::gpu

#endif
