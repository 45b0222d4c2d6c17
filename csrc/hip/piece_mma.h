// The beginning of a piece, its query, and its end.
#pragma once

#include "worker_mma.h"

namespace mla::gpu {

template <class S>
__device__ __forceinline__ void DecodeWorker<S>::begin_piece(const Note& note) {
  const bool is_triangle = args_.causal && args_.q_len > 1;
  const int32_t length = is_triangle ? MLA_LOAD(args_.seq_lens + note.sequence) : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    reference_[half] = -kInfinity;
    sum_[half] = exact_sum_[half] = 0.0f;
    seen_[half] = note.tokens;
    if (is_triangle) {
      const int32_t visible =
          visible_tokens(args_, length, row_begin_ + score_row() + 8 * half) - note.begin;
      if (visible < note.tokens) seen_[half] = visible;
    }
  }
  if (threadIdx.x < S::kRows) shared_.reference[threadIdx.x] = -kInfinity;
#pragma unroll
  for (int tile = 0; tile < S::kRowTiles; ++tile)
#pragma unroll
    for (int i = 0; i < S::kColumnTiles; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) out_[tile][i][k] = 0.0f;
}

// The query of a sequence, as the matrix unit's operand A, in the order of numbers in which
// multiply_keys() reads the cache: step `index` of group g has of row r the numbers g * 4 *
// kRunNumbers + quarter * kRunNumbers + step * 4 and the three behind it.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::load_query(int32_t sequence, uint4* memory) {
  const Query query(decode_, sequence);
  const bool needs_scale = query.needs_scale(S::kBf16);
  // Runs of eight numbers: each thread of four has kRuns in a row, each warp every eighth of them.
  constexpr int kRuns = kMaxWidth / 32, kItems = (kRuns + kDecodeWarps - 1) / kDecodeWarps;
  constexpr int kRunsAtOnce = S::kRunNumbers / 8;  // that lie side by side in the cache's order
  __syncthreads();                                 // everyone is done with what was in `memory`
#pragma unroll 1
  for (int tile = 0; tile < S::kRowTiles; ++tile) {
    uint4 held[kItems][2];
    const auto number_of = [&](int item) {
      const int run = warp_ + item * kDecodeWarps;
      return run < kRuns
                 ? (run / kRunsAtOnce * 4 + quarter_) * S::kRunNumbers + run % kRunsAtOnce * 8
                 : kMaxWidth;
    };
    const auto row_of = [&](int half) { return row_begin_ + tile * 16 + row_ + 8 * half; };
    if (query.is_simple()) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int item = 0; item < kItems; ++item)
          held[item][half] = query.load(row_of(half), number_of(item));
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int item = 0; item < kItems; ++item)
          held[item][half] = query.load_slowly<S::kBf16>(row_of(half), number_of(item));
    }
    RowScale scale[2] = {RowScale(0), RowScale(0)};
    if (needs_scale) {
      uint32_t top[2] = {0, 0};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int item = 0; item < kItems; ++item)
#pragma unroll
          for (int k = 0; k < 4; ++k)
            top[half] = __vmaxu2(top[half], (&held[item][half].x)[k] & 0x7fff7fffu);
        top[half] = __vmaxu2(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
        top[half] = __vmaxu2(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
        if (quarter_ == 0) shared_.query_top[row_ + 8 * half][warp_] = top[half];
      }
      __syncthreads();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto* all = reinterpret_cast<const uint4*>(shared_.query_top[row_ + 8 * half]);
#pragma unroll
        for (int k = 0; k < kDecodeWarps; ++k)
          top[half] = __vmaxu2(top[half], (&all[k / 4].x)[k % 4]);
        scale[half] = RowScale(Magnitudes<BFloat16>::single(top[half]));
      }
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int run = warp_ + item * kDecodeWarps;
      if (run >= kRuns) break;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const uint32_t word = (&held[item][half].x)[2 * step + k];
            a[2 * k + half] = needs_scale ? scale[half].apply(word) : word;
          }
        memory[(tile * S::kSteps + 2 * run + step) * 32 + lane_] = {a[0], a[1], a[2], a[3]};
      }
    }
    if (warp_ == 0 && quarter_ == 0)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        shared_.query_scale[tile * 16 + row_ + 8 * half] =
            shared_.unit * (needs_scale ? scale[half].inverse : 1.0f);
    __syncthreads();
  }
  if (!has_rows()) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) scale_[half] = shared_.query_scale[score_row() + 8 * half];
  if constexpr (S::kQueryInRegisters) {
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) q_[step] = memory[step * 32 + lane_];
  }
}

