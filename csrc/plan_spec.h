// The host side of a plan: the integers that travel beside the plan tensor, so that a plan made for
// another problem is refused without reading it. mla_ops/plan.py makes them, field by field as
// here.
#pragma once

#include <ATen/ATen.h>

#include <array>

#include "checks.h"
#include "decode_args.h"
#include "schedule.h"

namespace mla {

struct PlanSpec {
  static constexpr int64_t kFields = 8;
  static constexpr int64_t kMaxWorkers = 1 << 16;  // MAX_WORKERS of mla_ops/checks.py
  static constexpr int64_t kNative = 0;            // `kind` of a plan for the native backends
  static constexpr int64_t kUnitTokens = 64;       // of a plan made here: UNIT_TOKENS of plan.py

  int64_t kind, batch, q_len, heads, workers, unit_tokens, fixed_split, unit_capacity;

  explicit PlanSpec(at::IntArrayRef spec) {
    MLA_CHECK(spec.size() == kFields, "plan_spec", c10::str(kFields, " integers"), spec);
    kind = spec[0], batch = spec[1], q_len = spec[2], heads = spec[3];
    workers = spec[4], unit_tokens = spec[5], fixed_split = spec[6], unit_capacity = spec[7];
    MLA_CHECK(kind == kNative, "plan_spec", "of a native plan (kind 0)", spec);
    MLA_CHECK(batch >= 0 && workers >= 1 && unit_tokens >= 1 && unit_capacity >= batch &&
                  workers <= kMaxWorkers && unit_tokens <= INT32_MAX && unit_capacity <= INT32_MAX,
              "plan_spec",
              c10::str("a batch >= 0, between 1 and ", kMaxWorkers,
                       " workers, unit_tokens >= 1 and unit_capacity >= batch, all int32"),
              spec);
  }

  void check_plan(const at::Tensor& plan) const {
    MLA_CHECK_DTYPE(plan, at::kInt);
    MLA_CHECK_SIZES(plan, {batch + 1});
    MLA_CHECK_CONTIGUOUS(plan);
    MLA_CHECK_MEMORY(plan);
  }

  // Of a plan that a decode makes for itself.
  static PlanSpec made(const DecodeArgs& args, int64_t workers, int64_t unit_capacity) {
    const std::array<int64_t, kFields> fields = {kNative, args.batch,  args.q_len, args.heads,
                                                 workers, kUnitTokens, 0,          unit_capacity};
    return PlanSpec{at::IntArrayRef(fields)};
  }

  // Of the plan that a decode was given.
  static PlanSpec given(const at::Tensor& plan, at::OptionalIntArrayRef spec,
                        const DecodeArgs& args, at::Device device) {
    MLA_CHECK(spec.has_value(), "plan_spec", "given with a plan", "None");
    const PlanSpec result(*spec);
    result.check_plan(plan, args, device);
    return result;
  }

  // What a plan is made from, and what it is written to.
  void check_making(const at::Tensor& seq_lens, const at::Tensor& plan) const {
    MLA_CHECK_DTYPE(seq_lens, at::kInt);
    MLA_CHECK_SIZES(seq_lens, {batch});
    MLA_CHECK_CONTIGUOUS(seq_lens);
    MLA_CHECK_MEMORY(seq_lens);
    MLA_CHECK(plan.device() == seq_lens.device(), "plan", c10::str("on ", seq_lens.device()),
              plan.device());
    check_plan(plan);
  }

  // Whether it was made for this decode.
  void check_plan(const at::Tensor& plan, const DecodeArgs& args, at::Device device) const {
    MLA_CHECK(batch == args.batch && q_len == args.q_len && heads == args.heads, "plan",
              c10::str("made for ", args.batch, " sequences, ", args.q_len, " query tokens and ",
                       args.heads, " heads"),
              c10::str(batch, ", ", q_len, " and ", heads));
    MLA_CHECK(plan.device() == device, "plan", c10::str("on ", device), plan.device());
    check_plan(plan);
  }

  Schedule schedule(const int32_t* first_unit) const {
    return {first_unit, static_cast<int32_t>(batch), static_cast<int32_t>(workers),
            static_cast<int32_t>(unit_tokens), fixed_split != 0};
  }

  int64_t slots() const { return Schedule::slots(batch, workers, unit_capacity, fixed_split != 0); }
};

}  // namespace mla
