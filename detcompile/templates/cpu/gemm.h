// The inner loops of matmul.cpp: operands packed as 32-bit words, and the register blocks that multiply them.
//
// A word is one float, or a pair of bfloat16 with the earlier k in the high half. The dot product of pairs takes that one first,
// so its chain equals that of fma_flushed() over ascending k.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tile.h"

namespace {

constexpr int64_t kPanelWidth = kPanelVecs * kLanes;
constexpr int64_t kOverrun = 32;  // words that packing may write past the last one
constexpr int kFewRows = kMaxRows < 8 ? 4 : 8;  // up to this many tokens (one tile) packing w would cost more than the product
constexpr int64_t kBytesAhead = 512;  // bytes of a row of w, with few tokens
static_assert(kFewRows <= kMaxRows);

// One link of a chain: c + a * b over the k of a word. If chains restart, each block of words has its own, from +0, which is added
// to the earlier ones; that sum starts at -0, as -0 + s is s. Other chains continue, from +0.
struct Fma {
  static constexpr bool pairs = false, restarts = false;
  static Vec link(Vec a, Vec b, Vec c) { return fma(a, b, c); }
};
struct BlockedFma : Fma {
  static constexpr bool restarts = true;
};
struct FlushedFma {
  static constexpr bool pairs = false, restarts = false;
  static Vec link(Vec a, Vec b, Vec c) { return fma_flushed(a, b, c); }
};
struct PairDot {
  static constexpr bool pairs = true, restarts = false;
  static Vec link(Vec a, Vec b, Vec c) { return dot_pairs(a, b, c); }
};

template <class Link>
inline void begin_chains(float* c, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(c + i, splat(Link::restarts ? -0.0f : 0.0f));
}
template <class Link>
inline Vec chain_start(const float* c) { return Link::restarts ? splat(0.0f) : load(c); }
template <class Link>
inline void chain_end(float* c, Vec sum) { store(c, Link::restarts ? load(c) + sum : sum); }

// words of sixteen rows, from elements [k, k + kLanes * 4 / sizeof(T)): take(word) is called for each, in order
template <class T, bool Pairs, class Take>
inline void take_words(const T* const rows[kLanes], int64_t k, Take take) {
  Vec units[kLanes];
  if constexpr (Pairs) transpose_pairs(rows, k * int64_t(sizeof(T)), units);
  else transpose_words(rows, k * int64_t(sizeof(T)), units);
  for (int i = 0; i < kLanes; i++) {
    if constexpr (sizeof(T) == 4 || Pairs) {
      take(units[i]);
    } else {
      take(low_half(units[i], T{}));
      take(high_half(units[i], T{}));
    }
  }
}

// out[word * stride + lane] = words of rows[lane], from num_k elements; with an odd count the last is paired with `pad`. `room`
// elements may be read, so that only the last leaf of a row needs a copy of its tail.
template <class T, bool Pairs>
inline void pack_columns(const T* const rows[kLanes], int64_t num_k, int64_t room, float* out, int64_t stride, T pad) {
  constexpr int64_t per_block = kLanes * 4 / sizeof(T);
  int64_t readable = Pairs && num_k % 2 != 0 ? num_k : room;
  auto take = [&](Vec word) {
    store(out, word);
    out += stride;
  };
  for (int64_t k = 0; k < num_k; k += per_block) {
    if (k + per_block <= readable) {
      take_words<T, Pairs>(rows, k, take);
    } else {
      alignas(64) T tail[kLanes][per_block];
      const T* tails[kLanes];
      for (int lane = 0; lane < kLanes; lane++) {
        std::fill(tail[lane], tail[lane] + per_block, pad);
        std::memcpy(tail[lane], rows[lane] + k, min64(num_k - k, per_block) * sizeof(T));
        tails[lane] = tail[lane];
      }
      take_words<T, Pairs>(tails, 0, take);
    }
  }
}

// Adds a block of words to the chain of c[i, n]. Layouts: a [word][Rows], b [word][kPanelWidth], c [Rows][kPanelWidth].
template <class Link, int Rows>
inline void multiply_panel(const float* a, const float* b, int64_t words, float* c) {
  Vec sum[Rows * kPanelVecs];  // stays in registers if every enclosing loop is unrolled early
#pragma GCC unroll 32
  for (int i = 0; i < Rows * kPanelVecs; i++) sum[i] = chain_start<Link>(c + i * kLanes);
  for (int64_t word = 0; word < words; word++) {
    __builtin_prefetch(a + (words + word) * Rows);  // the next tile, which follows this one
    Vec b_word[kPanelVecs];
#pragma GCC unroll 32
    for (int j = 0; j < kPanelVecs; j++) b_word[j] = load(b + word * kPanelWidth + j * kLanes);
#pragma GCC unroll 32
    for (int i = 0; i < Rows * kPanelVecs; i++)
      sum[i] = Link::link(splat(a[word * Rows + i / kPanelVecs]), b_word[i % kPanelVecs], sum[i]);
  }
#pragma GCC unroll 32
  for (int i = 0; i < Rows * kPanelVecs; i++) chain_end<Link>(c + i * kLanes, sum[i]);
}

// A panel's rows of w, for products with few rows of x
template <class T>
struct PanelRows {
  const T* rows[kPanelVecs][kLanes];
  int64_t row_end;  // elements from the first to the end of its row
  int64_t stride;   // elements between rows of the same place in this panel and in the next
};

// The same as multiply_panel, straight from elements [begin, begin + num_k) of a panel's rows of w. It prefetches weights into
// L2, at the end of a row those of the next panel: hardware prefetchers do not follow streams this short.
template <class T, class Link, int Rows>
inline void multiply_rows(const float* a, const PanelRows<T>& w, int64_t begin, int64_t num_k, float* c) {
  constexpr int64_t per_block = kLanes * 4 / sizeof(T), per_word = Link::pairs ? 2 : 1;
  Vec sum[Rows * kPanelVecs];
#pragma GCC unroll 32
  for (int i = 0; i < Rows * kPanelVecs; i++) sum[i] = chain_start<Link>(c + i * kLanes);
  int64_t k = begin, end = begin + num_k;
  for (; k + per_block <= end; k += per_block, a += per_block / per_word * Rows) {
    int64_t fetched = k + kBytesAhead / int64_t(sizeof(T));
    if (fetched >= w.row_end) fetched += w.stride - w.row_end;
#pragma GCC unroll 2
    for (int group = 0; group < kPanelVecs; group++) {
      for (int i = 0; i < kLanes; i++) __builtin_prefetch(w.rows[group][i] + fetched, 0, 2);
      int64_t word = 0;
      take_words<T, Link::pairs>(w.rows[group], k, [&](Vec value) {
        for (int i = group; i < Rows * kPanelVecs; i += kPanelVecs)
          sum[i] = Link::link(splat(a[word * Rows + i / kPanelVecs]), value, sum[i]);
        word++;
      });
    }
  }
  for (int group = 0; group < kPanelVecs && k < end; group++) {
    alignas(64) float tail[kOverrun * kLanes];
    const T* rest[kLanes];
    for (int lane = 0; lane < kLanes; lane++) rest[lane] = w.rows[group][lane] + k;
    pack_columns<T, Link::pairs>(rest, end - k, w.row_end - k, tail, kLanes, T{0});
    for (int64_t word = 0; word * per_word < end - k; word++)
      for (int i = group; i < Rows * kPanelVecs; i += kPanelVecs)
        sum[i] = Link::link(splat(a[word * Rows + i / kPanelVecs]), load(tail + word * kLanes), sum[i]);
  }
#pragma GCC unroll 32
  for (int i = 0; i < Rows * kPanelVecs; i++) chain_end<Link>(c + i * kLanes, sum[i]);
}

template <class Link>
using MultiplyPanel = void (*)(const float*, const float*, int64_t, float*);
template <class T>
using MultiplyRows = void (*)(const float*, const PanelRows<T>&, int64_t, int64_t, float*);

template <class Link, int... I>
inline MultiplyPanel<Link> panel_kernel(int64_t rows, std::integer_sequence<int, I...>) {
  static const MultiplyPanel<Link> table[] = {multiply_panel<Link, I + 1>...};
  return table[rows - 1];
}
template <class Link>
inline MultiplyPanel<Link> panel_kernel(int64_t rows) {
  return panel_kernel<Link>(rows, std::make_integer_sequence<int, kMaxRows>());
}

template <class T, class Link, int... I>
inline MultiplyRows<T> rows_kernel(int64_t rows, std::integer_sequence<int, I...>) {
  static const MultiplyRows<T> table[] = {multiply_rows<T, Link, I + 1>...};
  return table[rows - 1];
}
template <class T, class Link>
inline MultiplyRows<T> rows_kernel(int64_t rows) {
  return rows_kernel<T, Link>(rows, std::make_integer_sequence<int, kFewRows>());
}

}  // namespace
