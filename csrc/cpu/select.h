// The instruction set in use, chosen once per process.
#pragma once

#include <ATen/ATen.h>

#include "isa/kernels.h"

namespace mla {

// The best that was compiled and that this processor runs, or what MLA_OPS_ISA names (an error
// where it cannot run).
const Kernels& kernels();

// The type as the kernels name it; raises TypeError for any other.
Type type_of(const at::Tensor& tensor, const char* name);

}  // namespace mla
