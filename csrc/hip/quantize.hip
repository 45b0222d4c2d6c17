// To float8: with a given scale, with one from the tensor's largest magnitude, or one for each row.
#include "launch.h"
#include "launchers.h"
#include "vectors.h"

namespace mla::gpu {

constexpr int kThreads = 256;

// Four loads of 16 bytes in flight.
template <class From>
constexpr int kUnroll = sizeof(typename From::Code) == 2 ? 2 : 1;

// The scale that puts the largest magnitude at the type's largest number; 1 where that would be 0.
template <class To>
__device__ __forceinline__ float scale_for(uint32_t top_bits) {
  const float scale = float_of(top_bits) / kLargest<To>;
  return scale == 0.0f ? 1.0f : scale;
}

__device__ __forceinline__ int64_t row_offset(const MlaRows& rows, int64_t row) {
  int64_t offset = 0;
  MLA_SHORT_LOOP
  for (int i = 3; i >= 0; --i) {
    offset += row % rows.size[i] * rows.stride[i];
    row /= rows.size[i];
  }
  return offset;
}

// Raises `top` to the bits of the largest magnitude of x. A single row is shared by the whole grid.
template <class From>
__global__ void __launch_bounds__(kThreads)
    find_largest(const typename From::Code* x, MlaRows rows, uint32_t* top) {
  MLA_AFTER_PREDECESSOR();
  MLA_SUCCESSOR_MAY_BEGIN();
  uint32_t mine = 0;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  if (rows.count == 1) {
    mine = largest_bits<From>(x, rows.columns, thread, threads);
  } else {
    for (int64_t row = thread / MLA_WAVE; row < rows.count; row += threads / MLA_WAVE) {
      const uint32_t of_row =
          largest_bits<From>(x + row_offset(rows, row), rows.columns, thread % MLA_WAVE, MLA_WAVE);
      mine = of_row > mine ? of_row : mine;
    }
  }
  mine = over_block<kThreads>(mine, Larger{});
  // A look first: a thousand atomics on one address take longer than the last blocks' loads.
  if (threadIdx.x == 0 && mine > *static_cast<volatile uint32_t*>(top)) atomicMax(top, mine);
}

// One scale for all. `top` is null where the scale is given, else what find_largest left.
template <class From, class To, int RUN>
__global__ void __launch_bounds__(kThreads)
    quantize(const typename From::Code* x, MlaRows rows, typename To::Code* out, const float* scale,
             const uint32_t* top, float* scale_out) {
  MLA_AFTER_PREDECESSOR();
  MLA_SUCCESSOR_MAY_BEGIN();
  const float by = top == nullptr ? *scale : scale_for<To>(*top);
  const Divisor divisor(by);
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  if (thread == 0) *scale_out = by;
  if (rows.count == 1) {
    // Backwards: the end of x is what find_largest read last, and is still in the cache.
    convert<From, To, RUN == kRun ? kUnroll<From> : 1, RUN>(x, out, rows.columns, divisor, thread,
                                                            threads, top != nullptr);
    return;
  }
  for (int64_t row = thread / MLA_WAVE; row < rows.count; row += threads / MLA_WAVE)
    convert<From, To, kUnroll<From>>(x + row_offset(rows, row), out + row * rows.columns,
                                     rows.columns, divisor, thread % MLA_WAVE, MLA_WAVE);
}

// A wave per row. `scale` is null where each row's scale is to be found.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    quantize_rows(const typename From::Code* x, MlaRows rows, typename To::Code* out,
                  const float* scale, float* scale_out) {
  MLA_AFTER_PREDECESSOR();
  MLA_SUCCESSOR_MAY_BEGIN();
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t waves = int64_t{gridDim.x} * kThreads / MLA_WAVE;
  const int lane = threadIdx.x % MLA_WAVE;
  for (int64_t row = thread / MLA_WAVE; row < rows.count; row += waves) {
    const typename From::Code* from = x + row_offset(rows, row);
    const float by = scale != nullptr
                         ? scale[row]
                         : scale_for<To>(over_wave(
                               largest_bits<From>(from, rows.columns, lane, MLA_WAVE), Larger{}));
    convert<From, To, kUnroll<From>>(from, out + row * rows.columns, rows.columns, Divisor(by),
                                     lane, MLA_WAVE);
    if (lane == 0) scale_out[row] = by;
  }
}

