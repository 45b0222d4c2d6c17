// A decode call's tensors as plain data, checked. The same for every device.
#pragma once

#include <ATen/ATen.h>

#include <optional>

#include "decode_args.h"
#include "tensors.h"

namespace mla {

inline const float* scale_of(const std::optional<at::Tensor>& scale, const char* name,
                             at::Device device) {
  if (!scale.has_value()) return nullptr;
  MLA_CHECK(scale->device() == device && scale->numel() == 1 && scale->scalar_type() == at::kFloat,
            name, c10::str("one float32 on ", device),
            c10::str(scale->sizes(), " ", scale->scalar_type(), " on ", scale->device()));
  MLA_CHECK_MEMORY(*scale);
  return scale->const_data_ptr<float>();
}

inline void copy_strides(const at::Tensor& tensor, int64_t stride[3]) {
  for (int64_t i = 0; i < 3; ++i) stride[i] = tensor.stride(i);
}

inline DecodeArgs decode_arguments(const at::Tensor& q, const at::Tensor& kv_cache,
                                   const at::Tensor& block_table, const at::Tensor& seq_lens,
                                   double softmax_scale, int64_t kv_lora_rank, bool causal,
                                   const std::optional<at::Tensor>& q_scale,
                                   const std::optional<at::Tensor>& kv_scale, const at::Tensor& out,
                                   const std::optional<at::Tensor>& lse) {
  for (const at::Tensor& tensor : {kv_cache, block_table, seq_lens, out})
    MLA_CHECK(tensor.device() == q.device(), "all tensors", c10::str("on ", q.device()),
              tensor.device());
  MLA_CHECK_DIM(q, 4);
  MLA_CHECK(kv_cache.dim() == 3 || (kv_cache.dim() == 4 && kv_cache.size(2) == 1), "kv_cache",
            "[pages, page_size, width], or with a 1 before width", kv_cache.sizes());
  DecodeArgs args{};
  args.batch = q.size(0), args.q_len = q.size(1), args.heads = q.size(2), args.width = q.size(3);
  args.latent = kv_lora_rank, args.page_size = kv_cache.size(1);
  args.pages = kv_cache.size(0);
  MLA_CHECK(args.q_len >= 1 && args.heads >= 1, "q_len and heads", "at least 1",
            c10::str(args.q_len, " and ", args.heads));
  // seq_lens is int32: products with page_size stay in 64 bits.
  MLA_CHECK(args.page_size >= 1 && args.page_size <= INT32_MAX, "the page size of kv_cache",
            c10::str("between 1 and ", INT32_MAX), args.page_size);
  MLA_CHECK(kv_cache.size(-1) == args.width, "the last size of kv_cache",
            c10::str("q's, ", args.width), kv_cache.size(-1));
  MLA_CHECK(args.latent >= 1 && args.latent <= args.width, "kv_lora_rank",
            c10::str("between 1 and ", args.width), args.latent);
  MLA_CHECK_DIM(block_table, 2);
  MLA_CHECK(block_table.size(0) == args.batch, "the first size of block_table",
            c10::str("q's, ", args.batch), block_table.size(0));
  MLA_CHECK_DTYPE(block_table, at::kInt);
  MLA_CHECK_SIZES(seq_lens, {args.batch});
  MLA_CHECK_DTYPE(seq_lens, at::kInt);
  MLA_CHECK_CONTIGUOUS(seq_lens);
  MLA_CHECK_SIZES(out, {args.batch, args.q_len, args.heads, args.latent});
  for (const at::Tensor& tensor : {q, kv_cache, block_table, out})
    MLA_CHECK_LAST_CONTIGUOUS(tensor);
  for (const at::Tensor& tensor : {q, kv_cache, block_table, seq_lens, out})
    MLA_CHECK_MEMORY(tensor);

  args.q_type = type_of(q, "q"), args.cache_type = type_of(kv_cache, "kv_cache"),
  args.out_type = type_of(out, "out");
  args.causal = causal;
  args.softmax_scale = static_cast<float>(softmax_scale);
  args.q_scale = scale_of(q_scale, "q_scale", q.device());
  args.kv_scale = scale_of(kv_scale, "kv_scale", q.device());
  args.q = q.const_data_ptr();
  copy_strides(q, args.q_stride);
  args.cache = kv_cache.const_data_ptr();
  args.page_stride = kv_cache.stride(0), args.row_stride = kv_cache.stride(1);
  args.block_table = block_table.const_data_ptr<int32_t>();
  args.table_stride = block_table.stride(0), args.table_pages = block_table.size(1);
  args.seq_lens = seq_lens.const_data_ptr<int32_t>();
  args.out = out.mutable_data_ptr();
  copy_strides(out, args.out_stride);
  if (lse.has_value()) {
    MLA_CHECK(lse->device() == q.device(), "lse", c10::str("on ", q.device()), lse->device());
    MLA_CHECK_DTYPE(*lse, at::kFloat);
    MLA_CHECK_SIZES(*lse, {args.batch, args.q_len, args.heads});
    MLA_CHECK_MEMORY(*lse);
    args.lse = lse->mutable_data_ptr<float>();
    copy_strides(*lse, args.lse_stride);
  }
  return args;
}

}  // namespace mla
