// Stand-in.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "cpu/isa/kernel.h"

namespace mla {

const char* cpu_isa() {
#ifdef MLA_HAVE_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return "avx512";
#endif
#ifdef MLA_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "baseline";
}

void double_(at::Tensor x) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat, "x must be float32, got ", x.scalar_type());
  float* p = x.data_ptr<float>();
  auto f = cpu_isa()[0] == 'b' ? baseline::twice : avx2::twice;
  at::parallel_for(0, x.numel(), 64, [&](int64_t b, int64_t e) { f(p + b, e - b); });
}

}  // namespace mla
