// Decode's tile loop on NVIDIA: mma.sync over a ring of cache tiles that cp.async fills.
//
// A block of eight warps is one worker of the plan for up to 64 query rows; it goes through its
// tiles of tokens, whichever sequences they are of, with the next ones always on their way. For
// q.k the warps share out the tokens (and the row tiles), for p.v the columns of the output; the
// weights P go from one to the other through shared memory, already in the order that the matrix
// unit takes. p.v of a tile and q.k of the next run together between two barriers.
//
// Rows lie in shared memory as they lie in the cache, float8 stays float8; 16-byte pieces are
// exchanged within lines of 128 bytes so that no access meets itself in a bank.
#pragma once

#include "query.h"
#include "vectors.h"

namespace mla::gpu {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = kDecodeWarps * 32;
inline constexpr int kMaxLatent = 512, kMaxWidth = 576;

// What a block works on: CACHE is the cache's type, ROW_TILES times 16 query rows and TOKENS tokens
// at a time.
template <class CACHE, int ROW_TILES, int TOKENS>
struct Shape {
  using Cache = CACHE;
  static constexpr bool kFloat8 = kIsFloat8<Cache>;
  static constexpr bool kBf16 = kMultipliesBf16<Cache>;
  static constexpr int kRowTiles = ROW_TILES, kRows = 16 * ROW_TILES, kTokens = TOKENS;
  static constexpr int kBytes = sizeof(typename Cache::Code);
  // For q.k: warps along the rows, and along the tokens.
  static constexpr int kRowWarps = ROW_TILES > 64 / TOKENS ? ROW_TILES : 64 / TOKENS;
  static constexpr int kTokenWarps = kDecodeWarps / kRowWarps;
  static constexpr int kTokensPerWarp = TOKENS / kTokenWarps;
  static constexpr int kTokenTiles = kTokensPerWarp / 8;
  // Of a row: groups of 64 bytes, in which each thread of four reads 16 bytes; and 128-byte boxes.
  static constexpr int kGroups = kMaxWidth * kBytes / 64;
  static constexpr int kBoxes = (kGroups + 1) / 2;
  static constexpr int kRunNumbers = 16 / kBytes;    // numbers in such 16 bytes
  static constexpr int kRunSteps = kRunNumbers / 4;  // matrix steps that they feed
  static constexpr int kSteps = kMaxWidth / 16;
  static constexpr int kColumns = kMaxLatent / kDecodeWarps;  // of the output, for each warp
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr bool kQueryInRegisters = ROW_TILES == 1;
  static constexpr int kRowsPerWarp = TOKENS / kDecodeWarps;  // cache rows that a warp fetches

  static constexpr int kStageBytes = kBoxes * TOKENS * 128;
  static constexpr int kQueryBytes = kQueryInRegisters ? 0 : ROW_TILES * kSteps * 32 * 16;
  static constexpr int kWeightBytes = ROW_TILES * (TOKENS / 16) * 32 * 16;
  static constexpr int kMaxStages = 6, kMinStages = 3;

