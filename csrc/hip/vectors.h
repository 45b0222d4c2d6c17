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
  for (int i = 0; i < static_cast<int>(kBytes / sizeof(Word)); ++i)
    held[i] = reinterpret_cast<const Word*>(from)[i];
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
  for (int i = 0; i < static_cast<int>(kBytes / sizeof(Word)); ++i)
    reinterpret_cast<Word*>(to)[i] = held[i];
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

// Thread `index` of `threads` converts its share of from[0..count) to to[..], divided by `divisor`,
// the last numbers first where `backwards`. UNROLL runs are loaded before the first is stored, and
// before the divisor is looked at: it comes from memory too.
template <class From, class To, int UNROLL, int RUN = kRun, class By>
__device__ __forceinline__ void convert(const typename From::Code* from, typename To::Code* to,
                                        int64_t count, const By& divisor, int64_t index,
                                        int64_t threads, bool backwards = false) {
  int64_t done = 0;
  if (aligned(from, 16) && aligned(to, 16)) {
    const int64_t runs = count / RUN;
    for (int64_t first = index; first < runs; first += UNROLL * threads) {
      Run<From, RUN> held[UNROLL];
      const auto begin_of = [&](int u) {
        const int64_t run = first + u * threads;
        return (backwards ? runs - 1 - run : run) * RUN;
      };
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (first + u * threads < runs) held[u] = load_run<From, RUN>(from + begin_of(u));
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (first + u * threads >= runs) break;
        if (!divisor.is_fast()) {
#pragma unroll 1
          for (int64_t i = begin_of(u); i < begin_of(u) + RUN; ++i)
            to[i] = convert_one<From, To>(from[i], divisor);
          continue;
        }
        float value[RUN];
        widen(held[u], value);
#pragma unroll
        for (int i = 0; i < RUN; ++i) value[i] = divisor.divide(value[i]);
        Run<To, RUN> result;
        narrow(value, result);
        store_run(result, to + begin_of(u));
      }
    }
    done = runs * RUN;
  }
  for (int64_t i = done + index; i < count; i += threads)
    to[i] = convert_one<From, To>(from[i], divisor);
}

// Magnitudes order like the integers they are stored as, with infinity and the NaNs above all
// numbers; those of 16 bits are compared two at a time.
template <class Kind>
struct Magnitudes {
  static constexpr bool kPairs = sizeof(typename Kind::Code) == 2;
  static constexpr uint32_t kMask = kPairs ? 0x7fff7fffu : 0x7fffffffu;
  static constexpr uint32_t kInfinity = kSame<Kind, Float32>    ? 0x7f800000u
                                        : kSame<Kind, BFloat16> ? 0x7f80u
                                                                : 0x7c00u;

  __device__ __forceinline__ static uint32_t larger(uint32_t a, uint32_t b) {
    if constexpr (kPairs) return MLA_MAX_PAIRS(a, b);
    return a > b ? a : b;
  }
  __device__ __forceinline__ static uint32_t single(uint32_t word) {
    if constexpr (!kPairs) return word;
    return (word & 0xffffu) > word >> 16 ? word & 0xffffu : word >> 16;
  }
};

// The largest finite magnitude of thread `index`'s share, as the bits of a float32.
template <class From>
__device__ __forceinline__ uint32_t largest_bits(const typename From::Code* from, int64_t count,
                                                 int64_t index, int64_t threads) {
  using Code = typename From::Code;
  using All = Magnitudes<From>;
  constexpr uint32_t kAbove = All::kInfinity;
  uint32_t top = 0;
  const auto take = [&top](Code code) {
    const uint32_t magnitude = code & All::kMask & static_cast<Code>(~Code{0});
    top = magnitude > top && magnitude < kAbove ? magnitude : top;
  };
  int64_t done = 0;
  if (aligned(from, 16)) {
    constexpr int kUnroll = 4, kWidth = 16 / sizeof(Code);
    const int64_t runs = count / kWidth;
    for (int64_t run = index; run < runs; run += kUnroll * threads) {
      uint4 held[kUnroll] = {};
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (run + u * threads < runs)
          held[u] = reinterpret_cast<const uint4*>(from)[run + u * threads];
      uint32_t most = 0;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        for (int w = 0; w < 4; ++w) most = All::larger(most, (&held[u].x)[w] & All::kMask);
      const uint32_t magnitude = All::single(most);
      if (magnitude < kAbove) {
        top = magnitude > top ? magnitude : top;
        continue;
      }
      // An infinity or a NaN is among them: number by number.
#pragma unroll 1
      for (int u = 0; u < kUnroll; ++u)
        for (int64_t i = 0; i < kWidth && run + u * threads < runs; ++i)
          take(from[(run + u * threads) * kWidth + i]);
    }
    done = runs * kWidth;
  }
  for (int64_t i = done + index; i < count; i += threads) take(from[i]);
  return bits_of(From::widen(static_cast<Code>(top)));
}

struct Larger {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const {
    return a > b ? a : b;
  }
};
struct LargerPairs {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const {
    return MLA_MAX_PAIRS(a, b);
  }
};
struct EitherBits {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; }
};

template <class Value, class Op>
__device__ __forceinline__ Value over_wave(Value value, Op op) {
#pragma unroll
  for (int mask = MLA_WAVE / 2; mask > 0; mask /= 2)
    value = op(value, MLA_SHUFFLE_XOR(value, mask));
  return value;
}

// Every thread of the block gets what `op` makes of all their values; 0 is its neutral element.
template <int THREADS, class Op>
__device__ __forceinline__ uint32_t over_block(uint32_t value, Op op) {
  __shared__ uint32_t of_wave[THREADS / MLA_WAVE];
  value = over_wave(value, op);
  if (threadIdx.x % MLA_WAVE == 0) of_wave[threadIdx.x / MLA_WAVE] = value;
  __syncthreads();
  uint32_t all = 0;
  for (int i = 0; i < THREADS / MLA_WAVE; ++i) all = op(all, of_wave[i]);
  __syncthreads();  // the next use of of_wave must not overtake this one
  return all;
}

}  // namespace mla::gpu
