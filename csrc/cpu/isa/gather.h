// Gathering: from the paged cache, in any of its types, to a tile of cells that multiply() reads;
// and q likewise.
#pragma once

#include "layout.h"

namespace mla::MLA_ISA {

struct Tile {
  const char* keys[kTile];  // each token's row of cells; a run of kBlock tokens, begun at a
                            // multiple, lies evenly
  int64_t tokens;           // rows from here to the next multiple of kBlock are zero
};

// What reading the cache takes beyond its address, made once per worker.
template <class Engine>
struct Cache {
  explicit Cache(Type) {}
};

#if defined(__AVX512BF16__)
// Interleaves two rows into cells (second, first), the order in which the dot product takes its
// pairs.
inline void pair_up(const uint16_t* first, const uint16_t* second, uint32_t* cells,
                    const Layout& layout) {
  alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                    37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                    11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < layout.value_width; i += kColumns, cells += layout.value_block) {
    const __m512i a = _mm512_loadu_si512(first + i), b = _mm512_loadu_si512(second + i);
    _mm512_store_si512(cells, _mm512_permutex2var_epi16(a, low, b));
    _mm512_store_si512(cells + 16, _mm512_permutex2var_epi16(a, high, b));
  }
}

// bfloat16 patterns of the 128 magnitudes of a float8 type, split into bytes for vpermi2b.
struct Float8Table {
  alignas(64) uint8_t low[128], high[128];
  uint8_t nan;  // a NaN whose magnitude bits alone do not say so (e4m3fnuz: 0x80), else any NaN

  explicit Float8Table(Type type) : nan(type == Type::kFloat8E4M3FNUZ ? 0x80 : 0xff) {
    for (int code = 0; code < 128; ++code) {
      const uint8_t magnitude = static_cast<uint8_t>(code);
      const uint32_t bits = bits_of(type == Type::kFloat8E4M3FNUZ ? widen_e4m3fnuz(magnitude)
                                                                  : widen_e4m3fn(magnitude));
      low[code] = static_cast<uint8_t>(bits >> 16);
      high[code] = static_cast<uint8_t>(bits >> 24);
    }
  }

  // Every float8 number is a bfloat16 number: the conversion is exact. Zeros fill up to
  // `padded_width`.
  void widen_row(const uint8_t* from, uint16_t* to, int64_t width, int64_t padded_width) const {
    const __m512i low0 = _mm512_load_si512(low), low1 = _mm512_load_si512(low + 64);
    const __m512i high0 = _mm512_load_si512(high), high1 = _mm512_load_si512(high + 64);
    const __m512i sign_bit = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i nan_code = _mm512_set1_epi8(static_cast<char>(nan));
    // unpack works within 128-bit quarters: spreading their halves first makes its results
    // consecutive.
    const __m512i spread = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t i = 0; i < padded_width; i += 64) {
      const int64_t left = width - i;
      const __mmask64 mask = left >= 64 ? ~0ull : left <= 0 ? 0 : (1ull << left) - 1;
      const __m512i code =
          _mm512_permutexvar_epi64(spread, _mm512_maskz_loadu_epi8(mask, from + i));
      const __mmask64 is_nan = _mm512_cmpeq_epi8_mask(code, nan_code);
      __m512i lower = _mm512_permutex2var_epi8(low0, code, low1);
      __m512i upper = _mm512_permutex2var_epi8(high0, code, high1);
      upper = _mm512_or_si512(upper, _mm512_and_si512(code, sign_bit));
      lower = _mm512_mask_mov_epi8(lower, is_nan, _mm512_set1_epi8(static_cast<char>(0xc0)));
      upper = _mm512_mask_mov_epi8(upper, is_nan, _mm512_set1_epi8(0x7f));
      _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(lower, upper));
      if (i + 32 < padded_width)
        _mm512_storeu_si512(to + i + 32, _mm512_unpackhi_epi8(lower, upper));
    }
  }
};

template <>
struct Cache<BFloat16Engine> {
  Float8Table table;  // unused for a bfloat16 cache

