// Products of bfloat16 by the tiles of amx.h. A leaf is the running sum of its blocks of 32 k, from +0.
//
// Legend: a panel is 32 features; a pair is two tiles of tokens, the last maybe one.
#pragma once

#include <cstring>

#include "amx.h"
#include "product.h"

namespace {

constexpr int64_t kPairTokens = kMostTokenTiles * kLanes;
constexpr int64_t kTokensPerGroup = 512;
constexpr int64_t kBlocksPerStep = 8;   // of a packed panel, so that it stays in L1 together with a pair
constexpr int64_t kMostTilePanels = 8;  // of a task
constexpr int64_t kFewTokens = 128;     // up to this many, weights are read in place
constexpr int64_t kFetchAhead = 16;     // blocks
constexpr int64_t kPanelBlockBytes = kPanelTiles * kTileBytes;
static_assert(!kHasTiles || kPanelWidth == kPanelTiles * kLanes);

// Blocks [block, block + blocks) of one leaf: whole blocks, or the short last one
struct TileStep {
  int64_t leaf, block, blocks, num_k;
};

struct TileProduct {
  const Problem& p;
  int64_t first_row, rows, token_tiles, leaf_blocks;
  float* packed_x;
  bool few;  // too few tokens to pack whole panels of w

  TileProduct(const Problem& problem, int64_t begin, int64_t end)
      : p(problem), first_row(begin), rows(end - begin), token_tiles((rows + kLanes - 1) / kLanes),
        leaf_blocks((p.leaf_k + kTileK - 1) / kTileK), packed_x(packed_x_scratch.floats(token_tiles * tile_floats())),
        few(rows <= kFewTokens && p.w_k_stride == 1) {}

  int64_t tile_floats() const { return p.leaves * leaf_blocks * kTileFloats; }  // of sixteen tokens

  void pack() const {
    float* out = packed_x;
    for (int64_t tile = 0; tile < token_tiles; tile++)
      for (int64_t leaf = 0; leaf < p.leaves; leaf++, out += leaf_blocks * kTileFloats) {
        const bf16* tokens[kLanes];
        for (int64_t i = 0; i < kLanes; i++) {
          int64_t row = first_row + min64(tile * kLanes + i, rows - 1);
          tokens[i] = reinterpret_cast<const bf16*>(p.x) + row * p.x_stride + leaf * p.leaf_k;
        }
        pack_tokens(tokens, p.leaf_k, out);
      }
  }

  int64_t most_blocks() const { return few && leaf_blocks > 0 ? leaf_blocks : kBlocksPerStep; }
  TileStep step_at(int64_t leaf, int64_t block) const {
    int64_t whole = p.leaf_k / kTileK - block;
    if (whole > 0) return {leaf, block, min64(whole, most_blocks()), min64(whole, most_blocks()) * kTileK};
    return {leaf, block, leaf_blocks - block, p.leaf_k - block * kTileK};
  }
  bool ends_leaf(const TileStep& step) const { return step.block + step.blocks == leaf_blocks; }
  bool is_last(const TileStep& step) const { return ends_leaf(step) && step.leaf + 1 == p.leaves; }
  TileStep next(const TileStep& step) const {
    return ends_leaf(step) ? step_at(step.leaf + 1, 0) : step_at(step.leaf, step.block + step.blocks);
  }

  // rows of w, 64 bytes of each at a time; rows past the last feature repeat it, and their sums are discarded
  void copy_rows(int64_t n, int64_t k, int64_t num_k, char* out) const {
    const bf16* features[kLanes];
    for (int64_t tile = 0; tile < kPanelTiles; tile++, n += kLanes, out += kTileBytes) {
      for (int64_t i = 0; i < kLanes; i++)
        features[i] = reinterpret_cast<const bf16*>(p.w) + min64(n + i, p.N - 1) * p.w_n_stride + k;
      if (num_k < kTileK) pad_block(features, num_k, kNoW, reinterpret_cast<bf16(*)[kTileK]>(out));
      for (int64_t i = 0; i < kLanes; i++)
        for (int64_t at = 0; at + kTileK <= num_k; at += kTileK)
          std::memcpy(out + at / kTileK * kPanelBlockBytes + i * 64, features[i] + at, 64);
    }
  }

  // the same for w with contiguous features
  void turn_columns(int64_t n, int64_t k, int64_t num_k, char* out) const {
    const bf16* w = reinterpret_cast<const bf16*>(p.w) + k * p.w_k_stride;
    alignas(64) float pairs[kLanes][kLanes];
    const char* from[kLanes];
    for (int i = 0; i < kLanes; i++) from[i] = reinterpret_cast<const char*>(pairs[i]);
    for (int64_t at = 0; at < num_k; at += kTileK)
      for (int64_t first = n; first < n + kPanelTiles * kLanes; first += kLanes, out += kTileBytes) {
        auto features = [&](int64_t i) {
          return i < num_k ? load_some(w + i * p.w_k_stride + first, p.N - first) : splat(to_float(kNoW));
        };
        for (int i = 0; i < kLanes; i++) store(pairs[i], join_halves(features(at + 2 * i + 1), features(at + 2 * i)));
        Vec rows_of_w[kLanes];
        transpose_words(from, 0, rows_of_w);
        for (int i = 0; i < kLanes; i++) store(reinterpret_cast<float*>(out + i * 64), rows_of_w[i]);
      }
  }

