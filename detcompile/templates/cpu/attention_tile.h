// Causal attention in KV order, over a paged cache or dense keys; one kernel with a lookup of key p.
//
// Keys are processed in blocks of 64 at absolute positions. For each row (a query of one head) and block:
//   s_j = (chains of fma(q_d, k_jd) over ascending d, 128 each, added ascending) * (scale * log2(e)), -inf where j is
//         not visible; with a soft cap, ALiBi or a bias Scores.shape replaces the multiplication
//   m'  = max(m, s); alpha = exp2(m - m'); p_j = exp2(s_j - m'), float32 (shaped scores: times c inside exp2); both are 0
//         while m' is -inf
//   l   = l * alpha + (p summed as Row(64, lanes=64))
//   o   = fma(o, alpha, chain of fma(p_j, v_j) over ascending j)
// (m, l, o) are reset in each chunk; chunks are merged ascending, a sink last; out = o / l + 0.0. Blocks without a visible key are
// skipped; keys that no row of a task sees are never read, and a row never multiplies a value that it does not see.
//
// Legend: T tokens, S sequences, Hq Hkv heads, G = Hq / Hkv, D Dv head dims; rows of a task are (query, head of the group).
#pragma once

#include <vector>

#include "attention_operands.h"
#include "tile.h"

namespace {

constexpr int64_t kWidth = kPanelVecs * kLanes;
constexpr int64_t kChain = 128;  // features per chain: longer chains would be less accurate than torch
constexpr int64_t kRowsPerTask = 8 * kMaxRows;

thread_local Scratch scratch;

// One task (sequence, kv head, query tile): its packed queries, its current block of keys, and the state of its rows.
struct Tile {
  const Heads& h;
  const Sequence& s;
  Task task;
  RowTiles row_tiles;
  int64_t Dv_padded, first_key, last_key;
  float *q, *k_panel, *v_panel, *scores, *chain, *values, *zeros, *m, *l, *o, *m_total, *l_total, *o_total;

  Tile(const Heads& heads, const Sequence& sequence, Task t)
      : h(heads), s(sequence), task(t), row_tiles((t.end - t.begin) * heads.group()) {
    int64_t rows = row_tiles.rows;
    Dv_padded = (h.Dv + kWidth - 1) / kWidth * kWidth;
    first_key = h.visible.first(position(0));
    last_key = position(rows - 1);
    int64_t widest = h.D > h.Dv ? h.D : h.Dv;
    k_panel = scratch.floats(kBlock * (h.D + Dv_padded + 2 * kMaxRows) + kMaxRows * Dv_padded + rows * (h.D + 2 * Dv_padded + 4) + widest);
    v_panel = k_panel + kBlock * h.D;
    scores = v_panel + kBlock * Dv_padded;
    chain = scores + kBlock * kMaxRows;
    values = chain + kBlock * kMaxRows;
    o = values + kMaxRows * Dv_padded;
    o_total = o + rows * Dv_padded;
    q = o_total + rows * Dv_padded;
    m = q + rows * h.D;
    l = m + rows;
    m_total = l + rows;
    l_total = m_total + rows;
    zeros = l_total + rows;
    std::memset(zeros, 0, widest * sizeof(float));
    clear(m_total, l_total, o_total);
    pack_queries();
  }

  int64_t position(int64_t row) const { return s.first_position + task.begin + row / h.group(); }
  const float* relative(int64_t row) const {
    if (!s.relative) return nullptr;
    return s.relative + (task.begin + row / h.group()) * h.relative_token_stride + head(row) * h.relative_head_stride;
  }
  int64_t head(int64_t row) const { return task.kv_head * h.group() + row % h.group(); }

  void clear(float* maximum, float* sum, float* output) const {
    for (int64_t i = 0; i < row_tiles.rows; i++) maximum[i] = -INFINITY;
    std::memset(sum, 0, row_tiles.rows * sizeof(float));
    std::memset(output, 0, row_tiles.rows * Dv_padded * sizeof(float));
  }

