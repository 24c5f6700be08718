// Attention of whole packed sequences, and its gradients.
//
// Forward: attention_tile.h, with contiguous keys. Backward, for each query head and sequence, float32 inside:
//   P  = exp2((score - lse) * c), 0 where a key is not visible; dP = g . v; both products as in the forward, in chains of 128
//   dS = P * (dP - delta), times 1 - tanh^2 with a soft cap; delta = the sum of g * out as Row(Dv)
// P and dS are rounded to the dtype of the operands. Then, in the orders Keys and Queries:
//   dq = scale * (dS . k) over keys; dv = P . g and dk = scale * (dS . q) over queries
//
// Legend: T tokens, S sequences, Hq Hkv heads, D Dv head dims, n tokens of a sequence. All tensors are contiguous.
#include "attention_tile.h"
#include "rowsum.h"

namespace {

constexpr int64_t kQueries = 64, kKeys = 128;  // of a tile; kQueries affects no bit, kKeys is orders.Keys.block

struct Given {
  const char *g, *q, *k, *v, *out;
  const float* lse;
  const int32_t* cu_seqlens;
  char *dq, *dk, *dv;
  float* sink_rows;  // [T, Hq], or null
  int64_t T, S, Hq, Hkv, D, Dv;
  Visible visible;
  Scores scores;
  float scale;  // factor of a product in a score, without the soft cap
  int32_t dtype;
};

int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// rows are columns of b, `Stride` apart
template <int... I>
BlockKernel turned_kernel(int64_t rows, std::integer_sequence<int, I...>) {
  static const BlockKernel table[] = {fma_block<I + 1, kPanelVecs, 1, kKeys>...};
  return table[rows - 1];
}

// One sequence and KV head, whose query heads are processed in turn
struct Gradients {
  const Given& a;
  int64_t first, n, kv_head, D, Dv, keys;
  std::vector<float> k_columns, v_columns, k_rows, q_rows, g_rows, dk_head, dv_head, dk, dv, delta;
  std::vector<float> packed_q, packed_g, dq, block_sum, p, ds, chain, factor;

  Gradients(const Given& given, int64_t sequence, int64_t head)
      : a(given), first(given.cu_seqlens[sequence]), n(given.cu_seqlens[sequence + 1] - first), kv_head(head),
        D(padded(a.D, kWidth)), Dv(padded(a.Dv, kWidth)), keys(padded(n, kKeys)),
        k_columns(a.D * keys), v_columns(a.Dv * keys), k_rows(keys * D), q_rows(n * D), g_rows(n * Dv), dk_head(keys * D),
        dv_head(keys * Dv), dk(keys * D), dv(keys * Dv), delta(n), packed_q(kQueries * a.D), packed_g(kQueries * a.Dv),
        dq(kQueries * D), block_sum(kQueries * D), p(kQueries * kKeys), ds(kQueries * kKeys), chain(kQueries * kKeys),
        factor(kKeys) {}

  int64_t place(int64_t token, int64_t heads, int64_t head, int64_t width) const { return ((first + token) * heads + head) * width; }

  void load_rows(const char* source, int64_t heads, int64_t head, int64_t width, int64_t stride, float* rows) const {
    for (int64_t t = 0; t < n; t++) load_row(rows + t * stride, source, a.dtype, place(t, heads, head, width), width);
  }
  void turn(const float* rows, int64_t width, int64_t stride, float* columns) const {
    for (int64_t t = 0; t < n; t++)
      for (int64_t d = 0; d < width; d++) columns[d * keys + t] = rows[t * stride + d];
  }
  void store_rows(char* target, int64_t heads, int64_t head, int64_t width, int64_t stride, int64_t begin, int64_t count,
                  const float* rows, float scale) const {
    for (int64_t t = 0; t < count; t++)
      for (int64_t d = 0; d < width; d += kLanes)
        store_as(target, a.dtype, place(begin + t, heads, head, width) + d, load_some(rows + t * stride + d, width - d) * splat(scale),
                 width - d);
  }

  void run() {
    load_rows(a.k, a.Hkv, kv_head, a.D, D, k_rows.data());
    turn(k_rows.data(), a.D, D, k_columns.data());
    load_rows(a.v, a.Hkv, kv_head, a.Dv, Dv, g_rows.data());  // temporarily
    turn(g_rows.data(), a.Dv, Dv, v_columns.data());
    int64_t group = a.Hq / a.Hkv;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
      run_head(head);
      add_head(dk, dk_head, head % group == 0);
      add_head(dv, dv_head, head % group == 0);
    }
    store_rows(a.dk, a.Hkv, kv_head, a.D, D, 0, n, dk.data(), a.scale);
    store_rows(a.dv, a.Hkv, kv_head, a.Dv, Dv, 0, n, dv.data(), 1.0f);
  }

  static void add_head(std::vector<float>& total, const std::vector<float>& head, bool is_first) {
    for (size_t i = 0; i < total.size(); i += kLanes)
      store(&total[i], is_first ? load(&head[i]) : load(&total[i]) + load(&head[i]));
  }

