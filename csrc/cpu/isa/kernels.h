// What the files compiled once per instruction set offer, and the plain data they work on. No ATen
// here: a template that two instruction sets instantiate could be merged by the linker into the one
// the machine cannot run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../schedule.h"
#include "../../types.h"

namespace mla {

// One decode call. Strides count elements; the last dimension of every tensor is contiguous.
struct DecodeArgs {
  int64_t batch, q_len, heads, latent, width, page_size;
  Type q_type, cache_type, out_type;
  bool causal;
  float score_scale;   // softmax_scale * q_scale * kv_scale
  float output_scale;  // kv_scale

  const void* q;  // [batch, q_len, heads, width]
  int64_t q_stride[3];
  const void* cache;  // [pages, page_size, width]
  int64_t page_stride, row_stride;
  const int32_t* block_table;  // [batch, pages per sequence]
  int64_t table_stride;
  const int32_t* seq_lens;  // [batch]
  void* out;                // [batch, q_len, heads, latent]
  int64_t out_stride[3];
  float* lse;  // [batch, q_len, heads] or null
  int64_t lse_stride[3];
  float* partials;  // [slots, Kernels::partial_floats]

  MLA_INLINE int64_t rows() const { return q_len * heads; }
};

struct Kernels {
  const char* name;

  size_t (*decode_scratch_bytes)(const DecodeArgs&);
  int64_t (*partial_floats)(const DecodeArgs&);
  // Reads worker's tokens; finished sequences go to `out`, cut ones to `partials`.
  void (*decode_worker)(const DecodeArgs&, const Schedule&, int32_t worker, void* scratch);
  // Merges the pieces of one cut sequence into `out`.
  void (*decode_merge)(const DecodeArgs&, const Schedule&, int32_t sequence, void* scratch);

  // to[i] = round(from[i] / divisor), saturating to float8 types.
  void (*convert)(const void* from, Type from_type, void* to, Type to_type, int64_t count,
                  float divisor);
  // max |from[i]| over the finite elements, 0 for none.
  float (*max_abs)(const void* from, Type type, int64_t count);
  // out = (a e^lse_a + b e^lse_b) / (e^lse_a + e^lse_b) over `width` elements; returns the new lse.
  float (*merge_row)(const void* a, float lse_a, const void* b, float lse_b, void* out, Type type,
                     int64_t width);
};

namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}

}  // namespace mla
