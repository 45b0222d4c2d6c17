// Decode's tile loop on AMD: MFMA over cache rows that go from memory to registers.
//
// A block of four waves is one worker of the plan for 16 query rows. Its waves have tiles of tokens
// of their own and their own maximum, sums and output; they meet only at the end of a piece, so
// that no barrier is in the loop. A row's 16-byte pieces lie in registers from when they are loaded
// to when tile_mfma.h is done with them, and then take those of the wave's next tile at once.
#pragma once

#include "launch.h"
#include "tile_mfma.h"

namespace mla::gpu {

inline constexpr int kDecodeWaves = 4;
inline constexpr int kDecodeThreads = kDecodeWaves * MLA_WAVE;
inline constexpr int kChunks = kMaxLatent / 128;

struct DecodeShared {
  // The query; then a transposition of each wave; then the waves' outputs.
  static constexpr int kWordsPerWave = 512;
  Word4 words[kDecodeWaves * kWordsPerWave];
  float inverse_scale[kRowsAtOnce];
  float top[kDecodeWaves][kRowsAtOnce];
  float sum[kDecodeWaves][kRowsAtOnce], exact_sum[kDecodeWaves][kRowsAtOnce];
  int32_t has_bad_page[kDecodeWaves];
};

template <class S, bool WHOLE>
class DecodeWorker {
 public:
  __device__ __forceinline__ DecodeWorker(int row_begin, DecodeShared& shared)
      : row_begin_(row_begin),
        shared_(shared),
        wave_(__builtin_amdgcn_readfirstlane(threadIdx.x / MLA_WAVE)),
        lane_(threadIdx.x % MLA_WAVE),
        place_(lane_ % 16),
        group_(lane_ / 16) {}

  __device__ __forceinline__ void run(const MlaDecode& argument, int32_t worker);

 private:
  __device__ __forceinline__ void load_query(const MlaDecode& decode, int32_t sequence);
  __device__ __forceinline__ void begin_piece();
  __device__ __forceinline__ void attend(const MlaDecode& decode, const Piece& piece);
  __device__ __forceinline__ void finish_piece(const MlaDecode& decode, const WorkerPiece& piece);
  __device__ __forceinline__ static void store(const RowTarget& target, const DecodeArgs& args,
                                               int index, const float (&four)[4]);

  const int row_begin_;
  DecodeShared& shared_;
  const int wave_, lane_;
  const int place_;  // query row of this lane's results, and token of what it loads
  const int group_;  // units that it loads, and tokens of its results

  Rows<S> rows_;
  QueryUnits<S> query_;
  float scale_;  // from products to scores in units of log2
  Softmax<S> softmax_;
  Sum4 out_[kChunks * kValueTiles];
  bool has_bad_page_;  // the piece at hand, among this lane's tokens
};

template <class S, bool WHOLE>
__device__ __forceinline__ void DecodeWorker<S, WHOLE>::load_query(const MlaDecode& decode,
                                                                   int32_t sequence) {
  const Query<S, WHOLE> query(decode, sequence, row_begin_);
  query.store(shared_.words, shared_.inverse_scale);
  __syncthreads();
  constexpr int kPieces = S::kParts * S::kPieces;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece)
    query_[piece] = shared_.words[piece * MLA_WAVE + lane_];
  scale_ = decode.args.score_scale() * kLog2E;
  if constexpr (S::kScaled) scale_ *= shared_.inverse_scale[place_];
  __syncthreads();
}

template <class S, bool WHOLE>
__device__ __forceinline__ void DecodeWorker<S, WHOLE>::begin_piece() {
  softmax_ = Softmax<S>();
  has_bad_page_ = false;
#pragma unroll
  for (int tile = 0; tile < kChunks * kValueTiles; ++tile) out_[tile] = Sum4{0, 0, 0, 0};
}

