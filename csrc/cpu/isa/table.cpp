// One instruction set's table.
#include "functions.h"

#define MLA_STRING_OF(name) #name
#define MLA_STRING(name) MLA_STRING_OF(name)

namespace mla::MLA_ISA {

const Kernels kKernels = {MLA_STRING(MLA_ISA),
                          decode_scratch_bytes,
                          decode_partial_floats,
                          decode_worker,
                          decode_merge,
                          convert,
                          max_abs,
                          merge_row};

}  // namespace mla::MLA_ISA
