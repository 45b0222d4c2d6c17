// What csrc/hip offers to host code: kernels launched on a stream, no allocation, no
// synchronization. Each returns null, or the runtime's message where the launch failed. `stream` is
// a hipStream_t or cudaStream_t; all other pointers are device memory.
#pragma once

#include "../decode_args.h"
#include "../schedule.h"
#include "../types.h"

extern "C" {

struct MlaDevice {
  int32_t processors;    // multiprocessors or compute units
  int32_t shared_bytes;  // shared memory that a block may have
  int32_t can_overlap;   // kernels may begin before the one in front of them ends
  mla::Type float8;      // AMD: what the matrix unit multiplies; float32 is none
};
// Asked once per device and process.
const MlaDevice* mla_device(int32_t device);

// A tensor as rows of contiguous numbers: row r begins where its index, written in the mixed base
// `size` (last fastest), puts it by `stride`, in elements.
struct MlaRows {
  int64_t count;    // rows
  int64_t columns;  // numbers in a row
  int64_t size[4], stride[4];
};

// How x is divided before it is rounded to float8.
enum MlaScaling : int32_t {
  kMlaGiven,       // by scale[0]
  kMlaGivenRows,   // by scale[r]
  kMlaTensor,      // by the largest finite magnitude over the type's largest number
  kMlaTensorRows,  // the same, row by row
};

// out [rows, columns] contiguous float8. scale_out gets the scale or scales used; for kMlaTensor a
// second float behind it is overwritten on the way.
const char* mla_quantize_fp8(const void* x, mla::Type x_type, MlaRows rows, void* out,
                             mla::Type out_type, MlaScaling scaling, const float* scale,
                             float* scale_out, const MlaDevice* device, void* stream);

// Token t of kv_c [tokens, latent] and k_pe [tokens, rope] to row slot % page_size of page
// slot / page_size; negative slots are skipped, of equal slots the last token's row stays. `scale`
// belongs to a float8 cache; null is 1.
struct MlaCacheWrite {
  const void* kv_c;
  const void* k_pe;
  int64_t kv_c_stride, k_pe_stride, latent, rope, tokens;
  const void* slots;  // int64, or int32 where `slots_are_int32`
  int32_t slots_are_int32;
  int64_t slot_stride;
  void* cache;
  int64_t page_size, page_stride, row_stride, capacity;
  const float* scale;
  mla::Type from_type, cache_type;
};
const char* mla_write_kv_cache(MlaCacheWrite write, const MlaDevice* device, void* stream);

// out[r] = (a[r] e^lse_a[r] + b[r] e^lse_b[r]) / (e^lse_a[r] + e^lse_b[r]), all contiguous.
const char* mla_merge_states(const void* a, const float* lse_a, const void* b, const float* lse_b,
                             void* out, float* lse, mla::Type type, int64_t rows, int64_t width,
                             const MlaDevice* device, void* stream);

// One decode call, planned.
struct MlaDecode {
  mla::DecodeArgs args;  // partials: slots * rows * (partial_width + 1) + 2 * batch floats
  mla::Schedule schedule;
  int64_t slots, partial_width;
  uint32_t pages, page_factor, page_shift;  // token / page_size is (2 token factor) >> 32 >> shift
  uint32_t page_bytes, row_bytes;           // from one to the next, where is_aligned
  int32_t is_aligned;        // cache rows are whole pieces of 16 bytes, and begin at multiples
  int32_t is_query_aligned;  // so are query rows
};

// Rows of a query that one worker takes; blocks of their own do others, over the same tokens.
int32_t mla_rows_per_worker(const MlaDevice* device, int64_t rows);

// Attention for every row; then the pieces of the sequences that the plan cuts are merged.
const char* mla_decode(const MlaDecode* decode, const MlaDevice* device, void* stream);
const char* mla_merge_pieces(const MlaDecode* decode, const MlaDevice* device, void* stream);

// first_unit[0..batch] of a plan (csrc/schedule.h) from the lengths. No sequence gets more than an
// equal share of `unit_capacity`.
const char* mla_plan(const int32_t* seq_lens, int64_t batch, int64_t unit_tokens,
                     int64_t unit_capacity, int32_t* first_unit, void* stream);

}  // extern "C"
