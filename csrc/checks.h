// One macro per kind of check. Each raises ValueError or TypeError and says what was expected and
// what came. The full checks, which users meet, are in mla_ops/checks.py; these guard the memory
// that the kernels touch.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#define MLA_CHECK(condition, name, expected, ...) \
  TORCH_CHECK_VALUE(condition, name, " must be ", expected, ", got ", __VA_ARGS__)

#define MLA_CHECK_CPU(tensor) MLA_CHECK((tensor).is_cpu(), #tensor, "on the CPU", (tensor).device())

// Storage can be taken from under a tensor (resize_, as FSDP does): its sizes then lie. And the
// kernels read whole elements; torch.frombuffer and DLPack can make tensors that begin within one.
#define MLA_CHECK_MEMORY(tensor)                                                               \
  do {                                                                                         \
    const at::Tensor& checked = (tensor);                                                      \
    const size_t bytes = at::detail::computeStorageNbytes(                                     \
        checked.sizes(), checked.strides(), checked.itemsize(), checked.storage_offset());     \
    const size_t held = checked.storage().nbytes();                                            \
    MLA_CHECK(checked.numel() == 0 || held >= bytes, #tensor, "backed by its storage",         \
              c10::str(held, " bytes"));                                                       \
    MLA_CHECK(reinterpret_cast<uintptr_t>(checked.const_data_ptr()) % checked.itemsize() == 0, \
              #tensor, c10::str("aligned to its elements of ", checked.itemsize(), " bytes"),  \
              checked.const_data_ptr());                                                       \
  } while (false)

#define MLA_CHECK_DIM(tensor, dims) \
  MLA_CHECK((tensor).dim() == (dims), #tensor, c10::str((dims), "-dimensional"), (tensor).sizes())

#define MLA_CHECK_SIZES(tensor, ...)                                   \
  MLA_CHECK((tensor).sizes() == at::IntArrayRef(__VA_ARGS__), #tensor, \
            at::IntArrayRef(__VA_ARGS__), (tensor).sizes())

#define MLA_CHECK_DTYPE(tensor, type)                                                       \
  TORCH_CHECK_TYPE((tensor).scalar_type() == (type), #tensor " must be ", (type), ", got ", \
                   (tensor).scalar_type())

#define MLA_CHECK_LAST_CONTIGUOUS(tensor)                                \
  MLA_CHECK((tensor).size(-1) <= 1 || (tensor).stride(-1) == 1, #tensor, \
            "contiguous in its last dimension", c10::str("strides ", (tensor).strides()))

#define MLA_CHECK_CONTIGUOUS(tensor)                         \
  MLA_CHECK((tensor).is_contiguous(), #tensor, "contiguous", \
            c10::str("strides ", (tensor).strides()))
