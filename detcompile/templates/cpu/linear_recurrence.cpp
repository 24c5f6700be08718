// A matrix state per head that every token decays and adds to: float32, sums over ascending keys with fused multiply-adds.
//
// Legend: T tokens, S sequences, H heads, G groups of heads that share queries and keys, K keys, V values.
#include "elementary.h"
#include "states.h"
#include "tile.h"

namespace {

enum DecayKind : int64_t { kPerHead = 0, kPerKey = 1, kPerValue = 2 };

constexpr int64_t kTileValues = 64;  // values of a task's part of a state

struct Recurrence {
  const float *q, *k;   // [T, G, K]
  const float* v;       // [T, H, V]
  const float* decay;   // [T, H], [T, H, K] or, with rates, [T, H, V]
  const float* beta;    // [T, H] or null
  const float* rates;   // [H, K, V] or null
  float* state;         // [num_slots, H, K, V]
  float* out;           // [T, H, V]
  int64_t H, G, K, V, kind;

  // the factor of each key (a single one if they are equal)
  void factors(int64_t row, float* target) const {
    if (kind == kPerHead) return store(target, exp(splat(decay[row])));
    for (int64_t i = 0; i < K; i += kLanes) store(target + i, exp(load_some(decay + row * K + i, K - i)));
  }

  Vec factor(const float* of_keys, int64_t row, int64_t h, int64_t key, int64_t value) const {
    if (kind == kPerHead) return load(of_keys);
    if (kind == kPerKey) return splat(of_keys[key]);
    Vec rate = load_some(rates + (h * K + key) * V + value, V - value);
    return exp(load_some(decay + row * V + value, V - value) * rate);
  }

  void run(const StateSteps& steps, int64_t s, int64_t h, int64_t from) const {
    static thread_local Scratch scratch;
    int64_t width = min64(kTileValues, V - from), padded = (width + kLanes - 1) / kLanes * kLanes;
    float* tile = scratch.floats(K * padded + K + 2 * kLanes);
    float* of_keys = tile + K * padded;
    int64_t slot = steps.slots[s];
    float* own = slot < 0 ? nullptr : state + (slot * H + h) * K * V + from;
    bool continues = steps.continues(s);
    for (int64_t key = 0; key < K; key++)
      for (int64_t j = 0; j < padded; j += kLanes)
        store(tile + key * padded + j, continues ? load_some(own + key * V + j, width - j) : splat(0.0f));
    for (int64_t t = steps.first(s); t < steps.first(s) + steps.count(s); t++) {
      if (kind != kPerValue) factors(t * H + h, of_keys);
      for (int64_t j = 0; j < width; j += kLanes) token(t, h, from + j, width - j, tile + j, padded, of_keys);
    }
    if (!own || steps.count(s) == 0) return;
    for (int64_t key = 0; key < K; key++)
      for (int64_t j = 0; j < width; j += kLanes) store_some(own + key * V + j, load(tile + key * padded + j), width - j);
  }

  void token(int64_t t, int64_t h, int64_t value, int64_t left, float* tile, int64_t stride, const float* of_keys) const {
    int64_t row = t * H + h;
    const float *q_t = q + (t * G + h / (H / G)) * K, *k_t = k + (t * G + h / (H / G)) * K;
    Vec update = load_some(v + row * V + value, left), known = splat(0.0f), sum = splat(0.0f);
    for (int64_t key = 0; key < K; key++) {
      Vec kept = load(tile + key * stride) * factor(of_keys, row, h, key, value);
      if (beta) known = fma(splat(k_t[key]), kept, known);
      store(tile + key * stride, kept);
    }
    if (beta) update = (update - known) * splat(beta[row]);
    for (int64_t key = 0; key < K; key++) {
      Vec next = fma(splat(k_t[key]), update, load(tile + key * stride));
      sum = fma(splat(q_t[key]), next, sum);
      store(tile + key * stride, next);
    }
    store_some(out + row * V + value, sum, left);
  }
};

}  // namespace

// sizes[8]: T S num_slots H G K V kind. On a StateFault `where` gets the sequence, and nothing is written.
EXPORT int64_t detcompile_linear_recurrence(const float* q, const float* k, const float* v, const float* decay, const float* beta,
                                            const float* rates, float* state, float* out, const int32_t* slots,
                                            const int32_t* cu_seqlens, const int32_t* seq_lens, const int64_t* sizes,
                                            int32_t num_threads, int64_t* where) {
  StateSteps steps{slots, cu_seqlens, seq_lens, sizes[0], sizes[1], sizes[2]};
  if (StateFault fault = steps.check(where)) return fault;
  Recurrence r{q, k, v, decay, beta, rates, state, out, sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]};
  int64_t tiles = (r.V + kTileValues - 1) / kTileValues, tasks = steps.S * r.H * tiles;
  if (steps.T * r.H * r.K * r.V < 16384) num_threads = 1;  // a parallel region costs more
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int64_t task = 0; task < tasks; task++)
    r.run(steps, task / tiles / r.H, task / tiles % r.H, task % tiles * kTileValues);
  steps.clear_padding(out, r.H * r.V * sizeof(float));
  return kStatesFine;
}
