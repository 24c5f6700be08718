// out[M,N] = x[M,K] @ w[N,K]^T in a fixed order: one chain of fused multiply-adds over ascending k for each output element,
// restarted at each leaf of the tree and, for float32, every 128 k. The chains of bfloat16 flush subnormals, as the dot product of
// pairs does, where available; AMX has another order, in matmul_amx.h. Tiles and threads cannot change bits.
//
// Legend: M tokens, N output features, K input features; a panel is kPanelWidth features of w packed as [word][feature].
#include "kernels.h"
#include "matmul_amx.h"
#include "product.h"

namespace {

constexpr int64_t kFloatBlock = 128;            // Blocked(K, 128) of float32
constexpr int64_t kWordsPerStep = kFloatBlock;  // packed at a time: part of a leaf, or several leaves
constexpr int64_t kRowsPerGroup = 512;          // w is packed once per group, and every thread packs its x
constexpr int64_t kManyWords = 2048;            // of x in a row: then half as many rows, or their copies outgrow the caches
constexpr int64_t kRowsPerPanel = 64;           // of a task: few rows read w best in one pass, many read x for several panels

// elements [k, k + num_k) of x rows [first, first + rows) as [word][rows]
template <class T, bool Pairs>
void pack_x(const Problem& p, int64_t first, int64_t rows, int64_t k, int64_t num_k, float* packed, T pad) {
  const T* pointers[kLanes];
  for (int64_t lane = 0; lane < kLanes; lane++)
    pointers[lane] = reinterpret_cast<const T*>(p.x) + (first + min64(lane, rows - 1)) * p.x_stride + k;
  pack_columns<T, Pairs>(pointers, num_k, p.K - k, packed, rows, pad);
}

// The rows of w of a panel, from k on; rows past the last feature repeat it, and their sums are discarded
template <class T>
PanelRows<T> panel_rows(const Problem& p, int64_t n, int64_t k) {
  PanelRows<T> panel;
  for (int64_t i = 0; i < kPanelWidth; i++)
    panel.rows[i / kLanes][i % kLanes] = reinterpret_cast<const T*>(p.w) + min64(n + i, p.N - 1) * p.w_n_stride + k;
  panel.row_end = p.K - k;
  panel.stride = kPanelWidth * p.w_n_stride;
  return panel;
}

template <class T, bool Pairs>
void pack_panel(const Problem& p, int64_t n, int64_t k, int64_t num_k, float* panel) {
  if (p.w_k_stride == 1) {
    PanelRows<T> features = panel_rows<T>(p, n, k);
    for (int group = 0; group < kPanelVecs; group++)
      pack_columns<T, Pairs>(features.rows[group], num_k, p.K - k, panel + group * kLanes, kPanelWidth, T{0});
    return;
  }
  const T* w = reinterpret_cast<const T*>(p.w) + k * p.w_k_stride;
  for (int64_t first = n; first < n + kPanelWidth; first += kLanes, panel += kLanes) {
    auto features = [&](int64_t i) { return load_some(w + i * p.w_k_stride + first, p.N - first); };
    for (int64_t i = 0; i < num_k; i += Pairs ? 2 : 1)
      store(panel + i / (Pairs ? 2 : 1) * kPanelWidth,
            Pairs ? join_halves(features(i), i + 1 < num_k ? features(i + 1) : splat(0.0f)) : features(i));
  }
}

template <int Rows>
void interleave(const float* x, int64_t stride, int64_t K, float* out) {
  for (int64_t k = 0; k < K; k++)
    for (int row = 0; row < Rows; row++) out[k * Rows + row] = x[row * stride + k];
}

// Few rows of x as [leaf][word][rows]. A single float32 row already has this layout; up to four are interleaved, not transposed.
template <class T, class Link>
const float* pack_few(const Problem& p, T pad) {
  constexpr bool floats = sizeof(T) == sizeof(float);
  const float* x = reinterpret_cast<const float*>(p.x);
  if (floats && p.M == 1) return x;
  float* packed = packed_x_scratch.floats(p.M * p.words() + kOverrun * kLanes);
  if (floats && p.M <= 4) {
    (p.M == 2 ? interleave<2> : p.M == 3 ? interleave<3> : interleave<4>)(x, p.x_stride, p.K, packed);
  } else {
    for (int64_t leaf = 0; leaf < p.leaves; leaf++)
      pack_x<T, Link::pairs>(p, 0, p.M, leaf * p.leaf_k, p.leaf_k, packed + leaf * p.leaf_words * p.M, pad);
  }
  return packed;
}

// Multiplies few rows of x by the features of a panel, read directly from w along a whole leaf
template <class T, class Link>
void multiply_few(const Problem& p, const float* packed_x, int64_t n) {
  int64_t block = kWordsPerStep * (Link::pairs ? 2 : 1);
  float* state = task_scratch.floats(TreeSum::floats(p, p.M * kPanelWidth));
  TreeSum tree{p, state, p.M * kPanelWidth};
  for (int64_t leaf = 0; leaf < p.leaves; leaf++) {
    PanelRows<T> features = panel_rows<T>(p, n, leaf * p.leaf_k);
    const float* a = packed_x + leaf * p.leaf_words * p.M;
    float* sum = tree.leaf_sum(leaf);
    begin_chains<Link>(sum, p.M * kPanelWidth);
    {
      FlushSubnormals flush(p.dtype == kBFloat16 && !Link::pairs);  // only in the chains
      for (int64_t word = 0, k = 0; word == 0 || word < p.leaf_words; word += kWordsPerStep, k += block)
        rows_kernel<T, Link>(p.M)(a + word * p.M, features, k, min64(block, p.leaf_k - k), sum);
    }
    tree.add_leaf(leaf);
  }
  finish(p, 0, p.M, n, state);
}

// The unit of packing: words [word, word + words) of each leaf in [leaf, leaf + leaves)
struct Step {
  int64_t leaf, leaves, word, words;

