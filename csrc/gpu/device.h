// The device that a tensor is on, as launchers take it. No CUDA or HIP header: torch's C interface
// is the same on both, and so one compiler and one set of include paths serve all of csrc/gpu.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "../hip/launchers.h"

// torch/csrc/inductor/aoti_torch/c/shim.h, behind `#ifdef USE_CUDA` there.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace mla::gpu {

// Makes a tensor's device the current one, and says its stream and size.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& tensor) : guard_(tensor.device()) {
    const int32_t index = tensor.get_device();
    TORCH_CHECK(aoti_torch_get_current_cuda_stream(index, &stream_) == 0,
                "no current stream on device ", index);
    device_ = mla_device(index);
  }

  void* stream() const { return stream_; }
  const MlaDevice* info() const { return device_; }

 private:
  c10::DeviceGuard guard_;
  void* stream_ = nullptr;
  const MlaDevice* device_ = nullptr;
};

inline void check_launch(const char* error, const char* op) {
  TORCH_CHECK(error == nullptr, "mla::", op, " could not be launched: ", error);
}

}  // namespace mla::gpu
