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
// at a time, STAGES such tiles in shared memory.
template <class CACHE, int ROW_TILES, int TOKENS, int STAGES>
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
  static constexpr int kRowsPerWarp = TOKENS / kDecodeWarps;  // cache rows that a warp fetches,
  static constexpr int kFetches = (kRowsPerWarp + 3) / 4;     // and a lane

  static constexpr int kStageBytes = kBoxes * TOKENS * 128;
  static constexpr int kFragmentBytes = ROW_TILES * kSteps * 32 * 16;
  static constexpr int kQueryBytes =
      kQueryInRegisters && kFragmentBytes <= kStageBytes ? 0 : kFragmentBytes;
  static constexpr int kWeightBytes =  // one of two buffers
      ROW_TILES * (TOKENS / 16) * 32 * 16;
  static constexpr int kStages = STAGES;
  static_assert(STAGES >= 3, "one for the values, one for the keys, one on its way");

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

// A piece of the worker's tokens, as written down for all threads. sequence -1 is none.
struct Note {
  int32_t sequence, begin, tokens;
  int32_t slot;
  bool is_valid;
  bool is_cut;  // the sequence has other pieces
  bool has_bad_page;
};

template <class S>
struct DecodeShared {
  static constexpr int kNotes = 8;  // pieces of one tile each may fill all stages
  static_assert(kNotes >= S::kStages + 3);
  Note note[kNotes];
  Pieces pieces;  // of the thread that writes notes
  float unit;     // of a product, in scores in units of log2
  float output_scale;
  float top[S::kTokenWarps][S::kRows];
  float reference[S::kRows];
  float rescale[S::kRows];
  float factor[S::kRows], log_sum[S::kRows];  // at the end of a piece
  float query_scale[S::kRows];                // from products to scores in units of log2
  union {                                     // at the end of a piece; at the beginning of one
    float sum[2][S::kTokenWarps][S::kRows];   // of the weights as rounded, and exact
    alignas(16) uint32_t query_top[16][kDecodeWarps];  // magnitudes, see RowScale
  };
};

template <class S>
inline constexpr int kDecodeSharedBytes = S::kStages * S::kStageBytes + S::kQueryBytes +
                                          2 * S::kWeightBytes + int{sizeof(DecodeShared<S>)};

// The scores' maximum may exceed the reference that weights are taken relative to by this much, in
// powers of two, before everything is rescaled; float16 weights stay finite, and those near the
// maximum keep all their bits.
inline constexpr float kSlack = 8.0f, kHeadroom = 6.0f;

