// Vec on AVX2 with FMA and F16C (x86-64-v3): two halves of eight lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_x86.h"

namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct Vec { __m256 lo, hi; };

constexpr int kMaxRows = 6;   // register block of the matrix kernels: kMaxRows x kPanelVecs accumulators
constexpr int kPanelVecs = 1;

inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec fma_flushed(Vec a, Vec b, Vec c) { return fma(a, b, c); }  // under FlushSubnormals
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }  // a > b ? a : b
inline Vec max_or_nan(Vec a, Vec b) {
  Vec most = max(a, b);  // b if b is NaN
  return {_mm256_blendv_ps(most.lo, a.lo, _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)),
          _mm256_blendv_ps(most.hi, a.hi, _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))};
}
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }  // a < b ? a : b

inline __m256 from_bits(__m256i bits) { return _mm256_castsi256_ps(bits); }
inline __m256i to_bits(__m256 value) { return _mm256_castps_si256(value); }
inline Vec shift_left_23(Vec a) {
  return {from_bits(_mm256_slli_epi32(to_bits(a.lo), 23)), from_bits(_mm256_slli_epi32(to_bits(a.hi), 23))};
}

inline __m128i load_eight(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline void store_eight(uint16_t* p, __m128i value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), value); }

inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load(const bf16* p) {
  __m256i lo = _mm256_cvtepu16_epi32(load_eight(&p->bits)), hi = _mm256_cvtepu16_epi32(load_eight(&p[8].bits));
  return {from_bits(_mm256_slli_epi32(lo, 16)), from_bits(_mm256_slli_epi32(hi, 16))};
}
inline Vec load(const fp16* p) { return {_mm256_cvtph_ps(load_eight(&p->bits)), _mm256_cvtph_ps(load_eight(&p[8].bits))}; }

inline __m256i bf16_bits(__m256 a) {  // to nearest even; every NaN becomes 0x7fc0, as in torch
  __m256i bits = to_bits(a);
  __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), to_bits(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
inline __m256i pack_words(__m256i lo, __m256i hi) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8); }

inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_words(bf16_bits(a.lo), bf16_bits(a.hi)));
}
inline void store(fp16* p, Vec a) {
  store_eight(&p->bits, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  store_eight(&p[8].bits, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Vec join_halves(Vec high, Vec) { return high; }

// 32-bit words -> the floats of their low and high halves
inline Vec low_half(Vec w, bf16) {
  return {from_bits(_mm256_slli_epi32(to_bits(w.lo), 16)), from_bits(_mm256_slli_epi32(to_bits(w.hi), 16))};
}
inline Vec high_half(Vec w, bf16) {
  __m256 mask = from_bits(_mm256_set1_epi32(int(0xffff0000u)));
  return {_mm256_and_ps(w.lo, mask), _mm256_and_ps(w.hi, mask)};
}
inline Vec halves_to_floats(__m256i halves) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
inline Vec low_half(Vec w, fp16) {
  __m256i mask = _mm256_set1_epi32(0xffff);
  return halves_to_floats(pack_words(_mm256_and_si256(to_bits(w.lo), mask), _mm256_and_si256(to_bits(w.hi), mask)));
}
inline Vec high_half(Vec w, fp16) {
  return halves_to_floats(pack_words(_mm256_srli_epi32(to_bits(w.lo), 16), _mm256_srli_epi32(to_bits(w.hi), 16)));
}

template <class T>
inline void transpose_eight(const T* const rows[8], int64_t byte_offset, __m256 out[8]) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = load_eight_words(rows[i], byte_offset);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int c = 0; c < 4; c++) {
    out[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
    out[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
  }
}

// a in the first `count` lanes, b in the others
inline Vec blend_first(int64_t count, Vec a, Vec b) {
  __m256i lo = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), hi = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  __m256i counts = _mm256_set1_epi32(int(count < 0 ? 0 : count < 16 ? count : 16));
  return {_mm256_blendv_ps(b.lo, a.lo, from_bits(_mm256_cmpgt_epi32(counts, lo))),
          _mm256_blendv_ps(b.hi, a.hi, from_bits(_mm256_cmpgt_epi32(counts, hi)))};
}

// add lane i and lane i + 8, then 4, 2, 1; or a > b ? a : b instead of the sum, which may lose a NaN
inline float halve(Vec a) { return add_eight(_mm256_add_ps(a.lo, a.hi)); }
inline float max_lanes(Vec a) { return max_eight(_mm256_max_ps(a.lo, a.hi)); }

// out[c] = word c of each of sixteen rows
template <class T>
inline void transpose_words(const T* const rows[16], int64_t byte_offset, Vec out[16]) {
  for (int column = 0; column < 16; column += 8) {
    __m256 upper[8], lower[8];
    transpose_eight(rows, byte_offset + 4 * column, upper);
    transpose_eight(rows + 8, byte_offset + 4 * column, lower);
    for (int c = 0; c < 8; c++) out[column + c] = {upper[c], lower[c]};
  }
}

}  // namespace
