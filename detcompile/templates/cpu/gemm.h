// The inner loops of matmul.cpp: operands packed as 32-bit words, and the register blocks that multiply them.
//
// A word is one float, or a pair of bfloat16 with the earlier k in the high half. The dot product of pairs takes that one first,
// so its chain equals that of fma_flushed() over ascending k.
#pragma once

#include <cstdlib>
#include <utility>

#include "tile.h"

namespace {

constexpr int64_t kPanelWidth = kPanelVecs * kLanes;
constexpr int64_t kOverrun = 32;  // words that packing may write past the last one
constexpr int kFewRows = 4;       // up to this many tokens (one tile) packing w would cost more than the product
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

// 32-bit units of sixteen rows -> words
template <class T, bool Pairs, class Take>
inline void take_words(Vec unit, Take take) {
  if constexpr (sizeof(T) == 4) {
    take(unit);
  } else if constexpr (Pairs) {
    take(swap_halves(unit));
  } else {
    take(low_half(unit, T{}));
    take(high_half(unit, T{}));
  }
}

// out[word * stride + lane] = words of rows[lane], from num_k elements; with an odd count the last is paired with `pad`
template <class T, bool Pairs>
inline void pack_columns(const T* const rows[kLanes], int64_t num_k, float* out, int64_t stride, T pad) {
  constexpr int64_t per_block = kLanes * 4 / sizeof(T);
  Vec units[kLanes];
  for (int64_t k = 0; k < num_k; k += per_block) {
    if (k + per_block <= num_k) {
      transpose_words(reinterpret_cast<const char* const*>(rows), k * int64_t(sizeof(T)), units);
    } else {
      alignas(64) T tail[kLanes][per_block];
      const char* tails[kLanes];
      for (int lane = 0; lane < kLanes; lane++) {
        for (int64_t i = 0; i < per_block; i++) tail[lane][i] = k + i < num_k ? rows[lane][k + i] : pad;
        tails[lane] = reinterpret_cast<const char*>(tail[lane]);
      }
      transpose_words(tails, 0, units);
    }
    for (int i = 0; i < kLanes; i++)
      take_words<T, Pairs>(units[i], [&](Vec word) {
        store(out, word);
        out += stride;
      });
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

// The same for sixteen features, straight from elements [begin, begin + num_k) of their rows of w
template <class T, class Link, int Rows>
inline void multiply_rows(const float* a, const T* const rows[kLanes], int64_t begin, int64_t num_k, float* c) {
  constexpr int64_t per_block = kLanes * 4 / sizeof(T), per_word = Link::pairs ? 2 : 1;
  Vec sum[Rows];
  for (int i = 0; i < Rows; i++) sum[i] = chain_start<Link>(c + i * kPanelWidth);
  auto take = [&](Vec word) {
    for (int i = 0; i < Rows; i++) sum[i] = Link::link(splat(a[i]), word, sum[i]);
    a += Rows;
  };
  int64_t k = begin, end = begin + num_k;
  for (; k + per_block <= end; k += per_block) {
    Vec units[kLanes];
    transpose_words(reinterpret_cast<const char* const*>(rows), k * int64_t(sizeof(T)), units);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) take_words<T, Link::pairs>(units[i], take);
  }
  if (k < end) {
    alignas(64) float tail[kOverrun * kLanes];
    const T* rest[kLanes];
    for (int lane = 0; lane < kLanes; lane++) rest[lane] = rows[lane] + k;
    pack_columns<T, Link::pairs>(rest, end - k, tail, kLanes, T{0});
    for (int64_t word = 0; word * per_word < end - k; word++) take(load(tail + word * kLanes));
  }
  for (int i = 0; i < Rows; i++) chain_end<Link>(c + i * kPanelWidth, sum[i]);
}

template <class Link>
using MultiplyPanel = void (*)(const float*, const float*, int64_t, float*);
template <class T>
using MultiplyRows = void (*)(const float*, const T* const*, int64_t, int64_t, float*);

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
