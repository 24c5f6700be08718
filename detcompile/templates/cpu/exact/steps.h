// The scalar steps of exact-1 (docs/exact.md): functions, rounding to integers, quantized rows.
//
// Loops over them are vectorized by the compiler. Each step is one IEEE operation, so every build has the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../simd.h"

#ifdef __FAST_MATH__
#error "fast math changes bits"
#endif

namespace exact {

inline int32_t bits(float x) { return bit_cast<int32_t>(x); }
inline float from_bits(uint32_t i) { return bit_cast<float>(i); }
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float fma(float a, float b, float c) { return fma_lane(a, b, c); }
#endif

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds |x| <= 2^22 to the nearest integer, ties to even
constexpr int32_t kMagicBits = 0x4b400000;
constexpr float kSmallest = 0x1p-60f;      // least magnitude of a row's largest element
constexpr int32_t kPoisonBits = 0x53800000;  // 2^40: a row with such a magnitude, or NaN, is poisoned
constexpr float kTop[3] = {0.0f, 127.0f, 32512.0f};  // largest quantized magnitude, by digits
constexpr int64_t kLongest = 65536;  // terms of an int32 sum of products

// the integer nearest to a * b, |a * b| <= 2^22
inline int32_t near(float a, float b) { return bits(fma(a, b, kMagic)) - kMagicBits; }
inline float clip(float x, float low, float high) {  // keeps NaN
  x = x < low ? low : x;
  return x > high ? high : x;
}
inline float power_of_two(int32_t k) { return from_bits(uint32_t(k + 127) << 23); }
inline float scaled(float y, int32_t k) { return y * power_of_two(k >> 1) * power_of_two(k - (k >> 1)); }
inline int32_t integer_of(float t) { return int32_t(uint32_t(bits(t)) - uint32_t(kMagicBits)); }  // t = n + kMagic; any bits for NaN

template <int N>
inline float polynomial(float f, const float (&c)[N]) {
  float y = c[N - 1];
  for (int i = N - 2; i >= 0; i--) y = fma(y, f, c[i]);
  return y;
}

constexpr float kLog2E = 0x1.715476p+0f, kLn2High = 0x1.63p-1f, kLn2Low = -0x1.bd0106p-13f;
constexpr float kExp2[] = {0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6af7ap-5f, 0x1.3b2dd2p-7f, 0x1.5f0948p-10f, 0x1.417a9cp-13f};
constexpr float kExp2Short[] = {0x1.ffffe8p-1f, 0x1.62e0dep-1f, 0x1.ec06b2p-3f, 0x1.ca13e4p-5f, 0x1.399f14p-7f};
constexpr float kExp[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b0p-5f, 0x1.12398ap-7f, 0x1.6a4d70p-10f};
constexpr float kLog[] = {-0x1.fffff8p-2f, 0x1.555550p-2f, -0x1.000432p-2f, 0x1.99a416p-3f, -0x1.5425c0p-3f,
                          0x1.226e6ep-3f,  -0x1.0f4050p-3f, 0x1.085db6p-3f, -0x1.383b80p-4f};
constexpr float kErf[] = {0x1.06eba8p-3f,  -0x1.8127p-2f,  0x1.ce1c44p-4f,
                          -0x1.b691b2p-6f, 0x1.471a58p-8f, -0x1.38ep-11f};
constexpr float kErfFar[] = {-0x1.079d0cp-3f, -0x1.450aap-1f,   -0x1.b55cb8p-4f, 0x1.8d6342p-6f,
                             -0x1.fd1438p-9f, 0x1.91cfb2p-12f, -0x1.22p-16f};
constexpr float kTanh[] = {-0x1.5553dap-2f, 0x1.10b23ep-3f, -0x1.ac766ap-5f, 0x1.01ep-6f};
constexpr float kGeluCube = 0x1.6e4e26p-5f, kGeluScale = -0x1.988454p+0f;

inline float exp2(float x) {
  x = clip(x, -160.0f, 136.0f);
  float t = x + kMagic, f = x - (t - kMagic);
  return scaled(fma(f, polynomial(f, kExp2), 1.0f), integer_of(t));
}
inline float exp(float x) {
  x = clip(x, -110.0f, 95.0f);
  float t = fma(x, kLog2E, kMagic), n = t - kMagic, f = fma(n, -kLn2Low, fma(n, -kLn2High, x));
  return scaled(fma(f * f, polynomial(f, kExp), f) + 1.0f, integer_of(t));
}
inline float log(float x) {
  bool tiny = x < 0x1p-126f;
  float z = tiny ? x * 0x1p24f : x;
  int32_t e = int32_t(uint32_t(bits(z)) - 0x3f3504f3u) >> 23;
  float f = from_bits(uint32_t(bits(z)) - (uint32_t(e) << 23)) - 1.0f, n = float(tiny ? e - 24 : e);
  float y = fma(n, kLn2High, fma(f * f, polynomial(f, kLog), fma(n, kLn2Low, f)));
  y = x == INFINITY ? x : y;
  y = x == 0.0f ? -INFINITY : y;
  return x >= 0.0f ? y : NAN;
}
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
inline float silu(float x) { return x / (1.0f + exp(-x)); }
inline float gelu_tanh(float x) { return x / (1.0f + exp(fma(x * x * kGeluCube, x, x) * kGeluScale)); }
inline float signed_as(float y, float x) { return x < 0.0f ? -y : y; }
inline float erf(float x) {
  float t = clip(std::fabs(x), 0.0f, 4.0f), near_zero = fma(polynomial(x * x, kErf), x, x);
  float far = 1.0f - exp(fma(polynomial(t, kErfFar), t, -t));
  return t > 0x1.dbp-1f ? signed_as(far, x) : near_zero;
}
inline float tanh(float x) {
  float t = std::fabs(x), s = x * x, near_zero = fma(s * polynomial(s, kTanh), x, x);
  float far = 1.0f - 2.0f / (exp(t + t) + 1.0f);
  return t >= 0x1.19999ap-1f ? signed_as(far, x) : near_zero;
}
inline float log1p(float x) {
  float u = 1.0f + x, y = log(u) * (x / (u - 1.0f));
  y = u == INFINITY ? u : y;
  return u == 1.0f ? x : y;
}
inline float gelu(float x) { return (x * 0.5f) * (1.0f + erf(x * 0x1.6a09e6p-1f)); }
inline float floor(float x) { return std::floor(x) + 0.0f; }  // never -0
// v rounded to bfloat16, ties to even, and widened
inline float bf16(float v) {
  uint32_t i = uint32_t(bits(v));
  float y = from_bits((i + 0x7fffu + ((i >> 16) & 1u)) & 0xffff0000u);
  return v == v ? y : NAN;
}
// 2^e for weights of a softmax, e <= 0
inline float exp2_short(float e) {
  e = clip(e, -100.0f, 0.0f);
  float t = e + kMagic, f = e - (t - kMagic);
  return from_bits(uint32_t(bits(polynomial(f, kExp2Short))) + (uint32_t(bits(t)) << 23));
}

// the bits of the largest magnitude of x, above which are those of NaN
inline int32_t peak_bits(const float* x, int64_t count) {
  int32_t peak = 0;
  for (int64_t i = 0; i < count; i++) {
    int32_t magnitude = bits(x[i]) & 0x7fffffff;
    peak = peak > magnitude ? peak : magnitude;
  }
  return peak;
}

// One row's digits; `low` is written if there are two. Returns the scale a / unit, NaN if poisoned.
// peak: peak_bits of the whole row, of which x may be a part.
inline float quantize_row(const float* x, int64_t count, int32_t peak, int32_t num_digits, float unit, int8_t* high, int8_t* low) {
  if (peak >= kPoisonBits) {
    std::memset(high, 0, count);
    if (num_digits == 2) std::memset(low, 0, count);
    return NAN;
  }
  float a = from_bits(uint32_t(peak)), top = kTop[num_digits];
  a = a < kSmallest ? kSmallest : a;
  float r = top / a;
  if (num_digits == 1) {
    for (int64_t i = 0; i < count; i++) high[i] = int8_t(near(x[i], r));
  } else {
    for (int64_t i = 0; i < count; i++) {
      int32_t v = near(x[i], r);
      high[i] = int8_t((v + 128) >> 8);
      low[i] = int8_t(v);  // v - 256 * high
    }
  }
  return a / unit;
}

}  // namespace exact