template <class S>
class DecodeWorker {
 public:
  __device__ __forceinline__ DecodeWorker(const MlaDecode& decode, int row_begin, char* memory)
      : decode_(decode),
        args_(decode.args),
        row_begin_(row_begin),
        stage_memory_(memory),
        query_(reinterpret_cast<uint4*>(memory + S::kStages * S::kStageBytes)),
        weights_(reinterpret_cast<uint4*>(memory + S::kStages * S::kStageBytes + S::kQueryBytes)),
        shared_(*reinterpret_cast<DecodeShared<S>*>(memory + S::kStages * S::kStageBytes +
                                                    S::kQueryBytes + 2 * S::kWeightBytes)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        row_(lane_ >> 2),
        quarter_(lane_ & 3),
        row_warp_(warp_ % S::kRowWarps),
        token_warp_(warp_ / S::kRowWarps) {}

  __device__ __forceinline__ void run(int32_t worker);

 private:
  static constexpr int kNotes = DecodeShared<S>::kNotes;
  using Scores = float[S::kTokenTiles][4];
  // Several, so that matrix instructions need not wait for one another.
  static constexpr int kChains = S::kTokenTiles >= 2 ? 1 : 2;
  using Products = float[kChains][S::kTokenTiles][4];

  // Tokens on their way to shared memory: what the next fetch() takes.
  struct Ahead {
    uint32_t piece;
    int32_t begin, tokens;  // of the tile; tokens to the end of the piece, -1 behind the last
    const int32_t* table;
    uint32_t page[S::kFetches], row[S::kFetches];  // of the cache, and of the page
  };

  __device__ __forceinline__ void write_note(Pieces& pieces, uint32_t number);
  __device__ __forceinline__ void take_piece(Ahead& ahead) const;
  __device__ __forceinline__ void find_pages(Ahead& ahead) const;
  __device__ __forceinline__ void fetch(Ahead& ahead, int stage_index);
  __device__ __forceinline__ void fetch_part(char* stage, int row, bool is_there, uint32_t page,
                                             uint32_t row_in_page);

  __device__ __forceinline__ void load_query(int32_t sequence, uint4* memory);
  __device__ __forceinline__ void begin_piece(const Note& note);
  template <int FROM, int TO>
  __device__ __forceinline__ void multiply_keys(int stage, Products& sums) const;
  __device__ __forceinline__ void multiply_values(int stage, int block, const uint4* weights);
  template <int BLOCK>
  __device__ __forceinline__ void interleave(int stage, int next_stage, const uint4* weights,
                                             Products& products);
  __device__ __forceinline__ bool finish_scores(const Products& sums, Scores& scores);
  __device__ __forceinline__ void move_reference(const Scores& scores);
  __device__ __forceinline__ void weigh(const Scores& scores, uint4* weights, float (&sum)[2],
                                        float (&exact_sum)[2]) const;
  __device__ __forceinline__ void finish_piece(const Note& note, float4* memory);

  __device__ __forceinline__ int fetched_row(int i) const {
    const int row = lane_ / 8 + 4 * i;
    return row < S::kRowsPerWarp ? warp_ * S::kRowsPerWarp + row : S::kTokens;
  }
  // Where the query is, or passes through: a stage that no copy is on its way to.
  __device__ __forceinline__ uint4* query_memory(int free_stage) const {
    return S::kQueryBytes > 0
               ? query_
               : reinterpret_cast<uint4*>(stage_memory_ + free_stage * S::kStageBytes);
  }
  __device__ __forceinline__ bool has_rows() const { return row_warp_ < S::kRowTiles; }
  __device__ __forceinline__ int score_row() const { return row_warp_ * 16 + row_; }

  const MlaDecode& decode_;
  const DecodeArgs& args_;
  const int row_begin_;
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
  int32_t tokens_;   // from the tile at hand to the end of its piece
  int32_t seen_[2];  // tokens from the tile at hand on that the two rows see, in this piece
};

// Writes down a piece; one thread does this, ahead of all others.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::write_note(Pieces& pieces, uint32_t number) {
  Note& note = shared_.note[number % kNotes];
  WorkerPiece piece;
  if (pieces.next(decode_, piece)) {
    note = {piece.sequence,
            static_cast<int32_t>(piece.begin),
            static_cast<int32_t>(piece.end - piece.begin),
            static_cast<int32_t>(piece.slot),
            piece.is_valid,
            piece.is_cut(),
            false};
    if (row_begin_ == 0)
      note_ends(decode_, piece.sequence, note.slot, piece.is_first, piece.is_last);
  } else {
    note = {-1, 0, 0, 0, false, false, false};
  }
}

template <class S>
__device__ __forceinline__ void DecodeWorker<S>::take_piece(Ahead& ahead) const {
  const Note& note = shared_.note[ahead.piece % kNotes];
  ahead.begin = note.begin, ahead.tokens = note.tokens;
  if (note.sequence < 0) {
    ahead.tokens = -1;
  } else {
    ahead.table = args_.block_table + note.sequence * args_.table_stride;
    Query(decode_, note.sequence).prefetch(row_begin_, S::kRows);
  }
}

// The pages of the cache rows that this lane is about to fetch.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::find_pages(Ahead& ahead) const {
#pragma unroll
  for (int i = 0; i < S::kFetches; ++i) {
    const uint32_t token = ahead.begin + fetched_row(i);
    const uint32_t index = __umulhi(2 * token, decode_.page_factor) >> decode_.page_shift;
    ahead.row[i] = token - index * static_cast<uint32_t>(args_.page_size);
    if (fetched_row(i) < ahead.tokens) ahead.page[i] = MLA_LOAD(ahead.table + index);
  }
}

