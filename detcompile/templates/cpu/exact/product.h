// Exact dot products of int8 rows: int32 sums of at most 65536 terms, the same on every instruction set.
#pragma once

#include "steps.h"

#ifdef __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
#endif

namespace exact {

// M rows, N output features, K input features; P padded K, T padded M; one or two digits of x and w
struct Linear {
  const int8_t *x, *w;            // [x_digits, M, P], [w_digits, N, K]
  const int32_t* sums_of_x;       // [x_digits, parts, T]: of each part of 65536 terms
  const float *x_scale, *w_scale, *bias;
  float* out;                     // [M, N]
  int64_t* totals;                // [M, N] or null
  int64_t M, N, K, P, T, parts;
  int32_t x_digits, w_digits;
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int64_t kBytes = 64;  // of a vector; rows of x are padded with zeros to a multiple
using Sums = __m512i;
inline Sums zero() { return _mm512_setzero_si512(); }
inline __m512i load_x(const int8_t* p) { return _mm512_loadu_si512(p); }
// w + 128 as unsigned bytes: vpdpbusd multiplies unsigned by signed. finish() subtracts 128 times the sum of x.
inline __m512i load_w(const int8_t* p, int64_t count) {
  __mmask64 mask = count >= 64 ? ~__mmask64(0) : (__mmask64(1) << count) - 1;
  return _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, p), _mm512_set1_epi8(char(0x80)));
}
inline Sums add_products(Sums sums, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(sums, w, x); }
inline int32_t finish(Sums sums, int32_t sum_of_x) {
  return int32_t(uint32_t(_mm512_reduce_add_epi32(sums)) - 128u * uint32_t(sum_of_x));  // wraps; the result fits
}
#elif defined(__AVX2__)
constexpr int64_t kBytes = 16;
using Sums = __m256i;
inline Sums zero() { return _mm256_setzero_si256(); }
inline __m256i load_x(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m256i load_w(const int8_t* p, int64_t count) {
  if (count >= kBytes) return load_x(p);
  int8_t bytes[kBytes] = {};
  std::memcpy(bytes, p, count);
  return load_x(bytes);
}
// pairs of products are int32: unlike vpmaddubsw, nothing saturates
inline Sums add_products(Sums sums, __m256i x, __m256i w) { return _mm256_add_epi32(sums, _mm256_madd_epi16(x, w)); }
inline int32_t finish(Sums sums, int32_t) {
  int32_t lanes[8], total = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums);
  for (int32_t lane : lanes) total += lane;
  return total;
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int64_t kBytes = 16;
using Sums = int32x4_t;
inline Sums zero() { return vdupq_n_s32(0); }
inline int8x16_t load_x(const int8_t* p) { return vld1q_s8(p); }
inline int8x16_t load_w(const int8_t* p, int64_t count) {
  if (count >= kBytes) return load_x(p);
  int8_t bytes[kBytes] = {};
  std::memcpy(bytes, p, count);
  return load_x(bytes);
}
inline Sums add_products(Sums sums, int8x16_t x, int8x16_t w) { return vdotq_s32(sums, x, w); }
inline int32_t finish(Sums sums, int32_t) { return vaddvq_s32(sums); }
#else
constexpr int64_t kBytes = 16;
struct Bytes { int16_t v[kBytes]; };
struct Sums { int32_t v[kBytes]; };
inline Sums zero() { return {}; }
inline Bytes load_w(const int8_t* p, int64_t count) {
  Bytes bytes = {};
  for (int64_t i = 0; i < kBytes && i < count; i++) bytes.v[i] = p[i];
  return bytes;
}
inline Bytes load_x(const int8_t* p) { return load_w(p, kBytes); }
inline Sums add_products(Sums sums, Bytes x, Bytes w) {
  for (int64_t i = 0; i < kBytes; i++) sums.v[i] += int32_t(x.v[i]) * w.v[i];
  return sums;
}
inline int32_t finish(Sums sums, int32_t) {
  int32_t total = 0;
  for (int32_t lane : sums.v) total += lane;
  return total;
}
#endif

inline int64_t padded(int64_t count) { return (count + 63) / 64 * 64; }

inline int32_t sum_of(const int8_t* x, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; i++) sum += x[i];
  return sum;
}

// out[i][j] += the product of row i of x, padded with zeros, and row j of w, over count <= 65536 terms.
// sums_of_x [MR]: the sums of the rows of x over these terms. If NR > 1, the next NR rows of w are prefetched.
template <int MR, int NR>
inline void add_dots(const int8_t* x, int64_t x_stride, const int32_t* sums_of_x, const int8_t* w, int64_t w_stride, int64_t count,
                     int64_t factor, int64_t (&out)[MR][NR]) {
  Sums sums[MR][NR];
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NR; j++) sums[i][j] = zero();
  auto add = [&](int64_t k, int64_t terms) __attribute__((always_inline)) {
    decltype(load_x(x)) rows[MR];
    for (int i = 0; i < MR; i++) rows[i] = load_x(x + i * x_stride + k);
    if (NR > 1 && k % 64 == 0)
      for (int j = 0; j < NR; j++) __builtin_prefetch(w + (j + NR) * w_stride + k);
    for (int j = 0; j < NR; j++) {
      auto column = load_w(w + j * w_stride + k, terms);
      for (int i = 0; i < MR; i++) sums[i][j] = add_products(sums[i][j], rows[i], column);
    }
  };
  const int64_t whole = count / kBytes * kBytes;
  for (int64_t k = 0; k < whole; k += kBytes) add(k, kBytes);
  if (whole < count) add(whole, count - whole);
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NR; j++) out[i][j] += factor * finish(sums[i][j], sums_of_x[i]);
}

}  // namespace exact