  // Exchanges the 16-byte pieces of a box's line: reads of K take eight tokens' neighbouring
  // pieces, those of V the same piece of several tokens.
  __device__ __forceinline__ static int exchange(int token) {
    return kFloat8 ? ((token & 3) << 1) ^ (token & 4) : token & 7;
  }
  __device__ __forceinline__ static uint32_t piece_offset(int token, int piece) {
    return (piece >> 3) * (kTokens * 128) + token * 128 + (((piece & 7) ^ exchange(token)) << 4);
  }
};

// Tokens in the order in which a thread of q.k sees them: column n of a tile of 8 is token n / 2,
// or that + 4 for odd n. Four threads then read 16 bytes each of two tokens without a conflict.
__device__ __forceinline__ int token_of_column(int column) {
  return (column >> 1) | ((column & 1) << 2);
}

// One tile of the worker's tokens: from `begin`, `tokens` to the end of the piece it is of.
// sequence -1 is none.
struct Tile {
  int32_t sequence, begin, tokens;
  int32_t is_valid;
};

template <class S>
struct DecodeShared {
  static constexpr int kRing = 8;  // tiles known ahead: more than stages
  Pieces pieces;                   // of the thread that describes tiles
  Piece piece;
  bool is_valid;
  Tile tile[kRing];
  int32_t slot_of[kRing];  // Piece::slot
  int32_t is_cut[kRing];   // the sequence has other pieces
  int32_t has_bad_page[kRing];
  float top[S::kTokenWarps][S::kRows];
  float reference[S::kRows];
  float rescale[S::kRows];
  float sum[2][S::kTokenWarps][S::kRows];  // of the weights as rounded, and exact
  uint32_t query_top[S::kRows];            // largest magnitudes, see RowScale
};

template <class S>
inline constexpr int kDecodeSharedBytes(int stages) {
  return stages * S::kStageBytes + S::kQueryBytes + S::kWeightBytes + int{sizeof(DecodeShared<S>)};
}

// The scores' maximum may exceed the reference that weights are taken relative to by this much, in
// powers of two, before everything is rescaled; float16 weights stay finite, and those near the
// maximum keep all their bits.
inline constexpr float kSlack = 8.0f, kHeadroom = 6.0f;

template <class S>
class DecodeWorker {
 public:
  __device__ __forceinline__ DecodeWorker(const MlaDecode& decode, int row_begin, int stages,
                                          char* memory)
      : decode_(decode),
        args_(decode.args),
        row_begin_(row_begin),
        stages_(stages),
        is_aligned_(decode.is_aligned),
        pieces_(static_cast<int>(args_.width) * S::kBytes / 16),
        stage_memory_(memory),
        query_(reinterpret_cast<uint4*>(memory + stages * S::kStageBytes)),
        weights_(reinterpret_cast<uint4*>(memory + stages * S::kStageBytes + S::kQueryBytes)),
        shared_(*reinterpret_cast<DecodeShared<S>*>(memory + stages * S::kStageBytes +
                                                    S::kQueryBytes + S::kWeightBytes)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        row_(lane_ >> 2),
        quarter_(lane_ & 3),
        row_warp_(warp_ % S::kRowWarps),
        token_warp_(warp_ / S::kRowWarps) {}

  __device__ __forceinline__ void run(int32_t worker);

 private:
  static constexpr int kRing = DecodeShared<S>::kRing;
  using Scores = float[S::kTokenTiles][4];

  // tiles and their loading
  __device__ __forceinline__ void describe(int tile);
  __device__ __forceinline__ int32_t page_for(int tile) const;
  __device__ __forceinline__ void fetch(int tile, int stage, int32_t page);
  __device__ __forceinline__ void fetch_unaligned(char* stage, int64_t offset);

  // arithmetic
  __device__ __forceinline__ void load_query(int32_t sequence);
  __device__ __forceinline__ void score(int stage, Scores& scores) const;
  __device__ __forceinline__ bool mask(int tile, Scores& scores) const;
  __device__ __forceinline__ void move_reference(const Scores& scores);
  __device__ __forceinline__ void weigh(const Scores& scores);
  __device__ __forceinline__ void add_values(int stage);
  __device__ __forceinline__ void begin_piece();
  __device__ __forceinline__ void finish_piece(int tile);
  __device__ __forceinline__ void store(const RowTarget& target,
                                        const float (&values)[2 * S::kColumnTiles]) const;

  __device__ __forceinline__ int32_t page_of(int32_t token) const {
    return decode_.page_shift >= 0 ? token >> decode_.page_shift
                                   : token / static_cast<int32_t>(args_.page_size);
  }
  __device__ __forceinline__ bool has_rows() const { return row_warp_ < S::kRowTiles; }
  __device__ __forceinline__ int score_row() const { return row_warp_ * 16 + row_; }

  const MlaDecode& decode_;
  const DecodeArgs& args_;
  const int row_begin_, stages_;
  const bool is_aligned_;  // cache rows are whole pieces of 16 bytes
  const int pieces_;       // of a row
  char* const stage_memory_;
  uint4* const query_;
  uint4* const weights_;
  DecodeShared<S>& shared_;
  const int warp_, lane_, row_, quarter_, row_warp_, token_warp_;

  uint4 q_[S::kQueryInRegisters ? S::kSteps : 1];
  float scale_[2];      // from products to scores in units of log2, for the two rows of this thread
  float reference_[2];  // see kSlack
  float sum_[2], exact_sum_[2];
  float out_[S::kRowTiles][S::kColumnTiles][4];
  bool has_bad_page_;  // the piece at hand
};

// tiles and their loading

// Writes down tile number `tile`; one thread does this, ahead of all others.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::describe(int tile) {
  const int place = tile % kRing;
  Piece& piece = shared_.piece;
  if (piece.sequence >= 0 && piece.begin >= piece.end &&
      !shared_.pieces.next(decode_, piece, shared_.is_valid))
    piece.sequence = -1;
  shared_.tile[place] = {piece.sequence, static_cast<int32_t>(piece.begin),
                         static_cast<int32_t>(piece.end - piece.begin), shared_.is_valid};
  if (piece.sequence < 0) return;
  shared_.has_bad_page[place] = 0;
  shared_.slot_of[place] = static_cast<int32_t>(piece.slot);
  shared_.is_cut[place] = decode_.schedule.pieces(piece.sequence) > 1;
  piece.begin += S::kTokens;
}

// The page of the cache row that this lane looks up for its warp.
template <class S>
__device__ __forceinline__ int32_t DecodeWorker<S>::page_for(int tile) const {
  const Tile& at = shared_.tile[tile % kRing];
  const int32_t ahead = warp_ * S::kRowsPerWarp + lane_ % S::kRowsPerWarp;
  if (at.sequence < 0 || ahead >= at.tokens) return -1;
  return args_.block_table[at.sequence * args_.table_stride + page_of(at.begin + ahead)];
}

// Starts the copies of a tile. A warp fetches kRowsPerWarp rows; what is behind the end is zero.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::fetch(int tile, int stage_index, int32_t page) {
  const Tile& at = shared_.tile[tile % kRing];
  char* stage = stage_memory_ + stage_index * S::kStageBytes;
  if (at.sequence >= 0) {
    constexpr int kRows = S::kRowsPerWarp;
    const int first = warp_ * kRows, ahead = first + lane_ % kRows;
    const bool is_there = ahead < at.tokens;
    const bool is_page = static_cast<uint32_t>(page) < static_cast<uint64_t>(args_.pages);
    if (is_there && !is_page) shared_.has_bad_page[tile % kRing] = 1;
    int64_t offset = -1;
    if (is_there && is_page)
      offset =
          (page * args_.page_stride +
           (at.begin + ahead - page_of(at.begin + ahead) * args_.page_size) * args_.row_stride) *
          S::kBytes;
    const char* cache = static_cast<const char*>(args_.cache);
    if (!is_aligned_) {
      fetch_unaligned(stage, offset);
      return;
    }
    const auto copy = [&](int row, int piece) {
      const int64_t from = __shfl_sync(0xffffffffu, offset, row);
      const bool is_read = from >= 0 && piece < pieces_;
      copy_async(shared_address(stage + S::piece_offset(first + row, piece)),
                 cache + (is_read ? from + piece * 16 : 0), is_read);
    };
    constexpr int kPieces = kMaxWidth * S::kBytes / 16, kWhole = kPieces / 32 * 32;
    constexpr int kRest = kPieces - kWhole, kRowsAtOnce = 32 / kRest;
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
      for (int piece = 0; piece < kWhole; piece += 32) copy(row, piece + lane_);
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsAtOnce)
      copy((row + lane_ / kRest) % kRows, kWhole + lane_ % kRest);
  }
  end_group();
}