  static Step first(const Problem& p) { return at(p, 0, 0); }
  static Step at(const Problem& p, int64_t leaf, int64_t word) {
    int64_t words = min64(kWordsPerStep, p.leaf_words - word);
    bool whole = words == p.leaf_words && words > 0;
    return {leaf, whole ? min64(kWordsPerStep / words, p.leaves - leaf) : 1, word, words};
  }
  bool ends_leaf(const Problem& p) const { return word + words == p.leaf_words; }
  bool is_last(const Problem& p) const { return ends_leaf(p) && leaf + leaves == p.leaves; }
  Step next(const Problem& p) const { return ends_leaf(p) ? at(p, leaf + leaves, 0) : at(p, leaf, word + words); }
};

// The products of a group of rows, in the arithmetic of one dtype. Every thread packs the rows for itself, which is cheaper than
// waiting for the others.
template <class T, class Link>
struct Product {
  static constexpr int64_t per_word = Link::pairs ? 2 : 1;
  const Problem& p;
  int64_t first_row;
  RowTiles tiles;
  float* packed_x;

  Product(const Problem& problem, int64_t begin, int64_t end)
      : p(problem), first_row(begin), tiles(end - begin),
        packed_x(packed_x_scratch.floats((end - begin) * p.words() + kOverrun * kLanes)) {}

  // layout [step][leaf of the step][tile][word][rows], so that a step reads its share contiguously
  void pack(T pad) const {
    for (Step step = Step::first(p);; step = step.next(p)) {
      for (int64_t i = 0; i < step.leaves; i++)
        for (int64_t tile = 0; tile < tiles.count; tile++) {
          int64_t row = tiles.begin(tile), rows = tiles.begin(tile + 1) - row;
          pack_x<T, Link::pairs>(p, first_row + row, rows, first_k(step, i), num_k(step), x_tile(step, i, row), pad);
        }
      if (step.is_last(p)) return;
    }
  }
  float* x_tile(const Step& step, int64_t i, int64_t row) const {
    return packed_x + ((step.leaf + i) * p.leaf_words + step.word) * tiles.rows + row * step.words;
  }
  int64_t first_k(const Step& step, int64_t i) const { return (step.leaf + i) * p.leaf_k + step.word * per_word; }
  int64_t num_k(const Step& step) const { return min64(step.words * per_word, p.leaf_k - step.word * per_word); }

