// Flash decoding of a paged latent cache: a worker walks its stretch of the schedule tile by tile,
// with an online softmax in float32. Query rows (q_len * heads of one sequence) lie in the vector
// lanes, so that a row's maximum, sum and rescaling are vertical operations. Per tile: gather, then
// for every block of rows scores[token][lane] = keys . q, softmax, output[column][lane] += values .
// weights.
#include "functions.h"
#include "gather.h"

namespace mla::MLA_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

#if defined(__AVX512BF16__)
// Rounds the weights of two tokens to bfloat16 and pairs them up as cells; `sum` takes what the
// cells hold.
inline __m512i pair_weights(Vec first, Vec second, Vec& sum) {
  const __m512i low = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(first)));
  const __m512i high = _mm512_slli_epi32(
      _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(second))), 16);
  sum += _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)) + _mm512_castsi512_ps(high);
  return _mm512_or_si512(low, high);
}
#endif

// Turns a tile's scores into weights, as cells, and brings the state of one block up to date.
template <class Engine, int VECS>
void softmax(const DecodeArgs& args, const State& state, int64_t begin, const Tile& tile,
             bool masked, float* scores, float* weights) {
  constexpr int kRow = VECS * kLanes;
  const Vec scale = splat(args.score_scale() * kLog2E);
  const int64_t padded = round_up(tile.tokens, kBlock);
  for (int v = 0; v < VECS; ++v, scores += kLanes, weights += kLanes) {
    IntVec visible;
    memcpy(&visible, state.visible + v * kLanes, sizeof(visible));
    const Vec before = load(state.maximum + v * kLanes);
    Vec top = before;
    for (int64_t n = 0; n < tile.tokens; ++n) {
      Vec score = load(scores + n * kRow) * scale;
      if (masked)
        score = (IntVec{} + static_cast<int32_t>(begin + n)) < visible ? score : splat(-kInfinity);
      store(scores + n * kRow, score);
      top = maximum(score, top);
    }
    for (int64_t n = tile.tokens; n < padded; ++n) store(scores + n * kRow, splat(-kInfinity));
    // While nothing is visible the maximum is -inf: exp2(-inf - 0) is the 0 that is wanted, -inf -
    // -inf is not.
    const Vec shift = top == splat(-kInfinity) ? Vec{} : top;
    const Vec factor = exp2(before - shift);
    // Of this tile, for the reason that multiply() has.
    Vec sum{}, rounded_sum{};
    for (int64_t n = 0; n < padded; n += Engine::kPack) {
      const Vec first = exp2(load(scores + n * kRow) - shift);
      float* cell = weights + n / Engine::kPack * kRow;
      if constexpr (Engine::kPack == 1) {
        store(cell, first);
        sum += first;
      } else {
#if defined(__AVX512BF16__)
        const Vec second = exp2(load(scores + (n + 1) * kRow) - shift);
        _mm512_store_si512(cell, pair_weights(first, second, rounded_sum));
        sum += first + second;
#endif
      }
    }
    store(state.maximum + v * kLanes, top);
    store(state.factor + v * kLanes, factor);
    if constexpr (Engine::kPack == 1) rounded_sum = sum;
    store(state.sum + v * kLanes, load(state.sum + v * kLanes) * factor + sum);
    store(state.rounded_sum + v * kLanes,
          load(state.rounded_sum + v * kLanes) * factor + rounded_sum);
  }
}

// Tokens and lanes: scores, weights. Then rows and columns: output.
template <class Engine, int VECS>
void attend(const DecodeArgs& args, const Layout& layout, const State& state, int64_t rows,
            int64_t begin, const Tile& tile, bool masked, const uint32_t* q, float* output,
            char* scratch, Prefetch& prefetch) {
  constexpr int kTokens = kRowsFor<VECS>, kRow = VECS * kLanes;
  float* scores = reinterpret_cast<float*>(scratch + layout.scores);
  float* weights = reinterpret_cast<float*>(scratch + layout.weights);
  const int64_t padded = round_up(tile.tokens, kBlock);
  for (int64_t n = 0; n < padded; n += kTokens) {
    const Operands at = {tile.keys[n],
                         tile.keys[n + 1] - tile.keys[n],
                         4,
                         reinterpret_cast<const float*>(q),
                         kRow,
                         scores + n * kRow,
                         kRow};
    multiply<Engine, kTokens, VECS>(at, layout.key_cells, nullptr, prefetch);
  }
  softmax<Engine, VECS>(args, state, begin, tile, masked, scores, weights);
  constexpr int kVecs = kLanes == 4 ? 4 : 2, kRows = kRowsFor<kVecs>;
  const float* values = reinterpret_cast<const float*>(scratch + layout.values);
  for (int64_t column = 0; column < layout.value_width; column += kVecs * kLanes)
    for (int64_t row = 0; row < rows; row += kRows) {
      const Operands at = {reinterpret_cast<const char*>(weights + row),
                           4,
                           kRow * 4,
                           values + column / kColumns * layout.value_block + column % kColumns,
                           layout.value_step,
                           output + row * layout.value_width + column,
                           layout.value_width};
      multiply<Engine, kRows, kVecs>(at, padded / Engine::kPack, state.factor + row, prefetch);
    }
}

