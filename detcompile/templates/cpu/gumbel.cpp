// Gumbel-max on the CPU: the highest logprob + noise of each row; the noise is computed where it is used.
//
// The bits are those of runtime/sampling/philox.py in double: the same Philox words, and the same operations in the same order
// for the logarithm; nothing is contracted. A maximum needs no order; among equal scores the lowest id wins, and NaN beats
// all, as in torch.argmax.
//
// Legend: T rows, V vocabulary size.
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

namespace {

constexpr int kRounds = 10, kKeyWords = 5;
constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kKeyStep0 = 0x9E3779B9, kKeyStep1 = 0xBB67AE85;
constexpr int kGroups = 64, kBlock = 4 * kGroups;  // Philox counters and tokens that are scored at a time
constexpr int64_t kTile = 16 * kBlock;             // tokens of a task
constexpr int64_t kLeastForThreads = 16384;        // scores; below, a parallel region costs more

constexpr double kSqrtHalf = 0.7071067811865476, kUnit = 1.0 / 4294967296.0;
constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
constexpr double kSeries[] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                              2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                              1.479819860511658591e-01};

// Natural logarithm of a positive, normal number; philox.portable_log step by step
inline double portable_log(double x) {
  uint64_t bits = bit_cast<uint64_t>(x);
  double mantissa = bit_cast<double>((bits & 0xFFFFFFFFFFFFFull) | 0x3FE0000000000000ull);  // in [1/2, 1)
  bool small = mantissa < kSqrtHalf;
  double f = (small ? mantissa * 2.0 : mantissa) - 1.0;
  double e = double(int32_t(bits >> 52) - 1022 - int32_t(small));
  double s = f / (f + 2.0), z = s * s, series = z * kSeries[6];
  for (int i = 5; i >= 0; i--) series = z * (series + kSeries[i]);
  double half_square = f * f * 0.5;
  return e * kLn2High - ((half_square - (s * (half_square + series) + e * kLn2Low)) - f);
}

// Words of kGroups counters from `group` on: token v of a row takes word v % 4 of counter (v / 4, position, stream)
inline void philox(const int64_t* key, uint32_t group, uint32_t words[kBlock]) {
  for (int i = 0; i < kGroups; i++) {
    uint32_t c0 = group + uint32_t(i), c1 = uint32_t(key[2]), c2 = uint32_t(key[3]), c3 = uint32_t(key[4]);
    uint32_t k0 = uint32_t(key[0]), k1 = uint32_t(key[1]);
    for (int round = 0; round < kRounds; round++, k0 += kKeyStep0, k1 += kKeyStep1) {
      uint64_t product0 = kMultiplier0 * c0, product1 = kMultiplier1 * c2;
      c0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
      c2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
      c1 = uint32_t(product1);
      c3 = uint32_t(product0);
    }
    words[4 * i] = c0;
    words[4 * i + 1] = c1;
    words[4 * i + 2] = c2;
    words[4 * i + 3] = c3;
  }
}

struct Best {
  double score = -std::numeric_limits<double>::infinity();
  int64_t token = -1;

  void take(double other, int64_t its_token) {
    bool higher = other > score || (other != other && score == score);
    if (higher || token < 0) score = other, token = its_token;
  }
};

// Whether all logprobs are -inf, as filters leave most of them
inline bool none_is_possible(const float* logprobs, int count) {
  int possible = 0;
  for (int i = 0; i < count; i++) possible |= !(logprobs[i] == -std::numeric_limits<float>::infinity());
  return !possible;
}

Best best_of(const float* logprobs, const int64_t* key, int64_t begin, int64_t end) {
  Best best;
  for (int64_t v = begin; v < end; v += kBlock) {
    uint32_t words[kBlock];
    double scores[kBlock];
    int count = end - v < kBlock ? int(end - v) : kBlock;
    if (none_is_possible(logprobs + v, count)) {
      best.take(-std::numeric_limits<double>::infinity(), v);  // whatever the noise
      continue;
    }
    philox(key, uint32_t(v / 4), words);
    for (int i = 0; i < kBlock; i++) scores[i] = portable_log(-portable_log((double(words[i]) + 0.5) * kUnit));
    for (int i = 0; i < count; i++) best.take(double(logprobs[v + i]) - scores[i], v + i);
  }
  return best;
}

}  // namespace

// logprobs [T, V] with unit stride in the row, keys [T, 5] -> scores [T] and tokens [T]
EXPORT void detcompile_gumbel_argmax(const float* logprobs, int64_t row_stride, const int64_t* keys, double* scores,
                                     int64_t* tokens, int64_t T, int64_t V, int32_t num_threads) {
  int64_t tiles = (V + kTile - 1) / kTile;
  std::vector<Best> found(T * tiles);
  if (T * V < kLeastForThreads) num_threads = 1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t i = 0; i < T * tiles; i++) {
    int64_t row = i / tiles, begin = i % tiles * kTile, end = begin + kTile < V ? begin + kTile : V;
    found[i] = best_of(logprobs + row * row_stride, keys + row * kKeyWords, begin, end);
  }
  for (int64_t row = 0; row < T; row++) {
    Best best;
    for (int64_t i = row * tiles; i < (row + 1) * tiles; i++) best.take(found[i].score, found[i].token);
    scores[row] = best.score;
    tokens[row] = best.token;
  }
}
