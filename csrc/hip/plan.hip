// The plan of a decode step (csrc/schedule.h), from lengths that are on the device.
#include "launch.h"
#include "launchers.h"

namespace mla::gpu {

constexpr int kPlanThreads = 1024;

// One block; each thread has a run of sequences. Lengths that cannot be are planned as the nearest
// that can: decode() looks at them again.
__global__ void __launch_bounds__(kPlanThreads)
    plan(const int32_t* seq_lens, int64_t batch, int32_t unit_tokens, int32_t most_units,
         int32_t* first_unit) {
  __shared__ int32_t before[kPlanThreads];
  const int thread = threadIdx.x;
  const int64_t each = (batch + kPlanThreads - 1) / kPlanThreads;
  const int64_t begin = thread * each < batch ? thread * each : batch;
  const int64_t end = begin + each < batch ? begin + each : batch;
  const auto units_of = [&](int64_t sequence) {
    const int32_t units = Schedule::units_of(seq_lens[sequence], unit_tokens);
    return units < most_units ? units : most_units;
  };
  int32_t units = 0;
  for (int64_t i = begin; i < end; ++i) units += units_of(i);
  before[thread] = units;
  __syncthreads();
  for (int step = 1; step < kPlanThreads; step *= 2) {
    const int32_t other = thread >= step ? before[thread - step] : 0;
    __syncthreads();
    before[thread] += other;
    __syncthreads();
  }
  int32_t first = before[thread] - units;
  if (thread == 0) first_unit[0] = 0;
  for (int64_t i = begin; i < end; ++i) {
    first += units_of(i);
    first_unit[i + 1] = first;
  }
}

}  // namespace mla::gpu

#if defined(MLA_LAUNCHERS)

const char* mla_plan(const int32_t* seq_lens, int64_t batch, int64_t unit_tokens,
                     int64_t unit_capacity, int32_t* first_unit, void* stream) {
  using namespace mla::gpu;
  const int64_t share = batch > 0 ? unit_capacity / batch : 1;
  hipLaunchKernelGGL(plan, dim3(1), dim3(kPlanThreads), 0, static_cast<hipStream_t>(stream),
                     seq_lens, batch, static_cast<int32_t>(unit_tokens),
                     static_cast<int32_t>(share), first_unit);
  return launch_error();
}

#endif
