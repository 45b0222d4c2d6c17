// Pieces of the plan into tiles, and tiles into shared memory.
#pragma once

#include "worker_mma.h"

namespace mla::gpu {

// Writes down a piece; one thread does this, ahead of all others.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::write_note(Pieces& pieces, uint32_t number) {
  Note& note = shared_.note[number % kNotes];
  WorkerPiece piece;
  if (pieces.next(decode_, piece)) {
    note = {piece.sequence,
            static_cast<int32_t>(piece.begin),
            static_cast<int32_t>(piece.end - piece.begin),
            static_cast<int32_t>(piece.slot),
            piece.is_valid,
            piece.is_cut(),
            false};
    if (row_begin_ == 0)
      note_ends(decode_, piece.sequence, note.slot, piece.is_first, piece.is_last);
  } else {
    note = {-1, 0, 0, 0, false, false, false};
  }
}

template <class S>
__device__ __forceinline__ void DecodeWorker<S>::take_piece(Ahead& ahead) const {
  const Note& note = shared_.note[ahead.piece % kNotes];
  ahead.begin = note.begin, ahead.tokens = note.tokens;
  if (note.sequence < 0) {
    ahead.tokens = -1;
  } else {
    ahead.table = args_.block_table + note.sequence * args_.table_stride;
    Query(decode_, note.sequence).prefetch(row_begin_, S::kRows);
  }
}

// The pages of the cache rows that this lane is about to fetch.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::find_pages(Ahead& ahead) const {
#pragma unroll
  for (int i = 0; i < S::kFetches; ++i) {
    const uint32_t token = ahead.begin + fetched_row(i);
    const uint32_t index = __umulhi(2 * token, decode_.page_factor) >> decode_.page_shift;
    ahead.row[i] = token - index * static_cast<uint32_t>(args_.page_size);
    if (fetched_row(i) < ahead.tokens) ahead.page[i] = MLA_LOAD(ahead.table + index);
  }
}

// Starts the copies of a tile; what is behind its end is zero. Eight lanes fetch a row, 128 bytes
// at a time. Then goes on to the next tile.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::fetch(Ahead& ahead, int stage_index) {
  char* stage = stage_memory_ + stage_index * S::kStageBytes;
  if (ahead.tokens >= 0) {
    const int first = lane_ % 8;
    const bool is_whole = has_whole_rows(decode_);
#pragma unroll
    for (int i = 0; i < S::kFetches; ++i) {
      const int row = fetched_row(i);
      const bool is_page = ahead.page[i] < decode_.pages, is_wanted = row < ahead.tokens;
      if (is_wanted && !is_page) shared_.note[ahead.piece % kNotes].has_bad_page = true;
      const bool is_there = is_wanted && is_page;
      const char* cache = static_cast<const char*>(args_.cache) + first * 16;
      // Bytes from page to page and row to row are below 2^32 where rows are aligned.
      const char* from = is_there ? cache + uint64_t{ahead.page[i]} * decode_.page_bytes +
                                        uint64_t{ahead.row[i]} * decode_.row_bytes
                                  : cache;
      const uint32_t to = shared_address(stage + S::piece_offset(row, first));
      if (S::kRowsPerWarp % 4 != 0 && row >= S::kTokens) continue;
      if (is_whole) {
        const int bytes = is_there ? 16 : 0;
        constexpr int kLast = S::kGroups % 2 == 1 ? S::kBoxes - 1 : S::kBoxes;
#pragma unroll
        for (int box = 0; box < kLast; ++box)
          copy_async(to + box * S::kTokens * 128, from + box * 128, bytes);
        if (kLast < S::kBoxes && first < 4)
          copy_async(to + kLast * S::kTokens * 128, from + kLast * 128, bytes);
      } else {
        fetch_part(stage, row, is_there, ahead.page[i], ahead.row[i]);
      }
    }
    if (ahead.tokens > S::kTokens) {
      ahead.begin += S::kTokens, ahead.tokens -= S::kTokens;
    } else {
      ++ahead.piece;
      take_piece(ahead);
      // Two ahead of the one taken: visible to all at the next barrier.
      if (threadIdx.x == 0) write_note(shared_.pieces, ahead.piece + 1);
    }
    find_pages(ahead);
  }
  end_group();
}

// The same for rows that are narrower than the kernel's, or do not begin at multiples of 16 bytes,
// number by number.
template <class S>
__device__ __forceinline__ void DecodeWorker<S>::fetch_part(char* stage, int row, bool is_there,
                                                            uint32_t page, uint32_t row_in_page) {
  using Code = typename S::Cache::Code;
  const char* from = static_cast<const char*>(args_.cache);
  if (is_there) from += (page * args_.page_stride + row_in_page * args_.row_stride) * S::kBytes;
  const int width = is_there ? static_cast<int>(args_.width) : 0;
#pragma unroll 1
  for (int piece = lane_ % 8; piece < kMaxWidth * S::kBytes / 16; piece += 8) {
    char* to = stage + S::piece_offset(row, piece);
    const int first = piece * S::kRunNumbers;
    if (decode_.is_aligned) {
      copy_async(shared_address(to), first < width ? from + piece * 16 : from,
                 first < width ? 16 : 0);
    } else {
#pragma unroll 1
      for (int i = 0; i < S::kRunNumbers; ++i)
        reinterpret_cast<Code*>(to)[i] =
            first + i < width ? reinterpret_cast<const Code*>(from)[first + i] : Code{0};
    }
  }
}

}  // namespace mla::gpu