// Sums to the end, and the piece's rows to where they belong.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::finish_piece(const Note& note, float4* memory) {
  if (has_rows()) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sums[2] = {S::kBf16 ? sum_[half] : exact_sum_[half], exact_sum_[half]};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
        if (quarter_ == 0) shared_.sum[i][token_warp_][score_row() + 8 * half] = sums[i];
      }
    }
  }
  __syncthreads();
  const bool is_bad = !note.is_valid || note.has_bad_page;
  if (threadIdx.x < S::kRows) {
    float sum = 0.0f, exact_sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < S::kTokenWarps; ++warp) {
      sum += shared_.sum[0][warp][threadIdx.x];
      exact_sum += shared_.sum[1][warp][threadIdx.x];
    }
    // A row that saw nothing: output 0, logarithm -infinity.
    shared_.factor[threadIdx.x] = is_bad        ? __builtin_nanf("")
                                  : sum == 0.0f ? 0.0f
                                                : __fdividef(shared_.output_scale, sum);
    shared_.log_sum[threadIdx.x] = is_bad ? __builtin_nanf("")
                                   : exact_sum == 0.0f
                                       ? -kInfinity
                                       : shared_.reference[threadIdx.x] + log2f(exact_sum);
  }
  __syncthreads();
  const Piece piece{note.sequence, 0, 0, note.slot};
  if (note.is_cut && !RowTarget::is_safe(decode_, note.slot)) return;
  const int latent = static_cast<int>(args_.latent);
  // By way of shared memory of the warp's own, so that lanes side by side write side by side.
  constexpr int kWords = S::kColumns / 4;  // float4 in a row of the warp's columns
  static_assert(kWords == 16);
  float4* const rows = memory + warp_ * 8 * kWords;
  const auto place = [](int row, int word) { return row * kWords + (word ^ row); };
#pragma unroll
  for (int row_tile = 0; row_tile < S::kRowTiles; ++row_tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto& out = out_[row_tile];
      __syncwarp();
      if constexpr (S::kFloat8) {
      // Column c of tile i is number 8 c + i of the warp's.
#pragma unroll
        for (int i = 0; i < 4; ++i)
          rows[place(row_, quarter_ * 4 + i)] = {
              out[i % 2 * 4][2 * half + i / 2], out[i % 2 * 4 + 1][2 * half + i / 2],
              out[i % 2 * 4 + 2][2 * half + i / 2], out[i % 2 * 4 + 3][2 * half + i / 2]};
      } else {
#pragma unroll
        for (int i = 0; i < S::kColumnTiles; ++i)
          reinterpret_cast<float2*>(rows + place(row_, 2 * i + quarter_ / 2))[quarter_ % 2] = {
              out[i][2 * half], out[i][2 * half + 1]};
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row_of_eight = 2 * i + lane_ / kWords;
        const int row = row_tile * 16 + 8 * half + row_of_eight;
        if (row_begin_ + row >= args_.rows()) continue;
        const float4 held = rows[place(row_of_eight, lane_ % kWords)];
        const float factor = shared_.factor[row];
        const float values[4] = {held.x * factor, held.y * factor, held.z * factor,
                                 held.w * factor};
        const RowTarget target(decode_, piece, row_begin_ + row, note.is_cut);
        store_run(target, warp_ * S::kColumns + lane_ % kWords * 4, latent, values);
      }
    }
  if (threadIdx.x < S::kRows && row_begin_ + static_cast<int>(threadIdx.x) < args_.rows())
    RowTarget(decode_, piece, row_begin_ + threadIdx.x, note.is_cut)
        .store_lse(shared_.log_sum[threadIdx.x]);
}

}  // namespace mla::gpu
