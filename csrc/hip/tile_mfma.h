// The arithmetic of a tile of tokens in one wave, with the token as the row of both products'
// tiles:
//
//   S^T = K q^T    A is the rows as they were loaded, B the query, both in units of 16 bytes
//   O^T = V^T P^T  B is P^T, which lies in the lanes as S^T came out; A is the rows, transposed
//                  through shared memory of the wave's own, 128 numbers at a time
//
// float8 is multiplied as it is, against a query and weights that are sums of two float8 numbers:
// as exact as bfloat16 with its 8 bits, at the cost in matrix instructions of bfloat16, and nothing
// is widened. The weights' second number has e5m2's range: what is far below the maximum must not
// become 0, or a long tail of small weights would be lost.
#pragma once

#include "rows_mfma.h"

namespace mla::gpu {

inline constexpr int kValueTiles = 8;  // matrix tiles of 128 numbers

// In lane l: units l / 16, l / 16 + 4, ... of token l % 16 of each block, and of query row l % 16.
template <class S>
using Rows = Word4[S::kBlocks][S::kPieces];
template <class S>
using QueryUnits = Word4[S::kParts * S::kPieces];
// In lane l: tokens 4 * (l / 16) to that + 3 of each block, of query row l % 16.
template <class S>
using Scores = Sum4[S::kBlocks];
// The same tokens. 16 bits: of one block; float8: two blocks' first numbers, and their second ones.
template <class S>
using Weights = Word2[S::kFloat8 ? 2 : 1];

// q.k of a tile.
template <class S>
__device__ __forceinline__ void score(const Rows<S>& rows, const QueryUnits<S>& query, float scale,
                                      Scores<S>& scores) {
  // Sums next to each other, so that a product need not wait for the one before.
  constexpr int kSums = S::kFloat8 ? S::kParts : 2;
  Sum4 sums[kSums][S::kBlocks] = {};
#pragma unroll
  for (int piece = 0; piece < S::kPieces; ++piece)
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block)
#pragma unroll
      for (int part = 0; part < S::kParts; ++part) {
        Sum4& sum = sums[S::kFloat8 ? part : piece % 2][block];
        sum =
            multiply<typename S::Cache>(rows[block][piece], query[part * S::kPieces + piece], sum);
      }
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
    scores[block] = sums[kSums - 1][block];
#pragma unroll
    for (int i = kSums - 2; i >= 0; --i)
      scores[block] = sums[i][block] + scores[block] * (S::kFloat8 ? 1.0f / kPartUnit : 1.0f);
    scores[block] *= scale;
  }
}

// What a wave knows of query row l % 16; sums are of this lane's tokens alone.
template <class S>
struct Softmax {
  // The maximum may exceed the reference that weights are taken relative to by kHeadroom and
  // another kSlack, in powers of two, before everything is rescaled: weights stay finite, and those
  // near the maximum keep all their bits. float8: below 2^7.
  static constexpr float kSlack = S::kFloat8 ? 4.0f : 8.0f;
  static constexpr float kHeadroom = S::kFloat8                          ? 3.0f
                                     : kSame<typename S::Cache, Float16> ? 6.0f
                                                                         : 0.0f;

  float reference = -kInfinity;
  // Of the weights as they are multiplied, and exact. What the output is divided by has the same
  // roundings: a token that has all the weight is exact.
  float sum = 0.0f, exact_sum = 0.0f;

  __device__ __forceinline__ bool is_far_above(float top) const {
    return top > reference + (kSlack + kHeadroom);
  }

  // Puts the reference below the largest score so far; returns what the output has to be multiplied
  // by.
  __device__ __forceinline__ float move_reference(float top) {
    const float after = fmaxf(reference, top - kHeadroom);
    // Rows that have seen nothing, and those that stay: both may be -infinity.
    const float factor = reference == after ? 1.0f : exp2_fast(reference - after);
    sum *= factor, exact_sum *= factor;
    reference = after;
    return factor;
  }

