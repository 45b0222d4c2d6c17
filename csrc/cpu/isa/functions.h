// The functions behind one instruction set's table.
#pragma once

#include "kernels.h"

namespace mla::MLA_ISA {

size_t decode_scratch_bytes(const DecodeArgs& args);
int64_t decode_partial_floats(const DecodeArgs& args);
void decode_worker(const DecodeArgs& args, const Schedule& schedule, int32_t worker, void* scratch);
void decode_merge(const DecodeArgs& args, const Schedule& schedule, int32_t sequence,
                  void* scratch);
void convert(const void* from, Type from_type, void* to, Type to_type, int64_t count,
             float divisor);
float max_abs(const void* from, Type type, int64_t count);
float merge_row(const void* a, float lse_a, const void* b, float lse_b, void* out, Type type,
                int64_t width);

}  // namespace mla::MLA_ISA
