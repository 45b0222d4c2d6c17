// Decode on GPUs. The tile loop is the vendor's; plan, checks and merging are shared.
#include "launch.h"
#if MLA_WAVE == 32
#include "decode_mma.h"
#else
#include "decode_mfma.h"
#endif

#if defined(MLA_LAUNCHERS)

const char* mla_decode(const MlaDecode* decode, const MlaDevice* device, void* stream) {
  using namespace mla::gpu;
  bool is_served = false;
  const auto with = [&](auto cache) {
    is_served = launch_tiles<decltype(cache)>(*decode, *device, static_cast<hipStream_t>(stream));
  };
  if (decode->args.width > kMaxWidth || decode->args.latent > kMaxLatent)
    return "rows wider than the kernel takes";
  with_float8(decode->args.cache_type, with);
  with_half(decode->args.cache_type, with);
  if (!is_served) return "no kernel for this device and these types";
  const char* error = launch_error();
  return error != nullptr ? error : mla_merge_pieces(decode, device, stream);
}

#endif
