// What the decode kernels of both vendors and the merging of their pieces share: which tokens a row
// sees, where its results go, and what becomes of a sequence whose lengths or pages cannot be
// right.
#pragma once

#include "platform.h"
// platform.h says how these are compiled.
#include "launchers.h"
#include "vectors.h"

namespace mla::gpu {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr float kInfinity = __builtin_huge_valf();

// What the tile loops have room for: numbers of a value, and of a cache row.
inline constexpr int kMaxLatent = 512, kMaxWidth = 576;

// Rows of full width that are whole pieces of 16 bytes: what the tile loops are quickest with.
MLA_INLINE bool has_whole_rows(const MlaDecode& decode) {
  return decode.is_aligned && decode.args.width == kMaxWidth;
}

// Offsets of a sequence's tokens fit int32, as seq_lens is; everything else is 64 bits wide.
struct Length {
  int32_t tokens;
  // False where the length is not one that the table has room for, or not the one that was planned.
  // Nothing is read for such a sequence, and its output is NaN: a kernel cannot raise.
  bool is_valid;
};

__device__ __forceinline__ Length length_of(const MlaDecode& decode, int32_t sequence,
                                            int32_t planned_units) {
  const int32_t length = MLA_LOAD(decode.args.seq_lens + sequence);
  const bool is_valid = length >= 0 && length <= decode.args.table_pages * decode.args.page_size &&
                        planned_units == Schedule::units_of(length, decode.schedule.unit_tokens);
  return {is_valid ? length : 0, is_valid};
}

// The tokens that query row `row` = query token * heads + head sees, of `length`.
__device__ __forceinline__ int32_t visible_tokens(const DecodeArgs& args, int32_t length, int row) {
  if (!args.causal) return length;
  const int32_t hidden = static_cast<int32_t>(args.q_len) - 1 - row / static_cast<int>(args.heads);
  return length > hidden ? length - hidden : 0;
}

__device__ __forceinline__ int64_t row_offset(const int64_t (&stride)[3], const DecodeArgs& args,
                                              int32_t sequence, int row) {
  if (args.q_len == 1) return sequence * stride[0] + row * stride[2];
  const int heads = static_cast<int>(args.heads), token = row / heads;
  return sequence * stride[0] + token * stride[1] + (row - token * heads) * stride[2];
}

// N numbers to columns `first` onwards of a row of `width`.
template <class Kind, int N>
__device__ __forceinline__ void store_columns(void* row, int first, int width,
                                              const Run<Kind, N>& run) {
  auto* to = static_cast<typename Kind::Code*>(row) + first;
  constexpr int kBytes = N * sizeof(typename Kind::Code);
  if (first + N <= width && aligned(to, kBytes < 16 ? kBytes : 16)) {
    store_run(run, to);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (first + i < width) to[i] = run.code[i];
}

template <class Kind, int N>
__device__ __forceinline__ void store_columns(void* row, int first, int width,
                                              const float (&values)[N]) {
  Run<Kind, N> run;
  narrow(values, run);
  store_columns<Kind>(row, first, width, run);
}

// The partial results of cut sequences: [slots, rows, width] float32, each divided by its own sum;
// [slots, rows] logarithms of the sums, base 2; and the slots of each sequence's first and last
// piece, [batch, 2], which is what the merging goes by.
struct Partials {
  float* out;
  float* lse;
  int32_t* ends;
  int64_t width;

  MLA_INLINE explicit Partials(const MlaDecode& decode)
      : out(decode.args.partials), width(decode.partial_width) {
    const int64_t rows = decode.slots * decode.args.rows();
    lse = out + rows * width;
    ends = reinterpret_cast<int32_t*>(lse + rows);
  }
};

// A piece as its worker knows it.
struct WorkerPiece : Piece {
  bool is_valid;           // see Length
  bool is_first, is_last;  // of its sequence

  __device__ __forceinline__ bool is_cut() const { return !(is_first && is_last); }
};

// Tells the merging of a piece; one thread of the first block of rows does it.
__device__ __forceinline__ void note_ends(const MlaDecode& decode, int32_t sequence, int32_t slot,
                                          bool is_first, bool is_last) {
  const Partials partials(decode);
  if (is_first) partials.ends[2 * int64_t{sequence}] = slot;
  if (is_last) partials.ends[2 * int64_t{sequence} + 1] = slot;
}

// Where a row of one piece goes: to the output, or to the partial results.
struct RowTarget {
  void* out;
  float* lse;
  Type type;
  bool is_partial;

  __device__ __forceinline__ RowTarget(const MlaDecode& decode, const Piece& piece, int row,
                                       bool is_cut)
      : lse(nullptr), type(is_cut ? Type::kFloat32 : decode.args.out_type), is_partial(is_cut) {
    const DecodeArgs& args = decode.args;
    if (is_cut) {
      const Partials partials(decode);
      const int64_t index = piece.slot * args.rows() + row;
      out = partials.out + index * partials.width;
      lse = partials.lse + index;
    } else {
      const int64_t offset = row_offset(args.out_stride, args, piece.sequence, row);
      out = static_cast<char*>(args.out) + offset * size_of(args.out_type);
      if (args.lse != nullptr)
        lse = args.lse + row_offset(args.lse_stride, args, piece.sequence, row);
    }
  }

  // False for a plan that would write beyond the partial results: one that this call's batch does
  // not have.
  __device__ __forceinline__ static bool is_safe(const MlaDecode& decode, int64_t slot) {
    return slot >= 0 && slot < decode.slots;
  }

  // `log_sum` in units of log2.
  __device__ __forceinline__ void store_lse(float log_sum) const {
    if (lse != nullptr) *lse = is_partial ? log_sum : log_sum * kLn2;
  }
};

// Four numbers to columns `first` onwards of a row of `width`, rounded to the target's type.
__device__ __forceinline__ void store_columns(const RowTarget& target, int first, int width,
                                              const float (&values)[4]) {
  if (target.type == Type::kFloat32) {
    store_columns<Float32>(target.out, first, width, values);
  } else if (target.type == Type::kFloat16) {
    store_columns<Float16>(target.out, first, width, values);
  } else {
    store_columns<BFloat16>(target.out, first, width, values);
  }
}

// The pieces of one worker, one after the other.
struct Pieces {
  int64_t unit, end;
  int32_t worker, sequence;

  __device__ __forceinline__ void start(const Schedule& schedule, int32_t of_worker) {
    const int32_t all = MLA_LOAD(schedule.first_unit + schedule.batch);
    worker = of_worker;
    unit = schedule.first_unit_of_worker(worker, all);
    end = schedule.first_unit_of_worker(worker + 1, all);
    sequence = unit < end ? schedule.sequence_of(unit) : 0;
  }

  // False behind the last. A piece of a sequence that is not valid has no tokens.
  __device__ __forceinline__ bool next(const MlaDecode& decode, WorkerPiece& piece) {
    if (unit >= end) return false;
    const Schedule& schedule = decode.schedule;
    int32_t first = MLA_LOAD(schedule.first_unit + sequence);
    int32_t behind = MLA_LOAD(schedule.first_unit + sequence + 1);
    while (sequence + 1 < schedule.batch && behind <= unit) {
      ++sequence;
      first = behind, behind = MLA_LOAD(schedule.first_unit + sequence + 1);
    }
    const Length length = length_of(decode, sequence, behind - first);
    piece.is_first = unit == first;
    static_cast<Piece&>(piece) =
        schedule.take_piece(unit, end, worker, sequence, length.tokens, first, behind);
    piece.is_last = unit >= behind;
    piece.is_valid = length.is_valid;
    if (!piece.is_valid) piece.begin = piece.end = 0;
    return true;
  }
};

}  // namespace mla::gpu
