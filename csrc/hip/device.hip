// What host code has to know of a device.
#include "platform.h"

#include "launchers.h"

#if defined(MLA_LAUNCHERS)

const MlaDevice* mla_device(int32_t index) {
  static MlaDevice known[64];  // written with the same values by whoever comes first
  static const MlaDevice none{1, 48 * 1024, 0, mla::Type::kFloat32};
  if (index < 0 || index >= 64) return &none;
  if (known[index].processors == 0) {
    int processors = 0, shared = 0, major = 0;
    auto float8 = mla::Type::kFloat32;
    if (hipDeviceGetAttribute(&processors, hipDeviceAttributeMultiprocessorCount, index) !=
            hipSuccess ||
        hipDeviceGetAttribute(&shared, hipDeviceAttributeMaxSharedMemoryPerBlock, index) !=
            hipSuccess)
      return &none;
#if defined(__CUDACC__)
    if (hipDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != hipSuccess)
      return &none;
#else
    hipDeviceProp_t properties;
    if (hipGetDeviceProperties(&properties, index) != hipSuccess) return &none;
    const auto is = [&properties](const char* name) {
      return __builtin_strncmp(properties.gcnArchName, name, __builtin_strlen(name)) == 0;
    };
    if (is("gfx942")) float8 = mla::Type::kFloat8E4M3FNUZ;
    if (is("gfx950")) float8 = mla::Type::kFloat8E4M3FN;
#endif
    known[index].float8 = float8;
    known[index].shared_bytes = shared, known[index].can_overlap = major >= 9;
    known[index].processors = processors;
  }
  return &known[index];
}

#endif