// Writes one row to `out` and `lse`.
void finish(const DecodeArgs& args, const Layout& layout, int64_t sequence, int64_t row,
            const State& state, float* output) {
  const bool empty = *state.sum == 0.0f;
  const float factor = empty ? 0.0f : args.output_scale() / *state.rounded_sum;
  for (int64_t i = 0; i < layout.value_width; ++i) output[i] = empty ? 0.0f : output[i] * factor;
  const int64_t offset = element_offset(args.out_stride, sequence, row, args.heads);
  narrow(output, static_cast<char*>(args.out) + offset * size_of(args.out_type), args.out_type,
         args.latent);
  if (args.lse != nullptr)
    args.lse[element_offset(args.lse_stride, sequence, row, args.heads)] =
        empty ? -kInfinity : (*state.maximum + __builtin_log2f(*state.sum)) * kLn2;
}

// Keeps one row for merge().
void keep(const Layout& layout, int64_t row, const State& state, const float* output,
          float* partial) {
  const State kept = State::at(partial, layout.rows).from(row);
  *kept.maximum = *state.maximum;
  *kept.sum = *state.sum;
  *kept.rounded_sum = *state.rounded_sum;
  memcpy(partial + layout.partial_output(row), output, static_cast<size_t>(layout.value_width) * 4);
}

// One piece, for the group of rows that begins at `first_row`.
template <class Engine>
void process(const DecodeArgs& args, const Cache<Engine>& cache, const Layout& layout,
             const Piece& piece, int64_t first_row, bool cut, char* scratch) {
  const int64_t stop_row = least(first_row + layout.group_rows, layout.rows);
  const int64_t length = args.seq_lens[piece.sequence];
  const State state = State::at(reinterpret_cast<float*>(scratch + layout.state), layout.rows);
  uint32_t* q = reinterpret_cast<uint32_t*>(scratch + layout.q);
  float* output = reinterpret_cast<float*>(scratch + layout.output);
  float* row_memory = reinterpret_cast<float*>(scratch + layout.row);
  const auto q_of = [&](int64_t row) { return q + (row - first_row) * layout.key_cells; };
  const auto output_of = [&](int64_t row) {
    return output + (row - first_row) * layout.value_width;
  };

  int64_t all_see = length;
  for (int64_t row = first_row; row < stop_row; ++row) {
    const int64_t visible = args.causal ? length - args.q_len + 1 + row / args.heads : length;
    state.maximum[row] = -kInfinity;
    state.sum[row] = state.rounded_sum[row] = 0.0f;
    state.visible[row] = static_cast<int32_t>(visible);
    all_see = least(all_see, visible);
  }
  memset(output, 0, static_cast<size_t>((stop_row - first_row) * layout.value_width) * 4);
  for (int64_t row = first_row, lanes; row < stop_row; row += lanes) {
    lanes = block_lanes(layout.rows - row);
    gather_q<Engine>(args, layout, piece.sequence, row, args.rows() - row, lanes, q_of(row),
                     row_memory);
  }

  Tile tile;
  for (int64_t begin = piece.begin; begin < piece.end; begin += kTile) {
    gather(cache, args, layout, piece, begin, scratch, tile);
    const char* next_rows[kTile];
    const int64_t next = begin + tile.tokens, next_tokens = least(piece.end - next, kTile);
    for (int64_t n = 0; n < next_tokens; ++n)
      next_rows[n] = cache_row(args, piece.sequence, next + n);
    Prefetch prefetch(next_rows, next_tokens, args.width * size_of(args.cache_type));
    const bool masked = begin + tile.tokens > all_see;
    for (int64_t row = first_row, lanes; row < stop_row; row += lanes) {
      lanes = block_lanes(layout.rows - row);
      const State block = state.from(row);
      const int64_t rows = least(lanes, args.rows() - row);
      if (kLanes == 16 && lanes == 2 * kBlock) {
        attend<Engine, 2>(args, layout, block, rows, begin, tile, masked, q_of(row), output_of(row),
                          scratch, prefetch);
      } else {
        attend<Engine, 16 / kLanes>(args, layout, block, rows, begin, tile, masked, q_of(row),
                                    output_of(row), scratch, prefetch);
      }
    }
  }

  float* partial = args.partials + piece.slot * layout.partial_floats();
  for (int64_t row = first_row; row < least(stop_row, args.rows()); ++row) {
    if (cut) {
      keep(layout, row, state.from(row), output_of(row), partial);
    } else {
      finish(args, layout, piece.sequence, row, state.from(row), output_of(row));
    }
  }
}

