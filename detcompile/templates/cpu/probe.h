// Shared by the probes of instructions: random bits, edge values, and the comparison of results.
#pragma once

#include "simd.h"

namespace {

struct Random {  // xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators", 2016)
  uint64_t state = 0x9e3779b97f4a7c15u;
  uint32_t next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return uint32_t((state * 0x2545f4914f6cdd1du) >> 32);
  }
  // random sign and fraction, biased exponent from [low, low + span)
  uint32_t bf16(uint32_t low, uint32_t span) { return (next() & 0x807f) | (low + next() % span) << 7; }
};

// bfloat16: zeros, subnormals, the smallest and largest normals and their neighbors, one and its neighbors, infinities, NaN
constexpr uint32_t kEdges[] = {0x0000, 0x8000, 0x0001, 0x807f, 0x0080, 0x8080, 0x0081, 0x1f80, 0x2000, 0x3f7f, 0x3f80,
                               0xbf80, 0x3f81, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0};

// count results with different bits; all NaN count as equal
inline int64_t differing(const float* got, const float* expected, int64_t count) {
  int64_t differ = 0;
  for (int64_t i = 0; i < count; i++) {
    bool both_nan = got[i] != got[i] && expected[i] != expected[i];
    differ += !both_nan && std::memcmp(&got[i], &expected[i], 4) != 0;
  }
  return differ;
}

}  // namespace
