#include "select.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace mla {
namespace {

// Best last. The build leaves out what its compiler does not know.
std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable{&baseline::kKernels};
#if defined(__x86_64__)
  // __builtin_cpu_supports asks the operating system too, whether it saves the wide registers.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool avx512_bf16 =
      avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
#if defined(MLA_HAVE_AVX2)
  if (avx2) usable.push_back(&avx2::kKernels);
#endif
#if defined(MLA_HAVE_AVX512)
  if (avx512) usable.push_back(&avx512::kKernels);
#endif
#if defined(MLA_HAVE_AVX512_BF16)
  if (avx512_bf16) usable.push_back(&avx512_bf16::kKernels);
#endif
#endif
  return usable;
}

const Kernels& choose() {
  const std::vector<const Kernels*> usable = usable_kernels();
  const char* wanted = std::getenv("MLA_OPS_ISA");
  if (wanted == nullptr || *wanted == '\0') return *usable.back();
  std::string names;
  for (const Kernels* kernels : usable) {
    if (std::string(kernels->name) == wanted) return *kernels;
    names += (names.empty() ? "" : ", ") + std::string(kernels->name);
  }
  TORCH_CHECK_VALUE(false, "MLA_OPS_ISA must be one of ", names,
                    " on this processor and build, got ", wanted);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace mla