// Starts the copies of a tile; what is behind its end is zero. Eight lanes fetch a row, 128 bytes
// at a time. Then goes on to the next tile.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::fetch(Ahead& ahead, int stage_index) {
  char* stage = stage_memory_ + stage_index * S::kStageBytes;
  if (ahead.tokens >= 0) {
    const int first = lane_ % 8;
    const bool is_whole = decode_.is_aligned && args_.width == kMaxWidth;
#pragma unroll
    for (int i = 0; i < S::kFetches; ++i) {
      const int row = fetched_row(i);
      const bool is_page = ahead.page[i] < decode_.pages, is_wanted = row < ahead.tokens;
      if (is_wanted && !is_page) shared_.note[ahead.piece % kNotes].has_bad_page = true;
      const bool is_there = is_wanted && is_page;
      const char* cache = static_cast<const char*>(args_.cache) + first * 16;
      // Bytes from page to page and row to row are below 2^32 where rows are aligned.
      const char* from = is_there ? cache + uint64_t{ahead.page[i]} * decode_.page_bytes +
                                        uint64_t{ahead.row[i]} * decode_.row_bytes
                                  : cache;
      const uint32_t to = shared_address(stage + S::piece_offset(row, first));
      if (S::kRowsPerWarp % 4 != 0 && row >= S::kTokens) continue;
      if (is_whole) {
        const int bytes = is_there ? 16 : 0;
        constexpr int kLast = S::kGroups % 2 == 1 ? S::kBoxes - 1 : S::kBoxes;
#pragma unroll
        for (int box = 0; box < kLast; ++box)
          copy_async(to + box * S::kTokens * 128, from + box * 128, bytes);
        if (kLast < S::kBoxes && first < 4)
          copy_async(to + kLast * S::kTokens * 128, from + kLast * 128, bytes);
      } else {
        fetch_part(stage, row, is_there, ahead.page[i], ahead.row[i]);
      }
    }
    if (ahead.tokens > S::kTokens) {
      ahead.begin += S::kTokens, ahead.tokens -= S::kTokens;
    } else {
      ++ahead.piece;
      take_piece(ahead);
      // Two ahead of the one taken: visible to all at the next barrier.
      if (threadIdx.x == 0) write_note(shared_.pieces, ahead.piece + 1);
    }
    find_pages(ahead);
  }
  end_group();
}

// The same for rows that are narrower than the kernel's, or do not begin at multiples of 16 bytes,
// number by number.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::fetch_part(char* stage, int row, bool is_there,
                                                            uint32_t page, uint32_t row_in_page) {
  using Code = typename S::Cache::Code;
  const char* from = static_cast<const char*>(args_.cache);
  if (is_there) from += (page * args_.page_stride + row_in_page * args_.row_stride) * S::kBytes;
  const int width = is_there ? static_cast<int>(args_.width) : 0;
#pragma unroll 1
  for (int piece = lane_ % 8; piece < kMaxWidth * S::kBytes / 16; piece += 8) {
    char* to = stage + S::piece_offset(row, piece);
    const int first = piece * S::kRunNumbers;
    if (decode_.is_aligned) {
      copy_async(shared_address(to), first < width ? from + piece * 16 : from,
                 first < width ? 16 : 0);
    } else {
#pragma unroll 1
      for (int i = 0; i < S::kRunNumbers; ++i)
        reinterpret_cast<Code*>(to)[i] =
            first + i < width ? reinterpret_cast<const Code*>(from)[first + i] : Code{0};
    }
  }
}

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

// The query of a sequence, as the matrix unit's operand A, in the order of numbers in which score()
// reads the cache: step `index` of group g has of row r the numbers g * 4 * kRunNumbers + quarter *
// kRunNumbers + step * 4 and the three behind it.
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
