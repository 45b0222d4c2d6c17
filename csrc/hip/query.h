// Query rows on their way to the matrix unit, and output rows on their way back.
#pragma once

#include "decode.h"
#include "mma.h"

namespace mla::gpu {

// bfloat16 numbers become float16 after a power of two that puts the row's largest near the top of
// float16's range: what is not exact then is 2^-28 of that and less.
struct RowScale {
  float factor, inverse;

  // `top`: the magnitudes of the row's largest numbers at even and odd places.
  __device__ __forceinline__ explicit RowScale(uint32_t top) {
    const uint32_t low = top & 0xffffu, high = top >> 16;
    const uint32_t exponent = (low > high ? low : high) >> 7;
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

// The query rows of one sequence.
class Query {
 public:
  __device__ __forceinline__ Query(const MlaDecode& decode, int32_t sequence)
      : args_(decode.args), sequence_(sequence), is_aligned_(decode.is_query_aligned) {}

  // Whether load() gives bfloat16 where float16 is multiplied.
  __device__ __forceinline__ bool needs_scale(bool multiplies_bf16) const {
    return !multiplies_bf16 && args_.q_type == Type::kBFloat16;
  }

  // N numbers from `first` on, two to a word; zeros behind the width and where there is no row.
  // 16-bit numbers as they are, float8 as the matrix unit takes it.
  template <bool BF16, int WORDS>
  __device__ __forceinline__ void load(int row, bool is_there, int first,
                                       uint32_t (&words)[WORDS]) const {
    constexpr int N = 2 * WORDS;
    const int width = static_cast<int>(args_.width),
              bytes = static_cast<int>(size_of(args_.q_type));
    const char* from = static_cast<const char*>(args_.q);
    if (is_there) from += (row_offset(args_.q_stride, args_, sequence_, row) + first) * bytes;
    const int count = is_there ? width - first : 0;
    if (bytes == 2) {
      if (is_aligned_) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
          const uint4 held =
              2 * i < count ? *reinterpret_cast<const uint4*>(from + 4 * i) : uint4{};
          words[i] = held.x, words[i + 1] = held.y, words[i + 2] = held.z, words[i + 3] = held.w;
        }
      } else {
        const auto* codes = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
          const uint32_t low = 2 * i < count ? codes[2 * i] : 0;
          const uint32_t high = 2 * i + 1 < count ? codes[2 * i + 1] : 0;
          words[i] = high << 16 | low;
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      uint32_t codes = 0;
      if (is_aligned_) {
        if (4 * i < count) codes = reinterpret_cast<const uint32_t*>(from)[i];
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (4 * i + k < count)
            codes |= static_cast<uint32_t>(static_cast<uint8_t>(from[4 * i + k])) << 8 * k;
      }
      uint32_t pair[2];
      if (args_.q_type == Type::kFloat8E4M3FN) {
        widen_float8<Float8E4M3FN>(codes, pair[0], pair[1]);
      } else {
        widen_float8<Float8E4M3FNUZ>(codes, pair[0], pair[1]);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float2 value = unpack<false>(pair[k]);
        words[2 * i + k] = BF16 ? pack<true>(value.x, value.y) : pair[k];
      }
    }
  }

 private:
  const DecodeArgs& args_;
  int32_t sequence_;
  bool is_aligned_;
};

}  // namespace mla::gpu