// This wave's tiles of a piece.
template <class S, bool WHOLE>
__device__ __forceinline__ void DecodeWorker<S, WHOLE>::attend(const MlaDecode& decode,
                                                               const Piece& piece) {
  constexpr int32_t kStep = kDecodeWaves * S::kTokens;
  const CacheRows<S, WHOLE> cache(decode, piece);
  const int32_t end = static_cast<int32_t>(piece.end);
  int32_t tile = static_cast<int32_t>(piece.begin) + wave_ * S::kTokens;
  if (tile >= end) return;
  if (!cache.has_pages()) {
    has_bad_page_ = true;
    return;
  }
  int32_t seen =
      visible_tokens(decode.args, decode.args.seq_lens[piece.sequence], row_begin_ + place_);
  if (seen > end) seen = end;
  Word4* const chunk = shared_.words + wave_ * DecodeShared::kWordsPerWave;

  // Pages are looked up a tile ahead of the rows, and those a tile ahead of their use.
  typename CacheRows<S, WHOLE>::Pages pages;
  typename CacheRows<S, WHOLE>::Places places;
  cache.look_up(tile, pages);
  has_bad_page_ |= !cache.locate(tile, pages, places);
  cache.look_up(tile + kStep, pages);
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < S::kPieces; ++i) rows_[block][i] = cache.load(places[block], i);
  for (; tile < end; tile += kStep) {
    if (cache.is_short()) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) {
        const Word4 unit = cache.load_short(places[block]);
#pragma unroll
        for (int i = 0; i < S::kPieces; ++i) rows_[block][i] = unit;
      }
    }
    has_bad_page_ |= !cache.locate(tile + kStep, pages, places);
    cache.look_up(tile + 2 * kStep, pages);

    Scores<S> scores;
    score<S>(rows_, query_, scale_, scores);
    order_schedule();
    constexpr int kValuePieces = kChunks * S::kChunkPieces;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block)
#pragma unroll
      for (int i = kValuePieces; i < S::kPieces; ++i)
        rows_[block][i] = cache.load(places[block], i);

    float top = -kInfinity;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (tile + 16 * block + 4 * group_ + i >= seen) scores[block][i] = -kInfinity;
        top = fmaxf(top, scores[block][i]);
      }
    top = over_groups(top, [](float a, float b) { return fmaxf(a, b); });
    if (__builtin_amdgcn_ballot_w64(softmax_.is_far_above(top)) != 0) {
      const float factor = softmax_.move_reference(top);
#pragma unroll
      for (int i = 0; i < kChunks * kValueTiles; ++i) out_[i] *= factor;
    }
    Weights<S> weights;
    softmax_.weigh(scores, weights);

#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      // Two chunks have room.
      Word4* const at = chunk + c % 2 * (DecodeShared::kWordsPerWave / 2);
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < S::kChunkPieces; ++i) {
          Word4& piece_of_row = rows_[block][c * S::kChunkPieces + i];
          at[unit_place<S>(16 * block + place_, 4 * i + group_)] = piece_of_row;
          piece_of_row = cache.load(places[block], c * S::kChunkPieces + i);
        }
      order_wave();
      add_values<S>(reinterpret_cast<Sum4(&)[kValueTiles]>(out_[c * kValueTiles]), at, weights);
      order_wave();
    }
  }
}

