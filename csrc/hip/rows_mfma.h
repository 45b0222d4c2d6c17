// Cache rows as units of 16 bytes on their way from memory to registers, and query rows in the
// order that goes with them.
#pragma once

#include "decode.h"
#include "mfma.h"

namespace mla::gpu {

inline constexpr int kRowsAtOnce = 16;  // query rows of a block: the columns of a matrix tile

// How a wave takes rows of a cache: BLOCKS matrix tiles of tokens at a time, in lane l units
// l / 16, l / 16 + 4, ... of token l % 16. A query number is the sum of PARTS of the cache's type.
template <class CACHE, int PARTS>
struct Shape {
  using Cache = CACHE;
  static constexpr bool kFloat8 = kIsFloat8<Cache>;
  static constexpr int kBytes = sizeof(typename Cache::Code);
  static constexpr int kBlocks = kFloat8 ? 2 : 1, kTokens = 16 * kBlocks;
  static constexpr int kNumbers = 16 / kBytes;  // in a unit
  static constexpr int kUnits = kMaxWidth / kNumbers;
  static constexpr int kPieces = kUnits / 4;  // of a row in one lane
  // Values are multiplied in chunks of 128 numbers.
  static constexpr int kChunkPieces = 128 / kNumbers / 4, kChunkUnits = 128 / kNumbers;
  static constexpr int kParts = PARTS;
  // Powers of two that query rows are scaled to before they are narrowed: the magnitude of their
  // largest number is below 2^kTop. bfloat16 has float32's range.
  static constexpr bool kScaled = !kSame<Cache, BFloat16>;
  static constexpr int kTop = kFloat8 ? 7 : 14;

  // The number with which a unit begins. The last one of a row that is not made of whole units is
  // moved back to end with the row, so that nothing behind it is read; of a row shorter than a unit
  // it begins in front of it.
  __device__ __forceinline__ static int first_number(int unit, int width) {
    const int last = width - kNumbers, first = unit * kNumbers;
    return first < last ? first : last;
  }
};

// What loads read whose result is not used.
static __device__ const uint4 kNothing{};

// The rows of a piece's tokens. WHOLE: they have kMaxWidth numbers and begin at multiples of 16
// bytes; of others every unit has an address of its own.
template <class S, bool WHOLE>
class CacheRows {
 public:
  using Code = typename S::Cache::Code;
  using Pages = int32_t[S::kBlocks];         // of this lane's token of each block
  using Places = const char * [S::kBlocks];  // where those tokens' rows begin

  __device__ __forceinline__ CacheRows(const MlaDecode& decode, const Piece& piece)
      : cache_(static_cast<const char*>(decode.args.cache)),
        table_(decode.args.block_table + piece.sequence * decode.args.table_stride),
        page_bytes_(decode.args.page_stride * S::kBytes),
        row_bytes_(decode.args.row_stride * S::kBytes),
        pages_(decode.pages),
        page_factor_(decode.page_factor),
        page_shift_(decode.page_shift),
        page_size_(static_cast<int32_t>(decode.args.page_size)),
        width_(static_cast<int>(decode.args.width)),
        end_(static_cast<int32_t>(piece.end)),
        place_(threadIdx.x % 16),
        group_(threadIdx.x % MLA_WAVE / 16) {}

  __device__ __forceinline__ bool has_pages() const { return pages_ > 0; }

  __device__ __forceinline__ void look_up(int32_t tile, Pages& pages) const {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block)
      pages[block] = table_[page_of(token(tile, block))];
  }

  // False where a page is none of the cache's; page 0 is read in its place.
  __device__ __forceinline__ bool locate(int32_t tile, const Pages& pages, Places& places) const {
    bool is_good = true;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      const int32_t at = token(tile, block);
      const bool is_page = static_cast<uint32_t>(pages[block]) < pages_;
      is_good &= is_page;
      places[block] = cache_ + (is_page ? pages[block] : 0) * page_bytes_ +
                      (at - page_of(at) * page_size_) * row_bytes_;
    }
    return is_good;
  }

  // Unit 4 * piece + l / 16 of a row.
  __device__ __forceinline__ Word4 load(const char* row, int piece) const {
    if constexpr (WHOLE) return *reinterpret_cast<const Word4*>(row + 16 * (4 * piece + group_));
    const int first = S::first_number(4 * piece + group_, width_);
    const char* from =
        is_short() ? reinterpret_cast<const char*>(&kNothing) : row + first * S::kBytes;
    return load_anywhere(from);
  }

  // For rows shorter than a unit load() gives nothing, load_short() all of it.
  __device__ __forceinline__ bool is_short() const { return !WHOLE && width_ < S::kNumbers; }

  __device__ __forceinline__ Word4 load_short(const char* row) const {
    Word4 unit = {0, 0, 0, 0};
    constexpr int kBits = 8 * S::kBytes;
#pragma unroll 1
    for (int i = 0; i < width_; ++i) {
      const uint32_t next = reinterpret_cast<const Code*>(row)[i];
#pragma unroll
      for (int word = 0; word < 4; ++word)
        unit[word] = unit[word] >> kBits | (word < 3 ? unit[(word + 1) % 4] : next) << (32 - kBits);
    }
    return unit;
  }

 private:
  // This lane's token of a block of the tile that begins at token `tile`. Behind the end it is the
  // last one again: finite numbers, which are masked.
  __device__ __forceinline__ int32_t token(int32_t tile, int block) const {
    const int32_t wanted = tile + 16 * block + place_;
    return wanted < end_ ? wanted : end_ - 1;
  }

  __device__ __forceinline__ int32_t page_of(int32_t token) const {
    return static_cast<int32_t>(__umulhi(2 * static_cast<uint32_t>(token), page_factor_) >>
                                page_shift_);
  }

  const char* cache_;
  const int32_t* table_;
  int64_t page_bytes_, row_bytes_;
  uint32_t pages_, page_factor_, page_shift_;
  int32_t page_size_;
  int width_;
  int32_t end_;
  int place_, group_;
};

