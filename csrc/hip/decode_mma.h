// Decode's tile loop on NVIDIA: mma.sync over a ring of cache tiles that cp.async fills.
//
// A block of eight warps is one worker of the plan for up to 64 query rows; it goes through its
// tiles of tokens, whichever sequences they are of, with the next ones always on their way. For
// q.k the warps share out the tokens (and the row tiles), for p.v the columns of the output; the
// weights P go from one to the other through shared memory, already in the order that the matrix
// unit takes. p.v of a tile and q.k of the next run together, between one barrier and the next.
//
// Rows lie in shared memory as they lie in the cache, float8 stays float8; 16-byte pieces are
// exchanged within lines of 128 bytes so that no access meets itself in a bank.
#pragma once

#include "fetch_mma.h"
#include "launch.h"
#include "piece_mma.h"
#include "tile_mma.h"

namespace mla::gpu {

template <class S>
__device__ __forceinline__ void DecodeWorker<S>::run(int32_t worker) {
  // Lines that one thread is about to walk through, on their way all at once.
  int32_t line = 0;
  const int32_t walked = threadIdx.x % 64 * 32;
  if (threadIdx.x >= 128 && walked < args_.batch)
    line = MLA_LOAD((threadIdx.x < 192 ? args_.seq_lens : decode_.schedule.first_unit) + walked);
  if (threadIdx.x == 0) {
    Pieces pieces;
    pieces.start(decode_.schedule, worker);
#pragma unroll 1
    for (int piece = 0; piece < 2; ++piece) write_note(pieces, piece);
    shared_.pieces = pieces;
  }
  if (threadIdx.x == 32) {
    shared_.unit = args_.score_scale() * kLog2E;
    shared_.output_scale = args_.output_scale();
  }
  asm volatile("" ::"r"(line));
  __syncthreads();
  if (shared_.note[0].sequence < 0) return;
  Ahead ahead{};
  take_piece(ahead);
  find_pages(ahead);
  int stage = 0, piece = -1;
  // Tile after tile, with as many before the first as there are stages to fill.
#pragma unroll 1
  for (int tile = 1 - S::kStages;; ++tile) {
    fetch(ahead, tile < 0 ? tile + S::kStages - 1 : stage == 0 ? S::kStages - 1 : stage - 1);
    // p.v of this tile, whose weights are there, and q.k of the next.
    const int next_stage = tile < 0 || stage + 1 == S::kStages ? 0 : stage + 1;
    uint4* const weights = weights_ + (tile & 1) * (S::kWeightBytes / 16);
    uint4* const next_weights = weights_ + (~tile & 1) * (S::kWeightBytes / 16);
    Products products = {};
    if (tile >= 0 && tokens_ > S::kTokens) {
      interleave<0>(stage, next_stage, weights, products);
      tokens_ -= S::kTokens, seen_[0] -= S::kTokens, seen_[1] -= S::kTokens;
    } else {
      // The first query is loaded with two tiles on their way.
      if (tile >= 0 || tile == 2 - S::kStages) {
        const int free_stage = tile < 0 ? S::kStages - 1 : stage;
        if (tile >= 0) {
#pragma unroll
          for (int block = 0; block < S::kTokens / 16; ++block)
            multiply_values(stage, block, weights);
          finish_piece(shared_.note[piece % kNotes],
                       reinterpret_cast<float4*>(stage_memory_ + free_stage * S::kStageBytes));
        }
        ++piece;
        const Note next = shared_.note[piece % kNotes];
        if (next.sequence < 0) return;
        load_query(next.sequence, query_memory(free_stage));
        begin_piece(next);
        tokens_ = next.tokens;
      }
      if (tile < -1) {
        __syncthreads();
        continue;
      }
      wait_for_copies<S::kStages - 2>();  // of tile 0
      __syncthreads();
      multiply_keys<0, S::kGroups>(next_stage, products);
    }
    // Weights as if the reference could stay where it is, which it mostly can.
    Scores scores;
    const bool is_far = finish_scores(products, scores);
    float sum[2], exact_sum[2];
    weigh(scores, next_weights, sum, exact_sum);
    wait_for_copies<S::kStages - 3>();
    // Behind this barrier the weights are there, and the tile behind the next; and nobody reads
    // the stage of this tile any more.
    if (__syncthreads_or(is_far)) {
      move_reference(scores);
      weigh(scores, next_weights, sum, exact_sum);
      __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum_[half] += sum[half], exact_sum_[half] += exact_sum[half];
    stage = next_stage;
  }
}

// Block x is a worker of the plan, block y a part of the rows.
template <class S>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_tiles(const MLA_PARAMETER MlaDecode decode) {
  extern __shared__ __align__(128) char memory[];
  MLA_AFTER_PREDECESSOR();
  MLA_SUCCESSOR_MAY_BEGIN();
  DecodeWorker<S> worker(decode, static_cast<int>(blockIdx.y) * S::kRows, memory);
  worker.run(static_cast<int32_t>(blockIdx.x));
}

#if defined(MLA_LAUNCHERS)

// False where the device has not the shared memory.
template <class S>
bool launch_shape(const MlaDecode& decode, const MlaDevice& device, hipStream_t stream) {
  constexpr int kShared = kDecodeSharedBytes<S>;
  if (kShared > device.shared_bytes) return false;
  if (cudaFuncSetAttribute(decode_tiles<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared) !=
      cudaSuccess)
    return true;  // launch_error() says why
  const int64_t rows = decode.args.rows();
  const dim3 grid(static_cast<unsigned>(decode.schedule.workers),
                  static_cast<unsigned>((rows + S::kRows - 1) / S::kRows));
  launch_overlapping(device, decode_tiles<S>, grid, dim3(kDecodeThreads), kShared, stream, decode);
  return true;
}

// More rows over one tile of the cache, as far as there is shared memory for the query.
inline int rows_per_worker(const MlaDevice& device, int64_t rows) {
  if (device.shared_bytes < 227 * 1024 || rows <= 16) return 16;
  return rows <= 32 ? 32 : 64;
}

// The shapes for 227 KiB of shared memory (sm_90, sm_100), and those for the 99 KiB that every
// device from sm_80 on has.
template <class Cache>
bool launch_tiles(const MlaDecode& decode, const MlaDevice& device, hipStream_t stream) {
  constexpr bool kFloat8 = kIsFloat8<Cache>;
  using One = Shape<Cache, 1, 64, kFloat8 ? 5 : 3>;
  using Two = Shape<Cache, 2, kFloat8 ? 64 : 32, kFloat8 ? 4 : 5>;
  using Four = Shape<Cache, 4, kFloat8 ? 64 : 32, kFloat8 ? 3 : 4>;
  using Small = Shape<Cache, 1, kFloat8 ? 32 : 16, 3>;
  switch (rows_per_worker(device, decode.args.rows())) {
    case Four::kRows:
      return launch_shape<Four>(decode, device, stream);
    case Two::kRows:
      return launch_shape<Two>(decode, device, stream);
    default:
      return launch_shape<One>(decode, device, stream) ||
             launch_shape<Small>(decode, device, stream);
  }
}

#endif

}  // namespace mla::gpu