  // leaf i of the step, for one tile and one panel, added to the chain in `sum`
  void multiply(const Step& step, int64_t i, int64_t tile, const float* panel, float* sum) const {
    int64_t row = tiles.begin(tile), rows = tiles.begin(tile + 1) - row;
    const float* a = x_tile(step, i, row);
    if (step.word == 0) begin_chains<Link>(sum, rows * kPanelWidth);
    FlushSubnormals flush(p.dtype == kBFloat16 && !Link::pairs);
    panel_kernel<Link>(rows)(a, panel + i * step.words * kPanelWidth, step.words, sum);
  }

  // Prefetches a tile's share of the panel at n of w for a step. Inlined, because GCC drops calls that only prefetch.
  [[gnu::always_inline]] void prefetch(int64_t n, const Step& step, int64_t tile) const {
    if (p.w_k_stride != 1) return;
    constexpr int64_t item = sizeof(T), line = 64;
    for (int64_t i = kPanelWidth * tile / tiles.count; i < kPanelWidth * (tile + 1) / tiles.count; i++) {
      const char* row = p.w + (min64(n + i, p.N - 1) * p.w_n_stride + first_k(step, 0)) * item;
      for (int64_t byte = 0; byte < step.leaves * num_k(step) * item; byte += line) __builtin_prefetch(row + byte, 0, 2);
    }
  }

  // Prefetches where a tile's last step stores its sums. Inlined for the same reason.
  [[gnu::always_inline]] void prefetch_out(int64_t row, int64_t rows, int64_t n) const {
    int64_t item = item_size(p.out_dtype), bytes = min64(kPanelWidth, p.N - n) * item;
    for (int64_t i = first_row + row; i < first_row + row + rows; i++) {
      const char* target = static_cast<const char*>(p.out) + (i * p.N + n) * item;
      for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(target + byte, 1, 3);
    }
  }

  void run(int64_t panel_begin, int64_t panel_end) const {
    int64_t state_floats = TreeSum::floats(p, kMaxRows * kPanelWidth), panel_floats = (kWordsPerStep + kOverrun) * kPanelWidth;
    float* panel = task_scratch.floats(panel_floats + tiles.count * (panel_end - panel_begin) * state_floats);
    for (Step step = Step::first(p);; step = step.next(p)) {
      float* state = panel + panel_floats;
      for (int64_t n = panel_begin * kPanelWidth; n < panel_end * kPanelWidth; n += kPanelWidth) {
        bool turns = n + kPanelWidth == panel_end * kPanelWidth, ends = turns && step.is_last(p);
        int64_t next_n = turns && !ends ? panel_begin * kPanelWidth : n + kPanelWidth;
        Step next_step = ends ? Step::first(p) : turns ? step.next(p) : step;  // of the thread's next task, if it has one
        for (int64_t i = 0; i < step.leaves; i++)
          pack_panel<T, Link::pairs>(p, n, first_k(step, i), num_k(step), panel + i * step.words * kPanelWidth);
        for (int64_t tile = 0; tile < tiles.count; tile++, state += state_floats) {
          int64_t row = tiles.begin(tile), rows = tiles.begin(tile + 1) - row;
          TreeSum tree{p, state, rows * kPanelWidth};
          if (next_n < p.N) prefetch(next_n, next_step, tile);
          if (step.is_last(p)) prefetch_out(row, rows, n);
          for (int64_t leaf = step.leaf; leaf < step.leaf + step.leaves; leaf++) {
            multiply(step, leaf - step.leaf, tile, panel, tree.leaf_sum(leaf));
            if (step.ends_leaf(p)) tree.add_leaf(leaf);
          }
          if (step.is_last(p)) finish(p, first_row + row, rows, n, state);
        }
      }
      if (step.is_last(p)) return;
    }
  }
};

template <class T, class Link>
void run_few(const Problem& p, T pad) {
  int64_t panels = (p.N + kPanelWidth - 1) / kPanelWidth;
#pragma omp parallel num_threads(p.num_threads) if (p.num_threads > 1)
  {
    const float* packed_x = pack_few<T, Link>(p, pad);
#pragma omp for schedule(static) nowait
    for (int64_t panel = 0; panel < panels; panel++) multiply_few<T, Link>(p, packed_x, panel * kPanelWidth);
  }
}

template <class T, class Link>
void run(const Call& call, T pad) {
  Problem p(call, Link::pairs);
  if (p.M <= kFewRows && p.w_k_stride == 1) return run_few<T, Link>(p, pad);
  int64_t panels = (p.N + kPanelWidth - 1) / kPanelWidth;
  bool small = p.words() > kManyWords || panels < p.num_threads;
  int64_t rows = small ? kRowsPerGroup / 2 : kRowsPerGroup, groups = (p.M + rows - 1) / rows;
  int64_t wanted = min64(panels * groups / (kTasksPerThread * p.num_threads), p.M / groups / kRowsPerPanel);
  int64_t width = wanted < 1 ? 1 : wanted, blocks = (panels + width - 1) / width;
#pragma omp parallel num_threads(p.num_threads) if (p.num_threads > 1)
  {
    int64_t packed_group = -1;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < blocks * groups; i++) {
      int64_t group = i / blocks, panel = i % blocks * width;
      Product<T, Link> product(p, p.M * group / groups, p.M * (group + 1) / groups);
      if (group != packed_group) product.pack(pad);
      packed_group = group;
      product.run(panel, min64(panel + width, panels));
    }
  }
}

