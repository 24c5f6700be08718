// Shared by the AVX versions of Vec.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

// While it lives, this thread's AVX arithmetic flushes subnormal operands and results. The compiler does not know this: code
// to be flushed must be in functions that are not inlined into its scope.
class FlushSubnormals {
 public:
  explicit FlushSubnormals(bool wanted) : wanted_(wanted), before_(wanted ? _mm_getcsr() : 0) {
    if (wanted_) _mm_setcsr(before_ | 0x8040);  // FTZ and DAZ
  }
  ~FlushSubnormals() {
    if (wanted_) _mm_setcsr(before_);  // drains the pipeline, so only if the mode was changed
  }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  bool wanted_;
  unsigned before_;
};

inline __m256 load_eight_words(const void* row, int64_t byte_offset) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(static_cast<const char*>(row) + byte_offset));
}

// lane i and lane i + 4, then 2, then 1
inline float add_eight(__m256 a) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_eight(__m256 a) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace
