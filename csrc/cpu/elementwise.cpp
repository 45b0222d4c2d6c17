// Host side of the conversions, the cache writes and the merging of states.
#include <ATen/Parallel.h>

#include "../tensors.h"
#include "ops.h"
#include "select.h"

namespace mla::cpu {
namespace {

// Elements for which one more thread is worth its start.
constexpr int64_t kGrain = 1 << 15;

float largest_of(Type type) { return type == Type::kFloat8E4M3FNUZ ? 240.0f : 448.0f; }

float value_of(const at::Tensor& scale) {
  MLA_CHECK_CPU(scale);
  MLA_CHECK_DTYPE(scale, at::kFloat);
  MLA_CHECK_MEMORY(scale);
  MLA_CHECK(scale.numel() == 1, "scale", "one element", scale.sizes());
  return *scale.const_data_ptr<float>();
}

// The scale that puts the largest magnitude at the type's largest number; 1 where that would be 0.
float scale_for(float top, Type type) {
  const float scale = top / largest_of(type);
  return scale == 0.0f ? 1.0f : scale;
}

// [..., 1] for x [..., columns].
void check_row_scales(const at::Tensor& scale, const at::Tensor& x) {
  MLA_CHECK_CPU(scale);
  MLA_CHECK_DTYPE(scale, at::kFloat);
  MLA_CHECK_MEMORY(scale);
  at::DimVector sizes(x.sizes());
  sizes.back() = 1;
  MLA_CHECK_SIZES(scale, sizes);
}

void quantize_rows(const char* read, Type from_type, char* write, Type to_type, int64_t rows,
                   int64_t columns, const float* scale, float* scale_out) {
  const Kernels& isa = kernels();
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       const char* from = read + row * columns * size_of(from_type);
                       const float by =
                           scale != nullptr
                               ? scale[row]
                               : scale_for(isa.max_abs(from, from_type, columns), to_type);
                       isa.convert(from, from_type, write + row * columns * size_of(to_type),
                                   to_type, columns, by);
                       scale_out[row] = by;
                     }
                   });
}

}  // namespace

void quantize_fp8(const at::Tensor& x, const std::optional<at::Tensor>& scale, bool per_row,
                  at::Tensor out, at::Tensor scale_out) {
  MLA_CHECK_CPU(x);
  MLA_CHECK_CPU(out);
  MLA_CHECK_SIZES(out, x.sizes());
  MLA_CHECK_CONTIGUOUS(out);
  for (const at::Tensor& tensor : {x, out}) MLA_CHECK_MEMORY(tensor);
  const at::Tensor from = x.contiguous();
  const Type from_type = type_of(x, "x"), to_type = type_of(out, "out");
  const Kernels& isa = kernels();
  const char* read = static_cast<const char*>(from.const_data_ptr());
  char* write = static_cast<char*>(out.mutable_data_ptr());
  const int64_t count = x.numel();

  if (per_row) {
    MLA_CHECK(x.dim() >= 1, "x", "at least 1-dimensional", x.sizes());
    check_row_scales(scale_out, x);
    MLA_CHECK_CONTIGUOUS(scale_out);
    at::Tensor given;
    if (scale.has_value()) {
      check_row_scales(*scale, x);
      given = scale->contiguous();
    }
    quantize_rows(read, from_type, write, to_type, scale_out.numel(), x.size(-1),
                  scale.has_value() ? given.const_data_ptr<float>() : nullptr,
                  scale_out.mutable_data_ptr<float>());
    return;
  }
  float divisor = 1.0f;
  if (scale.has_value()) {
    divisor = value_of(*scale);
  } else {
    const float top = at::parallel_reduce(
        0, count, kGrain, 0.0f,
        [&](int64_t begin, int64_t end, float before) {
          return std::max(before,
                          isa.max_abs(read + begin * size_of(from_type), from_type, end - begin));
        },
        [](float a, float b) { return std::max(a, b); });
    divisor = scale_for(top, to_type);
  }
  (void)value_of(scale_out);
  *scale_out.mutable_data_ptr<float>() = divisor;
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    isa.convert(read + begin * size_of(from_type), from_type, write + begin * size_of(to_type),
                to_type, end - begin, divisor);
  });
}

