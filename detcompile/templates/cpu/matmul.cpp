// out[M,N] = x[M,K] @ w[N,K]^T in a fixed order: one chain of fused multiply-adds over ascending k for each output element,
// restarted at each leaf of the tree and, for float32, after each 128 k. Tiles and threads cannot change bits.
//
// Legend: M tokens, N output features, K input features; a panel is kPanelWidth features of w packed as [k][feature].
#include <cstring>

#include "tile.h"

namespace {

constexpr int64_t kPanelWidth = kPanelVecs * kLanes;
constexpr int64_t kFloatBlock = 128;   // Blocked(K, 128) of float32
constexpr int64_t kHalfChunk = 256;    // k packed at a time where the chain goes on; not part of the order
constexpr int64_t kRowsPerTask = 16 * kMaxRows;
constexpr int64_t kRowsPerPass = 1024;  // bounds the packed copy of x

struct Problem {
  const char* x; int64_t x_stride;
  const char* w; int64_t w_n_stride, w_k_stride;
  const void* bias; const void* residual; int64_t residual_stride;
  void* out;
  int64_t M, N, K;
  const int64_t* radices; int64_t num_radices;
  int32_t dtype, bias_dtype, residual_dtype, out_dtype;
};

thread_local Scratch packed_x_scratch, task_scratch;

// x rows [first, first + rows) as [k][rows], float32
void pack_x(const Problem& p, int64_t first, int64_t rows, float* packed) {
  for (int64_t i = 0; i < rows; i++) {
    const char* row = p.x + (first + i) * p.x_stride * item_size(p.dtype);
    for (int64_t k = 0; k < p.K; k += kLanes) {
      float lanes[kLanes];
      int64_t count = min64(kLanes, p.K - k);
      store(lanes, load_as(row, p.dtype, k, count));
      for (int64_t lane = 0; lane < count; lane++) packed[(k + lane) * rows + i] = lanes[lane];
    }
  }
}

template <class T>
void pack_panel(const Problem& p, int64_t n, int64_t k, int64_t num_k, float* panel) {
  static const T zeros[kHalfChunk] = {};
  const T* w = reinterpret_cast<const T*>(p.w);
  for (int64_t group = 0; group < kPanelWidth; group += kLanes) {
    int64_t first = n + group;
    if (p.w_k_stride == 1) {
      const T* rows[kLanes];
      for (int64_t lane = 0; lane < kLanes; lane++)
        rows[lane] = first + lane < p.N ? w + (first + lane) * p.w_n_stride + k : zeros;
      pack_rows(rows, num_k, panel + group, kPanelWidth);
    } else {
      for (int64_t i = 0; i < num_k; i++)
        store(panel + i * kPanelWidth + group, load_some(w + (k + i) * p.w_k_stride + first, p.N - first));
    }
  }
}

void pack_w(const Problem& p, int64_t n, int64_t k, int64_t num_k, float* panel) {
  if (p.dtype == kFloat32) pack_panel<float>(p, n, k, num_k, panel);
  else if (p.dtype == kBFloat16) pack_panel<bf16>(p, n, k, num_k, panel);
  else pack_panel<fp16>(p, n, k, num_k, panel);
}

void add_into(float* total, const float* value, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(total + i, load(total + i) + load(value + i));
}

// Feeds leaf sums in order; each node of radix r adds its children left to right. level[0] is the root.
struct TreeSum {
  const Problem& p;
  float* levels;
  int64_t count;

