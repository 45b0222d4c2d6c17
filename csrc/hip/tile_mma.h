// The arithmetic of a tile: scores, weights, values.
#pragma once

#include "worker_mma.h"

namespace mla::gpu {

// q.k of a tile, for this warp's rows and tokens and groups FROM to TO of the numbers.
template <class S>
template <int FROM, int TO>
__device__ __forceinline__ void DecodeWorker<S>::multiply_keys(int stage, Products& sums) const {
  const char* memory = stage_memory_ + stage * S::kStageBytes;
  const uint4* query = query_ + row_warp_ * S::kSteps * 32 + lane_;
#pragma unroll
  for (int group = FROM; group < TO; ++group) {
    uint4 keys[S::kTokenTiles];
#pragma unroll
    for (int tile = 0; tile < S::kTokenTiles; ++tile) {
      const int token = token_warp_ * S::kTokensPerWarp + tile * 8 + token_of_column(row_);
      keys[tile] =
          *reinterpret_cast<const uint4*>(memory + S::piece_offset(token, group * 4 + quarter_));
    }
#pragma unroll
    for (int step = 0; step < S::kRunSteps; ++step) {
      const int index = group * S::kRunSteps + step;
      const uint4 a = S::kQueryInRegisters ? q_[index] : query[index * 32];
#pragma unroll
      for (int tile = 0; tile < S::kTokenTiles; ++tile) {
        const uint32_t* words = &keys[tile].x;
        uint32_t b0, b1;
        if constexpr (S::kFloat8) {
          widen_float8<typename S::Cache>(words[step], b0, b1);
        } else {
          b0 = words[2 * step], b1 = words[2 * step + 1];
        }
        multiply<S::kBf16>(sums[index % kChains][tile], a, b0, b1);
      }
    }
  }
}

// Products to scores in units of log2, hidden tokens at -infinity. Says whether one is too far
// above the reference.
template <class S>
__device__ __forceinline__ bool DecodeWorker<S>::finish_scores(const Products& sums,
                                                               Scores& scores) {
#pragma unroll
  for (int tile = 0; tile < S::kTokenTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = sums[0][tile][i];
#pragma unroll
      for (int chain = 1; chain < kChains; ++chain) sum += sums[chain][tile][i];
      scores[tile][i] = sum * scale_[i / 2];
    }
  if (seen_[0] < S::kTokens || seen_[1] < S::kTokens) {
#pragma unroll
    for (int tile = 0; tile < S::kTokenTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Columns 2 * quarter and one more: tokens `quarter` and that + 4.
        const int token = token_warp_ * S::kTokensPerWarp + quarter_ + 8 * tile + 4 * (i & 1);
        if (token >= seen_[i / 2]) scores[tile][i] = -kInfinity;
      }
  }
  float top[2] = {-kInfinity, -kInfinity};
#pragma unroll
  for (int tile = 0; tile < S::kTokenTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], scores[tile][i]);
  return has_rows() && (top[0] > reference_[0] + kSlack || top[1] > reference_[1] + kSlack);
}

// Moves the reference of every row below its largest score so far. All threads take part.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::move_reference(const Scores& scores) {
  if (has_rows()) {
    float top[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int i = 0; i < S::kTokenTiles; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) top[k / 2] = fmaxf(top[k / 2], scores[i][k]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
      if (quarter_ == 0) shared_.top[token_warp_][score_row() + 8 * half] = top[half];
    }
  }
  __syncthreads();
  if (threadIdx.x < S::kRows) {
    const float before = shared_.reference[threadIdx.x];
    float top = -kInfinity;
    for (int warp = 0; warp < S::kTokenWarps; ++warp)
      top = fmaxf(top, shared_.top[warp][threadIdx.x]);
    const float after = fmaxf(before, top - kHeadroom);
    shared_.reference[threadIdx.x] = after;
    // Nothing was added up while the reference was -infinity.
    shared_.rescale[threadIdx.x] = before == -kInfinity ? 0.0f : exp2_fast(before - after);
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!has_rows()) break;
    const int row = score_row() + 8 * half;
    reference_[half] = shared_.reference[row];
    sum_[half] *= shared_.rescale[row];
    exact_sum_[half] *= shared_.rescale[row];
  }
#pragma unroll
  for (int tile = 0; tile < S::kRowTiles; ++tile) {
    const float factor[2] = {shared_.rescale[tile * 16 + row_],
                             shared_.rescale[tile * 16 + row_ + 8]};
#pragma unroll
    for (int i = 0; i < S::kColumnTiles; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) out_[tile][i][k] *= factor[k / 2];
  }
}

