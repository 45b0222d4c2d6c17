// The instruction set in use, chosen once per process.
#pragma once

#include "isa/kernels.h"

namespace mla {

// The best that was compiled and that this processor runs, or what MLA_OPS_ISA names (an error
// where it cannot run).
const Kernels& kernels();

}  // namespace mla