template <class Engine>
void work(const DecodeArgs& args, const Schedule& schedule, int32_t worker, char* scratch) {
  const Layout layout = Layout::of<Engine>(args);
  const Cache<Engine> cache(args.cache_type);
  int64_t unit = schedule.first_unit_of_worker(worker);
  const int64_t stop = schedule.first_unit_of_worker(worker + 1);
  if (unit == stop) return;
  for (int32_t sequence = schedule.sequence_of(unit); unit < stop;) {
    const Piece piece = schedule.take_piece(unit, stop, worker, sequence, args.seq_lens[sequence]);
    const bool cut = schedule.pieces(sequence) > 1;
    for (int64_t row = 0; row < layout.rows; row += layout.group_rows)
      process(args, cache, layout, piece, row, cut, scratch);
    if (unit == schedule.first_unit[sequence + 1]) ++sequence;
  }
}

// float16 and float32 hold more digits than bfloat16: where q or the cache has them, they are not
// thrown away.
bool fits_bfloat16(const DecodeArgs& args) {
  const auto wide = [](Type type) { return type == Type::kFloat32 || type == Type::kFloat16; };
  return !wide(args.q_type) && !wide(args.cache_type);
}

}  // namespace

void decode_worker(const DecodeArgs& args, const Schedule& schedule, int32_t worker,
                   void* scratch) {
#if defined(__AVX512BF16__)
  if (fits_bfloat16(args))
    return work<BFloat16Engine>(args, schedule, worker, static_cast<char*>(scratch));
#else
  (void)fits_bfloat16;
#endif
  work<Float32Engine>(args, schedule, worker, static_cast<char*>(scratch));
}

void decode_merge(const DecodeArgs& args, const Schedule& schedule, int32_t sequence,
                  void* scratch_memory) {
  // Partials are float32 and laid out alike whatever the engine.
  const Layout layout = Layout::of<Float32Engine>(args);
  char* scratch = static_cast<char*>(scratch_memory);
  float* output = reinterpret_cast<float*>(scratch + layout.output);
  const State merged = State::at(reinterpret_cast<float*>(scratch + layout.state), layout.rows);
  float* partials = args.partials + schedule.first_slot(sequence) * layout.partial_floats();
  const int32_t pieces = schedule.pieces(sequence);
  const auto partial = [&](int32_t piece) { return partials + piece * layout.partial_floats(); };

  for (int64_t row = 0; row < args.rows(); ++row) {
    const State state = merged.from(row);
    *state.maximum = -kInfinity;
    *state.sum = *state.rounded_sum = 0.0f;
    memset(output, 0, static_cast<size_t>(layout.value_width) * 4);
    for (int32_t piece = 0; piece < pieces; ++piece) {
      const float top = *State::at(partial(piece), layout.rows).from(row).maximum;
      *state.maximum = top > *state.maximum ? top : *state.maximum;
    }
    const float shift = *state.maximum == -kInfinity ? 0.0f : *state.maximum;
    for (int32_t piece = 0; piece < pieces; ++piece) {
      const State kept = State::at(partial(piece), layout.rows).from(row);
      const float weight = __builtin_exp2f(*kept.maximum - shift);
      *state.sum += *kept.sum * weight;
      *state.rounded_sum += *kept.rounded_sum * weight;
      const float* from = partial(piece) + layout.partial_output(row);
      for (int64_t i = 0; i < layout.value_width; ++i) output[i] += from[i] * weight;
    }
    finish(args, layout, sequence, row, state, output);
  }
}

// Enough for decode_merge() too, which lays out as the float32 engine does.
size_t decode_scratch_bytes(const DecodeArgs& args) {
  size_t bytes = Layout::of<Float32Engine>(args).bytes;
#if defined(__AVX512BF16__)
  const size_t paired = Layout::of<BFloat16Engine>(args).bytes;
  bytes = paired > bytes ? paired : bytes;
#endif
  return bytes;
}

int64_t decode_partial_floats(const DecodeArgs& args) {
  return Layout::of<Float32Engine>(args).partial_floats();
}

}  // namespace mla::MLA_ISA
