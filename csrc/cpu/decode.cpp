// Host side of decode on a CPU: arguments, plan and workspaces for the kernels of the instruction
// set in use.
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include "../decode_arguments.h"
#include "../plan_spec.h"
#include "ops.h"
#include "select.h"
#include "tables.h"

namespace mla::cpu {
namespace {

// The plan that came, or one made here with a worker per thread.
PlanSpec check_or_make_plan(const DecodeArgs& args, const at::Tensor& seq_lens,
                            const std::optional<at::Tensor>& plan,
                            at::OptionalIntArrayRef plan_spec, std::vector<int32_t>& first_unit) {
  const PlanSpec spec = plan.has_value()
                            ? PlanSpec::given(*plan, plan_spec, args, seq_lens.device())
                            : PlanSpec::made(args, at::get_num_threads(), INT32_MAX);
  fill_first_unit(seq_lens, spec.unit_tokens, spec.unit_capacity, first_unit.data());
  if (!plan.has_value()) return spec;
  const int32_t* planned = plan->const_data_ptr<int32_t>();
  for (int64_t b = 0; b <= args.batch; ++b)
    TORCH_CHECK_VALUE(
        planned[b] == first_unit[static_cast<size_t>(b)],
        "the plan must be made for the lengths in seq_lens (refresh it with plan.update_()), got ",
        planned[b], " units before sequence ", b, " and not ", first_unit[static_cast<size_t>(b)]);
  return spec;
}

}  // namespace

void decode(const at::Tensor& q, const at::Tensor& kv_cache, const at::Tensor& block_table,
            const at::Tensor& seq_lens, double softmax_scale, int64_t kv_lora_rank, bool causal,
            const std::optional<at::Tensor>& q_scale, const std::optional<at::Tensor>& kv_scale,
            const std::optional<at::Tensor>& plan, at::OptionalIntArrayRef plan_spec,
            at::Tensor out, std::optional<at::Tensor> lse) {
  MLA_CHECK_CPU(q);
  DecodeArgs args = decode_arguments(q, kv_cache, block_table, seq_lens, softmax_scale,
                                     kv_lora_rank, causal, q_scale, kv_scale, out, lse);
  if (args.batch == 0) return;
  check_tables(block_table, seq_lens, kv_cache.size(0), args.page_size);
  std::vector<int32_t> first_unit(static_cast<size_t>(args.batch) + 1);
  const PlanSpec spec = check_or_make_plan(args, seq_lens, plan, plan_spec, first_unit);
  const Schedule schedule = spec.schedule(first_unit.data());

  const Kernels& isa = kernels();
  at::Tensor partials;
  bool cut = false;
  for (int32_t b = 0; b < args.batch && !cut; ++b) cut = schedule.pieces(b) > 1;
  if (cut) {
    const int64_t slots =
        Schedule::slots(args.batch, schedule.busy_workers(), schedule.units(), spec.fixed_split);
    partials = at::empty({slots, isa.partial_floats(args)}, seq_lens.options().dtype(at::kFloat));
    args.partials = partials.mutable_data_ptr<float>();
  }
  const size_t scratch_bytes = isa.decode_scratch_bytes(args);
  at::parallel_for(0, schedule.busy_workers(), 1, [&](int64_t begin, int64_t end) {
    const at::DataPtr scratch = c10::GetCPUAllocator()->allocate(scratch_bytes);
    for (int64_t worker = begin; worker < end; ++worker)
      isa.decode_worker(args, schedule, static_cast<int32_t>(worker), scratch.get());
  });
  if (!cut) return;
  at::parallel_for(0, args.batch, 1, [&](int64_t begin, int64_t end) {
    const at::DataPtr scratch = c10::GetCPUAllocator()->allocate(scratch_bytes);
    for (int64_t b = begin; b < end; ++b)
      if (schedule.pieces(static_cast<int32_t>(b)) > 1)
        isa.decode_merge(args, schedule, static_cast<int32_t>(b), scratch.get());
  });
}

}  // namespace mla::cpu
