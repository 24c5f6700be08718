// exact_paged_attention: causal attention over quantized keys and values in pages (docs/exact.md).
//
// Legend: T tokens, S sequences, Hq Hkv heads, D head dim, V width of a value. A cached row of a head has W bytes: its digits,
// D or V bytes each, then its float32 scale.
#include <algorithm>
#include <vector>

#include "product.h"

namespace {

constexpr int64_t kBlock = 128, kGroup = 8;  // keys of a block, blocks of a group
constexpr float kTop = 32512.0f;             // of the softmax's weights, which have two digits

struct Attention {
  const int8_t *q, *k_cache, *v_cache;  // q [2, T, Hq, D]
  const float* q_scale;                 // [T, Hq]
  const float *sinks, *slopes;          // [Hq], or null
  float* out;                           // [T, Hq, V]
  const int64_t* strides;               // block, slot and head of k_cache, then of v_cache
  int64_t T, Hq, Hkv, D, V, digits, block_size, window, chunk;  // window: the newest keys that a query sees; 0: all
  float factor, softcap;  // of the scores: log2(e) times their scale, or their scale if softcap > 0
};

// 2^k for an integer k <= 0; 0 below -126
inline float shift(float k) { return k < -126.0f ? 0.0f : exact::power_of_two(int32_t(k)); }

// weights and values summed over some keys, in units of 2^peak
struct State {
  std::vector<float> acc;
  float total, peak;
  explicit State(int64_t V) : acc(V) { clear(); }
  void clear() {
    std::fill(acc.begin(), acc.end(), 0.0f);
    total = 0.0f;
    peak = -0x1p127f;
  }
  void merge(const State& other) {
    float next = other.peak > peak ? other.peak : peak, mine = shift(peak - next), its = shift(other.peak - next);
    for (size_t i = 0; i < acc.size(); i++) acc[i] = exact::fma(other.acc[i], its, acc[i] * mine);
    total = exact::fma(other.total, its, total * mine);
    peak = next;
  }
};

// One query head's row and what a thread needs for it.
class Row {
 public:
  explicit Row(const Attention& a)
      : a_(a), padded_(exact::padded(a.D)), q_(2 * padded_), high_(a.V), low_(a.V), block_(a.V), group_(a.V), whole_(a.V) {}

  void attend(const int32_t* table, int64_t t, int64_t head, int64_t position) {
    const int64_t D = a_.D, at = (t * a_.Hq + head) * D;
    for (int digit = 0; digit < 2; digit++) {
      std::memcpy(q_.data() + digit * padded_, a_.q + digit * a_.T * a_.Hq * D + at, D);
      sums_[digit] = exact::sum_of(q_.data() + digit * padded_, D);
    }
    float scale = a_.q_scale[t * a_.Hq + head];
    poisoned_ = scale != scale;
    r_ = (poisoned_ ? 1.0f : scale) * a_.factor;
    whole_.clear();
    if (a_.sinks) add_sink(a_.sinks[head]);
    slope_ = a_.slopes ? a_.slopes[head] * exact::kLog2E : 0.0f;
    int64_t oldest = a_.window ? std::max<int64_t>(0, position + 1 - a_.window) : 0;
    if (a_.chunk) oldest = std::max(oldest, position / a_.chunk * a_.chunk);
    for (int64_t start = oldest / (kGroup * kBlock) * (kGroup * kBlock); start <= position; start += kGroup * kBlock) {
      group_.clear();
      for (int64_t block = std::max(start, oldest / kBlock * kBlock); block <= position && block < start + kGroup * kBlock;
           block += kBlock) {
        const int64_t first = std::max(block, oldest), stop = min64(block + kBlock, position + 1);
        add_block(table, head / (a_.Hq / a_.Hkv), first, stop - first, position);
        group_.merge(block_);
      }
      whole_.merge(group_);
    }
    float share = 1.0f / whole_.total;
    float* out = a_.out + (t * a_.Hq + head) * a_.V;
    for (int64_t i = 0; i < a_.V; i++) out[i] = poisoned_ ? NAN : whole_.acc[i] * share;
  }

 private:
  const int8_t* cached(const int8_t* cache, const int64_t* strides, const int32_t* table, int64_t head, int64_t position) const {
    return cache + table[position / a_.block_size] * strides[0] + position % a_.block_size * strides[1] + head * strides[2];
  }
  // the scale behind a row's digits; 1 if it is NaN, which poisons the row of the result
  float scale_of(const int8_t* row, int64_t width) {
    float scale;
    std::memcpy(&scale, row + a_.digits * width, sizeof scale);
    poisoned_ |= scale != scale;
    return scale == scale ? scale : 1.0f;
  }

