// Vec in plain C++ without intrinsics, with the bits of the AVX versions.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct Vec { float v[16]; };

constexpr int kMaxRows = 4;   // register block of the matrix kernels: kMaxRows x kPanelVecs accumulators
constexpr int kPanelVecs = 1;

constexpr float kLeastNormal = 1.1754943508222875e-38f;  // 2^-126
constexpr double kTiny = 1.1754943157898258e-38;         // 2^-126 - 2^-151: below it, rounding to 24 bits stays below 2^-126

struct FlushSubnormals { explicit FlushSubnormals(bool) {} };  // fma_flushed() itself flushes

template <class F>
inline Vec lanewise(F f) {
  Vec out;
  for (int i = 0; i < 16; i++) out.v[i] = f(i);
  return out;
}

// a * b is exact in double; the sum is rounded to odd, so the rounding to float is the only one
// (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008)
inline double fma_to_odd(float a, float b, float c) {
  double product = double(a) * double(b), addend = c, sum = product + addend;
  double shadow = sum - product;
  double error = (product - (sum - shadow)) + (addend - shadow);
  int64_t bits = bit_cast<int64_t>(sum);
  int64_t inexact = (error > 0) | (error < 0);  // false for NaN, so infinities are kept
  int64_t outward = (error > 0) == (sum > 0);
  bits += inexact & ~bits & 1 ? (outward ? 1 : -1) : 0;
  return bit_cast<double>(bits);
}
inline float fma_lane(float a, float b, float c) { return float(fma_to_odd(a, b, c)); }

// flush subnormal operands and results to zero, as the AVX versions do under FlushSubnormals
inline float flushed_operand(float x) { return x > -kLeastNormal && x < kLeastNormal ? bit_cast<float>(bit_cast<uint32_t>(x) & 0x80000000u) : x; }
inline float fma_flushed_lane(float a, float b, float c) {
  double odd = fma_to_odd(flushed_operand(a), flushed_operand(b), flushed_operand(c));
  bool tiny = odd > -kTiny && odd < kTiny;
  return tiny ? bit_cast<float>(uint32_t(bit_cast<uint64_t>(odd) >> 32) & 0x80000000u) : float(odd);
}

inline Vec splat(float x) { return lanewise([&](int) { return x; }); }
inline Vec operator+(Vec a, Vec b) { return lanewise([&](int i) { return a.v[i] + b.v[i]; }); }
inline Vec operator-(Vec a, Vec b) { return lanewise([&](int i) { return a.v[i] - b.v[i]; }); }
inline Vec operator*(Vec a, Vec b) { return lanewise([&](int i) { return a.v[i] * b.v[i]; }); }
inline Vec operator/(Vec a, Vec b) { return lanewise([&](int i) { return a.v[i] / b.v[i]; }); }
inline Vec fma(Vec a, Vec b, Vec c) { return lanewise([&](int i) { return fma_lane(a.v[i], b.v[i], c.v[i]); }); }
inline Vec fma_flushed(Vec a, Vec b, Vec c) {
  return lanewise([&](int i) { return fma_flushed_lane(a.v[i], b.v[i], c.v[i]); });
}
inline Vec max(Vec a, Vec b) { return lanewise([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec max_or_nan(Vec a, Vec b) {
  return lanewise([&](int i) { return a.v[i] > b.v[i] || a.v[i] != a.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) { return lanewise([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec shift_left_23(Vec a) {
  return lanewise([&](int i) { return bit_cast<float>(bit_cast<uint32_t>(a.v[i]) << 23); });
}

inline float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24 is exact
    float magnitude = float(fraction) * 5.9604644775390625e-08f;
    return bit_cast<float>(bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | (fraction ? 0x400000u : 0u) | fraction << 13);
  return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t float_to_half(float value) {  // to nearest even; NaN becomes quiet and keeps its leading payload, as in F16C
  uint32_t bits = bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal result: adding 0.5 aligns its last bit with the float's
    float aligned = bit_cast<float>(magnitude) + 0.5f;
    return uint16_t(sign | (bit_cast<uint32_t>(aligned) - 0x3f000000u));
  }
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

inline Vec load(const float* p) { return lanewise([&](int i) { return p[i]; }); }
inline Vec load(const bf16* p) { return lanewise([&](int i) { return bit_cast<float>(uint32_t(p[i].bits) << 16); }); }
inline Vec load(const fp16* p) { return lanewise([&](int i) { return half_to_float(p[i].bits); }); }

inline void store(float* p, Vec a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store(bf16* p, Vec a) {  // to nearest even; every NaN becomes 0x7fc0, as in torch
  for (int i = 0; i < 16; i++) {
    uint32_t bits = bit_cast<uint32_t>(a.v[i]);
    p[i].bits = a.v[i] != a.v[i] ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
inline void store(fp16* p, Vec a) {
  for (int i = 0; i < 16; i++) p[i].bits = float_to_half(a.v[i]);
}

inline Vec join_halves(Vec high, Vec) { return high; }

// 32-bit words -> the floats of their low and high halves
inline Vec low_half(Vec w, bf16) { return lanewise([&](int i) { return bit_cast<float>(bit_cast<uint32_t>(w.v[i]) << 16); }); }
inline Vec high_half(Vec w, bf16) {
  return lanewise([&](int i) { return bit_cast<float>(bit_cast<uint32_t>(w.v[i]) & 0xffff0000u); });
}
inline Vec low_half(Vec w, fp16) { return lanewise([&](int i) { return half_to_float(uint16_t(bit_cast<uint32_t>(w.v[i]))); }); }
inline Vec high_half(Vec w, fp16) {
  return lanewise([&](int i) { return half_to_float(uint16_t(bit_cast<uint32_t>(w.v[i]) >> 16)); });
}

// a in the first `count` lanes, b in the others
inline Vec blend_first(int64_t count, Vec a, Vec b) { return lanewise([&](int i) { return i < count ? a.v[i] : b.v[i]; }); }

// add lane i and lane i + 8, then 4, 2, 1; or a > b ? a : b instead of the sum, which may lose a NaN
template <class F>
inline float fold(Vec a, F f) {
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; i++) a.v[i] = f(a.v[i], a.v[i + width]);
  return a.v[0];
}
inline float halve(Vec a) { return fold(a, [](float x, float y) { return x + y; }); }
inline float max_lanes(Vec a) { return fold(a, [](float x, float y) { return x > y ? x : y; }); }

// out[c] = word c of each of sixteen rows (words are little-endian)
template <class T>
inline void transpose_words(const T* const rows[16], int64_t byte_offset, Vec out[16]) {
  for (int i = 0; i < 16; i++)
    for (int c = 0; c < 16; c++) std::memcpy(&out[c].v[i], reinterpret_cast<const char*>(rows[i]) + byte_offset + 4 * c, 4);
}

}  // namespace
