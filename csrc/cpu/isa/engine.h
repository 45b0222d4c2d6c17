// The two ways to multiply: float32, and pairs of bfloat16 where the processor has the dot product
// for them. Both work on 32-bit cells, so that everything above them is written once: a cell is one
// float32 or two neighbouring bfloat16.
#pragma once

#include "convert.h"
#include "vec.h"

namespace mla::MLA_ISA {

struct Float32Engine {
  static constexpr int kPack = 1;  // numbers per cell

  static Vec dot(Vec sum, uint32_t a, Vec b) { return sum + float_of(a) * b; }
};

#if defined(__AVX512BF16__)
struct BFloat16Engine {
  static constexpr int kPack = 2;

  static Vec dot(Vec sum, uint32_t a, Vec b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a))),
                            reinterpret_cast<__m512bh>(b));
  }
};
#endif

// Rows of the cache to ask for while computing: gathering alone touches memory, and a burst of
// requests would fill the processor's miss buffers and hold up the loads of the multiplication
// itself. So multiply() asks for a little each step.
class Prefetch {
 public:
  static constexpr int64_t kSteps = 32;  // in which one row is asked for

  Prefetch(const char* const* rows, int64_t count, int64_t row_bytes)
      : row_(rows), stop_(rows + count), stride_((row_bytes + kSteps - 1) / kSteps) {}

  int64_t stride() const { return row_ == stop_ ? 0 : stride_; }
  const char* take(const char* otherwise) { return row_ == stop_ ? otherwise : *row_++; }

 private:
  const char* const* row_;
  const char* const* stop_;
  int64_t stride_;
};

// Where the operands of multiply() lie. Steps and rows of `a` are bytes apart, of `b` and `c`
// floats.
struct Operands {
  const char* a;
  int64_t a_row, a_step;
  const float* b;
  int64_t b_step;
  float* c;
  int64_t c_row;
};

// c[i][lane] = sum over steps of a[i][step] * b[step][lane], for ROWS rows i and VECS vectors of
// lanes; where `factor` is given, added to c[i][lane] * factor[i]. Holding ROWS * VECS sums in
// registers, each step loads VECS vectors of b and broadcasts ROWS cells of a, so that neither keys
// nor values need transposing: keys are `a` of the scores, and values `b` of the output. The steps
// are summed on their own before they are added to c: added one by one to what 100,000 tokens left
// there, equal values would all round the same way, to errors of several 1e-3.
template <class Engine, int ROWS, int VECS>
inline void multiply(Operands at, int64_t steps, const float* factor, Prefetch& prefetch) {
  Vec sum[ROWS][VECS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) sum[i][v] = Vec{};
  while (steps > 0) {
    const int64_t some = steps < Prefetch::kSteps ? steps : Prefetch::kSteps;
    const int64_t stride = prefetch.stride();
    const char* ahead = prefetch.take(at.a);
    for (int64_t step = 0; step < some; ++step) {
      __builtin_prefetch(ahead);
      Vec operand[VECS];
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) operand[v] = load(at.b + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
        uint32_t cell;
        memcpy(&cell, at.a + i * at.a_row, 4);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) sum[i][v] = Engine::dot(sum[i][v], cell, operand[v]);
      }
      at.a += at.a_step, at.b += at.b_step, ahead += stride;
    }
    steps -= some;
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      float* to = at.c + i * at.c_row + v * kLanes;
      store(to, factor == nullptr ? sum[i][v] : load(to) * splat(factor[i]) + sum[i][v]);
    }
}

// Sums that fit the registers: 32 vectors with AVX-512, 16 below. The
// rows divide kBlock.
template <int VECS>
inline constexpr int kRowsFor = kLanes == 16  ? 16 / VECS
                                : kLanes == 8 ? 8 / VECS
                                              : 2;

}  // namespace mla::MLA_ISA