  void add_leaf(int64_t leaf, const float* value) const {
    for (int64_t level = p.num_radices - 1; level >= 0; level--) {
      float* node = levels + level * count;
      int64_t child = leaf % p.radices[level];
      if (child == 0) std::memcpy(node, value, count * sizeof(float));
      else add_into(node, value, count);
      if (child != p.radices[level] - 1) return;
      leaf /= p.radices[level];
      value = node;
    }
  }
};

// chain over k in [begin, end) for every row tile of the task, into sum[rows][kPanelWidth]
void multiply(const Problem& p, const float* packed_x, const RowTiles& tiles, int64_t tile_begin, int64_t tile_end, int64_t n,
              int64_t begin, int64_t end, float* panel, float* sum, bool fresh) {
  pack_w(p, n, begin, end - begin, panel);
  int64_t first = tiles.begin(tile_begin);
  for (int64_t tile = tile_begin; tile < tile_end; tile++) {
    int64_t row = tiles.begin(tile), rows = tiles.begin(tile + 1) - row;
    packed_kernel<kPanelVecs>(rows)(packed_x + row * p.K + begin * rows, panel, kPanelWidth, end - begin,
                                    sum + (row - first) * kPanelWidth, kPanelWidth, fresh);
  }
}

void finish(const Problem& p, int64_t row, int64_t rows, int64_t n, const float* sum) {
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

void run_task(const Problem& p, const float* packed_x, const RowTiles& tiles, int64_t first_row, int64_t tile_begin,
              int64_t tile_end, int64_t n) {
  int64_t rows = tiles.begin(tile_end) - tiles.begin(tile_begin), count = rows * kPanelWidth;
  float* panel = task_scratch.floats(kHalfChunk * kPanelWidth + (2 + p.num_radices) * count);
  float* sum = panel + kHalfChunk * kPanelWidth;
  float* block = sum + count;
  TreeSum tree{p, block + count, count};
  int64_t leaves = 1;
  for (int64_t i = 0; i < p.num_radices; i++) leaves *= p.radices[i];
  bool blocked = p.dtype == kFloat32;
  int64_t leaf_k = p.K / leaves, step = blocked ? kFloatBlock : kHalfChunk;
  for (int64_t leaf = 0; leaf < leaves; leaf++) {
    int64_t begin = leaf * leaf_k, end = begin + leaf_k;
    if (leaf_k == 0) std::memset(sum, 0, count * sizeof(float));
    for (int64_t k = begin; k < end; k += step) {
      bool first = k == begin;
      float* target = blocked && !first ? block : sum;
      multiply(p, packed_x, tiles, tile_begin, tile_end, n, k, min64(k + step, end), panel, target, blocked || first);
      if (target == block) add_into(sum, block, count);
    }
    if (p.num_radices) tree.add_leaf(leaf, sum);
  }
  finish(p, first_row + tiles.begin(tile_begin), rows, n, p.num_radices ? tree.levels : sum);
}

void run_pass(const Problem& p, int64_t first_row, int64_t rows, int32_t num_threads) {
  RowTiles tiles(rows);
  float* packed_x = packed_x_scratch.floats(rows * p.K);
  const int64_t tiles_per_task = kRowsPerTask / kMaxRows;
  int64_t panels = (p.N + kPanelWidth - 1) / kPanelWidth, groups = (tiles.count + tiles_per_task - 1) / tiles_per_task;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < tiles.count; tile++) {
      int64_t row = tiles.begin(tile);
      pack_x(p, first_row + row, tiles.begin(tile + 1) - row, packed_x + row * p.K);
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * groups; task++) {
      int64_t group = task / panels, panel = task % panels;
      run_task(p, packed_x, tiles, first_row, tiles.count * group / groups, tiles.count * (group + 1) / groups,
               panel * kPanelWidth);
    }
  }
}

}  // namespace

// Strides count elements. w_k_stride == 1 or w_n_stride == 1. residual and bias may be null. K is a multiple of prod(radices).
EXPORT void detcompile_matmul(const void* x, int64_t x_stride, const void* w, int64_t w_n_stride, int64_t w_k_stride,
                              const void* bias, const void* residual, int64_t residual_stride, void* out, int64_t M, int64_t N,
                              int64_t K, const int64_t* radices, int64_t num_radices, int32_t dtype, int32_t bias_dtype,
                              int32_t residual_dtype, int32_t out_dtype, int32_t num_threads) {
  Problem p{static_cast<const char*>(x), x_stride, static_cast<const char*>(w), w_n_stride, w_k_stride, bias, residual,
            residual_stride, out, M, N, K, radices, num_radices, dtype, bias_dtype, residual_dtype, out_dtype};
  if (M * N * K < 32768) num_threads = 1;  // a parallel region costs more
  for (int64_t row = 0; row < M; row += kRowsPerPass) run_pass(p, row, min64(kRowsPerPass, M - row), num_threads);
}