  explicit Cache(Type type) : table(type == Type::kBFloat16 ? Type::kFloat8E4M3FN : type) {}
};

inline void gather(const Cache<BFloat16Engine>& cache, const DecodeArgs& args, const Layout& layout,
                   const Piece& piece, int64_t begin, char* scratch, Tile& tile) {
  const bool is_bf16 = args.cache_type == Type::kBFloat16;
  // Rows of the cache that already are whole cells need no copy, where kBlock of them lie in one
  // page.
  const bool whole_cells = is_bf16 && args.width == layout.key_width;
  tile.tokens = least(piece.end - begin, kTile);
  const int64_t padded = round_up(tile.tokens, kBlock);
  bool in_place = false;
  for (int64_t n = 0; n < padded; ++n) {
    if (n % kBlock == 0)
      in_place = whole_cells && n + kBlock <= tile.tokens &&
                 (begin + n) / args.page_size == (begin + n + kBlock - 1) / args.page_size;
    uint16_t* copy = reinterpret_cast<uint16_t*>(scratch + layout.keys) + n * layout.key_width;
    tile.keys[n] = reinterpret_cast<char*>(copy);
    const char* row = n < tile.tokens ? cache_row(args, piece.sequence, begin + n) : nullptr;
    if (in_place) {
      tile.keys[n] = row;
    } else if (row == nullptr || is_bf16) {
      const int64_t width = row == nullptr ? 0 : args.width;
      if (width > 0) memcpy(copy, row, static_cast<size_t>(width) * 2);
      memset(copy + width, 0, static_cast<size_t>(layout.key_width - width) * 2);
    } else {
      cache.table.widen_row(reinterpret_cast<const uint8_t*>(row), copy, args.width,
                            layout.key_width);
    }
    if (n % 2 == 1)
      pair_up(reinterpret_cast<const uint16_t*>(tile.keys[n - 1]),
              reinterpret_cast<const uint16_t*>(tile.keys[n]),
              reinterpret_cast<uint32_t*>(scratch + layout.values) + n / 2 * layout.value_step,
              layout);
  }
}
#endif

inline void gather(const Cache<Float32Engine>&, const DecodeArgs& args, const Layout& layout,
                   const Piece& piece, int64_t begin, char* scratch, Tile& tile) {
  tile.tokens = least(piece.end - begin, kTile);
  const int64_t padded = round_up(tile.tokens, kBlock);
  for (int64_t n = 0; n < padded; ++n) {
    float* row = reinterpret_cast<float*>(scratch + layout.keys) + n * layout.key_width;
    tile.keys[n] = reinterpret_cast<char*>(row);
    const int64_t width = n < tile.tokens ? args.width : 0;
    if (width > 0) widen(cache_row(args, piece.sequence, begin + n), args.cache_type, row, width);
    memset(row + width, 0, static_cast<size_t>(layout.key_width - width) * 4);
  }
}

// q as cells [step][lane]; lanes beyond `rows` are zero.
template <class Engine>
void gather_q(const DecodeArgs& args, const Layout& layout, int64_t sequence, int64_t first_row,
              int64_t rows, int64_t lanes, uint32_t* cells, float* widened) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t width = lane < rows ? args.width : 0;
    if (width > 0) {
      const int64_t offset = element_offset(args.q_stride, sequence, first_row + lane, args.heads);
      widen(static_cast<const char*>(args.q) + offset * size_of(args.q_type), args.q_type, widened,
            width);
    }
    memset(widened + width, 0, static_cast<size_t>(layout.key_width - width) * 4);
    for (int64_t i = 0; i < layout.key_cells; ++i) {
      const uint32_t* numbers = reinterpret_cast<const uint32_t*>(widened) + i * Engine::kPack;
      cells[i * lanes + lane] =
          Engine::kPack == 1 ? numbers[0] : numbers[0] >> 16 | (numbers[1] & 0xffff0000u);
    }
  }
}

}  // namespace mla::MLA_ISA
