// Causal convolution of each channel over a packed step: taps ascending with fused multiply-adds, the bias last, one rounding.
//
// Legend: T tokens, S sequences, C channels, W taps.
#include "states.h"

namespace {

struct Convolution {
  const char* x;       // [T, C], unit last stride
  int64_t x_stride;    // elements
  const float* weight; // [W, C]
  const float* bias;   // [C] or null
  char* state;         // [num_slots, W - 1, C], the inputs before the step, oldest first
  char* out;           // [T, C]
  int64_t C, W;
  int32_t dtype;

  // the input `place` tokens after the sequence's first token in this step (before it if negative)
  Vec input(int64_t first, int64_t place, const char* before, int64_t c) const {
    if (place >= 0) return load_as(x, dtype, (first + place) * x_stride + c, C - c);
    return before ? load_as(before, dtype, (W - 1 + place) * C + c, C - c) : splat(0.0f);
  }

  void run(const StateSteps& steps, int64_t s, int64_t c) const {
    int64_t first = steps.first(s), count = steps.count(s), slot = steps.slots[s];
    char* own = slot < 0 ? nullptr : state + slot * (W - 1) * C * item_size(dtype);
    const char* before = steps.continues(s) ? own : nullptr;
    for (int64_t t = 0; t < count; t++) {
      Vec sum = splat(0.0f);
      for (int64_t w = 0; w < W; w++)
        sum = fma(input(first, t + w + 1 - W, before, c), load_some(weight + w * C + c, C - c), sum);
      if (bias) sum = sum + load_some(bias + c, C - c);
      store_as(out, dtype, (first + t) * C + c, sum, C - c);
    }
    if (own && count > 0)  // ascending: reads stay ahead of writes
      for (int64_t i = 0; i < W - 1; i++)
        store_as(own, dtype, i * C + c, input(first, count + i + 1 - W, before, c), C - c);
  }
};

}  // namespace

// sizes[7]: T S num_slots C W x_stride dtype. On a StateFault `where` gets the sequence, and nothing is written.
EXPORT int64_t detcompile_causal_conv(const char* x, const float* weight, const float* bias, char* state, char* out,
                                      const int32_t* slots, const int32_t* cu_seqlens, const int32_t* seq_lens,
                                      const int64_t* sizes, int32_t num_threads, int64_t* where) {
  StateSteps steps{slots, cu_seqlens, seq_lens, sizes[0], sizes[1], sizes[2]};
  if (StateFault fault = steps.check(where)) return fault;
  int32_t dtype = static_cast<int32_t>(sizes[6]);
  Convolution conv{x, sizes[5], weight, bias, state, out, sizes[3], sizes[4], dtype};
  int64_t vecs = (conv.C + kLanes - 1) / kLanes, tasks = steps.S * vecs;
  if (steps.T * conv.C < 16384) num_threads = 1;  // a parallel region costs more
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t task = 0; task < tasks; task++) conv.run(steps, task / vecs, task % vecs * kLanes);
  steps.clear_padding(out, conv.C * item_size(dtype));
  return kStatesFine;
}