  bool in_place(const TileStep& step, int64_t n) const {
    return few && n + kPanelTiles * kLanes <= p.N && step.num_k == step.blocks * kTileK;
  }
  WeightTiles weights(const TileStep& step, int64_t n, float* packed) const {
    int64_t k = step.leaf * p.leaf_k + step.block * kTileK, row = p.w_n_stride * 2;
    if (in_place(step, n)) return {p.w + n * row + k * 2, row, kLanes * row, 2 * kTileK};
    char* out = reinterpret_cast<char*>(packed);
    if (p.w_k_stride == 1) copy_rows(n, k, step.num_k, out);
    else turn_columns(n, k, step.num_k, out);
    return {out, 2 * kTileK, kTileBytes, kPanelBlockBytes};
  }

  void multiply(const TileStep& step, const WeightTiles& w, int64_t tile, int64_t tiles, bool ahead, float* sum) const {
    const float* x = packed_x + tile * tile_floats() + (step.leaf * leaf_blocks + step.block) * kTileFloats;
    auto kernel = tiles == 2 ? multiply_tiles<2> : multiply_tiles<1>;
    int64_t fetched = ahead ? kFetchAhead : 0;
    kernel(w, reinterpret_cast<const char*>(x), tile_floats() * 4, step.blocks, sum, step.block == 0, fetched);
  }

  // layout of sums: [feature tile][token tile][feature][token]
  void finish_pair(int64_t tile, int64_t tiles, int64_t n, const float* sums) const {
    alignas(64) float turned[kPairTokens * kPanelWidth];
    for (int64_t i = 0; i < kPanelTiles * tiles; i++) {
      const char* from[kLanes];
      for (int64_t row = 0; row < kLanes; row++)
        from[row] = reinterpret_cast<const char*>(sums + i * kTileFloats + row * kLanes);
      Vec tokens[kLanes];
      transpose_words(from, 0, tokens);
      for (int64_t row = 0; row < kLanes; row++)
        store(turned + (i % tiles * kLanes + row) * kPanelWidth + i / tiles * kLanes, tokens[row]);
    }
    finish(p, first_row + tile * kLanes, min64(tiles * kLanes, rows - tile * kLanes), n, turned);
  }

  void run(int64_t panel_begin, int64_t panel_end) const {
    int64_t panel_floats = most_blocks() * kPanelTiles * kTileFloats;
    int64_t state_floats = TreeSum::floats(p, kPanelTiles * kMostTokenTiles * kTileFloats);
    int64_t pairs = (token_tiles + 1) / kMostTokenTiles;
    float* packed = task_scratch.floats(panel_floats + pairs * (panel_end - panel_begin) * state_floats);
    for (TileStep step = step_at(0, 0);; step = next(step)) {
      float* state = packed + panel_floats;
      for (int64_t n = panel_begin * kPanelWidth; n < panel_end * kPanelWidth; n += kPanelWidth) {
        WeightTiles w = weights(step, n, packed);
        for (int64_t tile = 0; tile < token_tiles; tile += kMostTokenTiles, state += state_floats) {
          int64_t tiles = min64(kMostTokenTiles, token_tiles - tile);
          TreeSum tree{p, state, kPanelTiles * tiles * kTileFloats};
          multiply(step, w, tile, tiles, tile == 0 && in_place(step, n), tree.leaf_sum(step.leaf));
          if (ends_leaf(step)) tree.add_leaf(step.leaf);
          if (is_last(step)) finish_pair(tile, tiles, n, state);
        }
      }
      if (is_last(step)) return;
    }
  }
};

inline void run_tiles(const Call& call) {
  Problem p(call, true);
  int64_t groups = (p.M + kTokensPerGroup - 1) / kTokensPerGroup, panels = (p.N + kPanelWidth - 1) / kPanelWidth;
  int64_t wanted = p.M <= kFewTokens ? 1 : panels * groups / (kTasksPerThread * p.num_threads);
  int64_t width = wanted < 1 ? 1 : min64(wanted, kMostTilePanels), tasks = (panels + width - 1) / width;
#pragma omp parallel num_threads(p.num_threads) if (p.num_threads > 1)
  {
    Tiles tiles;
    int64_t packed_group = -1;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < tasks * groups; i++) {
      int64_t group = i / tasks, panel = i % tasks * width;
      TileProduct product(p, p.M * group / groups, p.M * (group + 1) / groups);
      if (group != packed_group) product.pack();
      packed_group = group;
      product.run(panel, min64(panel + width, panels));
    }
  }
}

}  // namespace
