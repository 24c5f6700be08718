// Shared by all multiplication methods of matmul.cpp: the call, the tree over its leaves, and the epilogue.
//
// Legend: M tokens, N output features, K input features; a panel is kPanelWidth features.
#pragma once

#include "gemm.h"
#include "matmul_call.h"

namespace {

constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kWorthThreads = 1 << 17;  // multiply-adds; below, a parallel region costs more

struct Problem : Call {
  int64_t leaves = 1, leaf_k, leaf_words;

  Problem(const Call& call, bool pairs) : Call(call) {
    for (int64_t i = 0; i < num_radices; i++) leaves *= radices[i];
    leaf_k = K / leaves;
    leaf_words = pairs ? (leaf_k + 1) / 2 : leaf_k;
    if (M * N * K < kWorthThreads) num_threads = 1;
  }
  int64_t words() const { return leaves * leaf_words; }
};

thread_local Scratch packed_x_scratch, task_scratch;

inline void add_into(float* total, const float* value, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(total + i, load(total + i) + load(value + i));
}

// The sums of one tile and panel, fed leaf by leaf. A node of radix r adds its children left to right, in place, starting with
// the first. Level 0 is the root, level num_radices the leaves.
struct TreeSum {
  const Problem& p;
  float* places;  // [level][count]
  int64_t count;

  static int64_t floats(const Problem& p, int64_t count) { return (p.num_radices + 1) * count; }
  float* place(int64_t level, int64_t node) const {
    for (; level > 0 && node % p.radices[level - 1] == 0; level--) node /= p.radices[level - 1];
    return places + level * count;
  }
  float* leaf_sum(int64_t leaf) const { return place(p.num_radices, leaf); }
  void add_leaf(int64_t leaf) const {
    int64_t node = leaf;
    for (int64_t level = p.num_radices; level > 0; level--) {
      int64_t radix = p.radices[level - 1], parent = node / radix;
      if (node % radix != 0) add_into(place(level - 1, parent), place(level, node), count);
      if (node % radix != radix - 1) return;
      node = parent;
    }
  }
};

inline void finish(const Problem& p, int64_t row, int64_t rows, int64_t n, const float* sum) {
  for (int64_t group = 0; group < kPanelWidth && n + group < p.N; group += kLanes) {
    int64_t feature = n + group, count = p.N - feature;
    Vec bias = p.bias ? load_as(p.bias, p.bias_dtype, feature, count) : splat(0.0f);
    for (int64_t i = 0; i < rows; i++) {
      Vec value = load(sum + i * kPanelWidth + group);
      if (p.bias) value = value + bias;
      if (p.residual)
        value = load_as(p.residual, p.residual_dtype, (row + i) * p.residual_stride + feature, count) + round_to(p.out_dtype, value);
      store_as(p.out, p.out_dtype, (row + i) * p.N + feature, value, count);
    }
  }
}

}  // namespace
