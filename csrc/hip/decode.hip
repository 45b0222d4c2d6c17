// Decode on GPUs. The tile loop is the vendor's; plan, checks and merging are shared.
#include "launch.h"
#if MLA_WAVE == 32
#include "decode_mma.h"
#else
#include "decode_mfma.h"
#endif

#if defined(MLA_LAUNCHERS)

int32_t mla_rows_per_worker(const MlaDevice* device, int64_t rows) {
  return mla::gpu::rows_per_worker(*device, rows);
}

const char* mla_decode(const MlaDecode* decode, const MlaDevice* device, void* stream) {
  using namespace mla::gpu;
  const mla::DecodeArgs& args = decode->args;
  if (args.width > kMaxWidth || args.latent > kMaxLatent)
    return "no kernel for rows wider than 576 numbers, 512 of them values";
  // float16 numbers are not all bfloat16 ones.
  if (args.q_type == mla::Type::kFloat32 ||
      (args.q_type == mla::Type::kFloat16 && args.cache_type == mla::Type::kBFloat16))
    return "no kernel for a query of this type over this cache";
  bool is_served = false;
  const auto with = [&](auto cache) {
    is_served = launch_tiles<decltype(cache)>(*decode, *device, static_cast<hipStream_t>(stream));
  };
  with_float8(args.cache_type, with);
  with_half(args.cache_type, with);
  if (!is_served) return "no kernel for this device and cache type";
  const char* error = launch_error();
  return error != nullptr ? error : mla_merge_pieces(decode, device, stream);
}

#endif
