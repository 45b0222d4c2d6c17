// Tensors as the kernels of every device take them: types, and the checks that guard the memory
// that is touched. The full checks, which users meet, are in mla_ops/checks.py.
#pragma once

#include <ATen/ATen.h>

#include "checks.h"
#include "types.h"

namespace mla {

// The type as the kernels name it; raises TypeError for any other.
inline Type type_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Type::kFloat32;
    case at::kHalf:
      return Type::kFloat16;
    case at::kBFloat16:
      return Type::kBFloat16;
    case at::kFloat8_e4m3fn:
      return Type::kFloat8E4M3FN;
    case at::kFloat8_e4m3fnuz:
      return Type::kFloat8E4M3FNUZ;
    default:
      TORCH_CHECK_TYPE(
          false, name,
          " must be float32, float16, bfloat16, float8_e4m3fn or float8_e4m3fnuz, got ",
          tensor.scalar_type());
  }
}

inline void check_cache_write(const at::Tensor& kv_c, const at::Tensor& k_pe,
                              const at::Tensor& kv_cache, const at::Tensor& slot_mapping) {
  for (const at::Tensor& tensor : {kv_c, k_pe, kv_cache, slot_mapping}) {
    MLA_CHECK(tensor.device() == kv_cache.device(), "all tensors",
              c10::str("on ", kv_cache.device()), tensor.device());
    MLA_CHECK_MEMORY(tensor);
  }
  MLA_CHECK_DIM(kv_c, 2);
  MLA_CHECK_DIM(k_pe, 2);
  MLA_CHECK_DIM(slot_mapping, 1);
  const int64_t tokens = slot_mapping.size(0), latent = kv_c.size(1), rope = k_pe.size(1);
  MLA_CHECK(kv_c.size(0) == tokens && k_pe.size(0) == tokens, "rows of kv_c and k_pe",
            c10::str("slot_mapping's, ", tokens), c10::str(kv_c.size(0), " and ", k_pe.size(0)));
  MLA_CHECK(kv_cache.dim() == 3 || (kv_cache.dim() == 4 && kv_cache.size(2) == 1), "kv_cache",
            "[pages, page_size, width], or with a 1 before width", kv_cache.sizes());
  MLA_CHECK(kv_cache.size(-1) == latent + rope, "the last size of kv_cache", latent + rope,
            kv_cache.size(-1));
  for (const at::Tensor& tensor : {kv_c, k_pe, kv_cache}) MLA_CHECK_LAST_CONTIGUOUS(tensor);
  MLA_CHECK_DTYPE(k_pe, kv_c.scalar_type());
}

inline void check_merge(const at::Tensor& out_a, const at::Tensor& lse_a, const at::Tensor& out_b,
                        const at::Tensor& lse_b, const at::Tensor& out, const at::Tensor& lse) {
  for (const at::Tensor& tensor : {out_a, lse_a, out_b, lse_b, out, lse}) {
    MLA_CHECK(tensor.device() == out_a.device(), "all tensors", c10::str("on ", out_a.device()),
              tensor.device());
    MLA_CHECK_MEMORY(tensor);
  }
  MLA_CHECK(out_a.dim() >= 1, "out_a", "at least 1-dimensional", out_a.sizes());
  MLA_CHECK_SIZES(out_b, out_a.sizes());
  MLA_CHECK_SIZES(out, out_a.sizes());
  const at::IntArrayRef rows_shape = out_a.sizes().slice(0, static_cast<size_t>(out_a.dim() - 1));
  for (const at::Tensor& tensor : {lse_a, lse_b, lse}) {
    MLA_CHECK_SIZES(tensor, rows_shape);
    MLA_CHECK_DTYPE(tensor, at::kFloat);
  }
  MLA_CHECK_DTYPE(out_b, out_a.scalar_type());
  MLA_CHECK_DTYPE(out, out_a.scalar_type());
  MLA_CHECK_CONTIGUOUS(out);
  MLA_CHECK_CONTIGUOUS(lse);
}

}  // namespace mla
