// Host side of decode on a CPU: arguments, plan and workspaces for the kernels of the instruction
// set in use.
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include "../plan_spec.h"
#include "../tensors.h"
#include "ops.h"
#include "select.h"
#include "tables.h"

namespace mla::cpu {
namespace {

// Tokens per unit of a schedule made here; see mla_ops/plan.py.
constexpr int64_t kUnitTokens = 64;

float scale_of(const std::optional<at::Tensor>& scale, const char* name) {
  if (!scale.has_value()) return 1.0f;
  MLA_CHECK(scale->is_cpu() && scale->numel() == 1 && scale->scalar_type() == at::kFloat, name,
            "one float32 on the CPU",
            c10::str(scale->sizes(), " ", scale->scalar_type(), " on ", scale->device()));
  MLA_CHECK_MEMORY(*scale);
  return *scale->const_data_ptr<float>();
}

void copy_strides(const at::Tensor& tensor, int64_t stride[3]) {
  for (int64_t i = 0; i < 3; ++i) stride[i] = tensor.stride(i);
}

DecodeArgs arguments(const at::Tensor& q, const at::Tensor& kv_cache, const at::Tensor& block_table,
                     const at::Tensor& seq_lens, double softmax_scale, int64_t kv_lora_rank,
                     bool causal, const std::optional<at::Tensor>& q_scale,
                     const std::optional<at::Tensor>& kv_scale, const at::Tensor& out,
                     const std::optional<at::Tensor>& lse) {
  for (const at::Tensor& tensor : {q, kv_cache, block_table, seq_lens, out}) MLA_CHECK_CPU(tensor);
  MLA_CHECK_DIM(q, 4);
  MLA_CHECK(kv_cache.dim() == 3 || (kv_cache.dim() == 4 && kv_cache.size(2) == 1), "kv_cache",
            "[pages, page_size, width], or with a 1 before width", kv_cache.sizes());
  DecodeArgs args{};
  args.batch = q.size(0), args.q_len = q.size(1), args.heads = q.size(2), args.width = q.size(3);
  args.latent = kv_lora_rank, args.page_size = kv_cache.size(1);
  MLA_CHECK(args.q_len >= 1 && args.heads >= 1, "q_len and heads", "at least 1",
            c10::str(args.q_len, " and ", args.heads));
  // seq_lens is int32: the products of page_size, here and in check_tables(), stay in 64 bits.
  MLA_CHECK(args.page_size >= 1 && args.page_size <= INT32_MAX, "the page size of kv_cache",
            c10::str("between 1 and ", INT32_MAX), args.page_size);
  MLA_CHECK(kv_cache.size(-1) == args.width, "the last size of kv_cache",
            c10::str("q's, ", args.width), kv_cache.size(-1));
  MLA_CHECK(args.latent >= 1 && args.latent <= args.width, "kv_lora_rank",
            c10::str("between 1 and ", args.width), args.latent);
  MLA_CHECK_DIM(block_table, 2);
  MLA_CHECK(block_table.size(0) == args.batch, "the first size of block_table",
            c10::str("q's, ", args.batch), block_table.size(0));
  MLA_CHECK_DTYPE(block_table, at::kInt);
  MLA_CHECK_SIZES(seq_lens, {args.batch});
  MLA_CHECK_DTYPE(seq_lens, at::kInt);
  MLA_CHECK_CONTIGUOUS(seq_lens);
  MLA_CHECK_SIZES(out, {args.batch, args.q_len, args.heads, args.latent});
  for (const at::Tensor& tensor : {q, kv_cache, block_table, out})
    MLA_CHECK_LAST_CONTIGUOUS(tensor);
  for (const at::Tensor& tensor : {q, kv_cache, block_table, seq_lens, out})
    MLA_CHECK_MEMORY(tensor);

  args.q_type = type_of(q, "q"), args.cache_type = type_of(kv_cache, "kv_cache"),
  args.out_type = type_of(out, "out");
  args.causal = causal;
  const float cache_scale = scale_of(kv_scale, "kv_scale");
  args.score_scale = static_cast<float>(softmax_scale) * scale_of(q_scale, "q_scale") * cache_scale;
  args.output_scale = cache_scale;
  args.q = q.const_data_ptr();
  copy_strides(q, args.q_stride);
  args.cache = kv_cache.const_data_ptr();
  args.page_stride = kv_cache.stride(0), args.row_stride = kv_cache.stride(1);
  args.block_table = block_table.const_data_ptr<int32_t>();
  args.table_stride = block_table.stride(0);
  args.seq_lens = seq_lens.const_data_ptr<int32_t>();
  args.out = out.mutable_data_ptr();
  copy_strides(out, args.out_stride);
  if (lse.has_value()) {
    MLA_CHECK_CPU(*lse);
    MLA_CHECK_DTYPE(*lse, at::kFloat);
    MLA_CHECK_SIZES(*lse, {args.batch, args.q_len, args.heads});
    MLA_CHECK_MEMORY(*lse);
    args.lse = lse->mutable_data_ptr<float>();
    copy_strides(*lse, args.lse_stride);
  }
  return args;
}

// The plan that came, or one made here with a worker per thread.
PlanSpec check_or_make_plan(const DecodeArgs& args, const at::Tensor& seq_lens,
                            const std::optional<at::Tensor>& plan,
                            at::OptionalIntArrayRef plan_spec, std::vector<int32_t>& first_unit) {
  if (!plan.has_value()) {
    const std::array<int64_t, PlanSpec::kFields> made = {
        PlanSpec::kNative,     args.batch,  args.q_len, args.heads,
        at::get_num_threads(), kUnitTokens, 0,          INT32_MAX};
    const PlanSpec spec{at::IntArrayRef(made)};
    fill_first_unit(seq_lens, spec.unit_tokens, spec.unit_capacity, first_unit.data());
    return spec;
  }
  MLA_CHECK(plan_spec.has_value(), "plan_spec", "given with a plan", "None");
  const PlanSpec spec(*plan_spec);
  MLA_CHECK(spec.batch == args.batch && spec.q_len == args.q_len && spec.heads == args.heads,
            "plan",
            c10::str("made for ", args.batch, " sequences, ", args.q_len, " query tokens and ",
                     args.heads, " heads"),
            c10::str(spec.batch, ", ", spec.q_len, " and ", spec.heads));
  MLA_CHECK_CPU(*plan);
  spec.check_plan(*plan);
  fill_first_unit(seq_lens, spec.unit_tokens, spec.unit_capacity, first_unit.data());
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
  DecodeArgs args = arguments(q, kv_cache, block_table, seq_lens, softmax_scale, kv_lora_rank,
                              causal, q_scale, kv_scale, out, lse);
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
