// The likeliest tokens of each row: those with less weight before them, from the highest logit on, than a limit.
//
// Equal logits count in the order of their indices, NaN is above all. Weights are integers (1, or a probability in units of 2^-56), so that no
// order of their sum matters. The logit at which the limit is reached is searched digit by digit, with a histogram of weights.
//
// Legend: T rows, V elements of a row.
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t kLeastForThreads = 16384;  // elements
constexpr int kDigits = 1 << 11;
constexpr int kShifts[] = {21, 10, 0}, kWidths[] = {11, 11, 10};
constexpr double kUnit = 72057594037927936.0;  // 2^56

// Logits in ascending order, as unsigned integers; NaN is above all
inline uint32_t key_of(float x) {
  uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return ~0u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline int64_t weight_of(const float* probabilities, int64_t i) {
  if (!probabilities) return 1;
  return probabilities[i] > 0 ? int64_t(double(probabilities[i]) * kUnit) : 0;
}

// The lowest key whose higher keys have less weight than the limit; that weight is added to `before`
uint32_t lowest_kept(const uint32_t* keys, const int64_t* weights, int64_t limit, int64_t V, int64_t& before) {
  uint32_t prefix = 0;
  for (int level = 0; level < 3; level++) {
    int shift = kShifts[level], width = kWidths[level];
    uint32_t last = (1u << width) - 1;
    int64_t histogram[kDigits] = {};
    for (int64_t i = 0; i < V; i++)
      if (level == 0 || keys[i] >> (shift + width) == prefix) histogram[keys[i] >> shift & last] += weights[i];
    uint32_t digit = last;
    for (; digit > 0 && before + histogram[digit] < limit; digit--) before += histogram[digit];
    prefix = prefix << width | digit;
  }
  return prefix;
}

}  // namespace

// logits [T, V], probabilities [T, V] or null for weights of 1, limits [T] -> out [T, V]: logits, and -inf elsewhere
EXPORT void detcompile_keep_likeliest(const float* logits, const float* probabilities, const int64_t* limits, float* out,
                                      int64_t T, int64_t V, int32_t num_threads) {
  if (T * V < kLeastForThreads) num_threads = 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    std::vector<uint32_t> keys(V);
    std::vector<int64_t> weights(V);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < T; row++) {
      const float* x = logits + row * V;
      float* kept = out + row * V;
      for (int64_t i = 0; i < V; i++) keys[i] = key_of(x[i]);
      for (int64_t i = 0; i < V; i++) weights[i] = weight_of(probabilities ? probabilities + row * V : nullptr, i);
      int64_t before = 0, limit = limits[row];
      uint32_t lowest = lowest_kept(keys.data(), weights.data(), limit, V, before);
      for (int64_t i = 0; i < V; i++) {
        bool is_kept = keys[i] > lowest || (keys[i] == lowest && before < limit);
        if (keys[i] == lowest) before += weights[i];
        kept[i] = is_kept ? x[i] : -std::numeric_limits<float>::infinity();
      }
    }
  }
}
