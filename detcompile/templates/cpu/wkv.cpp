// A weighted average per channel of the tokens so far, kept with its maximum exponent: float32, token by token.
//
// Legend: T tokens, S sequences, C channels.
#include "elementary.h"
#include "states.h"

namespace {

constexpr float kNoExponent = -1e38f;  // for an empty average

struct Average {
  const float *k, *v;          // [T, C]
  const float *decay, *bonus;  // [C]
  float* state;                // [num_slots, 3, C]: weighted values, weights, and the exponent by which both are divided
  float* out;                  // [T, C]
  int64_t C;

  void run(const StateSteps& steps, int64_t s, int64_t c) const {
    int64_t slot = steps.slots[s], left = C - c;
    float* own = slot < 0 ? nullptr : state + slot * 3 * C + c;
    bool continues = steps.continues(s);
    Vec values = continues ? load_some(own, left) : splat(0.0f);
    Vec weights = continues ? load_some(own + C, left) : splat(0.0f);
    Vec most = continues ? load_some(own + 2 * C, left) : splat(kNoExponent);
    Vec fall = load_some(decay + c, left), more = load_some(bonus + c, left);
    for (int64_t t = steps.first(s); t < steps.first(s) + steps.count(s); t++) {
      Vec key = load_some(k + t * C + c, left), value = load_some(v + t * C + c, left);
      Vec raised = key + more, top = max(most, raised);
      Vec before = exp(most - top), now = exp(raised - top);
      store_some(out + t * C + c, (before * values + now * value) / (before * weights + now), left);
      Vec fallen = most + fall;
      most = max(fallen, key);
      before = exp(fallen - most), now = exp(key - most);
      values = before * values + now * value;
      weights = before * weights + now;
    }
    if (!own || steps.count(s) == 0) return;
    store_some(own, values, left);
    store_some(own + C, weights, left);
    store_some(own + 2 * C, most, left);
  }
};

}  // namespace

// sizes[4]: T S num_slots C. On a StateFault `where` gets the sequence, and nothing is written.
EXPORT int64_t detcompile_wkv(const float* k, const float* v, const float* decay, const float* bonus, float* state, float* out,
                              const int32_t* slots, const int32_t* cu_seqlens, const int32_t* seq_lens, const int64_t* sizes,
                              int32_t num_threads, int64_t* where) {
  StateSteps steps{slots, cu_seqlens, seq_lens, sizes[0], sizes[1], sizes[2]};
  if (StateFault fault = steps.check(where)) return fault;
  Average average{k, v, decay, bonus, state, out, sizes[3]};
  int64_t vecs = (average.C + kLanes - 1) / kLanes, tasks = steps.S * vecs;
  if (steps.T * average.C < 16384) num_threads = 1;  // a parallel region costs more
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t task = 0; task < tasks; task++) average.run(steps, task / vecs, task % vecs * kLanes);
  steps.clear_padding(out, average.C * sizeof(float));
  return kStatesFine;
}
