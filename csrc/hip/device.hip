// What host code has to know of a device.
#include "platform.h"

#include "launchers.h"

#if defined(MLA_LAUNCHERS)

const MlaDevice* mla_device(int32_t index) {
  static MlaDevice known[64];  // written with the same values by whoever comes first
  static const MlaDevice none{1, 48 * 1024, 0};
  if (index < 0 || index >= 64) return &none;
  if (known[index].processors == 0) {
    int processors = 0, shared = 0, major = 0;
    if (hipDeviceGetAttribute(&processors, hipDeviceAttributeMultiprocessorCount, index) !=
            hipSuccess ||
        hipDeviceGetAttribute(&shared, hipDeviceAttributeMaxSharedMemoryPerBlock, index) !=
            hipSuccess)
      return &none;
#if defined(__CUDACC__)
    if (hipDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != hipSuccess)
      return &none;
#endif
    known[index].shared_bytes = shared, known[index].can_overlap = major >= 9;
    known[index].processors = processors;
  }
  return &known[index];
}

#endif