  void pack_queries() const {
    for (int64_t tile = 0; tile < row_tiles.count; tile++) {
      int64_t begin = row_tiles.begin(tile), rows = row_tiles.begin(tile + 1) - begin;
      for (int64_t row = begin; row < begin + rows; row++) {
        int64_t index = (task.begin + row / h.group()) * h.q_token_stride + head(row) * h.q_head_stride;
        for (int64_t d = 0; d < h.D; d += kLanes) {
          float lanes[kLanes];
          store(lanes, load_as(s.q, h.dtype, index + d, h.D - d));
          for (int64_t i = 0; i < min64(kLanes, h.D - d); i++) q[begin * h.D + (d + i) * rows + row - begin] = lanes[i];
        }
      }
    }
  }

  template <class T>
  void load_keys(int64_t block, int64_t begin, int64_t end) const {
    for (int64_t group = begin / kLanes * kLanes; group < end; group += kLanes) {
      const T* rows[kLanes];
      for (int64_t i = 0; i < kLanes; i++) {
        rows[i] = reinterpret_cast<const T*>(zeros);
        if (group + i >= begin && group + i < end)
          rows[i] = reinterpret_cast<const T*>(key_address(s.k, s.table, h.block_size, h.k_block_stride, h.k_key_stride,
                                                           block * kBlock + group + i, sizeof(T))) +
                    task.kv_head * h.k_head_stride;
      }
      pack_rows(rows, h.D, k_panel + group, kBlock);
    }
  }

  // Keys that no row of the task sees are zeros in k_panel, because leftovers may be subnormal, which is slow. Their rows of
  // v_panel are not read.
  void load_block(int64_t block) const {
    int64_t first = block * kBlock, begin = first_key > first ? first_key - first : 0, end = min64(last_key + 1 - first, kBlock);
    if (begin > 0 || end < kBlock) std::memset(k_panel, 0, kBlock * h.D * sizeof(float));
    if (h.cache_dtype == kFloat32) load_keys<float>(block, begin, end);
    else if (h.cache_dtype == kBFloat16) load_keys<bf16>(block, begin, end);
    else load_keys<fp16>(block, begin, end);
    for (int64_t j = begin; j < end; j++) {
      const char* base =
          key_address(s.v, s.table, h.block_size, h.v_block_stride, h.v_key_stride, first + j, item_size(h.cache_dtype));
      for (int64_t d = 0; d < Dv_padded; d += kLanes)
        store(v_panel + j * Dv_padded + d, load_as(base, h.cache_dtype, task.kv_head * h.v_head_stride + d, h.Dv - d));
    }
  }

  Keys seen(int64_t row, int64_t block) const {
    int64_t first = h.visible.first(position(row)) - block * kBlock;
    return {first > 0 ? first : 0, min64(position(row) - block * kBlock + 1, kBlock)};
  }

  // Scale one row's scores in place, with -inf where not visible; return their maximum, which may ignore a NaN (the NaN still
  // reaches p)
  float mask(float* score, const Keys& keys) const {
    Vec largest = splat(-INFINITY), scale = splat(h.scores.plain() ? h.scores.scale : 1.0f);
    for (int64_t j = 0; j < kBlock; j += kLanes) {
      Vec s_j = load(score + j) * scale;
      if (!keys.all()) {  // after scaling: a negative scale must not turn a masked score into +inf
        s_j = blend_first(keys.end - j, s_j, splat(-INFINITY));
        s_j = blend_first(keys.begin - j, splat(-INFINITY), s_j);
      }
      store(score + j, s_j);
      largest = max(largest, s_j);
    }
    return max_lanes(largest);
  }

  // masked scores of one row -> p in place; returns their sum
  float soften(float* score, float maximum) const {
    Vec p[kBlock / kLanes];
    for (int64_t j = 0; j < kBlock / kLanes; j++) {
      p[j] = exp2(h.scores.in_log2(load(score + j * kLanes) - splat(maximum)));
      store(score + j * kLanes, p[j]);
    }
    return sum_lanes(p[0], p[1], p[2], p[3]);
  }