// The same for rows that do not begin at multiples of 16 bytes, number by number.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::fetch_unaligned(char* stage, int64_t offset) {
  using Code = typename S::Cache::Code;
#pragma unroll 1
  for (int row = 0; row < S::kRowsPerWarp; ++row) {
    const int64_t from = __shfl_sync(0xffffffffu, offset, row);
    const auto* cache = reinterpret_cast<const Code*>(static_cast<const char*>(args_.cache) +
                                                      (from < 0 ? 0 : from));
#pragma unroll 1
    for (int i = lane_; i < kMaxWidth; i += 32) {
      const bool is_read = from >= 0 && i < args_.width;
      *reinterpret_cast<Code*>(stage +
                               S::piece_offset(warp_ * S::kRowsPerWarp + row, i * S::kBytes / 16) +
                               i * S::kBytes % 16) = is_read ? cache[i] : Code{0};
    }
  }
  end_group();
}

// arithmetic

// q.k of a tile: products for this warp's rows and tokens.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::score(int stage, Scores& scores) const {
  constexpr int kChains = S::kTokenTiles >= 4 ? 1 : 4 / S::kTokenTiles;
  float sums[kChains][S::kTokenTiles][4] = {};
  const char* memory = stage_memory_ + stage * S::kStageBytes;
  const uint4* query = query_ + row_warp_ * S::kSteps * 32 + lane_;