// Scores to weights, which go to shared memory as the matrix unit's operand A, and their sums: of
// the weights as rounded, which are what the values are multiplied with, and exact. float16 rounds
// so little that the exact one serves for both.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::weigh(const Scores& scores, uint4* weights,
                                                       float (&sum)[2],
                                                       float (&exact_sum)[2]) const {
#pragma unroll
  for (int half = 0; half < 2; ++half) sum[half] = exact_sum[half] = 0.0f;
  if (!has_rows()) return;
  // A row that has seen nothing yet has only scores of -infinity.
  const float shift[2] = {reference_[0] == -kInfinity ? 0.0f : reference_[0],
                          reference_[1] == -kInfinity ? 0.0f : reference_[1]};
  uint2* to = reinterpret_cast<uint2*>(
      weights + (row_warp_ * (S::kTokens / 16) + token_warp_ * S::kTokensPerWarp / 16) * 32 +
      lane_);
  const int first = token_warp_ * S::kTokensPerWarp / 8 % 2;
#pragma unroll
  for (int i = 0; i < S::kTokenTiles; ++i) {
    uint32_t packed[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float a = exp2_fast(scores[i][2 * half] - shift[half]);
      const float b = exp2_fast(scores[i][2 * half + 1] - shift[half]);
      packed[half] = pack<S::kBf16>(a, b);
      exact_sum[half] += a + b;
      if constexpr (S::kBf16) {
        const float2 rounded = unpack<true>(packed[half]);
        sum[half] += rounded.x + rounded.y;
      }
    }
    to[(first + i) / 2 * 64 + (first + i) % 2] = {packed[0], packed[1]};
  }
}

// p.v of sixteen tokens of a tile for this warp's columns.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::multiply_values(int stage, int block,
                                                                 const uint4* weights) {
  const char* memory = stage_memory_ + stage * S::kStageBytes;
  uint4 p[S::kRowTiles];
#pragma unroll
  for (int tile = 0; tile < S::kRowTiles; ++tile)
    p[tile] = weights[(tile * (S::kTokens / 16) + block) * 32 + lane_];
  if constexpr (S::kFloat8) {
    // Eight numbers of each of four tokens; column `row_` of column tile i is number i of them.
    uint2 values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int piece = warp_ * (S::kColumns / 16) + (row_ >> 1);
      values[i] = *reinterpret_cast<const uint2*>(
          memory + S::piece_offset(block * 16 + 4 * i + quarter_, piece) + 8 * (row_ & 1));
    }
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const auto of = [&](int i) { return word == 0 ? values[i].x : values[i].y; };
      uint32_t b[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t one = of(2 * half), other = of(2 * half + 1);
        widen_float8<typename S::Cache>(__byte_perm(one, other, 0x5140), b[half][0], b[half][1]);
        widen_float8<typename S::Cache>(__byte_perm(one, other, 0x7362), b[half][2], b[half][3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int tile = 0; tile < S::kRowTiles; ++tile)
          multiply<S::kBf16>(out_[tile][4 * word + i], p[tile], b[0][i], b[1][i]);
    }
  } else {
    const int token = block * 16 + 8 * (lane_ >> 3 & 1) + token_of_column(lane_ & 7);
#pragma unroll
    for (int i = 0; i < S::kColumnTiles; i += 2) {
      const int piece = warp_ * (S::kColumns / 8) + i + (lane_ >> 4);
      const uint4 b = load_transposed(shared_address(memory + S::piece_offset(token, piece)));
#pragma unroll
      for (int tile = 0; tile < S::kRowTiles; ++tile) {
        multiply<S::kBf16>(out_[tile][i], p[tile], b.x, b.y);
        multiply<S::kBf16>(out_[tile][i + 1], p[tile], b.z, b.w);
      }
    }
  }
}

// p.v of one tile and q.k of the next, a little of each in turn.
template <class S>
template <int BLOCK>
__device__ __forceinline__ void DecodeWorker<S>::interleave(int stage, int next_stage,
                                                            const uint4* weights,
                                                            Products& products) {
  constexpr int kBlocks = S::kTokens / 16;
  if constexpr (BLOCK < kBlocks) {
    multiply_values(stage, BLOCK, weights);
    multiply_keys<BLOCK * S::kGroups / kBlocks, (BLOCK + 1) * S::kGroups / kBlocks>(next_stage,
                                                                                    products);
    interleave<BLOCK + 1>(stage, next_stage, weights, products);
  }
}

}  // namespace mla::gpu
