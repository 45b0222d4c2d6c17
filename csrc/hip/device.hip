// What host code has to know of a device.
#include "platform.h"

#include "launchers.h"

#if defined(MLA_LAUNCHERS)

int32_t mla_processors(int32_t device) {
  static int32_t known[64];  // written with the same value by whoever comes first
  if (device < 0 || device >= 64) return 1;
  if (known[device] == 0) {
    int count = 0;
    if (hipDeviceGetAttribute(&count, hipDeviceAttributeMultiprocessorCount, device) != hipSuccess)
      return 1;
    known[device] = count;
  }
  return known[device];
}

#endif
