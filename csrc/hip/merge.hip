// Merging results of attention over disjoint tokens: two of them, or the pieces of a sequence.
#include "decode.h"
#include "launch.h"
#include "launchers.h"
#include "vectors.h"

namespace mla::gpu {

constexpr int kMergeThreads = 256;

// A side without weight may hold anything, NaN included.
__device__ __forceinline__ float weighted(float value, float factor) {
  return factor == 0.0f ? 0.0f : value * factor;
}

// A wave per row.
template <class Kind>
__global__ void __launch_bounds__(kMergeThreads)
    merge_states(const typename Kind::Code* a, const float* lse_a, const typename Kind::Code* b,
                 const float* lse_b, typename Kind::Code* out, float* lse, int64_t rows,
                 int64_t width) {
  constexpr int kWidth = 16 / sizeof(typename Kind::Code);
  constexpr float kInfinity = __builtin_huge_valf();
  const int lane = threadIdx.x % MLA_WAVE;
  const int64_t waves = int64_t{gridDim.x} * kMergeThreads / MLA_WAVE;
  const int64_t wave = (int64_t{blockIdx.x} * kMergeThreads + threadIdx.x) / MLA_WAVE;
  for (int64_t row = wave; row < rows; row += waves) {
    // FlashMLA writes +inf for a row that sees nothing; nothing else can.
    const float of_a = lse_a[row] == kInfinity ? -kInfinity : lse_a[row];
    const float of_b = lse_b[row] == kInfinity ? -kInfinity : lse_b[row];
    const float top = of_a > of_b ? of_a : of_b;
    const float shift = top == -kInfinity ? 0.0f : top;
    const float weight_a = expf(of_a - shift), weight_b = expf(of_b - shift);
    const float sum = weight_a + weight_b;
    const float factor_a = sum == 0.0f ? 0.0f : weight_a / sum;
    const float factor_b = sum == 0.0f ? 0.0f : weight_b / sum;

    const auto *from_a = a + row * width, *from_b = b + row * width;
    auto* to = out + row * width;
    int64_t done = 0;
    if (aligned(from_a, 16) && aligned(from_b, 16) && aligned(to, 16)) {
      done = width / kWidth * kWidth;
      for (int64_t i = lane * kWidth; i < done; i += MLA_WAVE * kWidth) {
        const auto run_a = load_run<Kind, kWidth>(from_a + i);
        const auto run_b = load_run<Kind, kWidth>(from_b + i);
        Run<Kind, kWidth> merged;
#pragma unroll
        for (int k = 0; k < kWidth; ++k)
          merged.code[k] = Kind::narrow(weighted(Kind::widen(run_a.code[k]), factor_a) +
                                        weighted(Kind::widen(run_b.code[k]), factor_b));
        store_run(merged, to + i);
      }
    }
    for (int64_t i = done + lane; i < width; i += MLA_WAVE)
      to[i] = Kind::narrow(weighted(Kind::widen(from_a[i]), factor_a) +
                           weighted(Kind::widen(from_b[i]), factor_b));
    if (lane == 0) lse[row] = sum == 0.0f ? -kInfinity : shift + logf(sum);
  }
}

constexpr int kPieceThreads = 128;

// A block per row of the output, four columns a thread. Always in the order of the tokens.
__global__ void __launch_bounds__(kPieceThreads)
    merge_pieces(const MLA_PARAMETER MlaDecode decode) {
  MLA_AFTER_PREDECESSOR();
  MLA_SUCCESSOR_MAY_BEGIN();
  const DecodeArgs& args = decode.args;
  const Schedule& schedule = decode.schedule;
  const Partials partials(decode);
  const int rows = static_cast<int>(args.rows());
  for (int64_t index = blockIdx.x; index < args.batch * rows; index += gridDim.x) {
    const int32_t sequence = static_cast<int32_t>(index / rows);
    const int row = static_cast<int>(index - int64_t{sequence} * rows);
    const int32_t pieces = schedule.pieces(sequence);
    const int64_t first = schedule.first_slot(sequence);
    if (pieces <= 1 || first < 0 || first + pieces > decode.slots) continue;
    const float* lse = partials.lse + first * rows + row;
    float top = -kInfinity, sum = 0.0f;
    for (int32_t i = 0; i < pieces; ++i) top = fmaxf(top, lse[int64_t{i} * rows]);
    const float shift = top == -kInfinity ? 0.0f : top;
    for (int32_t i = 0; i < pieces; ++i) sum += exp2f(lse[int64_t{i} * rows] - shift);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const RowTarget target(decode, {sequence, 0, 0, 0}, row, false);
    if (threadIdx.x == 0) target.store_lse(sum == 0.0f ? -kInfinity : shift + log2f(sum));
    for (int column = threadIdx.x * 4; column < args.latent; column += kPieceThreads * 4) {
      const float* from = partials.out + (first * rows + row) * partials.width + column;
      float merged[4] = {};
#pragma unroll 8
      for (int32_t i = 0; i < pieces; ++i) {
        const float weight = exp2f(lse[int64_t{i} * rows] - shift) * inverse;
        const float4 part = *reinterpret_cast<const float4*>(from + i * rows * partials.width);
        merged[0] = fmaf(weight, part.x, merged[0]), merged[1] = fmaf(weight, part.y, merged[1]);
        merged[2] = fmaf(weight, part.z, merged[2]), merged[3] = fmaf(weight, part.w, merged[3]);
      }
      store_columns(target, column, static_cast<int>(args.latent), merged);
    }
  }
}

#if !defined(MLA_LAUNCHERS)

#define MLA_NAME(Kind)                                                                            \
  template __global__ void merge_states<Kind>(const Kind::Code*, const float*, const Kind::Code*, \
                                              const float*, Kind::Code*, float*, int64_t,         \
                                              int64_t);
MLA_NAME(Float32)
MLA_NAME(Float16)
MLA_NAME(BFloat16)

#endif

}  // namespace mla::gpu

#if defined(MLA_LAUNCHERS)

const char* mla_merge_states(const void* a, const float* lse_a, const void* b, const float* lse_b,
                             void* out, float* lse, mla::Type type, int64_t rows, int64_t width,
                             int32_t processors, void* stream) {
  using namespace mla::gpu;
  const int64_t wanted = (rows * MLA_WAVE + kMergeThreads - 1) / kMergeThreads;
  const int64_t most = int64_t{processors} * (2048 / kMergeThreads);
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most));
  with_wide(type, [&](auto kind) {
    using Code = typename decltype(kind)::Code;
    hipLaunchKernelGGL((merge_states<decltype(kind)>), grid, dim3(kMergeThreads), 0,
                       static_cast<hipStream_t>(stream), static_cast<const Code*>(a), lse_a,
                       static_cast<const Code*>(b), lse_b, static_cast<Code*>(out), lse, rows,
                       width);
  });
  return launch_error();
}

const char* mla_merge_pieces(const MlaDecode* decode, const MlaDevice* device, void* stream) {
  using namespace mla::gpu;
  const int64_t rows = decode->args.batch * decode->args.rows();
  const int64_t most = int64_t{device->processors} * (2048 / kPieceThreads);
  launch_overlapping(*device, merge_pieces, dim3(static_cast<unsigned>(rows < most ? rows : most)),
                     dim3(kPieceThreads), 0, static_cast<hipStream_t>(stream), *decode);
  return launch_error();
}

#endif
