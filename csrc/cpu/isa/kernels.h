// What the files compiled once per instruction set offer, and the plain data they work on. No ATen
// here: a template that two instruction sets instantiate could be merged by the linker into the one
// the machine cannot run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../decode_args.h"
#include "../../schedule.h"

namespace mla {

struct Kernels {
  const char* name;

  size_t (*decode_scratch_bytes)(const DecodeArgs&);
  int64_t (*partial_floats)(const DecodeArgs&);
  // Reads worker's tokens; finished sequences go to `out`, cut ones to `partials`.
  void (*decode_worker)(const DecodeArgs&, const Schedule&, int32_t worker, void* scratch);
  // Merges the pieces of one cut sequence into `out`.
  void (*decode_merge)(const DecodeArgs&, const Schedule&, int32_t sequence, void* scratch);

  // to[i] = round(from[i] / divisor), saturating to float8 types.
  void (*convert)(const void* from, Type from_type, void* to, Type to_type, int64_t count,
                  float divisor);
  // max |from[i]| over the finite elements, 0 for none.
  float (*max_abs)(const void* from, Type type, int64_t count);
  // out = (a e^lse_a + b e^lse_b) / (e^lse_a + e^lse_b) over `width` elements; returns the new lse.
  float (*merge_row)(const void* a, float lse_a, const void* b, float lse_b, void* out, Type type,
                     int64_t width);
};

namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}

}  // namespace mla
