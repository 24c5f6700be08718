// Probe: does this CPU's tile product of bfloat16 sum in the order of amx.h? Covers edge values among zeros of one or both signs,
// and random values near the smallest normal, near each other, and of any kind.
#include "amx.h"
#include "probe.h"

namespace {

constexpr int kTilesOfAKind = 1 << 10;
constexpr int kKinds = 6;

struct Operands {
  alignas(64) bf16 w[kPanelTiles][kLanes][kTileK];
  alignas(64) bf16 x[kTileK / 2][kLanes][2];
  alignas(64) float c[kPanelTiles][kLanes][kLanes];  // initial values, flushed as by a chain of blocks
};

bf16 draw(Random& random, int kind, uint16_t sign) {
  if (kind == 0) return {uint16_t(random.bf16(50, 26))};   // products around 2^-126
  if (kind == 1) return {uint16_t(random.bf16(120, 14))};  // sums that cancel and round
  if (kind == 2) return {uint16_t(random.next())};
  constexpr int edges = sizeof kEdges / sizeof *kEdges, finite = edges - 3;
  if (kind == 3 && random.next() % 64) return {sign};  // chains of only -0 products
  if (random.next() % 4) return {uint16_t(random.next() & 0x8000)};
  return {uint16_t(kEdges[random.next() % (kind == 4 ? finite : edges)])};
}

float draw_start(Random& random, int kind) {
  uint32_t exponent = kind == 0 ? 1 + random.next() % 4 : kind == 1 ? 110 + random.next() % 40 : random.next() % 256;
  return bits_to_float(random.next() % 8 ? (random.next() & 0x807fffffu) | exponent << 23 : random.next() & 0x80000000u);
}

void fill(Random& random, int kind, Operands& o) {
  for (auto& tile : o.w)
    for (auto& row : tile)
      for (bf16& value : row) value = draw(random, kind, 0);
  for (auto& pair : o.x)
    for (auto& token : pair)
      for (bf16& value : token) value = draw(random, kind, 0x8000);
  for (auto& tile : o.c)
    for (auto& row : tile)
      for (float& value : row) value = draw_start(random, kind);
}

// c + (chain over the even k + chain over the odd k), for one feature and sixteen tokens; not inlined, so that nothing moves out
// of an enclosing FlushSubnormals
__attribute__((noinline)) void sum_block(const bf16 w[kTileK], const float x[kTileK][kLanes], const float* c, float* out) {
  Vec chains[2] = {splat(0.0f), splat(0.0f)};
  for (int k = 0; k < kTileK; k++) chains[k % 2] = fma_flushed(splat(to_float(w[k])), load(x[k]), chains[k % 2]);
  Vec one = splat(1.0f);
  store(out, fma_flushed(one, fma_flushed(one, chains[0], chains[1]), load(c)));
}

int64_t faults(const Operands& o) {
  alignas(64) float got[kPanelTiles][kLanes][kLanes], expected[kPanelTiles][kLanes][kLanes], x[kTileK][kLanes];
  std::memcpy(got, o.c, sizeof got);
  WeightTiles w{reinterpret_cast<const char*>(o.w), kTileK * 2, kTileBytes, 0};
  multiply_tiles<1>(w, reinterpret_cast<const char*>(o.x), 0, 1, got[0][0], false, 0);
  for (int k = 0; k < kTileK; k++)
    for (int token = 0; token < kLanes; token++) x[k][token] = to_float(o.x[k / 2][token][k % 2]);
  FlushSubnormals flush(true);
  for (int tile = 0; tile < kPanelTiles; tile++)
    for (int i = 0; i < kLanes; i++) sum_block(o.w[tile][i], x, o.c[tile][i], expected[tile][i]);
  return differing(got[0][0], expected[0][0], kPanelTiles * kTileFloats);
}

}  // namespace

// -1 without the instruction
EXPORT int64_t detcompile_tile_faults() {
  if (!kHasTiles) return -1;
  Tiles tiles;
  Random random;
  Operands operands;
  int64_t count = 0;
  for (int i = 0; i < kKinds * kTilesOfAKind; i++) {
    fill(random, i % kKinds, operands);
    count += faults(operands);
  }
  return count;
}