  __device__ __forceinline__ void weigh(const Scores<S>& scores, Weights<S>& weights) {
    using Cache = typename S::Cache;
    // A row that has seen nothing yet has only scores of -infinity.
    const float shift = reference == -kInfinity ? 0.0f : reference;
    Sum4 rounded = {0, 0, 0, 0}, exact = {0, 0, 0, 0};
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      Sum4 weight;
#pragma unroll
      for (int i = 0; i < 4; ++i) weight[i] = exp2_fast(scores[block][i] - shift);
      exact += weight;
      if constexpr (S::kFloat8) {
        weights[0][block] = pack_float8<false>(weight);
        const Sum4 high = unpack_float8<false>(weights[0][block]);
        weights[1][block] = pack_float8<true>(weight - high);
        rounded += high + unpack_float8<true>(weights[1][block]);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          weights[0][i] = pack<Cache>(weight[2 * i], weight[2 * i + 1]);
          const float2 pair = unpack<Cache>(weights[0][i]);
          rounded[2 * i] += pair.x, rounded[2 * i + 1] += pair.y;
        }
      }
    }
    sum += (rounded.x + rounded.y) + (rounded.z + rounded.w);
    exact_sum += (exact.x + exact.y) + (exact.z + exact.w);
  }
};

// Where a unit of a chunk lies in a wave's transposition. Rows are written across and read along
// the tokens; the exchange keeps both from meeting themselves in a bank.
template <class S>
__device__ __forceinline__ int unit_place(int row, int unit) {
  const int exchange = S::kFloat8 ? (row & 7) ^ (row >> 2 & 4) : row & 15;
  return row * S::kChunkUnits + (unit ^ exchange);
}

// p.v of a chunk: row r of tile t is number 8 * r + t.
template <class S>
__device__ __forceinline__ void add_values(Sum4 (&out)[kValueTiles], const Word4* chunk,
                                           const Weights<S>& weights) {
  using Cache = typename S::Cache;
  const int place = threadIdx.x % 16, group = threadIdx.x % MLA_WAVE / 16;
  if constexpr (S::kFloat8) {
    Word2 row[4 * S::kBlocks];  // eight numbers of a token
#pragma unroll
    for (int i = 0; i < 4 * S::kBlocks; ++i)
      row[i] = reinterpret_cast<const Word2*>(
          chunk + unit_place<S>(i / 4 * 16 + 4 * group + i % 4, place >> 1))[place & 1];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      Word2 value[4];  // of four numbers, four tokens of each block
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) {
        const Word2* of = row + 4 * block;
        const uint32_t a = lower_bytes(of[1][word], of[0][word]);
        const uint32_t b = upper_bytes(of[1][word], of[0][word]);
        const uint32_t c = lower_bytes(of[3][word], of[2][word]);
        const uint32_t d = upper_bytes(of[3][word], of[2][word]);
        value[0][block] = lower_halves(c, a), value[1][block] = upper_halves(c, a);
        value[2][block] = lower_halves(d, b), value[3][block] = upper_halves(d, b);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Sum4& sum = out[4 * word + i];
        sum = multiply<Cache>(value[i], weights[0], sum);
        sum = multiply_wide(value[i], weights[1], sum);
      }
    }
  } else {
    Word4 row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) row[i] = chunk[unit_place<S>(4 * group + i, place)];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const Word2 even = {lower_halves(row[1][word], row[0][word]),
                          lower_halves(row[3][word], row[2][word])};
      const Word2 odd = {upper_halves(row[1][word], row[0][word]),
                         upper_halves(row[3][word], row[2][word])};
      out[2 * word] = multiply<Cache>(even, weights[0], out[2 * word]);
      out[2 * word + 1] = multiply<Cache>(odd, weights[0], out[2 * word + 1]);
    }
  }
}

}  // namespace mla::gpu
