// Row sums in the order Row(lanes=64, vector=1) of numerics.row_order: element i belongs to lane i % 64.
#pragma once

#include "tile.h"

namespace {

// term(Vec) is evaluated on the row's elements; its result is rounded to float32 before it is added
template <class Term>
inline float sum_leaf(const float* row, int64_t length, Term term) {
  Vec lanes[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= length; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) lanes[j] = lanes[j] + term(load(row + i + j * kLanes));
  for (int j = 0; i < length; i += kLanes, j++)
    lanes[j] = lanes[j] + keep_first(term(load_some(row + i, length - i)), length - i);
  return sum_lanes(lanes[0], lanes[1], lanes[2], lanes[3]);
}

// radices from root to leaf; leaves of ceil(length / prod(radices)); a node adds its children left to right
template <class Term>
inline float sum_row(const float* row, int64_t length, const int64_t* radices, int64_t num_radices, Term term) {
  if (num_radices == 0) return sum_leaf(row, length, term);
  float nodes[16];  // cpu_library.radices_array bounds their number
  int64_t leaves = 1;
  for (int64_t i = 0; i < num_radices; i++) leaves *= radices[i];
  int64_t leaf_length = (length + leaves - 1) / leaves;
  for (int64_t leaf = 0; leaf < leaves; leaf++) {
    int64_t begin = min64(leaf * leaf_length, length), end = min64(begin + leaf_length, length);
    float value = sum_leaf(row + begin, end - begin, term);
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

// rows of x as float32 in a thread's scratch; `work(row index, row)` runs once a row, over threads
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