  void run_head(int64_t head) {
    load_rows(a.q, a.Hq, head, a.D, D, q_rows.data());
    load_rows(a.g, a.Hq, head, a.Dv, Dv, g_rows.data());
    std::vector<float> row(Dv);
    for (int64_t t = 0; t < n; t++) {
      load_row(row.data(), a.out, a.dtype, place(t, a.Hq, head, a.Dv), a.Dv);
      for (int64_t d = 0; d < a.Dv; d += kLanes) store(&row[d], load(&row[d]) * load(&g_rows[t * Dv + d]));
      delta[t] = sum_row(row.data(), a.Dv, identity);
      if (a.sink_rows) {
        float sink[kLanes], lse = a.lse[(first + t) * a.Hq + head];
        store(sink, exp2((splat(a.scores.sinks[head]) - splat(lse)) * splat(a.scores.c)));
        a.sink_rows[(first + t) * a.Hq + head] = -sink[0] * delta[t];
      }
    }
    std::fill(dk_head.begin(), dk_head.end(), 0.0f);
    std::fill(dv_head.begin(), dv_head.end(), 0.0f);
    for (int64_t query = 0; query < n; query += kQueries) run_queries(head, query, min64(kQueries, n - query));
  }

  void run_queries(int64_t head, int64_t query, int64_t count) {
    RowTiles tiles(count);
    for (int64_t tile = 0; tile < tiles.count; tile++) {
      int64_t row = tiles.begin(tile), rows = tiles.begin(tile + 1) - row;
      pack(q_rows.data(), query + row, rows, a.D, D, &packed_q[row * a.D]);
      pack(g_rows.data(), query + row, rows, a.Dv, Dv, &packed_g[row * a.Dv]);
    }
    std::fill(dq.begin(), dq.end(), 0.0f);
    int64_t lowest = a.visible.first(query);
    for (int64_t key = (query + count - 1) / kKeys * kKeys; key >= 0 && key + kKeys > lowest; key -= kKeys) {
      multiply(tiles, packed_q.data(), k_columns.data(), key, a.D, p.data());
      multiply(tiles, packed_g.data(), v_columns.data(), key, a.Dv, ds.data());
      for (int64_t row = 0; row < count; row++) soften(head, query + row, key, &p[row * kKeys], &ds[row * kKeys]);
      int64_t num_keys = min64(kKeys, n - key);
      for (int64_t tile = 0; tile < tiles.count; tile++) {
        int64_t row = tiles.begin(tile), rows = tiles.begin(tile + 1) - row;
        for (int64_t d = 0; d < D; d += kWidth)
          spread_kernel<kPanelVecs, kKeys>(rows)(&ds[row * kKeys], &k_rows[key * D + d], D, num_keys, &block_sum[row * D + d], D, true);
      }
      // a query before the block adds nothing, not even zeros
      for (int64_t row = query < key ? key - query : 0; row < count; row++)
        for (int64_t d = 0; d < D; d += kLanes)
          store(&dq[row * D + d], load(&dq[row * D + d]) + load(&block_sum[row * D + d]));
      add_turned(p.data(), g_rows.data(), Dv, query, count, key, num_keys, dv_head.data());
      add_turned(ds.data(), q_rows.data(), D, query, count, key, num_keys, dk_head.data());
    }
    store_rows(a.dq, a.Hq, head, a.D, D, query, count, dq.data(), a.scale);
  }

  static void pack(const float* source, int64_t begin, int64_t rows, int64_t width, int64_t stride, float* packed) {
    for (int64_t d = 0; d < width; d++)
      for (int64_t i = 0; i < rows; i++) packed[d * rows + i] = source[(begin + i) * stride + d];
  }

  void multiply(const RowTiles& tiles, const float* packed, const float* columns, int64_t key, int64_t width, float* out) {
    for (int64_t tile = 0; tile < tiles.count; tile++) {
      int64_t row = tiles.begin(tile), rows = tiles.begin(tile + 1) - row;
      for (int64_t d = 0; d < width; d += kChain) {
        float* target = d == 0 ? out + row * kKeys : chain.data();
        for (int64_t j = 0; j < kKeys; j += kWidth)
          packed_kernel<kPanelVecs>(rows)(packed + row * width + d * rows, columns + d * keys + key + j, keys,
                                          min64(kChain, width - d), target + j, kKeys, true);
        for (int64_t i = 0; i < rows * kKeys && d > 0; i += kLanes)
          store(out + row * kKeys + i, load(out + row * kKeys + i) + load(&chain[i]));
      }
    }
  }

