// Split scheduling for decode: which worker reads which tokens. Plain C++, no torch, shared by
// every native backend.
//
// A sequence of L tokens is max(1, ceil(L / unit_tokens)) units; all units of a batch, in order,
// form one line, which is cut into equal stretches, one for each worker, or for each of the first
// units() workers where there are more workers than units. Everything else follows from
// `first_unit`, the running sum that the plan tensor holds: it needs no addresses and may be
// copied, moved or captured.
#pragma once

#include "types.h"

namespace mla {

// A run of tokens of one sequence that one worker reads. `slot` is its place among the partial
// results.
struct Piece {
  int32_t sequence;
  int64_t begin;
  int64_t end;
  int64_t slot;
};

struct Schedule {
  const int32_t* first_unit;  // [batch + 1], first_unit[0] == 0
  int32_t batch;
  int32_t workers;
  int32_t unit_tokens;
  // Batch-invariant mode: every unit is a piece of its own, so that where a sequence is cut, and
  // the order in which its pieces are merged, depend on its own length alone.
  bool fixed_split;

  MLA_INLINE static int32_t units_of(int32_t length, int32_t unit_tokens) {
    const uint32_t tokens = static_cast<uint32_t>(length),
                   unit = static_cast<uint32_t>(unit_tokens);
    return length <= unit_tokens ? 1 : static_cast<int32_t>((tokens + unit - 1) / unit);
  }

  // Partial results to make room for. `first_unit` is not read, so that it can be asked before the
  // plan exists.
  MLA_INLINE static int64_t slots(int64_t batch, int64_t workers, int64_t unit_capacity,
                                  bool fixed_split) {
    return fixed_split ? unit_capacity : workers + batch;
  }

  MLA_INLINE int64_t units() const { return first_unit[batch]; }

  // A worker without a stretch between two that have one would leave a hole among the slots.
  MLA_INLINE int64_t busy_workers() const { return units() < workers ? units() : workers; }

  MLA_INLINE int64_t first_unit_of_worker(int32_t worker) const {
    return first_unit_of_worker(worker, static_cast<int32_t>(units()));
  }

  // The same, of `all` units: floor(all * worker / busy), in divisions of 32 bits. On a GPU those
  // of 64 are ten times slower.
  MLA_INLINE int64_t first_unit_of_worker(int32_t worker, int32_t all) const {
    const uint32_t index = static_cast<uint32_t>(worker), count = static_cast<uint32_t>(all);
    const uint32_t busy = static_cast<uint32_t>(all < workers ? all : workers);
    if (index >= busy) return all;
    const uint32_t whole = count / busy, rest = count - whole * busy;
    return int64_t{whole} * index + rest * index / busy;  // both below 2^16, kMaxWorkers
  }

  // The worker whose stretch `unit` is in: a guess that may be one or two off, mended.
  MLA_INLINE int32_t worker_of(int64_t unit) const {
    const float per_worker = static_cast<float>(units()) / static_cast<float>(busy_workers());
    int32_t worker = static_cast<int32_t>(static_cast<float>(unit) / per_worker);
    while (worker > 0 && first_unit_of_worker(worker) > unit) --worker;
    while (first_unit_of_worker(worker + 1) <= unit) ++worker;
    return worker;
  }

  MLA_INLINE int32_t sequence_of(int64_t unit) const {
    int32_t low = 0, high = batch - 1;
    while (low < high) {
      const int32_t middle = low + (high - low + 1) / 2;
      if (first_unit[middle] <= unit) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  MLA_INLINE int32_t pieces(int32_t sequence) const {
    const int64_t first = first_unit[sequence], last = first_unit[sequence + 1] - 1;
    return static_cast<int32_t>(fixed_split ? last - first + 1
                                            : worker_of(last) - worker_of(first) + 1);
  }

  // Slots of a sequence's pieces are consecutive, in the order of its tokens.
  MLA_INLINE int64_t first_slot(int32_t sequence) const {
    const int64_t first = first_unit[sequence];
    return fixed_split ? first : static_cast<int64_t>(worker_of(first)) + sequence;
  }

  // The piece that starts at `unit` within the stretch [.., stretch_end) of `worker`; moves `unit`
  // behind it.
  MLA_INLINE Piece take_piece(int64_t& unit, int64_t stretch_end, int32_t worker, int32_t sequence,
                              int64_t length) const {
    return take_piece(unit, stretch_end, worker, sequence, length, first_unit[sequence],
                      first_unit[sequence + 1]);
  }

  // The same for a sequence whose units are known: [start, behind).
  MLA_INLINE Piece take_piece(int64_t& unit, int64_t stretch_end, int32_t worker, int32_t sequence,
                              int64_t length, int64_t start, int64_t behind) const {
    int64_t stop = behind;
    stop = fixed_split ? unit + 1 : (stop < stretch_end ? stop : stretch_end);
    Piece piece{sequence, (unit - start) * unit_tokens, (stop - start) * unit_tokens, 0};
    piece.end = piece.end < length ? piece.end : length;
    // A worker that goes on to the next sequence, and a sequence that goes on to the next worker,
    // each move the slot by one: worker + sequence is unique.
    piece.slot = fixed_split ? unit : static_cast<int64_t>(worker) + sequence;
    unit = stop;
    return piece;
  }
};

}  // namespace mla
