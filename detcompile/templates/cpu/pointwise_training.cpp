// Elementwise parts of a training step: AdamW's update, and the terms of a policy's loss.
#include "elementary.h"

namespace {

constexpr int64_t kElementsPerTask = 1 << 14;

template <class Work>
void over_elements(int64_t count, int32_t num_threads, Work work) {
  if (count <= kElementsPerTask) num_threads = 1;  // a parallel region costs more
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t first = 0; first < count; first += kElementsPerTask) work(first, min64(first + kElementsPerTask, count));
}

inline Vec square_root(Vec x) {  // IEEE's
  float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = std::sqrt(lane);
  return load(lanes);
}

}  // namespace

// scalars[7]: 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1^t), sqrt(1 - beta2^t), eps. copy: bfloat16, or null
EXPORT void detcompile_adamw(float* parameter, const float* gradient, float* average, float* square_average, void* copy,
                             const float* scalars, int64_t count, int32_t num_threads) {
  over_elements(count, num_threads, [=](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i += kLanes) {
      int64_t rest = end - i;
      Vec g = load_some(gradient + i, rest), m = load_some(average + i, rest), v = load_some(square_average + i, rest);
      m = m + (g - m) * splat(scalars[1]);
      v = v * splat(scalars[2]) + (g * g) * splat(scalars[3]);
      Vec divisor = square_root(v) / splat(scalars[5]) + splat(scalars[6]);
      Vec p = load_some(parameter + i, rest) * splat(scalars[0]) - splat(scalars[4]) * (m / divisor);
      store_some(average + i, m, rest);
      store_some(square_average + i, v, rest);
      store_some(parameter + i, p, rest);
      if (copy) store_as(copy, kBFloat16, i, p, rest);
    }
  });
}

// For each token its term -min(ratio * A, clipped ratio * A) / denominator, and the term's derivative by the logprob; scalars[3]:
// lowest and highest ratio, denominator. All float32 [count]. Where A is 0, the logprobs may be uninitialized.
EXPORT void detcompile_policy_loss(const float* logprobs, const float* old, const float* advantages, float* terms, float* slopes,
                                   const float* scalars, int64_t count, int32_t num_threads) {
  over_elements(count, num_threads, [=](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i += kLanes) {
      float ratios[kLanes], a[kLanes], values[kLanes], derivatives[kLanes];
      store(ratios, exp(load_some(logprobs + i, end - i) - load_some(old + i, end - i)));
      store(a, load_some(advantages + i, end - i));
      for (int lane = 0; lane < kLanes; lane++) {
        float ratio = a[lane] == 0.0f ? 1.0f : ratios[lane];
        float bounded = ratio < scalars[0] ? scalars[0] : ratio > scalars[1] ? scalars[1] : ratio;
        float plain = ratio * a[lane], clipped = bounded * a[lane];
        bool is_clipped = clipped < plain;
        values[lane] = -(is_clipped ? clipped : plain);
        derivatives[lane] = is_clipped ? 0.0f : -plain;
      }
      store_some(terms + i, load(values) / splat(scalars[2]), end - i);
      store_some(slopes + i, load(derivatives) / splat(scalars[2]), end - i);
    }
  });
}