#pragma unroll
  for (int group = 0; group < S::kGroups; ++group) {
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
#pragma unroll
  for (int tile = 0; tile < S::kTokenTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = sums[0][tile][i];
#pragma unroll
      for (int chain = 1; chain < kChains; ++chain) sum += sums[chain][tile][i];
      scores[tile][i] = sum * scale_[i / 2];
    }
}

// Hides what a row must not see. Says whether a score is too far above the reference.
template <class S>
__device__ __forceinline__ bool DecodeWorker<S>::mask(int tile, Scores& scores) const {
  if (!has_rows()) return false;
  const Tile& at = shared_.tile[tile % kRing];
  int32_t seen[2] = {at.tokens, at.tokens};
  if (args_.causal && args_.q_len > 1) {
    const int32_t length = args_.seq_lens[at.sequence];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t visible =
          visible_tokens(args_, length, row_begin_ + score_row() + 8 * half) - at.begin;
      seen[half] = visible < seen[half] ? visible : seen[half];
    }
  }
  float top[2] = {-kInfinity, -kInfinity};
#pragma unroll
  for (int i = 0; i < S::kTokenTiles; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      // Columns 2 * quarter and one more: tokens `quarter` and that + 4.
      const int32_t token = token_warp_ * S::kTokensPerWarp + quarter_ + 8 * i + 4 * (k & 1);
      if (token >= seen[k / 2]) scores[i][k] = -kInfinity;
      top[k / 2] = fmaxf(top[k / 2], scores[i][k]);
    }
  return top[0] > reference_[0] + kSlack || top[1] > reference_[1] + kSlack;
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

// Scores to weights, which go to shared memory as the matrix unit's operand A.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::weigh(const Scores& scores) {
  if (!has_rows()) return;
  // A row that has seen nothing yet has only scores of -infinity.
  const float shift[2] = {reference_[0] == -kInfinity ? 0.0f : reference_[0],
                          reference_[1] == -kInfinity ? 0.0f : reference_[1]};
  uint2* to = reinterpret_cast<uint2*>(
      weights_ + (row_warp_ * (S::kTokens / 16) + token_warp_ * S::kTokensPerWarp / 16) * 32 +
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
      const float2 rounded = unpack<S::kBf16>(packed[half]);
      exact_sum_[half] += a + b;
      sum_[half] += rounded.x + rounded.y;
    }
    to[(first + i) / 2 * 64 + (first + i) % 2] = {packed[0], packed[1]};
  }
}

// p.v of a tile for this warp's columns.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::add_values(int stage) {
  if (warp_ * S::kColumns >= args_.latent) return;
  const char* memory = stage_memory_ + stage * S::kStageBytes;
