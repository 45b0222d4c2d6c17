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
  MLA_AFTER_PREDECESSOR();
  MLA_SUCCESSOR_MAY_BEGIN();
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

constexpr int kColumnThreads = 128, kPieceGroups = 4, kPiecesAtOnce = 4;
constexpr int kPieceThreads = kColumnThreads * kPieceGroups;

// What the groups of threads of a block share out: the pieces of one row, or rows.
enum class Share { kPieces, kRows };

// One row from its pieces, four columns for each thread. All sums are in an order that depends on
// nothing but the number of pieces.
template <Share SHARE>
__device__ __forceinline__ void merge_row(const MlaDecode& decode, const Partials& partials,
                                          int32_t sequence, int row, int32_t first_slot,
                                          int32_t pieces, float4 (*sums)[kColumnThreads]) {
  constexpr int kStride = SHARE == Share::kPieces ? kPieceGroups : 1;
  constexpr int kAtOnce = (SHARE == Share::kPieces ? 2 : 1) * kPiecesAtOnce;
  const DecodeArgs& args = decode.args;
  const int group = threadIdx.x / kColumnThreads, thread = threadIdx.x % kColumnThreads;
  const int lane = threadIdx.x % MLA_WAVE, width = static_cast<int>(partials.width);
  const int first_piece = SHARE == Share::kPieces ? group : 0;
  const int64_t row_of_slots = int64_t{first_slot} * args.rows() + row, next = args.rows();
  const float* lse = partials.lse + row_of_slots;
  float top = -kInfinity, sum = 0.0f;
  for (int32_t i = lane; i < pieces; i += MLA_WAVE) top = fmaxf(top, lse[i * next]);
  for (int begin = 0; begin < width; begin += kColumnThreads * 4) {
    const int column = begin + thread * 4;
    const float* from = partials.out + row_of_slots * width + (column < width ? column : 0);
    // On their way while the weights are worked out.
    float4 part[kAtOnce];
    const auto load = [&](int32_t at) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (at + k * kStride < pieces)
          part[k] = *reinterpret_cast<const float4*>(from + (at + k * kStride) * next * width);
    };
    load(first_piece);
    if (begin == 0) {
      top = over_wave(top, [](float a, float b) { return fmaxf(a, b); });
      top = top == -kInfinity ? 0.0f : top;
      for (int32_t i = lane; i < pieces; i += MLA_WAVE) sum += exp2f(lse[i * next] - top);
      sum = over_wave(sum, [](float a, float b) { return a + b; });
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    float4 merged = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int32_t at = first_piece; at < pieces; at += kAtOnce * kStride) {
      if (at != first_piece) load(at);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (at + k * kStride >= pieces) break;
        const float weight = exp2f(lse[(at + k * kStride) * next] - top) * inverse;
        merged.x = fmaf(weight, part[k].x, merged.x), merged.y = fmaf(weight, part[k].y, merged.y);
        merged.z = fmaf(weight, part[k].z, merged.z), merged.w = fmaf(weight, part[k].w, merged.w);
      }
    }
    if constexpr (SHARE == Share::kPieces) {
      sums[group][thread] = merged;
      __syncthreads();
      merged = sums[0][thread];
#pragma unroll
      for (int k = 1; k < kPieceGroups; ++k) {
        const float4 other = sums[k][thread];
        merged.x += other.x, merged.y += other.y, merged.z += other.z, merged.w += other.w;
      }
      __syncthreads();
      if (group > 0) continue;
    }
    const RowTarget target(decode, {sequence, 0, 0, 0}, row, false);
    if (column == 0) target.store_lse(sum == 0.0f ? -kInfinity : top + log2f(sum));
    const float values[4] = {merged.x, merged.y, merged.z, merged.w};
    store_columns(target, column, static_cast<int>(args.latent), values);
  }
}

// A block has `rows_each` rows of one sequence.
template <Share SHARE>
__global__ void __launch_bounds__(kPieceThreads, 2)
    merge_pieces(const MLA_PARAMETER MlaDecode decode, int rows_each) {
  constexpr int kRowsAtOnce = SHARE == Share::kRows ? kPieceGroups : 1;
  const int rows = static_cast<int>(decode.args.rows());
  const int blocks = (rows + rows_each - 1) / rows_each;
  const int32_t sequence = static_cast<int32_t>(blockIdx.x) / blocks;
  const int begin = static_cast<int>(blockIdx.x) % blocks * rows_each;
  const int end = begin + rows_each < rows ? begin + rows_each : rows;
  MLA_AFTER_PREDECESSOR();
  MLA_SUCCESSOR_MAY_BEGIN();
  const Partials partials(decode);
  const int32_t first_slot = partials.ends[2 * int64_t{sequence}];
  const int32_t last_slot = partials.ends[2 * int64_t{sequence} + 1];
  if (last_slot <= first_slot || !RowTarget::is_safe(decode, first_slot) ||
      !RowTarget::is_safe(decode, last_slot))
    return;
  __shared__ float4 sums[kPieceGroups / kRowsAtOnce][kColumnThreads];
  for (int row = begin; row < end; row += kRowsAtOnce) {
    const int own = row + (SHARE == Share::kRows ? threadIdx.x / kColumnThreads : 0);
    if (own < end)
      merge_row<SHARE>(decode, partials, sequence, own, first_slot, last_slot - first_slot + 1,
                       sums);
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
template __global__ void merge_pieces<Share::kPieces>(const MLA_PARAMETER MlaDecode, int);
template __global__ void merge_pieces<Share::kRows>(const MLA_PARAMETER MlaDecode, int);

#endif

}  // namespace mla::gpu

#if defined(MLA_LAUNCHERS)

const char* mla_merge_states(const void* a, const float* lse_a, const void* b, const float* lse_b,
                             void* out, float* lse, mla::Type type, int64_t rows, int64_t width,
                             const MlaDevice* device, void* stream) {
  using namespace mla::gpu;
  const int64_t wanted = (rows * MLA_WAVE + kMergeThreads - 1) / kMergeThreads;
  const int64_t most = int64_t{device->processors} * (2048 / kMergeThreads);
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most));
  with_wide(type, [&](auto kind) {
    using Code = typename decltype(kind)::Code;
    launch_overlapping(*device, merge_states<decltype(kind)>, grid, dim3(kMergeThreads), 0,
                       static_cast<hipStream_t>(stream), static_cast<const Code*>(a), lse_a,
                       static_cast<const Code*>(b), lse_b, static_cast<Code*>(out), lse, rows,
                       width);
  });
  return launch_error();
}

const char* mla_merge_pieces(const MlaDecode* decode, const MlaDevice* device, void* stream) {
  using namespace mla::gpu;
  const int64_t rows = decode->args.rows(), batch = decode->args.batch;
  const auto launch = [&](auto kernel, int64_t rows_each) {
    const dim3 grid(static_cast<unsigned>(batch * ((rows + rows_each - 1) / rows_each)));
    launch_overlapping(*device, kernel, grid, dim3(kPieceThreads), 0,
                       static_cast<hipStream_t>(stream), *decode, rows_each);
  };
  const int64_t workers = decode->schedule.workers;
  if (decode->schedule.fixed_split || workers > kPiecesAtOnce * batch) {
    launch(merge_pieces<Share::kPieces>, 1);  // more than a group of threads reads at once
  } else if (workers > batch) {
    launch(merge_pieces<Share::kRows>, kPieceGroups);
  } else {
    // Few sequences are cut: as few blocks as may be, which mostly have nothing to do.
    launch(merge_pieces<Share::kRows>, 8 * kPieceGroups);
  }
  return launch_error();
}

#endif
