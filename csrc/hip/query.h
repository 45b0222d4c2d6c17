// Query rows on their way to the matrix unit, and output rows on their way back.
#pragma once

#include "decode.h"
#include "mma.h"

namespace mla::gpu {

// bfloat16 numbers become float16 after a power of two that puts the row's largest near the top of
// float16's range: what is not exact then is 2^-28 of that and less.
struct RowScale {
  float factor, inverse;

  // `top`: the largest magnitude in the row, as bfloat16.
  __device__ __forceinline__ explicit RowScale(uint32_t top) {
    const uint32_t exponent = top >> 7;
    // 2^14 over the largest number's power of two, within what a float holds.
    const uint32_t wanted = 127 + 14 + 127 - exponent;
    const uint32_t bits = exponent == 255 ? 127 : wanted < 253 ? wanted : 253;
    factor = float_of(bits << 23), inverse = float_of((254 - bits) << 23);
  }

  __device__ __forceinline__ uint32_t apply(uint32_t pair) const {
    const float2 value = unpack<true>(pair);
    return pack<false>(value.x * factor, value.y * factor);
  }
};

// Eight numbers from a row of which `count` are left, wherever it begins. Rare, and kept out of the
// kernels' way.
template <bool BF16>
__device__ __noinline__ uint4 load_eight_slowly(const char* from, Type type, int count) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t codes[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int index = 2 * i + k;
      codes[k] = index >= count       ? 0
                 : size_of(type) == 1 ? reinterpret_cast<const uint8_t*>(from)[index]
                                      : reinterpret_cast<const uint16_t*>(from)[index];
    }
    words[i] = codes[1] << 16 | codes[0];
    if (size_of(type) == 1) {
      float2 value = {Float8E4M3FN::widen(codes[0]), Float8E4M3FN::widen(codes[1])};
      if (type == Type::kFloat8E4M3FNUZ)
        value = {Float8E4M3FNUZ::widen(codes[0]), Float8E4M3FNUZ::widen(codes[1])};
      words[i] = pack<BF16>(value.x, value.y);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// The query rows of one sequence.
class Query {
 public:
  __device__ __forceinline__ Query(const MlaDecode& decode, int32_t sequence)
      : args_(decode.args), sequence_(sequence), is_aligned_(decode.is_query_aligned) {}

  // Whether load() gives bfloat16 where float16 is multiplied.
  __device__ __forceinline__ bool needs_scale(bool multiplies_bf16) const {
    return !multiplies_bf16 && args_.q_type == Type::kBFloat16;
  }

  // Rows of 16-bit numbers whose runs of eight begin at multiples of 16 bytes.
  __device__ __forceinline__ bool is_simple() const {
    return is_aligned_ && size_of(args_.q_type) == 2;
  }

  // Eight numbers of a row from `first` on; zeros behind the width and where there is no row.
  __device__ __forceinline__ uint4 load(int row, int first) const {
    if (row >= args_.rows() || first >= args_.width) return {};
    return MLA_LOAD(reinterpret_cast<const uint4*>(at(row, first)));
  }

  // The same for any row: 16-bit numbers as they are, float8 as the matrix unit takes it.
  template <bool BF16>
  __device__ __forceinline__ uint4 load_slowly(int row, int first) const {
    if (row >= args_.rows() || first >= args_.width) return {};
    return load_eight_slowly<BF16>(at(row, first), args_.q_type,
                                   static_cast<int>(args_.width) - first);
  }

  // Has rows come closer: a warp for each in turn.
  __device__ __forceinline__ void prefetch(int first_row, int rows) const {
    const int line = threadIdx.x % 32 * 128;
    for (int i = threadIdx.x / 32; i < rows; i += blockDim.x / 32)
      if (first_row + i < args_.rows() && line < args_.width * size_of(args_.q_type))
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at(first_row + i, 0) + line));
  }

 private:
  __device__ __forceinline__ const char* at(int row, int first) const {
    return static_cast<const char*>(args_.q) +
           (row_offset(args_.q_stride, args_, sequence_, row) + first) * size_of(args_.q_type);
  }

  const DecodeArgs& args_;
  int32_t sequence_;
  bool is_aligned_;
};

// N numbers to columns `first` onwards of a row of `width`, rounded to the target's type.
template <int N>
__device__ __forceinline__ void store_run(const RowTarget& target, int first, int width,
                                          const float (&values)[N]) {
  if (target.type == Type::kFloat32) {
    store_columns<Float32>(target.out, first, width, values);
    return;
  }
  Run<BFloat16, N> run;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const uint32_t pair = target.type == Type::kBFloat16 ? pack<true>(values[i], values[i + 1])
                                                         : pack<false>(values[i], values[i + 1]);
    run.code[i] = static_cast<uint16_t>(pair), run.code[i + 1] = pair >> 16;
  }
  store_columns<BFloat16>(target.out, first, width, run);
}

}  // namespace mla::gpu
