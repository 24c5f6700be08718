// Exact products of many tokens, by AMX tiles or AVX-512 VNNI. Weights are read in place.
//
// Legend: a block is 64 k; a tile of w is [16 features][64 k], one of x [16 quads of k][16 tokens][4], one of sums [16 features]
// [16 tokens] of int32, which hold 65536 terms; a panel is two tiles of features.
#pragma once

#include "../amx.h"
#include "product.h"

namespace exact {

constexpr int64_t kPanel = 32, kBlock = 64, kSums = kPanel * kLanes;

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
constexpr int64_t kFewestTokens = 2;  // fewer are faster without panels

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
inline void multiply_tiles(const int8_t* w, const int8_t* w_low, int64_t row, const char* x, const char* second, const int32_t*,
                           const int32_t*, int64_t count, int32_t* sums) {
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
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int64_t kFewestTokens = 9;

// -128 times the sums of x, for products with w + 128
inline Sums offset(const int32_t* sums_of_x) {
  return _mm512_sub_epi32(zero(), _mm512_slli_epi32(_mm512_loadu_si512(sums_of_x), 7));
}

// The same. Sums of eight features fill 16 registers. A block of their rows is copied, because rows of some lengths share L1
// sets, and that of the next eight is prefetched into L2. Inlined by GCC 12, it would keep x on the stack.
// sums_of_x, sums_of_second [16]: of the tokens' digits over these terms.
template <bool kSecond, bool kCross>
__attribute__((noinline)) void multiply_tiles(const int8_t* w, const int8_t* w_low, int64_t row, const char* x,
                                              const char* second, const int32_t* sums_of_x, const int32_t* sums_of_second,
                                              int64_t count, int32_t* sums) {
  constexpr int64_t kFeatures = 8;
  for (int64_t n = 0; n < kPanel; n += kFeatures, w += kFeatures * row, w_low += kFeatures * row) {
    const Sums start = offset(sums_of_x), start_of_second = kSecond ? offset(sums_of_second) : zero();
    Sums a[kFeatures], b[kFeatures];
    for (int64_t i = 0; i < kFeatures; i++)
      a[i] = start, b[i] = kCross ? _mm512_add_epi32(start, start_of_second) : start_of_second;
    for (int64_t k = 0; k < count; k += kBlock) {
      alignas(64) int32_t quads[2][kFeatures][kLanes];
      auto copy = [&](const int8_t* from, int32_t* to) {
        _mm512_store_si512(to, load_w(from, count - k));
        _mm_prefetch(from + kFeatures * row, _MM_HINT_T1);
      };
      for (int64_t i = 0; i < kFeatures; i++) {
        copy(w + i * row + k, quads[0][i]);
        if (kCross) copy(w_low + i * row + k, quads[1][i]);
      }
#pragma GCC unroll 1
      for (int64_t quad = 0; quad < kLanes; quad++) {
        const int64_t at = k * kLanes + quad * 64;
        const __m512i u = _mm512_loadu_si512(x + at), v = _mm512_loadu_si512((kSecond ? second : x) + at);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kFeatures; i++) {
          const __m512i high = _mm512_set1_epi32(quads[0][i][quad]);
          a[i] = add_products(a[i], u, high);
          if (kSecond) b[i] = add_products(b[i], v, high);
          if (kCross) b[i] = add_products(b[i], u, _mm512_set1_epi32(quads[1][i][quad]));
        }
      }
    }
    for (int64_t i = 0; i < kFeatures; i++) {
      _mm512_storeu_si512(sums + (n + i) * kLanes, a[i]);
      _mm512_storeu_si512(sums + kSums + (n + i) * kLanes, b[i]);
    }
  }
}
#else
constexpr int64_t kFewestTokens = INT64_MAX;
template <bool kSecond, bool kCross>
inline void multiply_tiles(const int8_t*, const int8_t*, int64_t, const char*, const char*, const int32_t*, const int32_t*, int64_t,
                           int32_t*) {}
#endif

// the tiles of x, [digits][tiles of tokens][blocks]; tokens past the last repeat it, and their sums are discarded
inline int64_t token_tiles(const Linear& p) { return p.T / kLanes; }
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

// out of a tile of tokens from m on and the panel from n on; total(i) is exact integer i of [features][tokens]
template <class Total>
inline void finish_tile(const Linear& p, int64_t m, int64_t n, Total total) {
  const int64_t tokens = min64(kLanes, p.M - m);
  if (p.totals) {
    for (int64_t j = 0; j < kPanel; j++)
      for (int64_t i = 0; i < tokens; i++) p.totals[(m + i) * p.N + n + j] = total(j * kLanes + i);
    return;
  }
  float scale[kLanes] = {};
  for (int64_t i = 0; i < tokens; i++) scale[i] = p.x_scale[m + i];
  for (int64_t first = 0; first < kPanel; first += kLanes) {
    alignas(64) float y[kLanes][kLanes];
    const char* rows[kLanes];
    for (int64_t j = 0; j < kLanes; j++) {
      rows[j] = reinterpret_cast<const char*>(y[j]);
      const float w_scale = p.w_scale[n + first + j];
      for (int64_t i = 0; i < kLanes; i++) y[j][i] = (float(total((first + j) * kLanes + i)) * scale[i]) * w_scale;
    }
    Vec turned[kLanes];
    transpose_words(rows, 0, turned);
    for (int64_t i = 0; i < tokens; i++)
      store(p.out + (m + i) * p.N + n + first, p.bias ? turned[i] + load(p.bias + n + first) : turned[i]);
  }
}

// the panel of features from n on, all tokens, K <= 65536. With one digit of x the second tile is the next tokens', with two
// the low digits'.
template <int kDigits, bool kCross>
inline void multiply_panel(const Linear& p, int64_t n, const char* packed) {
  const int64_t tiles = token_tiles(p), step = kDigits == 2 ? 1 : 2, to_second = kDigits == 2 ? tiles : 1;
  const int8_t* w = p.w + n * p.K;
  for (int64_t tile = 0; tile < tiles; tile += step) {
    const bool two = kDigits == 2 || tile + 1 < tiles;
    const char* x = packed + tile * tile_bytes(p);
    const int32_t* sums_of_x = p.sums_of_x + tile * kLanes;
    alignas(64) int32_t sums[2][kSums];
    auto kernel = two ? multiply_tiles<true, kCross> : multiply_tiles<false, kCross>;
    kernel(w, w + p.N * p.K, p.K, x, x + to_second * tile_bytes(p), sums_of_x, sums_of_x + to_second * kLanes, p.K, sums[0]);
    if (kDigits == 2) {
      finish_tile(p, tile * kLanes, n, [&](int64_t i) { return 256 * int64_t(sums[0][i]) + sums[1][i]; });
    } else {
      finish_tile(p, tile * kLanes, n, [&](int64_t i) { return sums[0][i]; });
      if (two) finish_tile(p, (tile + 1) * kLanes, n, [&](int64_t i) { return sums[1][i]; });
    }
  }
}

}  // namespace exact
