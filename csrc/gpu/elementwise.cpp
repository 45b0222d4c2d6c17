// Host side of the conversions, the cache writes and the merging of states on GPUs.
#include "../checks.h"
#include "../tensors.h"
#include "device.h"
#include "ops.h"

namespace mla::gpu {
namespace {

// x as rows of contiguous numbers, with as few outer dimensions as its strides allow; with `keep`
// the last dimension is a row by itself, joined to no other. False where that takes more than four
// dimensions, or where rows that are kept are not contiguous.
bool rows_of(const at::Tensor& x, bool keep, MlaRows& rows) {
  std::vector<int64_t> sizes, strides;  // last dimension first, neighbours joined where they can be
  bool contiguous = keep;
  if (keep) {
    if (x.size(-1) > 1 && x.stride(-1) != 1) return false;
    sizes.push_back(x.size(-1)), strides.push_back(1);
  }
  for (int64_t i = x.dim() - (keep ? 2 : 1); i >= 0; --i) {
    if (x.size(i) == 1) continue;
    const bool may_join = sizes.size() > (keep ? 1u : 0u);
    if (may_join && x.stride(i) == strides.back() * sizes.back()) {
      sizes.back() *= x.size(i);
    } else {
      sizes.push_back(x.size(i)), strides.push_back(x.stride(i));
    }
  }
  if (!keep) contiguous = !strides.empty() && strides.front() == 1;
  const size_t outer = sizes.size() - (contiguous ? 1 : 0);
  if (outer > 4) return false;
  rows = {1, contiguous ? sizes.front() : 1, {1, 1, 1, 1}, {0, 0, 0, 0}};
  for (size_t i = 0; i < outer; ++i) {
    const size_t from = i + (contiguous ? 1 : 0);
    rows.size[3 - i] = sizes[from], rows.stride[3 - i] = strides[from];
    rows.count *= sizes[from];
  }
  return true;
}

void check_scale(const at::Tensor& scale, const at::Tensor& like, int64_t count = 1) {
  MLA_CHECK(scale.device() == like.device(), "scale", c10::str("on ", like.device()),
            scale.device());
  MLA_CHECK_DTYPE(scale, at::kFloat);
  MLA_CHECK_MEMORY(scale);
  MLA_CHECK(scale.numel() == count, "scale", c10::str(count, " elements"), scale.sizes());
}

}  // namespace

void quantize_fp8(const at::Tensor& x_given, const std::optional<at::Tensor>& scale_given,
                  bool per_row, at::Tensor out, at::Tensor scale_out) {
  MLA_CHECK_SIZES(out, x_given.sizes());
  MLA_CHECK_CONTIGUOUS(out);
  MLA_CHECK(!per_row || x_given.dim() >= 1, "x", "at least 1-dimensional", x_given.sizes());
  MLA_CHECK(out.device() == x_given.device(), "out", c10::str("on ", x_given.device()),
            out.device());
  for (const at::Tensor& tensor : {x_given, out}) MLA_CHECK_MEMORY(tensor);
  const OnDevice device(x_given);
  int64_t scales = 1;
  for (int64_t i = 0; per_row && i < out.dim() - 1; ++i) scales *= out.size(i);
  at::Tensor x = x_given;
  MlaRows rows;
  if (x.numel() == 0) {
    // Rows without columns have scales all the same.
    rows = {scales, 0, {1, 1, 1, 1}, {0, 0, 0, 0}};
  } else if (!rows_of(x, per_row, rows)) {
    // Five and more dimensions that cannot be joined, and rows of strided numbers that have a scale
    // each: the cases that copy first.
    x = x.contiguous();
    rows_of(x, per_row, rows);
  }
  check_scale(scale_out, x, scales);
  MLA_CHECK_CONTIGUOUS(scale_out);
  const bool given = scale_given.has_value();
  MLA_CHECK(given || per_row ||
                scale_out.storage().nbytes() >= (scale_out.storage_offset() + 2) * sizeof(float),
            "scale_out", "followed by one more float32", scale_out.storage().nbytes());
  at::Tensor scale;
  if (given) {
    check_scale(*scale_given, x, scales);
    scale = scale_given->contiguous();
  }
  const MlaScaling scaling =
      per_row ? (given ? kMlaGivenRows : kMlaTensorRows) : (given ? kMlaGiven : kMlaTensor);
  check_launch(mla_quantize_fp8(
                   x.const_data_ptr(), type_of(x, "x"), rows, out.mutable_data_ptr(),
                   type_of(out, "out"), scaling, given ? scale.const_data_ptr<float>() : nullptr,
                   scale_out.mutable_data_ptr<float>(), device.info(), device.stream()),
               "quantize_fp8");
}

void write_kv_cache(const at::Tensor& kv_c, const at::Tensor& k_pe, at::Tensor kv_cache,
                    const at::Tensor& slot_mapping, const std::optional<at::Tensor>& kv_scale) {
  const OnDevice device(kv_cache);
  check_cache_write(kv_c, k_pe, kv_cache, slot_mapping);
  if (slot_mapping.size(0) == 0 || kv_cache.numel() == 0) return;
  MlaCacheWrite write{};
  write.kv_c = kv_c.const_data_ptr(), write.k_pe = k_pe.const_data_ptr();
  write.kv_c_stride = kv_c.stride(0), write.k_pe_stride = k_pe.stride(0);
  write.latent = kv_c.size(1), write.rope = k_pe.size(1), write.tokens = slot_mapping.size(0);
  write.slots = slot_mapping.const_data_ptr();
  write.slots_are_int32 = slot_mapping.scalar_type() == at::kInt;
  write.slot_stride = slot_mapping.stride(0);
  write.cache = kv_cache.mutable_data_ptr();
  write.page_size = kv_cache.size(1);
  write.page_stride = kv_cache.stride(0), write.row_stride = kv_cache.stride(1);
  write.capacity = kv_cache.size(0) * kv_cache.size(1);
  if (kv_scale.has_value()) {
    MLA_CHECK(kv_cache.element_size() == 1, "kv_scale", "none for a cache that is not float8",
              kv_cache.scalar_type());
    check_scale(*kv_scale, kv_cache);
    write.scale = kv_scale->const_data_ptr<float>();
  }
  write.from_type = type_of(kv_c, "kv_c"), write.cache_type = type_of(kv_cache, "kv_cache");
  check_launch(mla_write_kv_cache(write, device.info(), device.stream()), "write_kv_cache");
}

void merge_states(const at::Tensor& out_a, const at::Tensor& lse_a, const at::Tensor& out_b,
                  const at::Tensor& lse_b, at::Tensor out, at::Tensor lse) {
  const OnDevice device(out_a);
  check_merge(out_a, lse_a, out_b, lse_b, out, lse);
  if (out.numel() == 0) return;
  const at::Tensor a = out_a.contiguous(), b = out_b.contiguous();
  const at::Tensor of_a = lse_a.contiguous(), of_b = lse_b.contiguous();
  check_launch(
      mla_merge_states(a.const_data_ptr(), of_a.const_data_ptr<float>(), b.const_data_ptr(),
                       of_b.const_data_ptr<float>(), out.mutable_data_ptr(),
                       lse.mutable_data_ptr<float>(), type_of(out, "out"), lse.numel(),
                       out.size(-1), device.info(), device.stream()),
      "merge_states");
}

}  // namespace mla::gpu