// Rows [row, row + rows) of one panel: x holds the leaves themselves, float32 [leaves][M][N]; w is not read
void add_panel(const Problem& p, int64_t row, int64_t rows, int64_t n, float* state) {
  TreeSum tree{p, state, rows * kPanelWidth};
  for (int64_t leaf = 0; leaf < p.leaves; leaf++) {
    const float* partial = reinterpret_cast<const float*>(p.x) + (leaf * p.M + row) * p.N;
    float* sum = tree.leaf_sum(leaf);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t group = 0; group < kPanelWidth && n + group < p.N; group += kLanes)
        store(sum + i * kPanelWidth + group, load_some(partial + i * p.N + n + group, p.N - n - group));
    tree.add_leaf(leaf);
  }
  finish(p, row, rows, n, state);
}

void multiply(const Call& call) {
  if (call.dtype == kFloat32) run<float, BlockedFma>(call, 0.0f);
  else if (call.dtype == kFloat16) run<fp16, Fma>(call, fp16{0});
  else if (kHasTiles) run_tiles(call);
  else if (kHasPairs) run<bf16, PairDot>(call, bf16{0x8000});  // adding -0 * +0 leaves a chain unchanged
  else run<bf16, FlushedFma>(call, bf16{0});
}

}  // namespace

EXPORT void detcompile_add_partials(const void* packed) {
  Problem p(*static_cast<const Call*>(packed), false);
  int64_t tiles = (p.M + kMaxRows - 1) / kMaxRows, panels = (p.N + kPanelWidth - 1) / kPanelWidth;
#pragma omp parallel for schedule(static) num_threads(p.num_threads) if (p.num_threads > 1)
  for (int64_t i = 0; i < tiles * panels; i++) {
    int64_t row = i / panels * kMaxRows;
    float* state = task_scratch.floats(TreeSum::floats(p, kMaxRows * kPanelWidth));
    add_panel(p, row, min64(kMaxRows, p.M - row), i % panels * kPanelWidth, state);
  }
}

EXPORT void detcompile_matmul(const void* packed) { multiply(*static_cast<const Call*>(packed)); }

// Rows [0, counts[0]) of x times the first of num_experts matrices, the next counts[1] times the second, and so on
EXPORT void detcompile_expert_matmul(const void* packed, const int64_t* counts, int64_t num_experts, int64_t w_stride) {
  Call call = *static_cast<const Call*>(packed);
  for (int64_t expert = 0; expert < num_experts; expert++) {
    call.M = counts[expert];
    if (call.M > 0) multiply(call);
    call.x += call.M * call.x_stride * item_size(call.dtype);
    call.w += w_stride * item_size(call.dtype);
    call.out = static_cast<char*>(call.out) + call.M * call.N * item_size(call.out_dtype);
    if (call.bias) call.bias = static_cast<const char*>(call.bias) + call.N * item_size(call.bias_dtype);
  }
}
