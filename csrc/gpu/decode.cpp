// Host side of plans and decode on GPUs.
#include "../decode_arguments.h"
#include "../plan_spec.h"
#include "device.h"
#include "ops.h"

namespace mla::gpu {
namespace {

bool is_multiple(const void* pointer, std::initializer_list<int64_t> elements, int64_t bytes) {
  bool result = reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  for (const int64_t count : elements) result &= count * bytes % 16 == 0;
  return result;
}

void launch_plan(const at::Tensor& seq_lens, const PlanSpec& spec, at::Tensor& plan,
                 const OnDevice& device) {
  check_launch(mla_plan(seq_lens.const_data_ptr<int32_t>(), spec.batch, spec.unit_tokens,
                        spec.unit_capacity, plan.mutable_data_ptr<int32_t>(), device.stream()),
               "plan");
}

// The plan that came, or one made here.
PlanSpec check_or_make_plan(const DecodeArgs& args, const at::Tensor& seq_lens,
                            const std::optional<at::Tensor>& plan_given,
                            at::OptionalIntArrayRef plan_spec, const OnDevice& device,
                            at::Tensor& plan) {
  if (plan_given.has_value()) {
    plan = *plan_given;
    return PlanSpec::given(plan, plan_spec, args, seq_lens.device());
  }
  const int64_t units =
      (args.table_pages * args.page_size + PlanSpec::kUnitTokens - 1) / PlanSpec::kUnitTokens;
  const int64_t capacity = args.batch * (units > 1 ? units : 1);
  const PlanSpec spec = PlanSpec::made(args, workers(device.info(), args.rows()),
                                       capacity < INT32_MAX ? capacity : INT32_MAX);
  plan = at::empty({args.batch + 1}, seq_lens.options());
  launch_plan(seq_lens, spec, plan, device);
  return spec;
}

MlaDecode planned(const DecodeArgs& args, const PlanSpec& spec, const at::Tensor& plan) {
  MlaDecode decode{};
  decode.args = args;
  decode.schedule = spec.schedule(plan.const_data_ptr<int32_t>());
  decode.slots = spec.slots();
  decode.partial_width = (args.latent + 3) / 4 * 4;
  decode.pages = static_cast<uint32_t>(args.pages < UINT32_MAX ? args.pages : UINT32_MAX);
  // Exact for every token below 2^31: Granlund and Montgomery, PLDI 1994, theorem 4.2.
  while (int64_t{1} << decode.page_shift < args.page_size) ++decode.page_shift;
  decode.page_factor = static_cast<uint32_t>(
      ((uint64_t{1} << (31 + decode.page_shift)) + args.page_size - 1) / args.page_size);
  const int64_t bytes = size_of(args.cache_type);
  decode.is_aligned =
      is_multiple(args.cache, {args.page_stride, args.row_stride, args.width}, bytes) &&
      args.page_stride * bytes <= UINT32_MAX && args.row_stride * bytes <= UINT32_MAX;
  decode.page_bytes = static_cast<uint32_t>(args.page_stride * bytes);
  decode.row_bytes = static_cast<uint32_t>(args.row_stride * bytes);
  decode.is_query_aligned =
      is_multiple(args.q, {args.q_stride[0], args.q_stride[1], args.q_stride[2], args.width},
                  size_of(args.q_type));
  return decode;
}

}  // namespace

int64_t workers(const MlaDevice* device, int64_t rows) {
  const int64_t at_once = mla_rows_per_worker(device, rows);
  const int64_t count = device->processors / ((rows + at_once - 1) / at_once);
  return count > 1 ? count : 1;
}

void plan(const at::Tensor& seq_lens, const at::Tensor& block_table, at::IntArrayRef spec_fields,
          at::Tensor plan) {
  const PlanSpec spec(spec_fields);
  const OnDevice device(seq_lens);
  spec.check_making(seq_lens, plan);
  (void)block_table;
  launch_plan(seq_lens, spec, plan, device);
}

void decode(const at::Tensor& q, const at::Tensor& kv_cache, const at::Tensor& block_table,
            const at::Tensor& seq_lens, double softmax_scale, int64_t kv_lora_rank, bool causal,
            const std::optional<at::Tensor>& q_scale, const std::optional<at::Tensor>& kv_scale,
            const std::optional<at::Tensor>& plan_given, at::OptionalIntArrayRef plan_spec,
            at::Tensor out, std::optional<at::Tensor> lse) {
  const OnDevice device(q);
  const DecodeArgs args = decode_arguments(q, kv_cache, block_table, seq_lens, softmax_scale,
                                           kv_lora_rank, causal, q_scale, kv_scale, out, lse);
  if (args.batch == 0) return;
  at::Tensor plan;
  const PlanSpec spec = check_or_make_plan(args, seq_lens, plan_given, plan_spec, device, plan);
  MlaDecode decode = planned(args, spec, plan);
  const int64_t floats = decode.slots * args.rows() * (decode.partial_width + 1) + 2 * args.batch;
  const at::Tensor partials = at::empty({floats}, seq_lens.options().dtype(at::kFloat));
  decode.args.partials = partials.mutable_data_ptr<float>();
  check_launch(mla_decode(&decode, device.info(), device.stream()), "decode");
}

}  // namespace mla::gpu