  static float first_lane(Vec value) {
    float lanes[kLanes];
    store(lanes, value);
    return lanes[0];
  }

  float power(float difference) const { return first_lane(exp2(h.scores.in_log2(splat(difference)))); }

  // the chains of rows [i, i + rows) of a tile over some keys
  void chain_values(int64_t i, int64_t rows, const Keys& keys, bool fresh) const {
    for (int64_t d = 0; d < h.Dv && !keys.none(); d += kWidth)
      spread_kernel<kPanelVecs, kBlock>(rows)(scores + i * kBlock + keys.begin, v_panel + keys.begin * Dv_padded + d, Dv_padded,
                                              keys.end - keys.begin, values + i * Dv_padded + d, Dv_padded, fresh);
  }

  // o = fma(o, alpha, chain): keys that all rows see are multiplied together, others row by row
  void add_values(int64_t row, int64_t rows, const float* alpha, const Keys* keys) const {
    Keys common = keys[0];
    bool begin_together = true;
    for (int64_t i = 1; i < rows; i++) {
      begin_together = begin_together && keys[i].begin == keys[0].begin;
      common = {keys[i].begin > common.begin ? keys[i].begin : common.begin, min64(keys[i].end, common.end)};
    }
    if (common.none()) common.end = common.begin;
    bool fresh = begin_together && !common.none();
    if (!fresh) {
      std::memset(values, 0, rows * Dv_padded * sizeof(float));
      for (int64_t i = 0; i < rows; i++) chain_values(i, 1, {keys[i].begin, min64(keys[i].end, common.begin)}, false);
    }
    chain_values(0, rows, common, fresh);
    for (int64_t i = 0; i < rows; i++) {
      if (keys[i].none()) continue;
      chain_values(i, 1, {keys[i].begin > common.end ? keys[i].begin : common.end, keys[i].end}, false);
      float *row_o = o + (row + i) * Dv_padded, *value = values + i * Dv_padded;
      for (int64_t d = 0; d < Dv_padded; d += kLanes) store(row_o + d, fma(load(row_o + d), splat(alpha[i]), load(value + d)));
    }
  }

  void multiply_keys(int64_t row, int64_t rows) const {
    for (int64_t d = 0; d < h.D || d == 0; d += kChain) {
      float* target = d == 0 ? scores : chain;
      for (int64_t j = 0; j < kBlock; j += kWidth)
        packed_kernel<kPanelVecs>(rows)(q + row * h.D + d * rows, k_panel + d * kBlock + j, kBlock, min64(kChain, h.D - d),
                                        target + j, kBlock, true);
      for (int64_t i = 0; i < rows * kBlock && d > 0; i += kLanes)
        store(scores + i, load(scores + i) + load(chain + i));
    }
  }

  void attend_block(int64_t block) const {
    load_block(block);
    for (int64_t tile = 0; tile < row_tiles.count; tile++) {
      int64_t row = row_tiles.begin(tile), rows = row_tiles.begin(tile + 1) - row;
      if (position(row + rows - 1) < block * kBlock || h.visible.first(position(row)) >= (block + 1) * kBlock) continue;
      multiply_keys(row, rows);
      // Step by step for all rows, so that rows do not wait for each other, and one exp2 computes every alpha
      static_assert(kMaxRows <= kLanes);
      Keys keys[kMaxRows];
      float m_old[kLanes] = {}, m_new[kLanes] = {}, base[kLanes] = {}, sum[kLanes], alpha[kLanes];
      for (int64_t i = 0; i < rows; i++) {
        keys[i] = seen(row + i, block);
        if (keys[i].none()) continue;
        float* score = scores + i * kBlock;
        if (!h.scores.plain()) h.scores.shape(score, kBlock, block * kBlock, position(row + i), head(row + i), relative(row + i));
        float largest = mask(score, keys[i]);
        m_old[i] = m[row + i];
        m_new[i] = m_old[i] > largest ? m_old[i] : largest;
        base[i] = m_new[i] == -INFINITY ? 0.0f : m_new[i];  // visible keys without weight
      }
      for (int64_t i = 0; i < rows; i++)
        if (!keys[i].none()) sum[i] = soften(scores + i * kBlock, base[i]);
      store(alpha, exp2(h.scores.in_log2(load(m_old) - load(base))));
      for (int64_t i = 0; i < rows; i++) {
        if (keys[i].none()) continue;
        m[row + i] = m_new[i];
        l[row + i] = l[row + i] * alpha[i] + sum[i];
      }
      add_values(row, rows, alpha, keys);
    }
  }

