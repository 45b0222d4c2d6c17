// Lengths and page numbers are data: on a CPU they are checked in every call, before anything is
// read or written.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace mla::cpu {

// Raises ValueError with the first length outside [0, pages * page_size], or the first page in use
// that the cache does not have. mla_ops/validate.py does the same on other devices.
void check_tables(const at::Tensor& block_table, const at::Tensor& seq_lens, int64_t pages,
                  int64_t page_size);

// The running sum of a schedule. Raises ValueError where it would exceed `capacity`.
void fill_first_unit(const at::Tensor& seq_lens, int64_t unit_tokens, int64_t capacity,
                     int32_t* first_unit);

}  // namespace mla::cpu
