// Causal attention in KV order, over a paged cache or dense keys; one kernel, which asks where key p lies.
//
// Keys are taken in blocks of 64 at absolute positions. For each row (a query of one head) and block:
//   s_j = (chains of fma(q_d, k_jd) over ascending d, 128 each, added ascending) * (scale * log2(e)), -inf where j is
//         not visible; Scores.shape takes the place of the product where there is a soft cap, ALiBi or a bias
//   m'  = max(m, s); alpha = exp2(m - m'); p_j = exp2(s_j - m'), float32 (shaped scores: times c inside exp2)
//   l   = l * alpha + (p summed as Row(64, lanes=64))
//   o   = fma(o, alpha, chain of fma(p_j, v_j) over ascending j)
// (m, l, o) start afresh in each chunk; chunks are merged ascending, a sink last; out = o / l + 0.0. A block without a visible key is
// skipped; keys that no row of a task sees are never read, and a row never multiplies a key it does not see.
//
// Legend: T tokens, S sequences, Hq Hkv heads, G = Hq / Hkv, D Dv head dims; rows of a task are (query, head of the group).
#pragma once

#include <vector>

#include "attention_scores.h"
#include "tile.h"

namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kWidth = kPanelVecs * kLanes;
constexpr int64_t kChain = 128;  // features of one chain: a longer one would be less accurate than torch
constexpr int64_t kRowsPerTask = 8 * kMaxRows;

// The keys that a query sees: from first(its position) to its own.
struct Visible {
  int64_t window, attention_chunk;  // 0: none; at most one of them is positive
  int64_t first(int64_t position) const {
    if (attention_chunk > 0) return position / attention_chunk * attention_chunk;
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
};

// strides count elements
struct Heads {
  int64_t Hq, Hkv, D, Dv;
  int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
  int64_t k_key_stride, k_head_stride, k_block_stride, v_key_stride, v_head_stride, v_block_stride;
  int64_t block_size, chunk;
  Visible visible;
  Scores scores;
  int64_t relative_token_stride, relative_head_stride;
  int32_t dtype, cache_dtype;
  int64_t group() const { return Hq / Hkv; }
};

struct Sequence {
  const char* q; const char* k; const char* v; char* out;
  const int32_t* table;  // null: keys are contiguous
  int64_t num_queries, first_position;
  const float* relative;  // biases of its first query, or null
};

struct Task { int64_t sequence, kv_head, begin, end; };

thread_local Scratch scratch;

const char* key_address(const char* base, const int32_t* table, int64_t block_size, int64_t block_stride, int64_t key_stride,
                        int64_t p, int64_t bytes) {
  if (!table) return base + p * key_stride * bytes;
  return base + (table[p / block_size] * block_stride + p % block_size * key_stride) * bytes;
}

// One (sequence, kv head, query tile): its packed queries, its current block of keys, the state of its rows.
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
  void load_keys(int64_t block) const {
    for (int64_t group = 0; group < kBlock; group += kLanes) {
      const T* rows[kLanes];
      for (int64_t i = 0; i < kLanes; i++) {
        int64_t p = block * kBlock + group + i;
        rows[i] = reinterpret_cast<const T*>(zeros);
        if (p >= first_key && p <= last_key)
          rows[i] = reinterpret_cast<const T*>(
                        key_address(s.k, s.table, h.block_size, h.k_block_stride, h.k_key_stride, p, sizeof(T))) +
                    task.kv_head * h.k_head_stride;
      }
      pack_rows(rows, h.D, k_panel + group, kBlock);
    }
  }

  void load_block(int64_t block) const {
    if (h.cache_dtype == kFloat32) load_keys<float>(block);
    else if (h.cache_dtype == kBFloat16) load_keys<bf16>(block);
    else load_keys<fp16>(block);
    for (int64_t j = 0; j < kBlock; j++) {
      int64_t p = block * kBlock + j;
      float* row = v_panel + j * Dv_padded;
      std::memset(row, 0, Dv_padded * sizeof(float));
      if (p < first_key || p > last_key) continue;
      const char* base = key_address(s.v, s.table, h.block_size, h.v_block_stride, h.v_key_stride, p, item_size(h.cache_dtype));
      load_row(row, base, h.cache_dtype, task.kv_head * h.v_head_stride, h.Dv);
    }
  }

