// The GPU kernels of the private ops (schemas in mla_ops/ops.py), for both vendors.
#pragma once

#include <ATen/ATen.h>

#include <optional>

#include "../hip/launchers.h"

namespace mla::gpu {

// Workers that a device has room for, for sequences of so many query rows.
int64_t workers(const MlaDevice* device, int64_t rows);

void plan(const at::Tensor& seq_lens, const at::Tensor& block_table, at::IntArrayRef spec,
          at::Tensor plan);

void decode(const at::Tensor& q, const at::Tensor& kv_cache, const at::Tensor& block_table,
            const at::Tensor& seq_lens, double softmax_scale, int64_t kv_lora_rank, bool causal,
            const std::optional<at::Tensor>& q_scale, const std::optional<at::Tensor>& kv_scale,
            const std::optional<at::Tensor>& plan, at::OptionalIntArrayRef plan_spec,
            at::Tensor out, std::optional<at::Tensor> lse);

void quantize_fp8(const at::Tensor& x, const std::optional<at::Tensor>& scale, bool per_row,
                  at::Tensor out, at::Tensor scale_out);

void write_kv_cache(const at::Tensor& kv_c, const at::Tensor& k_pe, at::Tensor kv_cache,
                    const at::Tensor& slot_mapping, const std::optional<at::Tensor>& kv_scale);

void merge_states(const at::Tensor& out_a, const at::Tensor& lse_a, const at::Tensor& out_b,
                  const at::Tensor& lse_b, at::Tensor out, at::Tensor lse);

}  // namespace mla::gpu