#pragma unroll
  for (int block = 0; block < S::kTokens / 16; ++block) {
    uint4 p[S::kRowTiles];
#pragma unroll
    for (int tile = 0; tile < S::kRowTiles; ++tile)
      p[tile] = weights_[(tile * (S::kTokens / 16) + block) * 32 + lane_];
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
}

template <class S>
__device__ __forceinline__ void DecodeWorker<S>::begin_piece() {
  has_bad_page_ = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    reference_[half] = -kInfinity;
    sum_[half] = exact_sum_[half] = 0.0f;
  }
  // With one row tile nothing but this warp's own code has passed since finish_piece() read it.
  __syncwarp();
  if (threadIdx.x < S::kRows) shared_.reference[threadIdx.x] = -kInfinity;
#pragma unroll
  for (int tile = 0; tile < S::kRowTiles; ++tile)
#pragma unroll
    for (int i = 0; i < S::kColumnTiles; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) out_[tile][i][k] = 0.0f;
}

// The query of a sequence, as the matrix unit's operand A, in the order of numbers in which score()
// reads the cache: step `index` of group g has of row r the numbers g * 4 * kRunNumbers + quarter *
// kRunNumbers + step * 4 and the three behind it.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::load_query(int32_t sequence) {
  const Query query(decode_, sequence);
  const int rows = static_cast<int>(args_.rows());
  const float unit = args_.score_scale() * kLog2E;
  if constexpr (S::kQueryInRegisters) {
    scale_[0] = scale_[1] = unit;
    if (!has_rows()) return;
    const int row[2] = {row_begin_ + row_, row_begin_ + row_ + 8};
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[S::kRunNumbers / 2];
        query.template load<S::kBf16>(row[half], row[half] < rows,
                                      (group * 4 + quarter_) * S::kRunNumbers, words);
#pragma unroll
        for (int step = 0; step < S::kRunSteps; ++step) {
          uint32_t* a = &q_[group * S::kRunSteps + step].x;
          a[half] = words[2 * step], a[2 + half] = words[2 * step + 1];
        }
      }
    if (query.needs_scale(S::kBf16)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t top = 0;
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step) {
          const uint32_t* a = &q_[step].x;
          top = __vmaxu2(top, a[half] & 0x7fff7fffu);
          top = __vmaxu2(top, a[2 + half] & 0x7fff7fffu);
        }
        top = __vmaxu2(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = __vmaxu2(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const RowScale scale(top);
        scale_[half] *= scale.inverse;
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step) {
          uint32_t* a = &q_[step].x;
          a[half] = scale.apply(a[half]), a[2 + half] = scale.apply(a[2 + half]);
        }
      }
    }
  } else {
    __syncthreads();  // everyone is done with the query before
    if (query.needs_scale(S::kBf16)) {
      for (int row = warp_; row < S::kRows; row += kDecodeWarps) {
        uint32_t top = 0;
        for (int i = lane_ * 8; i < kMaxWidth; i += 256) {
          uint32_t words[4];
          query.template load<S::kBf16>(row_begin_ + row, row_begin_ + row < rows, i, words);
#pragma unroll
          for (int k = 0; k < 4; ++k) top = __vmaxu2(top, words[k] & 0x7fff7fffu);
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2)
          top = __vmaxu2(top, __shfl_xor_sync(0xffffffffu, top, mask));
        if (lane_ == 0) shared_.query_top[row] = top;
      }
      __syncthreads();
    }
    for (int item = warp_; item < S::kRowTiles * S::kGroups; item += kDecodeWarps) {
      const int tile = item / S::kGroups, group = item % S::kGroups;
      uint4 a[S::kRunSteps];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile * 16 + row_ + 8 * half;
        uint32_t words[S::kRunNumbers / 2];
        query.template load<S::kBf16>(row_begin_ + row, row_begin_ + row < rows,
                                      (group * 4 + quarter_) * S::kRunNumbers, words);
        if (query.needs_scale(S::kBf16)) {
          const RowScale scale(shared_.query_top[row]);
#pragma unroll
          for (int k = 0; k < S::kRunNumbers / 2; ++k) words[k] = scale.apply(words[k]);
        }
#pragma unroll
        for (int step = 0; step < S::kRunSteps; ++step) {
          uint32_t* to = &a[step].x;
          to[half] = words[2 * step], to[2 + half] = words[2 * step + 1];
        }
      }
#pragma unroll
      for (int step = 0; step < S::kRunSteps; ++step)
        query_[(tile * S::kSteps + group * S::kRunSteps + step) * 32 + lane_] = a[step];
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      scale_[half] = query.needs_scale(S::kBf16)
                         ? unit * RowScale(shared_.query_top[score_row() + 8 * half]).inverse
                         : unit;
  }
}

