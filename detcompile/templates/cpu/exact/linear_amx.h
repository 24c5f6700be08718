// Exact products by AMX tiles of int8. Weights are read in place.
//
// Legend: a block is 64 k; a tile of w is [16 features][64 k], one of x [16 quads of k][16 tokens][4], one of sums [16 features]
// [16 tokens] of int32, which hold a part of 65536 terms; a panel is two tiles of features.
#pragma once

#include "../amx.h"
#include "product.h"

namespace exact {

constexpr int64_t kPanel = 32, kBlock = 64, kSums = kPanel * kLanes;

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
constexpr bool kHasInt8Tiles = true;

// Tiles of sums 0 and 1 += w * x, 2 and 3 += w * second, all over blocks of k; if kCross, 2 and 3 += w_low * x.
// Rows of w are `row` bytes apart.
template <bool kSecond, bool kCross>
inline void add_blocks(const int8_t* w, const int8_t* w_low, int64_t row, const char* x, const char* second, int64_t blocks) {
  for (int64_t block = 0; block < blocks; block++, w += kBlock, w_low += kBlock, x += kTileBytes, second += kTileBytes) {
    _tile_loadd(6, x, 64);
    _tile_loadd(4, w, row);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, w + kLanes * row, row);
    _tile_dpbssd(1, 5, 6);
    if (kSecond) {
      _tile_loadd(7, second, 64);
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
    if (kCross) {
      _tile_loadd(4, w_low, row);
      _tile_dpbssd(2, 4, 6);
      _tile_loadd(5, w_low + kLanes * row, row);
      _tile_dpbssd(3, 5, 6);
    }
  }
}

// sums [2][features][tokens] of a panel over `count` terms of w from w[0] on, and of w_low if there is one
template <bool kSecond, bool kCross>
inline void multiply_tiles(const int8_t* w, const int8_t* w_low, int64_t row, const char* x, const char* second, int64_t count,
                           int32_t* sums) {
  asm volatile("" ::: "memory");  // the compiler does not know that tile loads read earlier stores
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t whole = count / kBlock, rest = count % kBlock;
  add_blocks<kSecond, kCross>(w, w_low, row, x, second, whole);
  if (rest) {
    alignas(64) int8_t last[2][kPanel * kBlock] = {};
    for (int64_t i = 0; i < kPanel; i++) {
      std::memcpy(last[0] + i * kBlock, w + whole * kBlock + i * row, rest);
      if (kCross) std::memcpy(last[1] + i * kBlock, w_low + whole * kBlock + i * row, rest);
    }
    asm volatile("" ::: "memory");
    add_blocks<kSecond, kCross>(last[0], last[1], kBlock, x + whole * kTileBytes, second + whole * kTileBytes, 1);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSums / 2, 64);
  _tile_stored(2, sums + kSums, 64);
  _tile_stored(3, sums + kSums * 3 / 2, 64);
}
#else
constexpr bool kHasInt8Tiles = false;
template <bool kSecond, bool kCross>
inline void multiply_tiles(const int8_t*, const int8_t*, int64_t, const char*, const char*, int64_t, int32_t*) {}
#endif

// the tiles of x, [digits][tiles of tokens][blocks]; tokens past the last repeat it, and their sums are discarded
inline int64_t token_tiles(const Linear& p) { return (p.M + kLanes - 1) / kLanes; }
inline int64_t tile_bytes(const Linear& p) { return p.P / kBlock * kTileBytes; }
inline void pack_tile(const Linear& p, int64_t index, char* out) {
  const char* rows[kLanes];
  for (int64_t i = 0; i < kLanes; i++)
    rows[i] = reinterpret_cast<const char*>(p.x) +
              (index / token_tiles(p) * p.M + min64(index % token_tiles(p) * kLanes + i, p.M - 1)) * p.P;
  for (int64_t k = 0; k < p.P; k += kBlock, out += kTileBytes) {
    Vec words[kLanes];
    transpose_words(rows, k, words);
    for (int i = 0; i < kLanes; i++) store(reinterpret_cast<float*>(out) + i * kLanes, words[i]);
  }
}

// out of a tile of tokens from m on and the panel from n on, from their exact integers [features][tokens]
inline void finish_tile(const Linear& p, int64_t m, int64_t n, const int64_t* t) {
  const int64_t tokens = min64(kLanes, p.M - m);
  if (p.totals) {
    for (int64_t j = 0; j < kPanel; j++)
      for (int64_t i = 0; i < tokens; i++) p.totals[(m + i) * p.N + n + j] = t[j * kLanes + i];
    return;
  }
  float scale[kLanes] = {};
  for (int64_t i = 0; i < tokens; i++) scale[i] = p.x_scale[m + i];
  for (int64_t first = n; first < n + kPanel; first += kLanes) {
    alignas(64) float y[kLanes][kLanes];
    const char* rows[kLanes];
    for (int64_t j = 0; j < kLanes; j++, t += kLanes) {
      rows[j] = reinterpret_cast<const char*>(y[j]);
      for (int64_t i = 0; i < kLanes; i++) y[j][i] = (float(t[i]) * scale[i]) * p.w_scale[first + j];
      if (p.bias)
        for (int64_t i = 0; i < kLanes; i++) y[j][i] = y[j][i] + p.bias[first + j];
    }
    Vec turned[kLanes];
    transpose_words(rows, 0, turned);
    for (int64_t i = 0; i < tokens; i++) store(p.out + (m + i) * p.N + first, turned[i]);
  }
}

// the panel of features from n on, all tokens. With one digit of x the second tile is the next tokens', with two the low digits'.
template <int kDigits, bool kCross>
inline void multiply_panel(const Linear& p, int64_t n, const char* packed) {
  const int64_t tiles = token_tiles(p), step = kDigits == 2 ? 1 : 2;
  for (int64_t tile = 0; tile < tiles; tile += step) {
    const bool two = kDigits == 2 || tile + 1 < tiles;
    const char *x = packed + tile * tile_bytes(p), *second = x + (kDigits == 2 ? tiles : 1) * tile_bytes(p);
    int64_t t[2][kSums] = {};
    for (int64_t k = 0; k < p.K; k += kLongest) {
      alignas(64) int32_t sums[2][kSums];
      const int8_t* w = p.w + n * p.K + k;
      const int64_t from = k / kBlock * kTileBytes, count = min64(p.K - k, kLongest);
      auto kernel = two ? multiply_tiles<true, kCross> : multiply_tiles<false, kCross>;
      kernel(w, w + p.N * p.K, p.K, x + from, second + from, count, sums[0]);
      for (int64_t i = 0; i < kSums; i++)
        if (kDigits == 2) t[0][i] += 256 * int64_t(sums[0][i]) + sums[1][i];
        else t[0][i] += sums[0][i], t[1][i] += sums[1][i];
    }
    finish_tile(p, tile * kLanes, n, t[0]);
    if (kDigits == 1 && two) finish_tile(p, (tile + 1) * kLanes, n, t[1]);
  }
}

}  // namespace exact
