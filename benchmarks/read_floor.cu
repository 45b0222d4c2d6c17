// How fast a card reads: nothing can decode a cache in less time than it takes to read it.
// Compiled by benchmarks/bench_decode_gpu.py.
#include <cuda_runtime.h>
#include <stdint.h>

template <int UNROLL>
__global__ void read(const uint4* from, int64_t count, uint32_t* to) {
  uint32_t all = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x * UNROLL;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x * UNROLL + threadIdx.x; i < count; i += step) {
    uint4 held[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int64_t at = i + int64_t{u} * blockDim.x;
      if (at < count) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(held[u].x), "=r"(held[u].y), "=r"(held[u].z), "=r"(held[u].w)
                     : "l"(from + at));
      } else {
        held[u] = {0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) all ^= held[u].x ^ held[u].y ^ held[u].z ^ held[u].w;
  }
  if (all == 0x12345679u) *to = all;  // never, and the compiler cannot know
}

extern "C" void read_floor(const void* from, int64_t bytes, void* to, int32_t blocks,
                           int32_t threads, void* stream) {
  read<4><<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(from), bytes / 16, static_cast<uint32_t*>(to));
}