// Sums to the end, and the piece's rows to where they belong.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::finish_piece(int tile) {
  if (has_rows()) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sums[2] = {sum_[half], exact_sum_[half]};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 1);
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], 2);
        if (quarter_ == 0) shared_.sum[i][token_warp_][score_row() + 8 * half] = sums[i];
      }
    }
  }
  __syncthreads();
  const int place = tile % kRing;
  const Tile& at = shared_.tile[place];
  const Piece piece{at.sequence, 0, 0, shared_.slot_of[place]};
  const bool is_cut = shared_.is_cut[place] != 0;
  const bool is_bad = !at.is_valid || has_bad_page_;
  if (is_cut && !RowTarget::is_safe(decode_, piece.slot)) return;
  const float output_scale = args_.output_scale();
#pragma unroll
  for (int row_tile = 0; row_tile < S::kRowTiles; ++row_tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_tile * 16 + row_ + 8 * half;
      if (row_begin_ + row >= args_.rows()) continue;
      float sum = 0.0f, exact_sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < S::kTokenWarps; ++warp) {
        sum += shared_.sum[0][warp][row];
        exact_sum += shared_.sum[1][warp][row];
      }
      // A row that saw nothing: output 0, logarithm -infinity.
      const float factor = is_bad ? __builtin_nanf("") : sum == 0.0f ? 0.0f : output_scale / sum;
      const RowTarget target(decode_, piece, row_begin_ + row, is_cut);
      if (warp_ == 0 && quarter_ == 0)
        target.store_lse(is_bad              ? factor
                         : exact_sum == 0.0f ? -kInfinity
                                             : shared_.reference[row] + log2f(exact_sum));
      float values[2 * S::kColumnTiles];
#pragma unroll
      for (int i = 0; i < S::kColumnTiles; ++i) {
        values[i] = out_[row_tile][i][2 * half] * factor;
        values[S::kColumnTiles + i] = out_[row_tile][i][2 * half + 1] * factor;
      }
      store(target, values);
    }
}

// This thread's columns of one row; `values` has first the even and then the odd column of each
// column tile.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::store(
    const RowTarget& target, const float (&values)[2 * S::kColumnTiles]) const {
  const int begin = warp_ * S::kColumns, latent = static_cast<int>(args_.latent);
  if constexpr (S::kFloat8) {
    // Column c of tile i is number 8 c + i of the warp's: 16 numbers in order.
    store_columns(target, begin + 16 * quarter_, latent, values);
  } else {
#pragma unroll
    for (int i = 0; i < S::kColumnTiles; ++i) {
      const float pair[2] = {values[i], values[S::kColumnTiles + i]};
      store_columns(target, begin + 8 * i + 2 * quarter_, latent, pair);
    }
  }
}