#if defined(MLA_LAUNCHERS)

template <class From, class To>
void launch(const void* x_memory, const MlaRows& rows, void* out_memory, MlaScaling scaling,
            const float* scale, float* scale_out, const MlaDevice& device, hipStream_t stream) {
  const auto* x = static_cast<const typename From::Code*>(x_memory);
  auto* out = static_cast<typename To::Code*>(out_memory);
  // A run for each thread, as far as they fill the processors; short ones where long ones would
  // leave most processors without work.
  const int64_t most = int64_t{device.processors} * (2048 / kThreads);
  const bool is_short = rows.count == 1 && rows.columns <= most * kThreads * kShortRun;
  const int64_t run = is_short ? kShortRun : kRun;
  const int64_t runs = rows.count == 1 ? (rows.columns + run - 1) / run : rows.count * MLA_WAVE;
  const int64_t wanted = (runs + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(wanted < 1 ? 1 : wanted < most ? wanted : most));
  const dim3 block(kThreads);
  if (scaling == kMlaGivenRows || scaling == kMlaTensorRows) {
    launch_overlapping(device, quantize_rows<From, To>, grid, block, 0, stream, x, rows, out,
                       scaling == kMlaGivenRows ? scale : nullptr, scale_out);
    return;
  }
  uint32_t* top = nullptr;
  if (scaling == kMlaTensor) {
    top = reinterpret_cast<uint32_t*>(scale_out + 1);
    if (hipMemsetAsync(top, 0, sizeof(uint32_t), stream) != hipSuccess) return;
    launch_overlapping(device, find_largest<From>, grid, block, 0, stream, x, rows, top);
  }
  if (is_short) {
    launch_overlapping(device, quantize<From, To, kShortRun>, grid, block, 0, stream, x, rows, out,
                       scale, top, scale_out);
  } else {
    launch_overlapping(device, quantize<From, To, kRun>, grid, block, 0, stream, x, rows, out,
                       scale, top, scale_out);
  }
}

#else

// The test compiler takes kernels alone, and only those that something names.
#define MLA_QUANTIZE(From, To, RUN)                                                       \
  template __global__ void quantize<From, To, RUN>(const From::Code*, MlaRows, To::Code*, \
                                                   const float*, const uint32_t*, float*);
#define MLA_NAME(From, To)                                                                \
  MLA_QUANTIZE(From, To, kRun)                                                            \
  MLA_QUANTIZE(From, To, kShortRun)                                                       \
  template __global__ void quantize_rows<From, To>(const From::Code*, MlaRows, To::Code*, \
                                                   const float*, float*);
MLA_NAME(BFloat16, Float8E4M3FN)
MLA_NAME(BFloat16, Float8E4M3FNUZ)
MLA_NAME(Float16, Float8E4M3FN)
MLA_NAME(Float16, Float8E4M3FNUZ)
MLA_NAME(Float32, Float8E4M3FN)
MLA_NAME(Float32, Float8E4M3FNUZ)
template __global__ void find_largest<BFloat16>(const uint16_t*, MlaRows, uint32_t*);
template __global__ void find_largest<Float16>(const uint16_t*, MlaRows, uint32_t*);
template __global__ void find_largest<Float32>(const uint32_t*, MlaRows, uint32_t*);

#endif

}  // namespace mla::gpu

#if defined(MLA_LAUNCHERS)

const char* mla_quantize_fp8(const void* x, mla::Type x_type, MlaRows rows, void* out,
                             mla::Type out_type, MlaScaling scaling, const float* scale,
                             float* scale_out, const MlaDevice* device, void* stream) {
  using namespace mla::gpu;
  with_wide(x_type, [&](auto from) {
    with_float8(out_type, [&](auto to) {
      launch<decltype(from), decltype(to)>(x, rows, out, scaling, scale, scale_out, *device,
                                           static_cast<hipStream_t>(stream));
    });
  });
  return launch_error();
}

#endif
