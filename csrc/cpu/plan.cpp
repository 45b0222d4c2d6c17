#include "../plan_spec.h"
#include "ops.h"
#include "tables.h"

namespace mla::cpu {

void check_tables(const at::Tensor& block_table, const at::Tensor& seq_lens, int64_t pages,
                  int64_t page_size) {
  const int32_t* lengths = seq_lens.const_data_ptr<int32_t>();
  const int32_t* table = block_table.const_data_ptr<int32_t>();
  const int64_t capacity = block_table.size(1) * page_size;
  for (int64_t b = 0; b < seq_lens.size(0); ++b)
    TORCH_CHECK_VALUE(lengths[b] >= 0 && lengths[b] <= capacity, "seq_lens[", b,
                      "] must be between 0 and ", capacity, " (", block_table.size(1), " pages of ",
                      page_size, " tokens in block_table), got ", lengths[b]);
  for (int64_t b = 0; b < seq_lens.size(0); ++b) {
    const int32_t* row = table + b * block_table.stride(0);
    const int64_t in_use = (lengths[b] + page_size - 1) / page_size;
    // One pass without branches, for page sizes of 1: the bad entry is looked for only where there
    // is one.
    int64_t bad = 0;
    for (int64_t i = 0; i < in_use; ++i) bad += row[i] < 0 || row[i] >= pages;
    for (int64_t i = 0; i < in_use && bad != 0; ++i)
      TORCH_CHECK_VALUE(row[i] >= 0 && row[i] < pages, "block_table[", b, ", ", i,
                        "] must be between 0 and ", pages - 1, " (kv_cache has ", pages,
                        " pages), got ", row[i]);
  }
}

void fill_first_unit(const at::Tensor& seq_lens, int64_t unit_tokens, int64_t capacity,
                     int32_t* first_unit) {
  const int32_t* lengths = seq_lens.const_data_ptr<int32_t>();
  int64_t units = 0;
  first_unit[0] = 0;
  for (int64_t b = 0; b < seq_lens.size(0); ++b) {
    TORCH_CHECK_VALUE(lengths[b] >= 0, "seq_lens[", b, "] must not be negative, got ", lengths[b]);
    units += Schedule::units_of(lengths[b], static_cast<int32_t>(unit_tokens));
    TORCH_CHECK_VALUE(units <= capacity, "seq_lens must fit the ", capacity, " units of ",
                      unit_tokens, " tokens that the plan has room for, got more at seq_lens[", b,
                      "] = ", lengths[b]);
    first_unit[b + 1] = static_cast<int32_t>(units);
  }
}

void plan(const at::Tensor& seq_lens, const at::Tensor& block_table, at::IntArrayRef spec_fields,
          at::Tensor plan) {
  const PlanSpec spec(spec_fields);
  MLA_CHECK_CPU(seq_lens);
  spec.check_making(seq_lens, plan);
  (void)block_table;
  // A plan that cannot be made leaves the old one as it is.
  std::vector<int32_t> first_unit(static_cast<size_t>(spec.batch) + 1);
  fill_first_unit(seq_lens, spec.unit_tokens, spec.unit_capacity, first_unit.data());
  std::copy(first_unit.begin(), first_unit.end(), plan.mutable_data_ptr<int32_t>());
}

}  // namespace mla::cpu