template <class S>
__device__ __forceinline__ void DecodeWorker<S>::run(int32_t worker) {
  if (threadIdx.x == 0) {
    shared_.pieces.begin(decode_.schedule, worker);
    shared_.piece = {0, 0, 0, 0};
    for (int tile = 0; tile <= stages_; ++tile) describe(tile);
  }
  __syncthreads();
  if (shared_.tile[0].sequence < 0) return;
  int32_t pages[S::kMaxStages];
#pragma unroll
  for (int tile = 0; tile < S::kMaxStages; ++tile)
    if (tile < stages_) pages[tile] = page_for(tile);
#pragma unroll
  for (int tile = 0; tile < S::kMaxStages; ++tile)
    if (tile < stages_ - 1) fetch(tile, tile, pages[tile]);
  int32_t page = 0;
#pragma unroll
  for (int tile = 0; tile < S::kMaxStages; ++tile)
    if (tile == stages_ - 1) page = pages[tile];

  load_query(shared_.tile[0].sequence);
  begin_piece();
  wait_for_copies(stages_ - 2);
  __syncthreads();
  Scores scores;
  score(0, scores);
  int stage = 0;
  for (int tile = 0;; ++tile) {
    const bool is_far = mask(tile, scores);
    // From here on the next tile is there, and nobody reads the one before.
    wait_for_copies(stages_ - 3);
    if (__syncthreads_or(is_far)) move_reference(scores);
    weigh(scores);
    fetch(tile + stages_ - 1, stage == 0 ? stages_ - 1 : stage - 1, page);
    page = page_for(tile + stages_);
    if (threadIdx.x == 0) describe(tile + stages_ + 1);
    __syncthreads();
    has_bad_page_ |= shared_.has_bad_page[tile % kRing] != 0;
    const int next_stage = stage + 1 == stages_ ? 0 : stage + 1;
    if (shared_.tile[tile % kRing].tokens > S::kTokens) {
      add_values(stage);
      score(next_stage, scores);
    } else {
      add_values(stage);
      finish_piece(tile);
      const int32_t next = shared_.tile[(tile + 1) % kRing].sequence;
      if (next < 0) return;
      load_query(next);
      begin_piece();
      score(next_stage, scores);
    }
    stage = next_stage;
  }
}

// Block x is a worker of the plan, block y a part of the rows.
template <class S>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_tiles(const MLA_PARAMETER MlaDecode decode, int stages) {
  extern __shared__ __align__(128) char memory[];
  MLA_AFTER_PREDECESSOR();
  MLA_SUCCESSOR_MAY_BEGIN();
  DecodeWorker<S> worker(decode, static_cast<int>(blockIdx.y) * S::kRows, stages, memory);
  worker.run(static_cast<int32_t>(blockIdx.x));
}

#if defined(MLA_LAUNCHERS)

// As many stages as the device has room for; too few for the shape give false.
template <class S>
bool launch_shape(const MlaDecode& decode, const MlaDevice& device, hipStream_t stream) {
  int stages = S::kMaxStages;
  while (stages > 0 && kDecodeSharedBytes<S>(stages) > device.shared_bytes) --stages;
  if (stages < S::kMinStages) return false;
  const int shared = kDecodeSharedBytes<S>(stages);
  if (cudaFuncSetAttribute(decode_tiles<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared) !=
      cudaSuccess)
    return true;  // launch_error() says why
  const int64_t rows = decode.args.rows();
  const dim3 grid(static_cast<unsigned>(decode.schedule.workers),
                  static_cast<unsigned>((rows + S::kRows - 1) / S::kRows));
  launch_overlapping(device, decode_tiles<S>, grid, dim3(kDecodeThreads), shared, stream, decode,
                     stages);
  return true;
}

// Tokens at a time: fewer of 16 bits where the query rows take up shared memory.
template <class Cache>
inline constexpr int kTokensAtOnce = kIsFloat8<Cache> ? 64 : 32;

template <class Cache>
bool launch_tiles(const MlaDecode& decode, const MlaDevice& device, hipStream_t stream) {
  const int rows = mla_rows_per_worker(&device, decode.args.rows());
  if (rows == 64)
    return launch_shape<Shape<Cache, 4, kTokensAtOnce<Cache>>>(decode, device, stream);
  if (rows == 32)
    return launch_shape<Shape<Cache, 2, kTokensAtOnce<Cache>>>(decode, device, stream);
  return launch_shape<Shape<Cache, 1, 64>>(decode, device, stream) ||
         launch_shape<Shape<Cache, 1, 16>>(decode, device, stream);
}

#endif

}  // namespace mla::gpu
