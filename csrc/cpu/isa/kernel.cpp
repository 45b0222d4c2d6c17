// Stand-in.
#include "cpu/isa/kernel.h"
namespace mla::MLA_ISA {
void twice(float* x, long n) {
  for (long i = 0; i < n; ++i) x[i] = x[i] * 2.0f;
}
}  // namespace mla::MLA_ISA
