// Vec: sixteen float lanes with the same bits on AVX-512, AVX2 and plain C++ (FMA only where fma() is called).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {
template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

#if !defined(__AVX512BF16__)
namespace {
constexpr bool kHasPairs = false;
inline Vec dot_pairs(Vec, Vec, Vec c) { return c; }
template <class T>
inline void transpose_pairs(const T* const*, int64_t, Vec*) {}
}  // namespace
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kLanes = 16;

// dtype codes, as in cpu/library.DTYPE_CODES
enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline int64_t item_size(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

inline float bits_to_float(uint32_t bits) { return bit_cast<float>(bits); }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
inline float to_float(fp16 x) {
  fp16 lanes[kLanes] = {x};
  float out[kLanes];
  store(out, load(lanes));
  return out[0];
}

// load the first `count` lanes, with +0 in the others; never reads past them
template <class T>
inline Vec load_some(const T* source, int64_t count) {
  if (count >= kLanes) return load(source);
  T lanes[kLanes];
  std::memset(lanes, 0, sizeof lanes);
  if (count > 0) std::memcpy(lanes, source, sizeof(T) * count);
  return load(lanes);
}

template <class T>
inline void store_some(T* target, Vec value, int64_t count) {
  if (count >= kLanes) return store(target, value);
  T lanes[kLanes];
  store(lanes, value);
  if (count > 0) std::memcpy(target, lanes, sizeof(T) * count);
}

// the same for a dtype known only at run time; `index` counts elements
inline Vec load_as(const void* source, int32_t dtype, int64_t index, int64_t count) {
  if (dtype == kFloat32) return load_some(static_cast<const float*>(source) + index, count);
  if (dtype == kBFloat16) return load_some(static_cast<const bf16*>(source) + index, count);
  return load_some(static_cast<const fp16*>(source) + index, count);
}

inline void store_as(void* target, int32_t dtype, int64_t index, Vec value, int64_t count) {
  if (dtype == kFloat32) return store_some(static_cast<float*>(target) + index, value, count);
  if (dtype == kBFloat16) return store_some(static_cast<bf16*>(target) + index, value, count);
  store_some(static_cast<fp16*>(target) + index, value, count);
}

inline Vec round_to(int32_t dtype, Vec value) {
  if (dtype == kFloat32) return value;
  uint16_t lanes[kLanes];
  store_as(lanes, dtype, 0, value, kLanes);
  return load_as(lanes, dtype, 0, kLanes);
}

inline void load_row(float* target, const void* source, int32_t dtype, int64_t index, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_some(target + i, load_as(source, dtype, index + i, count - i), count - i);
}

inline void store_row(void* target, int32_t dtype, int64_t index, const float* source, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_as(target, dtype, index + i, load_some(source + i, count - i), count - i);
}

// lanes of Row(lanes=64): inside each group of 32 by halving, then across the two groups
inline float sum_lanes(Vec a, Vec b, Vec c, Vec d) { return halve(a + b) + halve(c + d); }

}  // namespace
