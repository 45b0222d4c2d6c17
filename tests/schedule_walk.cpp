// Walks csrc/schedule.h as the backends do and prints what it finds, for tests/test_plan.py.
// Input: workers unit_tokens fixed_split batch, then the lengths.
#include <cstdio>
#include <iostream>
#include <vector>

#include "schedule.h"

int main() {
  int32_t workers, unit_tokens, fixed_split, batch;
  while (std::cin >> workers >> unit_tokens >> fixed_split >> batch) {
    std::vector<int32_t> lengths(static_cast<size_t>(batch)), first_unit{0};
    for (int32_t& length : lengths) {
      std::cin >> length;
      first_unit.push_back(first_unit.back() + mla::Schedule::units_of(length, unit_tokens));
    }
    const mla::Schedule schedule{first_unit.data(), batch, workers, unit_tokens, fixed_split != 0};
    std::printf("slots %lld\n", static_cast<long long>(mla::Schedule::slots(
                                    batch, workers, schedule.units(), fixed_split != 0)));
    for (int32_t b = 0; b < batch; ++b)
      std::printf("sequence %d %lld\n", schedule.pieces(b),
                  static_cast<long long>(schedule.first_slot(b)));
    for (int32_t worker = 0; worker < workers; ++worker) {
      int64_t unit = schedule.first_unit_of_worker(worker);
      const int64_t stop = schedule.first_unit_of_worker(worker + 1);
      if (unit == stop) continue;
      for (int32_t b = schedule.sequence_of(unit); unit < stop;) {
        const mla::Piece piece =
            schedule.take_piece(unit, stop, worker, b, lengths[static_cast<size_t>(b)]);
        std::printf("piece %d %d %lld %lld %lld\n", worker, piece.sequence,
                    static_cast<long long>(piece.begin), static_cast<long long>(piece.end),
                    static_cast<long long>(piece.slot));
        if (unit == schedule.first_unit[b + 1]) ++b;
      }
    }
    std::printf("end\n");
  }
}