  // merge the state of blocks [begin, end)
  void merge_chunk(int64_t begin, int64_t end) const {
    for (int64_t row = 0; row < row_tiles.rows; row++) {
      if (position(row) < begin * kBlock || h.visible.first(position(row)) >= end * kBlock) continue;  // nothing visible
      float m_new = m_total[row] > m[row] ? m_total[row] : m[row], base = m_new == -INFINITY ? 0.0f : m_new;
      float before = power(m_total[row] - base), now = power(m[row] - base);
      l_total[row] = l_total[row] * before + l[row] * now;
      m_total[row] = m_new;
      float *total = o_total + row * Dv_padded, *chunk = o + row * Dv_padded;
      for (int64_t d = 0; d < Dv_padded; d += kLanes)
        store(total + d, load(total + d) * splat(before) + load(chunk + d) * splat(now));
    }
  }

  void run() const {
    int64_t blocks_per_chunk = h.chunk / kBlock, last_block = last_key / kBlock;
    for (int64_t block = first_key / kBlock; block <= last_block;) {
      int64_t begin = block, chunk_end = (block / blocks_per_chunk + 1) * blocks_per_chunk;
      clear(m, l, o);
      for (; block < chunk_end && block <= last_block; block++) attend_block(block);
      merge_chunk(begin, block);
    }
    for (int64_t row = 0; row < row_tiles.rows; row++) {
      // a sink is one more key, without a value; if it dwarfs all others, infinity makes the row zeros
      if (h.scores.sinks) l_total[row] = l_total[row] + power(h.scores.sinks[head(row)] - m_total[row]);
      if (s.lse) s.lse[(task.begin + row / h.group()) * h.Hq + head(row)] = h.scores.log_sum(m_total[row], l_total[row]);
      int64_t index = (task.begin + row / h.group()) * h.out_token_stride + head(row) * h.out_head_stride;
      for (int64_t d = 0; d < h.Dv; d += kLanes) {
        Vec y = load(o_total + row * Dv_padded + d) / splat(l_total[row]) + splat(0.0f);
        store_as(s.out, h.dtype, index + d, y, h.Dv - d);
      }
    }
  }
};

void attend(const Heads& h, const std::vector<Sequence>& sequences, int32_t num_threads) {
  std::vector<Task> tasks;
  int64_t queries_per_task = kRowsPerTask / h.group() > 1 ? kRowsPerTask / h.group() : 1, work = 0;
  for (int64_t i = 0; i < int64_t(sequences.size()); i++) {
    int64_t num_queries = sequences[i].num_queries;
    work += num_queries * h.Hq * (sequences[i].first_position + num_queries) * h.D;
    for (int64_t kv_head = 0; kv_head < h.Hkv; kv_head++)
      for (int64_t begin = 0; begin < num_queries; begin += queries_per_task)
        tasks.push_back({i, kv_head, begin, min64(begin + queries_per_task, num_queries)});
  }
  if (work < 65536) num_threads = 1;  // a parallel region costs more
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int64_t i = 0; i < int64_t(tasks.size()); i++) Tile(h, sequences[tasks[i].sequence], tasks[i]).run();
}

}  // namespace
