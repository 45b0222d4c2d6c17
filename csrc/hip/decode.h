// What the decode kernels of both vendors and the merging of their pieces share: which tokens a row
// sees, where its results go, and what becomes of a sequence whose lengths or pages cannot be
// right.
#pragma once

#include "../decode_args.h"
#include "../schedule.h"
#include "launchers.h"
#include "vectors.h"

namespace mla::gpu {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr float kInfinity = __builtin_huge_valf();

// Offsets of a sequence's tokens fit int32, as seq_lens is; everything else is 64 bits wide.
struct Length {
  int32_t tokens;
  // False where the length is not one that the table has room for, or not the one that was planned.
  // Nothing is read for such a sequence, and its output is NaN: a kernel cannot raise.
  bool is_valid;
};

__device__ __forceinline__ Length length_of(const MlaDecode& decode, int32_t sequence) {
  const int32_t length = decode.args.seq_lens[sequence];
  const Schedule& schedule = decode.schedule;
  const int32_t planned = schedule.first_unit[sequence + 1] - schedule.first_unit[sequence];
  const bool is_valid = length >= 0 && length <= decode.args.table_pages * decode.args.page_size &&
                        planned == Schedule::units_of(length, schedule.unit_tokens);
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
  const int heads = static_cast<int>(args.heads), token = row / heads;
  return sequence * stride[0] + token * stride[1] + (row - token * heads) * stride[2];
}

// The partial results of cut sequences: [slots, rows, width] float32, each divided by its own sum,
// and [slots, rows] logarithms of the sums, base 2.
struct Partials {
  float* out;
  float* lse;
  int64_t width;

  __device__ __forceinline__ explicit Partials(const MlaDecode& decode)
      : out(decode.args.partials), width(decode.partial_width) {
    lse = out + decode.slots * decode.args.rows() * width;
  }
};

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

// N numbers to columns `first` onwards of a row of `width`, rounded to the target's type.
template <class Kind, int N>
__device__ __forceinline__ void store_columns(void* row, int first, int width,
                                              const float (&values)[N]) {
  using Code = typename Kind::Code;
  auto* to = static_cast<Code*>(row) + first;
  Run<Kind, N> run;
  narrow(values, run);
  constexpr int kBytes = N * sizeof(Code);
  if (first + N <= width && aligned(to, kBytes < 16 ? kBytes : 16)) {
    store_run(run, to);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (first + i < width) to[i] = run.code[i];
}

template <int N>
__device__ __forceinline__ void store_columns(const RowTarget& target, int first, int width,
                                              const float (&values)[N]) {
  if (target.type == Type::kFloat32) store_columns<Float32>(target.out, first, width, values);
  if (target.type == Type::kFloat16) store_columns<Float16>(target.out, first, width, values);
  if (target.type == Type::kBFloat16) store_columns<BFloat16>(target.out, first, width, values);
}

// The pieces of one worker, one after the other.
struct Pieces {
  int64_t unit, end;
  int32_t worker, sequence;

  __device__ __forceinline__ void begin(const Schedule& schedule, int32_t of_worker) {
    worker = of_worker;
    unit = schedule.first_unit_of_worker(worker), end = schedule.first_unit_of_worker(worker + 1);
    sequence = unit < end ? schedule.sequence_of(unit) : 0;
  }

  // False behind the last. A piece of a sequence that is not valid has no tokens.
  __device__ __forceinline__ bool next(const MlaDecode& decode, Piece& piece, bool& is_valid) {
    if (unit >= end) return false;
    const Schedule& schedule = decode.schedule;
    while (sequence + 1 < schedule.batch && schedule.first_unit[sequence + 1] <= unit) ++sequence;
    const Length length = length_of(decode, sequence);
    is_valid = length.is_valid;
    piece = schedule.take_piece(unit, end, worker, sequence, length.tokens);
    if (!is_valid) piece.begin = piece.end = 0;
    return true;
  }
};

}  // namespace mla::gpu
