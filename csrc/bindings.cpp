// Stand-in.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "build_info.h"
#include "cpu/isa/kernel.h"

namespace mla {
void double_(at::Tensor x);
const char* cpu_isa();
}  // namespace mla

TORCH_LIBRARY(mla_standin, m) { m.def("double_(Tensor(a!) x) -> ()"); }
TORCH_LIBRARY_IMPL(mla_standin, CPU, m) { m.impl("double_", mla::double_); }

PYBIND11_MODULE(_C, m) {
  mla::register_build_info(m);
  m.def("cpu_isa", &mla::cpu_isa);
}