  // products with the keys -> P, and with the values -> dS, in place
  void soften(int64_t head, int64_t query, int64_t key, float* product, float* grad) {
    bool capped = a.scores.cap != 0.0f;
    for (int64_t j = 0; j < kKeys && capped; j += kLanes) {
      Vec tanh = tanh_of(load(product + j) * splat(a.scores.scale));
      store(&factor[j], splat(1.0f) - tanh * tanh);
    }
    a.scores.shape(product, kKeys, key, query, head, nullptr);
    float lse = a.lse[(first + query) * a.Hq + head];
    int64_t begin = a.visible.first(query) - key, end = query + 1 - key;
    for (int64_t j = 0; j < kKeys; j += kLanes) {
      Vec weight = exp2((load(product + j) - splat(lse)) * splat(a.scores.c));
      Vec d = weight * (load(grad + j) - splat(delta[query]));
      if (capped) d = d * load(&factor[j]);
      store(product + j, round_to(a.dtype, seen(weight, begin - j, end - j)));
      store(grad + j, round_to(a.dtype, seen(d, begin - j, end - j)));
    }
  }
  static Vec seen(Vec value, int64_t begin, int64_t end) {
    value = blend_first(end, value, splat(0.0f));
    return begin > 0 ? blend_first(begin, splat(0.0f), value) : value;
  }

  void add_turned(const float* weights, const float* rows, int64_t width, int64_t query, int64_t count, int64_t key,
                  int64_t num_keys, float* sums) const {
    RowTiles tiles(num_keys);
    for (int64_t tile = 0; tile < tiles.count; tile++) {
      int64_t j = tiles.begin(tile), height = tiles.begin(tile + 1) - j;
      for (int64_t d = 0; d < width; d += kWidth)
        turned_kernel(height, std::make_integer_sequence<int, kMaxRows>())(
            weights + j, rows + query * width + d, width, count, sums + (key + j) * width + d, width, false);
    }
  }
};

// return the index of the first invalid sequence, or -1
int64_t misplaced(const int32_t* cu_seqlens, int64_t S, int64_t T) {
  if (cu_seqlens[0] != 0) return 0;
  for (int64_t s = 0; s < S; s++)
    if (cu_seqlens[s + 1] < cu_seqlens[s] || cu_seqlens[s + 1] > T) return s;
  return -1;
}

}  // namespace

// q [T, Hq, D], k v [T, Hkv, D | Dv], out [T, Hq, Dv], lse [T, Hq]. sizes[9]: T S Hq Hkv D Dv window chunk attention_chunk; then as
// detcompile_paged_attention. Returns the index of an invalid sequence, without writing anything; else -1.
EXPORT int64_t detcompile_packed_attention(const char* q, const char* k, const char* v, const int32_t* cu_seqlens, char* out,
                                           float* lse, const int64_t* sizes, const float* scalars, const float* slopes,
                                           const float* sinks, const float* relative, int64_t extent, int32_t dtype,
                                           int32_t num_threads) {
  int64_t T = sizes[0], S = sizes[1], Hq = sizes[2], Hkv = sizes[3], D = sizes[4], Dv = sizes[5];
  if (int64_t bad = misplaced(cu_seqlens, S, T); bad >= 0) return bad;
  Heads h{Hq, Hkv, D, Dv, Hq * D, D, Hq * Dv, Dv, Hkv * D, D, 0, Hkv * Dv, Dv, 0, 1, sizes[7], {sizes[6], sizes[8]},
          {scalars[0], scalars[1], scalars[2], slopes, sinks, extent}, Hq * extent, extent, dtype, dtype};
  std::vector<Sequence> sequences;
  int64_t bytes = item_size(dtype);
  for (int64_t s = 0; s < S; s++) {
    int64_t first = cu_seqlens[s], count = cu_seqlens[s + 1] - first;
    sequences.push_back({q + first * Hq * D * bytes, k + first * Hkv * D * bytes, v + first * Hkv * Dv * bytes,
                         out + first * Hq * Dv * bytes, nullptr, count, 0, relative ? relative + first * Hq * extent : nullptr,
                         lse + first * Hq});
  }
  attend(h, sequences, num_threads);
  int64_t used = cu_seqlens[S];
  if (used == T) return -1;
  std::memset(out + used * Hq * Dv * bytes, 0, (T - used) * Hq * Dv * bytes);
  std::memset(lse + used * Hq, 0, (T - used) * Hq * sizeof(float));
  return -1;
}

// g out [T, Hq, Dv], q dq [T, Hq, D], k dk [T, Hkv, D], v dv [T, Hkv, Dv], lse [T, Hq], sink_rows [T, Hq] or null. sizes[8]: T S Hq
// Hkv D Dv window attention_chunk. scalars[4]: the first three fields of Scores, as for shaped ones, and scale. Rows past the last
// sequence are not written. Returns as detcompile_packed_attention.
EXPORT int64_t detcompile_packed_attention_backward(const char* g, const char* q, const char* k, const char* v, const char* out,
                                                    const float* lse, const int32_t* cu_seqlens, char* dq, char* dk, char* dv,
                                                    float* sink_rows, const int64_t* sizes, const float* scalars,
                                                    const float* slopes, const float* sinks, int32_t dtype, int32_t num_threads) {
  Given given{g, q, k, v, out, lse, cu_seqlens, dq, dk, dv, sink_rows, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
              {sizes[6], sizes[7]}, {scalars[0], scalars[1], scalars[2], slopes, sinks, 0}, scalars[3],
              dtype};
  if (int64_t bad = misplaced(cu_seqlens, given.S, given.T); bad >= 0) return bad;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int64_t task = 0; task < given.S * given.Hkv; task++) Gradients(given, task / given.Hkv, task % given.Hkv).run();
  return -1;
}
