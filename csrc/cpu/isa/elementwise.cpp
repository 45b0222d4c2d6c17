// Conversions, the largest magnitude, and the merging of two partial results: loops that the
// compiler vectorizes for the instruction set this file is compiled for.
#include "convert.h"
#include "functions.h"

namespace mla::MLA_ISA {
namespace {

// Numbers widened at a time: 1 KiB, which stays in the first-level cache.
constexpr int64_t kChunk = 256;

}  // namespace

void convert(const void* from, Type from_type, void* to, Type to_type, int64_t count,
             float divisor) {
  float wide[kChunk];
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t some = least(count - begin, kChunk);
    widen(static_cast<const char*>(from) + begin * size_of(from_type), from_type, wide, some);
    // Dividing, not multiplying with the reciprocal: that would round twice.
    if (divisor != 1.0f)
      for (int64_t i = 0; i < some; ++i) wide[i] /= divisor;
    narrow(wide, static_cast<char*>(to) + begin * size_of(to_type), to_type, some);
  }
}

float max_abs(const void* from, Type type, int64_t count) {
  float wide[kChunk];
  // Magnitudes order like their bit patterns; infinity and the NaNs lie above every number.
  uint32_t top = 0;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t some = least(count - begin, kChunk);
    widen(static_cast<const char*>(from) + begin * size_of(type), type, wide, some);
    for (int64_t i = 0; i < some; ++i) {
      const uint32_t magnitude = bits_of(wide[i]) & 0x7fffffffu;
      top = magnitude > top && magnitude < 0x7f800000u ? magnitude : top;
    }
  }
  return float_of(top);
}

float merge_row(const void* a, float lse_a, const void* b, float lse_b, void* out, Type type,
                int64_t width) {
  const float infinity = __builtin_inff();
  // FlashMLA writes +inf for a row that sees nothing; nothing else can.
  lse_a = lse_a == infinity ? -infinity : lse_a;
  lse_b = lse_b == infinity ? -infinity : lse_b;
  const float top = lse_a > lse_b ? lse_a : lse_b;
  const float shift = top == -infinity ? 0.0f : top;
  const float weight_a = __builtin_expf(lse_a - shift), weight_b = __builtin_expf(lse_b - shift);
  const float sum = weight_a + weight_b;
  const float factor_a = sum == 0.0f ? 0.0f : weight_a / sum,
              factor_b = sum == 0.0f ? 0.0f : weight_b / sum;
  float wide_a[kChunk], wide_b[kChunk];
  for (int64_t begin = 0; begin < width; begin += kChunk) {
    const int64_t some = least(width - begin, kChunk), offset = begin * size_of(type);
    widen(static_cast<const char*>(a) + offset, type, wide_a, some);
    widen(static_cast<const char*>(b) + offset, type, wide_b, some);
    for (int64_t i = 0; i < some; ++i) {
      // A side without weight may hold anything, NaN included.
      const float from_a = factor_a == 0.0f ? 0.0f : wide_a[i] * factor_a;
      const float from_b = factor_b == 0.0f ? 0.0f : wide_b[i] * factor_b;
      wide_a[i] = from_a + from_b;
    }
    narrow(wide_a, static_cast<char*>(out) + offset, type, some);
  }
  return sum == 0.0f ? -infinity : shift + __builtin_logf(sum);
}

}  // namespace mla::MLA_ISA
