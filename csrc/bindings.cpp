// What the compiled module adds to the ops that mla_ops/ops.py defines: CPU kernels of the private
// ops, GPU kernels where there was a compiler for them, and an autograd kernel for the public ops,
// whose backward raises.
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "build_info.h"
#include "cpu/ops.h"
#include "cpu/select.h"
#if defined(MLA_HAVE_GPU)
#include "gpu/ops.h"
#endif

TORCH_LIBRARY_IMPL(mla, CPU, m) {
  m.impl("_decode_native", mla::cpu::decode);
  m.impl("_plan", mla::cpu::plan);
  m.impl("_quantize_fp8", mla::cpu::quantize_fp8);
  m.impl("_write_kv_cache", mla::cpu::write_kv_cache);
  m.impl("_merge_states", mla::cpu::merge_states);
}

#if defined(MLA_HAVE_GPU)
// ROCm's tensors come under this key too.
TORCH_LIBRARY_IMPL(mla, CUDA, m) {
  m.impl("_decode_native", mla::gpu::decode);
  m.impl("_plan", mla::gpu::plan);
  m.impl("_quantize_fp8", mla::gpu::quantize_fp8);
  m.impl("_write_kv_cache", mla::gpu::write_kv_cache);
  m.impl("_merge_states", mla::gpu::merge_states);
}
#endif

TORCH_LIBRARY_IMPL(mla, Autograd, m) {
  for (const char* op : {"decode", "decode_lse", "decode_out", "plan", "plan_", "quantize_fp8",
                         "write_kv_cache", "merge_states"})
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of mla_ops; importing it registers them with torch.";
  mla::register_build_info(m);
  m.def(
      "cpu_isa", [] { return mla::kernels().name; },
      "The instruction set in use on this processor.");
#if defined(MLA_HAVE_GPU)
  m.def(
      "gpu_workers",
      [](int32_t device, int64_t rows) { return mla::gpu::workers(mla_device(device), rows); },
      "Workers that a GPU has room for, for sequences of so many query rows.");
#endif
}