// The waves' results together, and the piece's rows to where they belong.
template <class S, bool WHOLE>
__device__ __forceinline__ void DecodeWorker<S, WHOLE>::finish_piece(const MlaDecode& decode,
                                                                     const WorkerPiece& piece) {
  order_schedule();
  const auto add = [](float a, float b) { return a + b; };
  const float sum_of_wave = over_groups(softmax_.sum, add);
  const float exact_sum_of_wave = over_groups(softmax_.exact_sum, add);
  const bool has_bad_page = __builtin_amdgcn_ballot_w64(has_bad_page_) != 0;
  if (group_ == 0) {
    shared_.top[wave_][place_] = softmax_.reference;
    shared_.sum[wave_][place_] = sum_of_wave;
    shared_.exact_sum[wave_][place_] = exact_sum_of_wave;
    if (place_ == 0) shared_.has_bad_page[wave_] = has_bad_page;
  }
  __syncthreads();
  bool is_bad = !piece.is_valid;
  float top = -kInfinity, sum = 0.0f, exact_sum = 0.0f;
#pragma unroll
  for (int wave = 0; wave < kDecodeWaves; ++wave) {
    is_bad |= shared_.has_bad_page[wave] != 0;
    top = fmaxf(top, shared_.top[wave][place_]);
  }
  // A wave that saw nothing has no weight.
  const auto weight = [top](float reference) {
    return reference == -kInfinity ? 0.0f : exp2_fast(reference - top);
  };
#pragma unroll
  for (int wave = 0; wave < kDecodeWaves; ++wave) {
    const float of_wave = weight(shared_.top[wave][place_]);
    sum += of_wave * shared_.sum[wave][place_];
    exact_sum += of_wave * shared_.exact_sum[wave][place_];
  }
  const bool is_cut = piece.is_cut(), is_safe = !is_cut || RowTarget::is_safe(decode, piece.slot);
  const int rows = static_cast<int>(decode.args.rows());
  // A row that saw nothing: output 0, logarithm -infinity.
  const float factor = is_bad ? __builtin_nanf("")
                       : sum == 0.0f
                           ? 0.0f
                           : weight(softmax_.reference) * decode.args.output_scale() / sum;
  if (threadIdx.x == 0 && row_begin_ == 0)
    note_ends(decode, piece.sequence, static_cast<int32_t>(piece.slot), piece.is_first,
              piece.is_last);
  if (threadIdx.x < kRowsAtOnce && is_safe && row_begin_ + place_ < rows)
    RowTarget(decode, piece, row_begin_ + place_, is_cut)
        .store_lse(is_bad              ? factor
                   : exact_sum == 0.0f ? -kInfinity
                                       : top + log2f(exact_sum));

  // Chunk by chunk, each thread adds up eight numbers of one row. A wave's numbers lie as
  // [row][32 times 4], exchanged as in unit_place().
  const int row = static_cast<int>(threadIdx.x) / 16, eight = static_cast<int>(threadIdx.x) % 16;
  const bool is_stored = is_safe && row_begin_ + row < rows;
  const RowTarget target(decode, piece, row_begin_ + row, is_cut);
  Word4* const mine = shared_.words + wave_ * DecodeShared::kWordsPerWave + place_ * 32;
  MLA_SHORT_LOOP
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int known = 0; known < kChunks; ++known)  // registers have no index at run time
      if (c == known) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const Sum4* tile = out_ + known * kValueTiles + 4 * half;
            const Sum4 four = Sum4{tile[0][i], tile[1][i], tile[2][i], tile[3][i]} * factor;
            mine[(2 * (4 * group_ + i) + half) ^ (place_ & 7)] = __builtin_bit_cast(Word4, four);
          }
      }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Sum4 sums = {0, 0, 0, 0};
#pragma unroll
      for (int wave = 0; wave < kDecodeWaves; ++wave)
        sums +=
            __builtin_bit_cast(Sum4, shared_.words[wave * DecodeShared::kWordsPerWave + row * 32 +
                                                   ((2 * eight + half) ^ (row & 7))]);
      const float four[4] = {sums.x, sums.y, sums.z, sums.w};
      if (is_stored) store(target, decode.args, 32 * c + 2 * eight + half, four);
    }
    __syncthreads();
  }
}

