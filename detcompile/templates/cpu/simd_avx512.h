// Vec on AVX-512 (x86-64-v4).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_x86.h"

namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct Vec { __m512 v; };

constexpr int kMaxRows = 14;   // register block of the matrix kernels: kMaxRows x kPanelVecs accumulators
constexpr int kPanelVecs = 2;

inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec fma_flushed(Vec a, Vec b, Vec c) { return fma(a, b, c); }  // under FlushSubnormals
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // a > b ? a : b
inline Vec max_or_nan(Vec a, Vec b) {  // max returns b if b is NaN
  return {_mm512_mask_mov_ps(max(a, b).v, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }  // a < b ? a : b
inline Vec shift_left_23(Vec a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))}; }

#ifdef __AVX512BF16__
constexpr bool kHasPairs = true;
inline Vec dot_pairs(Vec a, Vec b, Vec c) {  // the high halves first, then the low halves; subnormals are flushed
  return {_mm512_dpbf16_ps(c.v, __m512bh(_mm512_castps_si512(a.v)), __m512bh(_mm512_castps_si512(b.v)))};
}
#endif

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Vec load(const fp16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(bf16* p, Vec a) {  // to nearest even; every NaN becomes 0x7fc0, as in torch
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff))), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void store(fp16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Vec join_halves(Vec high, Vec low) {  // each a bfloat16 held as a float
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(high.v), _mm512_srli_epi32(_mm512_castps_si512(low.v), 16)))};
}

// 32-bit words -> the floats of their low and high halves
inline Vec low_half(Vec words, bf16) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(words.v), 16))}; }
inline Vec high_half(Vec words, bf16) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(words.v), _mm512_set1_epi32(int(0xffff0000u))))};
}
inline Vec low_half(Vec words, fp16) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_castps_si512(words.v)))}; }
inline Vec high_half(Vec words, fp16) {
  return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(words.v), 16)))};
}

// a in the first `count` lanes, b in the others
inline Vec blend_first(int64_t count, Vec a, Vec b) {
  return {_mm512_mask_mov_ps(b.v, __mmask16(_bzhi_u32(0xffff, count < 0 ? 0 : count < 16 ? count : 16)), a.v)};
}

inline __m256 lower_eight(Vec a) { return _mm512_castps512_ps256(a.v); }
inline __m256 upper_eight(Vec a) { return _mm512_extractf32x8_ps(a.v, 1); }

// add lane i and lane i + 8, then 4, 2, 1; or a > b ? a : b instead of the sum, which may lose a NaN
inline float halve(Vec a) { return add_eight(_mm256_add_ps(lower_eight(a), upper_eight(a))); }
inline float max_lanes(Vec a) { return max_eight(_mm256_max_ps(lower_eight(a), upper_eight(a))); }

// the 64-bit units of a and b at these places; with SwapHalves, the 16-bit halves of each word are swapped, at no cost
template <bool SwapHalves>
inline __m512 merge(__m512d a, __m512i places, __m512d b) {
  if constexpr (!SwapHalves) return _mm512_castpd_ps(_mm512_permutex2var_pd(a, places, b));
  // places of 16 bits: those of a unit are 4 * place + 1, 0, 3, 2
  __m512i quarters = _mm512_mullo_epi64(places, _mm512_set1_epi64(0x0004000400040004));
  __m512i halves = _mm512_add_epi16(quarters, _mm512_set1_epi64(0x0002000300000001));
  return _mm512_castsi512_ps(_mm512_permutex2var_epi16(_mm512_castpd_si512(a), halves, _mm512_castpd_si512(b)));
}

// eight rows and the next eight, 256 bits each: out[c] = word c of each of sixteen rows, c < 8
template <bool SwapHalves, class T>
inline void transpose_half(const T* const rows[16], int64_t byte_offset, Vec out[8]) {
  __m512 r[8], t[8];
  __m512d u[8];
  for (int i = 0; i < 8; i++) {
    __m256 upper = load_eight_words(rows[i], byte_offset);
    __m256 lower = load_eight_words(rows[i + 8], byte_offset);
    r[i] = _mm512_mask_broadcast_f32x8(_mm512_castps256_ps512(upper), 0xff00, lower);  // joined by the load, without a shuffle
  }
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    __m512d t0 = _mm512_castps_pd(t[i]), t1 = _mm512_castps_pd(t[i + 1]);
    __m512d t2 = _mm512_castps_pd(t[i + 2]), t3 = _mm512_castps_pd(t[i + 3]);
    u[i] = _mm512_unpacklo_pd(t0, t2);
    u[i + 1] = _mm512_unpackhi_pd(t0, t2);
    u[i + 2] = _mm512_unpacklo_pd(t1, t3);
    u[i + 3] = _mm512_unpackhi_pd(t1, t3);
  }
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  for (int c = 0; c < 4; c++) {
    out[c].v = merge<SwapHalves>(u[c], first, u[4 + c]);
    out[4 + c].v = merge<SwapHalves>(u[c], second, u[4 + c]);
  }
}

// out[c] = word c of each of sixteen rows
template <class T>
inline void transpose_words(const T* const rows[16], int64_t byte_offset, Vec out[16]) {
  transpose_half<false>(rows, byte_offset, out);
  transpose_half<false>(rows, byte_offset + 32, out + 8);
}

#ifdef __AVX512BF16__
// the same words with their halves swapped
template <class T>
inline void transpose_pairs(const T* const rows[16], int64_t byte_offset, Vec out[16]) {
  transpose_half<true>(rows, byte_offset, out);
  transpose_half<true>(rows, byte_offset + 32, out + 8);
}
#endif

}  // namespace
