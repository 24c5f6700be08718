// AMX tiles of bfloat16. In each block of 32 k the even k form one chain from +0 and the odd k another; their sum is added to the
// tile of sums. Subnormals are flushed throughout (Intel SDM, TDPBF16PS). Products are transposed: a tile of sums is [16 features]
// [16 tokens], so weights are read in place, 32 k of a row per cache line.
//
// Legend: a block is 32 k; a tile of w is [16 features][32 k], one of x [16 pairs of k][16 tokens][2], 1 KiB each.
#pragma once

#include "tile.h"

namespace {

constexpr int64_t kTileK = 32, kTileBytes = 1024, kTileFloats = kTileBytes / 4;
constexpr int kPanelTiles = 2;     // tiles of features
constexpr int kMostTokenTiles = 2;  // tiles of tokens that are multiplied at once

// Location of a panel's tiles of w, in bytes
struct WeightTiles {
  const char* start;
  int64_t row, tile, block;  // from one feature, tile of features and block of k to the next
};

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
constexpr bool kHasTiles = true;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kTileConfig;

// While it lives, this thread's eight tiles are configured as 16 rows of 64 bytes
class Tiles {
 public:
  Tiles() { _tile_loadconfig(&kTileConfig); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// c[feature tile][token tile] of a panel += w * x over blocks of k; from +0 if `fresh`. Token tiles of x are x_tile bytes apart.
// Weights are prefetched into L2 (their rows share L1 sets) `ahead` blocks before their use; 0: they are cached.
template <int TokenTiles>
inline void multiply_tiles(const WeightTiles& w, const char* x, int64_t x_tile, int64_t blocks, float* c, bool fresh,
                           int64_t ahead) {
  constexpr bool two = TokenTiles == 2;
  float* second = c + TokenTiles * kTileFloats;  // second tile of features
  asm volatile("" ::: "memory");  // the compiler does not know that tile loads read earlier stores
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) _tile_zero(2);
    if (two) _tile_zero(3);
  } else {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, second, 64);
    if (two) _tile_loadd(2, c + kTileFloats, 64);
    if (two) _tile_loadd(3, second + kTileFloats, 64);
  }
  const char* at = w.start;
  for (int64_t block = 0; block < blocks; block++, at += w.block, x += kTileBytes) {
    _tile_loadd(6, x, 64);
    _tile_loadd(4, at, w.row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, at + w.tile, w.row);
    _tile_dpbf16ps(1, 5, 6);
    if (two) {
      _tile_loadd(7, x + x_tile, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    if (ahead)
      for (int i = 0; i < kPanelTiles * kLanes; i++) _mm_prefetch(at + ahead * w.block + i * w.row, _MM_HINT_T1);
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, second, 64);
  if (two) _tile_stored(2, c + kTileFloats, 64);
  if (two) _tile_stored(3, second + kTileFloats, 64);
}
#else
constexpr bool kHasTiles = false;
struct Tiles {
  Tiles() {}
};
template <int TokenTiles>
inline void multiply_tiles(const WeightTiles&, const char*, int64_t, int64_t, float*, bool, int64_t) {}
#endif

// A missing k is -0 in x and +0 in w: adding their product leaves a chain unchanged.
constexpr bf16 kNoX{0x8000}, kNoW{0};

// 32 k of each of sixteen rows, the first num_k of which exist -> rows of 64 bytes
inline void pad_block(const bf16* const rows[kLanes], int64_t num_k, bf16 pad, bf16 out[kLanes][kTileK]) {
  for (int lane = 0; lane < kLanes; lane++)
    for (int64_t i = 0; i < kTileK; i++) out[lane][i] = i < num_k ? rows[lane][i] : pad;
}

// num_k of sixteen tokens -> their tiles of x
inline void pack_tokens(const bf16* const rows[kLanes], int64_t num_k, float* out) {
  for (int64_t k = 0; k < num_k; k += kTileK) {
    alignas(64) bf16 padded[kLanes][kTileK];
    const char* from[kLanes];
    const bf16* block[kLanes];
    for (int lane = 0; lane < kLanes; lane++) block[lane] = rows[lane] + k;
    bool whole = k + kTileK <= num_k;
    if (!whole) pad_block(block, num_k - k, kNoX, padded);
    for (int lane = 0; lane < kLanes; lane++) from[lane] = reinterpret_cast<const char*>(whole ? block[lane] : padded[lane]);
    Vec words[kLanes];
    transpose_words(from, 0, words);
    for (int i = 0; i < kLanes; i++, out += kLanes) store(out, words[i]);
  }
}

}  // namespace
