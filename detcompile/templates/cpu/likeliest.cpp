// The lowest index of the highest element of each row, as torch.argmax: NaN is above all, and the zeros are equal.
//
// Legend: T rows, V elements of a row.
#include <cmath>
#include <limits>

#include "simd.h"

namespace {

constexpr int64_t kBlock = 16 * kLanes;
constexpr int64_t kLeastForThreads = 1 << 17;  // elements

inline bool is_above(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

template <class T>
float highest(const T* row, int64_t count) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  Vec most = splat(lowest);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) most = max_or_nan(most, load(row + i));
  if (i < count) most = max_or_nan(most, blend_first(count - i, load_some(row + i, count - i), splat(lowest)));
  float lanes[kLanes], result = lowest;
  store(lanes, most);
  for (float lane : lanes)
    if (is_above(lane, result)) result = lane;
  return result;
}

template <class T>
void find_likeliest(const T* row, int64_t V, int64_t* out) {
  float most = highest(row, min64(kBlock, V));
  int64_t first = 0;
  for (int64_t begin = kBlock; begin < V; begin += kBlock) {
    float other = highest(row + begin, min64(kBlock, V - begin));
    if (is_above(other, most)) most = other, first = begin;
  }
  auto is_most = [&](float x) { return x == most || (std::isnan(x) && std::isnan(most)); };
  while (!is_most(to_float(row[first]))) first++;
  out[0] = !std::isfinite(most);
  out[1] = first;
}

template <class T>
void find_all(const T* logits, int64_t row_stride, int64_t* out, int64_t rows, int64_t V, int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t row = 0; row < rows; row++) find_likeliest(logits + row * row_stride, V, out + 2 * row);
}

}  // namespace

// logits [T, V] with unit stride in the row, V > 0 -> out [T, 2]: whether the highest is NaN or infinite, and its index
EXPORT void detcompile_likeliest(const void* logits, int64_t row_stride, int64_t* out, int64_t T, int64_t V, int32_t dtype,
                                 int32_t num_threads) {
  if (T * V < kLeastForThreads) num_threads = 1;
  if (dtype == kFloat32) find_all(static_cast<const float*>(logits), row_stride, out, T, V, num_threads);
  else if (dtype == kBFloat16) find_all(static_cast<const bf16*>(logits), row_stride, out, T, V, num_threads);
  else find_all(static_cast<const fp16*>(logits), row_stride, out, T, V, num_threads);
}
