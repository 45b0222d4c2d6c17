// Threads side by side over memory: runs of 16 bytes where addresses allow it, single numbers where
// they do not, and reductions over a wave or a block.
#pragma once

#include "fp8.h"

namespace mla::gpu {

// Numbers handled at once: 16 bytes of float8; and of tensors too small to fill a GPU with those.
inline constexpr int kRun = 16;
inline constexpr int kShortRun = 4;

__device__ __forceinline__ bool aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// The widest word that a run of BYTES is made of.
template <int BYTES>
struct WordOf {
  using Type = uint4;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};

template <class Kind, int N>
__device__ __forceinline__ Run<Kind, N> load_run(const typename Kind::Code* from) {
  constexpr int kBytes = N * sizeof(typename Kind::Code);
  using Word = typename WordOf<kBytes>::Type;
  Word held[kBytes / sizeof(Word)];
#pragma unroll
  for (int i = 0; i < kBytes / sizeof(Word); ++i) held[i] = reinterpret_cast<const Word*>(from)[i];
  Run<Kind, N> run;
  __builtin_memcpy(&run, held, kBytes);
  return run;
}

template <class Kind, int N>
__device__ __forceinline__ void store_run(const Run<Kind, N>& run, typename Kind::Code* to) {
  constexpr int kBytes = N * sizeof(typename Kind::Code);
  using Word = typename WordOf<kBytes>::Type;
  Word held[kBytes / sizeof(Word)];
  __builtin_memcpy(held, &run, kBytes);
#pragma unroll
  for (int i = 0; i < kBytes / sizeof(Word); ++i) reinterpret_cast<Word*>(to)[i] = held[i];
}

// One number, by true division.
template <class From, class To, class By>
__device__ __forceinline__ typename To::Code convert_one(typename From::Code code,
                                                         const By& divisor) {
  const float value[1] = {divisor.divide_slowly(From::widen(code))};
  Run<To, 1> result;
  narrow(value, result);
  return result.code[0];
}

// Thread `index` of `threads` converts its share of from[0..count) to to[..], divided by what
// `divisor()` returns, the last numbers first where `backwards`. UNROLL runs are loaded before the
// first is stored, and the first of them before the divisor is asked for: it comes from memory too,
// and a thread that waits for it issues no loads.
template <class From, class To, int UNROLL, int RUN = kRun, class By>
__device__ __forceinline__ void convert(const typename From::Code* from, typename To::Code* to,
                                        int64_t count, By&& divisor, int64_t index, int64_t threads,
                                        bool backwards = false) {
  const int64_t runs = aligned(from, 16) && aligned(to, 16) ? count / RUN : 0;
  const auto begin_of = [&](int64_t run) { return (backwards ? runs - 1 - run : run) * RUN; };
  Run<From, RUN> held[UNROLL];
  const auto load = [&](int64_t first) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (first + u * threads < runs)
        held[u] = load_run<From, RUN>(from + begin_of(first + u * threads));
  };
  load(index);
  const auto by = divisor();
  for (int64_t first = index; first < runs; load(first)) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u, first += threads) {
      if (first >= runs) continue;
      if (!by.is_fast()) {
#pragma unroll 1
        for (int64_t i = begin_of(first); i < begin_of(first) + RUN; ++i)
          to[i] = convert_one<From, To>(from[i], by);
        continue;
      }
      float value[RUN];
      widen(held[u], value);
#pragma unroll
      for (int i = 0; i < RUN; ++i) value[i] = by.divide(value[i]);
      Run<To, RUN> result;
      narrow(value, result);
      store_run(result, to + begin_of(first));
    }
  }
  for (int64_t i = runs * RUN + index; i < count; i += threads)
    to[i] = convert_one<From, To>(from[i], by);
}

// The largest finite magnitude of thread `index`'s share, as bits, which order like the numbers.
template <class From>
__device__ __forceinline__ uint32_t largest_bits(const typename From::Code* from, int64_t count,
                                                 int64_t index, int64_t threads) {
  uint32_t top = 0;
  const auto take = [&top](float value) {
    const uint32_t magnitude = bits_of(value) & 0x7fffffffu;
    top = magnitude > top && magnitude < 0x7f800000u ? magnitude : top;
  };
  int64_t done = 0;
  if (aligned(from, 16)) {
    constexpr int kUnroll = 4, kWidth = 16 / sizeof(typename From::Code);
    const int64_t runs = count / kWidth;
    for (int64_t run = index; run < runs; run += kUnroll * threads) {
      Run<From, kWidth> held[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (run + u * threads < runs)
          held[u] = load_run<From, kWidth>(from + (run + u * threads) * kWidth);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (run + u * threads >= runs) break;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) take(From::widen(held[u].code[i]));
      }
    }
    done = runs * kWidth;
  }
  for (int64_t i = done + index; i < count; i += threads) take(From::widen(from[i]));
  return top;
}

__device__ __forceinline__ uint32_t wave_max(uint32_t value) {
#pragma unroll
  for (int mask = MLA_WAVE / 2; mask > 0; mask /= 2) {
    const uint32_t other = MLA_SHUFFLE_XOR(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

// Every thread of the block gets the block's largest value.
template <int THREADS>
__device__ __forceinline__ uint32_t block_max(uint32_t value) {
  __shared__ uint32_t of_wave[THREADS / MLA_WAVE];
  value = wave_max(value);
  if (threadIdx.x % MLA_WAVE == 0) of_wave[threadIdx.x / MLA_WAVE] = value;
  __syncthreads();
  uint32_t top = 0;
  for (int i = 0; i < THREADS / MLA_WAVE; ++i) top = of_wave[i] > top ? of_wave[i] : top;
  __syncthreads();  // the next use of of_wave must not overtake this one
  return top;
}

}  // namespace mla::gpu
