// Writing tokens into the paged cache.
#include "launch.h"
#include "launchers.h"
#include "vectors.h"

namespace mla::gpu {

constexpr int kWriteThreads = 256;
constexpr int kWaves = kWriteThreads / MLA_WAVE;
// Tokens per block. All later slots are read once for the whole block, to find out which of its
// tokens are overwritten: a cost of tokens^2 / kTokens reads, under the cost of the rows
// themselves up to some 30,000 tokens a call.
constexpr int kTokens = 16;

__device__ __forceinline__ int64_t slot_of(const MlaCacheWrite& write, int64_t token) {
  return write.slots_are_int32
             ? int64_t{static_cast<const int32_t*>(write.slots)[token * write.slot_stride]}
             : static_cast<const int64_t*>(write.slots)[token * write.slot_stride];
}

template <class From, class To, class By>
__device__ __forceinline__ void write_row(const MlaCacheWrite& write, int64_t token, int64_t slot,
                                          const By& divisor, int lane) {
  using FromCode = typename From::Code;
  auto* row = static_cast<typename To::Code*>(write.cache) +
              slot / write.page_size * write.page_stride +
              slot % write.page_size * write.row_stride;
  const auto* latent = static_cast<const FromCode*>(write.kv_c) + token * write.kv_c_stride;
  const auto* rope = static_cast<const FromCode*>(write.k_pe) + token * write.k_pe_stride;
  MLA_SHORT_LOOP
  for (int part = 0; part < 2; ++part)
    convert<From, To, 1>(part == 0 ? latent : rope, part == 0 ? row : row + write.latent,
                         part == 0 ? write.latent : write.rope, divisor, lane, MLA_WAVE);
}

template <class From, class To>
__global__ void __launch_bounds__(kWriteThreads) write_kv_cache(MlaCacheWrite write) {
  MLA_AFTER_PREDECESSOR();
  MLA_SUCCESSOR_MAY_BEGIN();
  __shared__ int64_t slots[kTokens];
  const int64_t first = int64_t{blockIdx.x} * kTokens;
  if (threadIdx.x < kTokens) {
    const int64_t token = first + threadIdx.x;
    const int64_t slot = token < write.tokens ? slot_of(write, token) : -1;
    slots[threadIdx.x] = slot < write.capacity ? slot : -1;
  }
  __syncthreads();
  // Of tokens for one slot the last one stays, whatever the order in which blocks run. A bit for
  // each token of the block that a later one overwrites.
  uint32_t overwritten = 0;
  for (int64_t later = first + 1 + threadIdx.x; later < write.tokens; later += kWriteThreads) {
    const int64_t slot = slot_of(write, later);
    for (int i = 0; i < kTokens; ++i)
      if (slots[i] == slot && first + i < later) overwritten |= 1u << i;
  }
  overwritten = over_block<kWriteThreads>(overwritten, EitherBits{});
  const int lane = threadIdx.x % MLA_WAVE;
  for (int i = threadIdx.x / MLA_WAVE; i < kTokens; i += kWaves) {
    if (slots[i] < 0 || overwritten >> i & 1) continue;
    if constexpr (kIsFloat8<To>) {
      const Divisor divisor(write.scale == nullptr ? 1.0f : *write.scale);
      write_row<From, To>(write, first + i, slots[i], divisor, lane);
    } else {
      write_row<From, To>(write, first + i, slots[i], NoDivisor{}, lane);
    }
  }
}

#if !defined(MLA_LAUNCHERS)

#define MLA_NAME(From)                                                        \
  template __global__ void write_kv_cache<From, Float32>(MlaCacheWrite);      \
  template __global__ void write_kv_cache<From, Float16>(MlaCacheWrite);      \
  template __global__ void write_kv_cache<From, BFloat16>(MlaCacheWrite);     \
  template __global__ void write_kv_cache<From, Float8E4M3FN>(MlaCacheWrite); \
  template __global__ void write_kv_cache<From, Float8E4M3FNUZ>(MlaCacheWrite);
MLA_NAME(Float32)
MLA_NAME(Float16)
MLA_NAME(BFloat16)

#endif

}  // namespace mla::gpu

#if defined(MLA_LAUNCHERS)

const char* mla_write_kv_cache(MlaCacheWrite write, const MlaDevice* device, void* stream) {
  using namespace mla::gpu;
  const dim3 grid(static_cast<unsigned>((write.tokens + kTokens - 1) / kTokens));
  with_wide(write.from_type, [&](auto from) {
    with_type(write.cache_type, [&](auto to) {
      launch_overlapping(*device, write_kv_cache<decltype(from), decltype(to)>, grid,
                         dim3(kWriteThreads), 0, static_cast<hipStream_t>(stream), write);
    });
  });
  return launch_error();
}

#endif
