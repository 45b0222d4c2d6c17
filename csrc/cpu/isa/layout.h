// Where everything lies in a worker's scratch memory, and the walks over it that several files
// need.
#pragma once

#include "engine.h"
#include "kernels.h"

namespace mla::MLA_ISA {

// Tokens gathered at a time.
inline constexpr int64_t kTile = 64;
// Query rows lie in vector lanes, in blocks of 16 or 32.
inline constexpr int64_t kBlock = 16;
// Columns of the output that are computed together, at most.
inline constexpr int64_t kColumns = 32;
// Rows that share one gathered tile: 128 rows of 512 float32 sums are 256 KiB, which with the tile
// and q stay in L2.
inline constexpr int64_t kGroup = 128;

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Blocks of 32 rows where the registers allow it, of 16 otherwise and for what is left.
inline int64_t block_lanes(int64_t rows_left) {
  return kLanes == 16 && rows_left > kBlock ? 2 * kBlock : kBlock;
}

// Running softmax, one entry per row: maximum (of scores in units of log2), sum of the weights, sum
// of the weights as the engine rounds them, the factor that the last tile put on the output, and
// the number of tokens a row may see.
struct State {
  float* maximum;
  float* sum;
  float* rounded_sum;
  float* factor;
  int32_t* visible;

  static State at(float* memory, int64_t rows) {
    return {memory, memory + rows, memory + 2 * rows, memory + 3 * rows,
            reinterpret_cast<int32_t*>(memory + 4 * rows)};
  }

  State from(int64_t row) const {
    return {maximum + row, sum + row, rounded_sum + row, factor + row, visible + row};
  }
};

struct Layout {
  int64_t rows;         // query rows, rounded up to whole blocks of 16
  int64_t group_rows;   // of those, handled together
  int64_t key_width;    // numbers in a gathered key row, zero beyond the problem's width
  int64_t key_cells;    // the same in cells
  int64_t value_width;  // output columns, rounded up
  int64_t value_step;   // cells from the values of one step to those of the next
  int64_t value_block;  // cells from those of one block of kColumns columns to the next
  size_t q, keys, values, scores, weights, state, output, row, bytes;

  template <class Engine>
  static Layout of(const DecodeArgs& args) {
    Layout layout{};
    layout.rows = round_up(args.rows(), kBlock);
    layout.group_rows = least(layout.rows, kGroup);
    layout.value_width = round_up(args.latent, kColumns);
    layout.key_width = round_up(args.width, kColumns);
    layout.key_cells = layout.key_width / Engine::kPack;
    // Paired values are gathered block by block: rows of 512 cells would meet in few sets of the
    // first-level cache.
    layout.value_step = Engine::kPack == 1 ? layout.key_width : kColumns;
    layout.value_block =
        Engine::kPack == 1 ? kColumns : kTile / Engine::kPack * kColumns + kColumns;
    const auto take = [&layout](int64_t cells) {
      const size_t here = layout.bytes;
      layout.bytes += static_cast<size_t>(round_up(cells * 4, 64));
      return here;
    };
    layout.q = take(layout.group_rows * layout.key_cells);
    layout.keys = take(kTile * layout.key_cells);
    layout.values =
        Engine::kPack == 1 ? layout.keys : take(layout.value_width / kColumns * layout.value_block);
    layout.scores = take(kTile * 2 * kBlock);
    layout.weights = take(kTile * 2 * kBlock);
    layout.state = take(layout.rows * 5);
    layout.output = take(layout.group_rows * layout.value_width);
    layout.row = take(layout.key_width);
    return layout;
  }

  // A partial result: maximum, sum and rounded_sum of every row, then the output, block after
  // block.
  int64_t partial_floats() const { return rows * (3 + value_width); }
  int64_t partial_output(int64_t row) const { return rows * 3 + row * value_width; }
};

inline int64_t element_offset(const int64_t stride[3], int64_t sequence, int64_t row,
                              int64_t heads) {
  return sequence * stride[0] + row / heads * stride[1] + row % heads * stride[2];
}

inline const char* cache_row(const DecodeArgs& args, int64_t sequence, int64_t token) {
  const int64_t page = args.block_table[sequence * args.table_stride + token / args.page_size];
  const int64_t offset = page * args.page_stride + token % args.page_size * args.row_stride;
  return static_cast<const char*>(args.cache) + offset * size_of(args.cache_type);
}

}  // namespace mla::MLA_ISA