void write_kv_cache(const at::Tensor& kv_c, const at::Tensor& k_pe, at::Tensor kv_cache,
                    const at::Tensor& slot_mapping, const std::optional<at::Tensor>& kv_scale) {
  check_cache_write(kv_c, k_pe, kv_cache, slot_mapping);
  for (const at::Tensor& tensor : {kv_c, k_pe, kv_cache, slot_mapping}) MLA_CHECK_CPU(tensor);
  const int64_t tokens = slot_mapping.size(0), latent = kv_c.size(1), rope = k_pe.size(1);
  const at::Tensor slots = slot_mapping.to(at::kLong).contiguous();
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t page_size = kv_cache.size(1), capacity = kv_cache.size(0) * page_size;
  for (int64_t t = 0; t < tokens; ++t)
    TORCH_CHECK_VALUE(slot[t] >= -1 && slot[t] < capacity, "slot_mapping[", t,
                      "] must be between 0 and ", capacity - 1, " (", kv_cache.size(0),
                      " pages of ", page_size, " tokens), or -1 to skip, got ", slot[t]);

  const Type from_type = type_of(kv_c, "kv_c"), to_type = type_of(kv_cache, "kv_cache");
  const float divisor = kv_scale.has_value() ? value_of(*kv_scale) : 1.0f;
  const Kernels& isa = kernels();
  const char* latents = static_cast<const char*>(kv_c.const_data_ptr());
  const char* ropes = static_cast<const char*>(k_pe.const_data_ptr());
  char* cache = static_cast<char*>(kv_cache.mutable_data_ptr());
  const int64_t page_stride = kv_cache.stride(0), row_stride = kv_cache.stride(1);
  const int64_t parts =
      std::clamp<int64_t>(tokens * (latent + rope) / kGrain, 1, at::get_num_threads());
  // Each part goes through all tokens in order and writes the slots that are its own: of two tokens
  // for one slot the later one stays, however many threads there are.
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      for (int64_t t = 0; t < tokens; ++t) {
        if (slot[t] < 0 || slot[t] % parts != part) continue;
        char* row = cache + (slot[t] / page_size * page_stride + slot[t] % page_size * row_stride) *
                                size_of(to_type);
        isa.convert(latents + t * kv_c.stride(0) * size_of(from_type), from_type, row, to_type,
                    latent, divisor);
        isa.convert(ropes + t * k_pe.stride(0) * size_of(from_type), from_type,
                    row + latent * size_of(to_type), to_type, rope, divisor);
      }
  });
}

void merge_states(const at::Tensor& out_a, const at::Tensor& lse_a, const at::Tensor& out_b,
                  const at::Tensor& lse_b, at::Tensor out, at::Tensor lse) {
  check_merge(out_a, lse_a, out_b, lse_b, out, lse);
  for (const at::Tensor& tensor : {out_a, lse_a, out_b, lse_b, out, lse}) MLA_CHECK_CPU(tensor);
  const at::Tensor a = out_a.contiguous(), b = out_b.contiguous();
  const at::Tensor weights_a = lse_a.contiguous(), weights_b = lse_b.contiguous();
  const Type type = type_of(out, "out");
  const int64_t width = out.size(-1), row_bytes = width * size_of(type);
  const char* from_a = static_cast<const char*>(a.const_data_ptr());
  const char* from_b = static_cast<const char*>(b.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const Kernels& isa = kernels();
  at::parallel_for(0, lse.numel(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row)
                       lse.mutable_data_ptr<float>()[row] = isa.merge_row(
                           from_a + row * row_bytes, weights_a.const_data_ptr<float>()[row],
                           from_b + row * row_bytes, weights_b.const_data_ptr<float>()[row],
                           to + row * row_bytes, type, width);
                   });
}

}  // namespace mla::cpu