// q 2^x = sum of part i / kPartUnit^i. A float8 number has 4 significant bits: two have the 8 of
// bfloat16, three the 11 of float16.
inline constexpr float kPartUnit = 32.0f;

// The query rows of one block, on their way to the registers of all its waves.
template <class S, bool WHOLE>
class Query {
 public:
  static constexpr int kThreads = 256, kThreadsPerRow = kThreads / kRowsAtOnce;
  static constexpr int kEights = kMaxWidth / 8;

  __device__ __forceinline__ Query(const MlaDecode& decode, int32_t sequence, int row_begin)
      : args_(decode.args),
        is_aligned_(decode.is_query_aligned),
        row_(static_cast<int>(threadIdx.x) / kThreadsPerRow) {
    is_there_ = row_begin + row_ < args_.rows();
    from_ = static_cast<const char*>(args_.q);
    if (is_there_)
      from_ +=
          row_offset(args_.q_stride, args_, sequence, row_begin + row_) * size_of(args_.q_type);
  }

  // Unit u of row r to words[u * 16 + r], the parts one after the other. inverse_scale[r] undoes
  // the row's power of two.
  __device__ __forceinline__ void store(Word4* words, float* inverse_scale) const {
    const int first = static_cast<int>(threadIdx.x) % kThreadsPerRow;
    float up = 1.0f;
    if constexpr (S::kScaled) {
      float top = 0.0f;
      for (int eight = first; eight < kEights; eight += kThreadsPerRow) {
        float value[8];
        load(eight, value);
#pragma unroll
        for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(value[i]));
      }
#pragma unroll
      for (int mask = kThreadsPerRow / 2; mask > 0; mask /= 2)
        top = fmaxf(top, MLA_SHUFFLE_XOR(top, mask));
      const int exponent = static_cast<int>(bits_of(top) >> 23);  // top < 2^(exponent - 126)
      // Within what a float holds; a row of zeros, or one with an infinity, stays as it is.
      const int wanted = exponent == 0 || exponent == 255 ? 0 : S::kTop + 126 - exponent;
      const int bits = 127 + (wanted < 126 ? wanted : 126);
      up = float_of(static_cast<uint32_t>(bits) << 23);
      if (first == 0) inverse_scale[row_] = float_of(static_cast<uint32_t>(254 - bits) << 23);
    }
    for (int eight = first; eight < kEights; eight += kThreadsPerRow) {
      float value[8];
      load(eight, value);
      if constexpr (S::kFloat8) {
        Sum4 rest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          rest[i] = Sum4{value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]} * up;
        auto* to = reinterpret_cast<Word2*>(words) + (eight / 2 * kRowsAtOnce + row_) * 2;
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
          Word2 codes;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            codes[i] = pack_float8<false>(rest[i]);
            rest[i] = (rest[i] - unpack_float8<false>(codes[i])) * kPartUnit;
          }
          to[part * S::kUnits * kRowsAtOnce * 2 + eight % 2] = codes;
        }
      } else {
        Word4 packed;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          packed[i] = pack<typename S::Cache>(value[2 * i] * up, value[2 * i + 1] * up);
        words[eight * kRowsAtOnce + row_] = packed;
      }
    }
  }

 private:
  // Numbers 8 * eight to that + 7 of a row, as its units have them; zeros where there are none, and
  // where the unit before has them too.
  __device__ __forceinline__ void load(int eight, float (&value)[8]) const {
    switch (args_.q_type) {
      case Type::kBFloat16:
        return load_as<BFloat16>(eight, value);
      case Type::kFloat16:
        return load_as<Float16>(eight, value);
      case Type::kFloat8E4M3FN:
        return load_as<Float8E4M3FN>(eight, value);
      default:
        return load_as<Float8E4M3FNUZ>(eight, value);
    }
  }

  template <class Kind>
  __device__ __forceinline__ void load_as(int eight, float (&value)[8]) const {
    const auto* codes = reinterpret_cast<const typename Kind::Code*>(from_);
    const int width = static_cast<int>(args_.width);
    if (WHOLE && is_aligned_) {
      Run<Kind, 8> run{};
      if (is_there_) run = load_run<Kind, 8>(codes + eight * 8);
      widen(run, value);
      return;
    }
    constexpr int kEightsOfUnit = S::kNumbers / 8;
    const int unit = eight / kEightsOfUnit, begin = unit * S::kNumbers;
    const int first = S::first_number(unit, width) + eight % kEightsOfUnit * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool is_new = is_there_ && first + i >= begin;
      value[i] = is_new ? Kind::widen(codes[first + i]) : 0.0f;
    }
  }

  const DecodeArgs& args_;
  const bool is_aligned_;
  const int row_;
  bool is_there_;
  const char* from_;
};

}  // namespace mla::gpu
