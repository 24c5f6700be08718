// Row sums in the order Row(lanes, vector=1) of numerics.row_order: element i belongs to lane i % lanes.
#pragma once

#include "tile.h"

namespace {

constexpr int64_t kLeastRowLanes = 64, kMostRowLanes = 4096;

// numerics.row_order for a leaf of this length
inline int64_t row_lanes(int64_t length) {
  int64_t lanes = kLeastRowLanes;
  while (lanes * 8 < length && lanes < kMostRowLanes) lanes *= 2;
  return lanes;
}

// lanes by halving inside each group of 32, then the groups by halving
inline float sum_groups(const float* lanes, int64_t num_lanes) {
  float groups[kMostRowLanes / 32];
  int64_t count = num_lanes / 32;
  for (int64_t g = 0; g < count; g++) groups[g] = halve(load(lanes + g * 32) + load(lanes + g * 32 + kLanes));
  for (count /= 2; count >= 1; count /= 2)
    for (int64_t g = 0; g < count; g++) groups[g] = groups[g] + groups[g + count];
  return groups[0];
}

// term(Vec) of up to kLanes elements, +0 in the other lanes
template <class Term>
inline Vec term_of(const float* elements, int64_t count, Term term) {
  return count >= kLanes ? term(load(elements)) : blend_first(count, term(load_some(elements, count)), splat(0.0f));
}

// term(Vec) is evaluated on the row's elements; its result is rounded to float32 before the addition
template <class Term>
inline float sum_leaf(const float* row, int64_t length, int64_t num_lanes, Term term) {
  if (num_lanes == kLeastRowLanes) {
    Vec sums[kLeastRowLanes / kLanes] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (; length >= kLeastRowLanes; row += kLeastRowLanes, length -= kLeastRowLanes)
      for (int64_t j = 0; j < kLeastRowLanes / kLanes; j++) sums[j] = sums[j] + term(load(row + j * kLanes));
    for (int64_t j = 0; j * kLanes < length; j++)
      sums[j] = sums[j] + term_of(row + j * kLanes, length - j * kLanes, term);
    return sum_lanes(sums[0], sums[1], sums[2], sums[3]);
  }
  alignas(64) float lanes[kMostRowLanes];
  std::memset(lanes, 0, num_lanes * sizeof(float));
  for (int64_t step = 0; step < length; step += num_lanes)
    for (int64_t i = step; i < length && i < step + num_lanes; i += kLanes)
      store(lanes + i - step, load(lanes + i - step) + term_of(row + i, length - i, term));
  return sum_groups(lanes, num_lanes);
}

// radices from root to leaf; leaves of ceil(length / prod(radices)); a node adds its children left to right
template <class Term>
inline float sum_row(const float* row, int64_t length, const int64_t* radices, int64_t num_radices, Term term) {
  if (num_radices == 0) return sum_leaf(row, length, row_lanes(length), term);
  float nodes[16];  // cpu/library.radices_array limits their number
  int64_t leaves = 1;
  for (int64_t i = 0; i < num_radices; i++) leaves *= radices[i];
  int64_t leaf_length = (length + leaves - 1) / leaves;
  for (int64_t leaf = 0; leaf < leaves; leaf++) {
    int64_t begin = min64(leaf * leaf_length, length), end = min64(begin + leaf_length, length);
    float value = sum_leaf(row + begin, end - begin, row_lanes(leaf_length), term);
    int64_t rest = leaf;
    for (int64_t level = num_radices - 1; level >= 0; level--) {
      int64_t child = rest % radices[level];
      nodes[level] = child == 0 ? value : nodes[level] + value;
      if (child != radices[level] - 1) break;
      value = nodes[level];
      rest /= radices[level];
    }
  }
  return nodes[0];
}

template <class Term>
inline float sum_row(const float* row, int64_t length, Term term) {
  return sum_row(row, length, nullptr, 0, term);
}

inline Vec identity(Vec x) { return x; }

// Converts rows of x to float32 in a thread's scratch; `work(row index, row)` runs once per row, in parallel
template <class Work>
inline void for_each_row(const void* x, int32_t dtype, int64_t x_stride, int64_t M, int64_t R, int32_t num_threads, Work work) {
  static thread_local Scratch scratch;
  if (M * R < 16384) num_threads = 1;  // a parallel region costs more
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t m = 0; m < M; m++) {
    float* row = scratch.floats(R);
    load_row(row, x, dtype, m * x_stride, R);
    work(m, row);
  }
}

}  // namespace
