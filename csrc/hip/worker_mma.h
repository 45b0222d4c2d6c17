// A block of decode on NVIDIA: what it works on, and what it keeps where. decode_mma.h says how it
// works.
#pragma once

#include "query.h"
#include "vectors.h"

namespace mla::gpu {

inline constexpr int kDecodeWarps = 8;
inline constexpr int kDecodeThreads = kDecodeWarps * 32;

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

}  // namespace mla::gpu
