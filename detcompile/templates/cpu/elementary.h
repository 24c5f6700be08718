// exp, exp2 and log from IEEE operations only, so neither libm nor the instruction set can change a bit.
#pragma once

#include "simd.h"

namespace {

constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits

inline Vec two_to(Vec integer) { return shift_left_23(integer + splat(8388608.0f + 127.0f)); }

// value * 2^n for integer n in [-252, 254], rounded once
inline Vec scale_by_power(Vec value, Vec n) {
  Vec half = (n * splat(0.5f) + splat(kRoundToInteger)) - splat(kRoundToInteger);
  return value * two_to(half) * two_to(n - half);
}

// 2^x, within 1 ulp; 0 below 2^-150, inf above 2^128, NaN kept
inline Vec exp2(Vec x) {
  x = min(splat(129.0f), max(splat(-151.0f), x));
  Vec n = (x + splat(kRoundToInteger)) - splat(kRoundToInteger);
  Vec r = x - n;  // exact, in [-1/2, 1/2]
  Vec p = splat(1.5252733804059841e-05f);  // ln(2)^i / i!
  p = fma(p, r, splat(1.5403530393381608e-04f));
  p = fma(p, r, splat(1.3333558146428443e-03f));
  p = fma(p, r, splat(9.6181291076284772e-03f));
  p = fma(p, r, splat(5.5504108664821580e-02f));
  p = fma(p, r, splat(2.4022650695910072e-01f));
  p = fma(p, r, splat(6.9314718055994531e-01f));
  p = fma(p, r, splat(1.0f));
  return scale_by_power(p, n);
}

// e^x, within 1 ulp; 0 below -104, inf above 88.73, NaN kept
inline Vec exp(Vec x) {
  x = min(splat(89.0f), max(splat(-104.0f), x));
  Vec n = (x * splat(1.44269504088896341f) + splat(kRoundToInteger)) - splat(kRoundToInteger);
  Vec r = fma(n, splat(-0.693359375f), x);  // ln(2) in two parts, the first of nine bits (Cody and Waite)
  r = fma(n, splat(2.12194440054690583e-4f), r);
  Vec p = splat(1.0f / 5040.0f);
  p = fma(p, r, splat(1.0f / 720.0f));
  p = fma(p, r, splat(1.0f / 120.0f));
  p = fma(p, r, splat(1.0f / 24.0f));
  p = fma(p, r, splat(1.0f / 6.0f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return scale_by_power(p, n);
}

// natural logarithm of a float32 value, computed in float64
inline double log_of(float value) {
  if (!(value > 0.0f) || value > 3.4028234663852886e38f)
    return value == 0.0f ? -INFINITY : value > 0.0f ? double(value) : double(NAN);
  double x = value;
  int64_t bits;
  std::memcpy(&bits, &x, 8);
  int64_t exponent = (bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
  std::memcpy(&x, &bits, 8);
  if (x > 1.4142135623730951) {
    x *= 0.5;
    exponent++;
  }
  double f = (x - 1.0) / (x + 1.0), square = f * f, sum = 0.0;
  for (int i = 21; i >= 1; i -= 2) sum = sum * square + 1.0 / i;  // 2 atanh(f) = ln(x)
  return double(exponent) * 0.69314718055994530942 + 2.0 * f * sum;
}

}  // namespace