// Numbers 4 * index to that + 3 of a row, as the cache rows' units had them.
template <class S, bool WHOLE>
__device__ __forceinline__ void DecodeWorker<S, WHOLE>::store(const RowTarget& target,
                                                              const DecodeArgs& args, int index,
                                                              const float (&four)[4]) {
  constexpr int kOfUnit = S::kNumbers / 4;
  const int unit = index / kOfUnit, begin = unit * S::kNumbers;
  const int latent = static_cast<int>(args.latent);
  if constexpr (WHOLE) {
    store_columns(target, index * 4, latent, four);
    return;
  }
  const int first = S::first_number(unit, static_cast<int>(args.width)) + index % kOfUnit * 4;
  // The unit before has those in front of `begin`.
  const int skipped = first < begin ? begin - first : 0;
  float rest[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int k = i; k < 4; ++k)
      if (i + skipped == k) rest[i] = four[k];
  store_columns(target, first + skipped, first + 4 < latent ? first + 4 : latent, rest);
}

template <class S, bool WHOLE>
__device__ __forceinline__ void DecodeWorker<S, WHOLE>::run(const MlaDecode& argument,
                                                            int32_t worker) {
  const auto decode = [&argument]() -> const MlaDecode& { return argument_again(argument); };
  Pieces pieces;
  pieces.start(decode().schedule, worker);
  WorkerPiece piece;
  int32_t query_of = -1;
  while (pieces.next(decode(), piece)) {
    if (piece.sequence != query_of && piece.begin < piece.end) {
      load_query(decode(), piece.sequence);
      query_of = piece.sequence;
    }
    begin_piece();
    attend(decode(), piece);
    finish_piece(decode(), piece);
  }
}

// Block x is a worker of the plan, block y a part of the rows.
template <class Cache, int PARTS, bool WHOLE>
__global__ void MLA_WAVES_PER_SIMD(1) __launch_bounds__(kDecodeThreads)
    decode_tiles([[maybe_unused]] const MLA_PARAMETER MlaDecode decode) {
  // float8 of the family that the hardware does not have: launch_tiles() does not come here.
  if constexpr (!kIsFloat8<Cache> || kSame<Cache, HardwareFloat8>) {
    __shared__ DecodeShared shared;
    DecodeWorker<Shape<Cache, PARTS>, WHOLE> worker(static_cast<int>(blockIdx.y) * kRowsAtOnce,
                                                    shared);
    worker.run(decode, static_cast<int32_t>(blockIdx.x));
  }
}

#if !defined(MLA_LAUNCHERS)

#define MLA_NAME(Cache, PARTS)                                                \
  template __global__ void decode_tiles<Cache, PARTS, true>(const MlaDecode); \
  template __global__ void decode_tiles<Cache, PARTS, false>(const MlaDecode);
MLA_NAME(Float16, 1)
MLA_NAME(BFloat16, 1)
MLA_NAME(HardwareFloat8, 2)
MLA_NAME(HardwareFloat8, 3)
#undef MLA_NAME

#else

template <class Cache, int PARTS>
void launch_parts(const MlaDecode& decode, const MlaDevice& device, hipStream_t stream) {
  const DecodeArgs& args = decode.args;
  const bool is_whole = has_whole_rows(decode);
  const auto kernel =
      is_whole ? decode_tiles<Cache, PARTS, true> : decode_tiles<Cache, PARTS, false>;
  const dim3 grid(static_cast<unsigned>(decode.schedule.workers),
                  static_cast<unsigned>((args.rows() + kRowsAtOnce - 1) / kRowsAtOnce));
  launch_overlapping(device, kernel, grid, dim3(kDecodeThreads), 0, stream, decode);
}

// False for float8 of the family that the matrix unit does not multiply.
template <class Cache>
bool launch_tiles(const MlaDecode& decode, const MlaDevice& device, hipStream_t stream) {
  if constexpr (!kIsFloat8<Cache>) {
    launch_parts<Cache, 1>(decode, device, stream);
  } else if (decode.args.cache_type != device.float8) {
    return false;
  } else if (decode.args.q_type == Type::kFloat16) {
    launch_parts<Cache, 3>(decode, device, stream);
  } else {
    launch_parts<Cache, 2>(decode, device, stream);
  }
  return true;
}

inline int rows_per_worker(const MlaDevice&, int64_t) { return kRowsAtOnce; }

#endif

}  // namespace mla::gpu
