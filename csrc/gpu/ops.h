// The GPU kernels of the private ops (schemas in mla_ops/ops.py), for both vendors.
#pragma once

#include <ATen/ATen.h>

#include <optional>

namespace mla::gpu {

void quantize_fp8(const at::Tensor& x, const std::optional<at::Tensor>& scale, bool per_row,
                  at::Tensor out, at::Tensor scale_out);

void write_kv_cache(const at::Tensor& kv_c, const at::Tensor& k_pe, at::Tensor kv_cache,
                    const at::Tensor& slot_mapping, const std::optional<at::Tensor>& kv_scale);

void merge_states(const at::Tensor& out_a, const at::Tensor& lse_a, const at::Tensor& out_b,
                  const at::Tensor& lse_b, at::Tensor out, at::Tensor lse);

}  // namespace mla::gpu
