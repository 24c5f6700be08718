// The maximum of each channel so far, which decays token by token: float32.
//
// Legend: T tokens, S sequences, C channels.
#include "states.h"

namespace {

struct RunningMax {
  const float *x, *decay;  // [T, C]
  float* state;            // [num_slots, 1, C]
  float* out;              // [T, C]
  int64_t C;

  void run(const StateSteps& steps, int64_t s, int64_t c) const {
    int64_t slot = steps.slots[s], left = C - c;
    float* own = slot < 0 ? nullptr : state + slot * C + c;
    Vec most = steps.continues(s) ? load_some(own, left) : splat(0.0f);
    for (int64_t t = steps.first(s); t < steps.first(s) + steps.count(s); t++) {
      most = max_or_nan(most + load_some(decay + t * C + c, left), load_some(x + t * C + c, left));
      store_some(out + t * C + c, most, left);
    }
    if (own && steps.count(s) > 0) store_some(own, most, left);
  }
};

}  // namespace

// sizes[4]: T S num_slots C. On a StateFault `where` gets the sequence, and nothing is written.
EXPORT int64_t detcompile_running_max(const float* x, const float* decay, float* state, float* out, const int32_t* slots,
                                      const int32_t* cu_seqlens, const int32_t* seq_lens, const int64_t* sizes,
                                      int32_t /*num_threads*/, int64_t* where) {
  StateSteps steps{slots, cu_seqlens, seq_lens, sizes[0], sizes[1], sizes[2]};
  if (StateFault fault = steps.check(where)) return fault;
  RunningMax most{x, decay, state, out, sizes[3]};
  for (int64_t s = 0; s < steps.S; s++)  // one channel per head: too few for threads
    for (int64_t c = 0; c < most.C; c += kLanes) most.run(steps, s, c);
  steps.clear_padding(out, most.C * sizeof(float));
  return kStatesFine;
}
