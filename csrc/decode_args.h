// One decode call as plain data, for the kernels of every device.
#pragma once

#include "types.h"

namespace mla {

// Strides count elements; the last dimension of every tensor is contiguous.
struct DecodeArgs {
  int64_t batch, q_len, heads, latent, width, pages, page_size;
  Type q_type, cache_type, out_type;
  bool causal;
  float softmax_scale;
  const float* q_scale;  // of float8, on the device; null is 1
  const float* kv_scale;

  const void* q;  // [batch, q_len, heads, width]
  int64_t q_stride[3];
  const void* cache;  // [pages, page_size, width]
  int64_t page_stride, row_stride;
  const int32_t* block_table;  // [batch, table_pages]
  int64_t table_stride, table_pages;
  const int32_t* seq_lens;  // [batch]
  void* out;                // [batch, q_len, heads, latent]
  int64_t out_stride[3];
  float* lse;  // [batch, q_len, heads] or null
  int64_t lse_stride[3];
  float* partials;  // of the pieces of cut sequences, in each backend's own layout

  MLA_INLINE int64_t rows() const { return q_len * heads; }
  MLA_INLINE float output_scale() const { return kv_scale == nullptr ? 1.0f : *kv_scale; }
  MLA_INLINE float score_scale() const {
    return softmax_scale * (q_scale == nullptr ? 1.0f : *q_scale) * output_scale();
  }
};

}  // namespace mla