  // the state of a key with this score and a value of 0
  void add_sink(float sink) {
    const float z = sink * exact::kLog2E;
    poisoned_ |= !(std::fabs(z) < 0x1p120f);
    whole_.peak = poisoned_ ? 0.0f : std::ceil(z);
    whole_.total = poisoned_ ? 1.0f : float(exact::near(exact::exp2_short(z - whole_.peak), kTop));
  }
  float scored(float z, int64_t distance) const {
    if (a_.softcap > 0.0f) z = (a_.softcap * exact::tanh(z / a_.softcap)) * exact::kLog2E;
    return a_.slopes ? z + slope_ * float(distance) : z;
  }

  void add_block(const int32_t* table, int64_t head, int64_t first, int64_t count, int64_t position) {
    const int64_t D = a_.D, V = a_.V;
    const int8_t* values[kBlock];
    float z[kBlock], v_scale[kBlock], largest = -INFINITY, reach = 0.0f;
    for (int64_t j = 0; j < count; j++) {
      const int8_t* key = cached(a_.k_cache, a_.strides, table, head, first + j);
      values[j] = cached(a_.v_cache, a_.strides + 3, table, head, first + j);
      int64_t dots[2][1] = {}, cross[1][1] = {};
      exact::add_dots<2, 1>(q_.data(), padded_, sums_, key, 0, D, 1, dots);
      if (a_.digits == 2) exact::add_dots<1, 1>(q_.data(), padded_, sums_, key + D, 0, D, 1, cross);
      z[j] = scored((float(256 * dots[0][0] + dots[1][0] + cross[0][0]) * scale_of(key, D)) * r_, first + j - position);
      v_scale[j] = scale_of(values[j], V);
      largest = z[j] > largest ? z[j] : largest;
      reach = v_scale[j] > reach ? v_scale[j] : reach;
    }
    block_.peak = std::ceil(largest);
    std::fill(high_.begin(), high_.end(), 0);
    std::fill(low_.begin(), low_.end(), 0);
    const float share = kTop / reach;
    int32_t weights = 0;
    for (int64_t j = 0; j < count; j++) {
      float p = exact::exp2_short(z[j] - block_.peak);
      weights += exact::near(p, kTop);
      int32_t w = exact::near(p, v_scale[j] * share), w_high = (w + 128) >> 8, w_low = w - w_high * 256;
      const int8_t* value = values[j];
      for (int64_t i = 0; i < V; i++) {
        high_[i] += w_high * value[i];
        low_[i] += w_low * value[i];
      }
      if (a_.digits == 2)
        for (int64_t i = 0; i < V; i++) low_[i] += w_high * value[V + i];
    }
    block_.total = float(weights);
    for (int64_t i = 0; i < V; i++) block_.acc[i] = float(256 * high_[i] + low_[i]) * reach;
  }

  const Attention& a_;
  int64_t padded_;
  std::vector<int8_t> q_;
  std::vector<int32_t> high_, low_;
  int32_t sums_[2];
  State block_, group_, whole_;
  float r_, slope_;
  bool poisoned_;
};

}  // namespace

// sizes [12]: T S Hq Hkv D V digits block_size max_blocks, threads, window, chunk. Rows past cu_seqlens[S] get zeros.
EXPORT void detcompile_exact_attention(const int8_t* q, const float* q_scale, const int8_t* k_cache, const int8_t* v_cache,
                                       const int64_t* strides, const int32_t* cu_seqlens, const int32_t* seq_lens,
                                       const int32_t* block_table, const float* sinks, const float* slopes, float* out,
                                       const int64_t* sizes, float factor, float softcap) {
  const int64_t T = sizes[0], S = sizes[1], Hq = sizes[2], V = sizes[5], max_blocks = sizes[8];
  const Attention a = {q,   k_cache, v_cache,  q_scale, sinks, slopes,   out,      strides,   T,         Hq,
                       sizes[3], sizes[4], V, sizes[6], sizes[7], sizes[10], sizes[11], factor, softcap};
  struct Place { int64_t sequence, position; };
  std::vector<Place> places;
  for (int64_t s = 0; s < S; s++)
    for (int64_t i = cu_seqlens[s]; i < cu_seqlens[s + 1]; i++) places.push_back({s, seq_lens[s] - cu_seqlens[s + 1] + i});
  const int64_t rows = int64_t(places.size()) * Hq;
  const int num_threads = rows > 1 ? int(sizes[9]) : 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Row row(a);
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < rows; i++) {
      const Place& place = places[i / Hq];
      row.attend(block_table + place.sequence * max_blocks, i / Hq, i % Hq, place.position);
    }
  }
  std::fill(out + rows * V, out + T * Hq * V, 0.0f);
}