  // scores of one row -> p in place, and its new (m, l); [begin, end) are the visible keys of the block; returns alpha
  float soften(int64_t row, float* score, int64_t begin, int64_t end) const {
    Vec s_j[kBlock / kLanes], largest = splat(-INFINITY), scale = splat(h.scores.plain() ? h.scores.scale : 1.0f);
    for (int64_t j = 0; j < begin; j++) score[j] = -INFINITY;
    for (int64_t j = end; j < kBlock; j++) score[j] = -INFINITY;
    for (int64_t j = 0; j < kBlock / kLanes; j++) {
      s_j[j] = load(score + j * kLanes) * scale;
      if (begin > 0 || end < kBlock) {  // a negative scale must not make a masked score +inf
        store(score + j * kLanes, s_j[j]);
        for (int64_t i = j * kLanes; i < (j + 1) * kLanes; i++)
          if (i < begin || i >= end) score[i] = -INFINITY;
        s_j[j] = load(score + j * kLanes);
      }
      largest = max(largest, s_j[j]);
    }
    float m_new = max_lanes(largest);
    m_new = m[row] > m_new ? m[row] : m_new;
    float alpha = power(m[row] - m_new);
    for (int64_t j = 0; j < kBlock / kLanes; j++) {
      s_j[j] = exp2(h.scores.in_log2(s_j[j] - splat(m_new)));
      store(score + j * kLanes, s_j[j]);
    }
    m[row] = m_new;
    l[row] = l[row] * alpha + sum_lanes(s_j[0], s_j[1], s_j[2], s_j[3]);
    return alpha;
  }

  static float first_lane(Vec value) {
    float lanes[kLanes];
    store(lanes, value);
    return lanes[0];
  }

  float power(float difference) const { return first_lane(exp2(h.scores.in_log2(splat(difference)))); }

  void add_values(int64_t row, int64_t rows, const float* p, const float* alpha, int64_t begin, int64_t end) const {
    for (int64_t d = 0; d < h.Dv; d += kWidth)
      spread_kernel<kPanelVecs, kBlock>(rows)(p + begin, v_panel + begin * Dv_padded + d, Dv_padded, end - begin, values + d,
                                              Dv_padded, true);
    float* row_o = o + row * Dv_padded;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t d = i * Dv_padded; d < (i + 1) * Dv_padded; d += kLanes)
        store(row_o + d, fma(load(row_o + d), splat(alpha[i]), load(values + d)));
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
      int64_t begin[kMaxRows], end[kMaxRows];
      float alpha[kMaxRows];
      bool whole = true;
      for (int64_t i = 0; i < rows; i++) {
        int64_t first = h.visible.first(position(row + i)) - block * kBlock;
        begin[i] = first > 0 ? first : 0;
        end[i] = min64(position(row + i) - block * kBlock + 1, kBlock);
        whole = whole && begin[i] == 0 && end[i] == kBlock;
        if (begin[i] >= end[i]) continue;
        if (!h.scores.plain())
          h.scores.shape(scores + i * kBlock, kBlock, block * kBlock, position(row + i), head(row + i), relative(row + i));
        alpha[i] = soften(row + i, scores + i * kBlock, begin[i], end[i]);
      }
      if (whole) add_values(row, rows, scores, alpha, 0, kBlock);
      for (int64_t i = 0; i < rows && !whole; i++)
        if (begin[i] < end[i]) add_values(row + i, 1, scores + i * kBlock, alpha + i, begin[i], end[i]);
    }
  }

  void merge_chunk() const {
    for (int64_t row = 0; row < row_tiles.rows; row++) {
      if (l[row] == 0.0f) continue;  // nothing visible: a visible maximum contributes 1
      float m_new = m_total[row] > m[row] ? m_total[row] : m[row];
      float before = power(m_total[row] - m_new), now = power(m[row] - m_new);
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
      int64_t chunk_end = (block / blocks_per_chunk + 1) * blocks_per_chunk;
      clear(m, l, o);
      for (; block < chunk_end && block <= last_block; block++) attend_block(block);
      merge_chunk();
    }
    for (int64_t row = 0; row < row_tiles.rows; row++) {
      // a sink is one more key, without a value; where it dwarfs all others, infinity makes a row of zeros
      if (h.scores.sinks) l_total[row] = l_total[row] + power(h.scores.sinks[head(row)] - m_total[row]);
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
