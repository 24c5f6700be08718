// Turn products with the keys into scores: soft cap, ALiBi, biases by distance.
#pragma once

#include "elementary.h"

namespace {

// tanh within 2 ulp: a polynomial (Cephes, tanhf) for |x| < 0.625
inline Vec tanh_of(Vec x) {
  Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  Vec near = fma(p * z, x, x);
  Vec e = exp2(max(x, splat(0.0f) - x) * splat(-2.88539008177792681f));
  Vec far = splat(1.0f) - (e + e) / (splat(1.0f) + e);
  float xs[kLanes], nears[kLanes], fars[kLanes];
  store(xs, x);
  store(nears, near);
  store(fars, far);
  for (int i = 0; i < kLanes; i++) {
    float size = xs[i] < 0.0f ? -xs[i] : xs[i], signed_far = xs[i] < 0.0f ? -fars[i] : fars[i];
    nears[i] = size < 0.625f ? nears[i] : signed_far;
  }
  return load(nears);
}

// Derived from scores.AttentionRule by templates/attention/op.py. Plain scores are in units of log2. Shaped ones (all others) are in
// natural units, so no constant is rounded before the maximum is subtracted, and log2(e) is applied inside exp2.
struct Scores {
  float scale;          // plain: scale * log2(e); shaped: scale, or scale / softcap
  float cap;            // 0: none
  float c;              // plain: 1; shaped: log2(e)
  const float* slopes;  // [Hq], or null
  const float* sinks;   // [Hq], in the units of the scores, or null
  int64_t extent;       // number of distances with a bias, from 0

  bool plain() const { return c == 1.0f; }
  float log_sum(float maximum, float sum) const {  // in natural units
    return float(double(maximum) * (plain() ? 0.69314718055994530942 : 1.0) + log_of(sum));
  }
  // biases of keys at `distance` and below, decreasing by one per lane; 0 past the extent, and for keys that are not visible
  Vec biases(const float* relative, int64_t distance) const {
    float found[kLanes];
    for (int64_t i = 0; i < kLanes; i++) found[i] = distance >= i && distance - i < extent ? relative[distance - i] : 0.0f;
    return load(found);
  }
  Vec in_log2(Vec difference) const { return plain() ? difference : difference * splat(c); }

  // products of the query at `position` with keys first_key, first_key + 1, ... -> shaped scores, in place;
  // relative [extent]: the query's biases, or null
  void shape(float* products, int64_t count, int64_t first_key, int64_t position, int64_t head, const float* relative) const {
    static const float ascending[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t j = 0; j < count; j += kLanes) {
      Vec score = load(products + j) * splat(scale);
      if (cap != 0.0f) score = splat(cap) * tanh_of(score);
      if (slopes) score = fma(splat(slopes[head]), splat(float(first_key + j - position)) + load(ascending), score);
      if (relative) score = score + biases(relative, position - first_key - j);
      store(products + j, score);
    }
  }
};

}  // namespace
