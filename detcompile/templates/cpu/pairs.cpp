// Probe: does this CPU's dot product of bfloat16 pairs round like two flushed multiply-adds, high halves first? Covers edge values
// and random values near the smallest normal, near each other, and of any kind.
#include "probe.h"

namespace {

constexpr int kRandomVectors = 1 << 15;

// not inlined, so that nothing moves out of an enclosing FlushSubnormals
__attribute__((noinline)) void link(const float* a, const float* b, const float* c, float* out) {
  store(out, fma_flushed(load(a), load(b), load(c)));
}

int64_t faults(const uint32_t a[kLanes], const uint32_t b[kLanes], const uint32_t c[kLanes]) {
  float words[2][kLanes], halves[4][kLanes], start[kLanes], expected[kLanes], got[kLanes];
  for (int i = 0; i < kLanes; i++) {
    words[0][i] = bits_to_float(a[i]);
    words[1][i] = bits_to_float(b[i]);
    start[i] = bits_to_float(c[i]);
    halves[0][i] = bits_to_float(a[i] & 0xffff0000u);
    halves[1][i] = bits_to_float(b[i] & 0xffff0000u);
    halves[2][i] = bits_to_float(a[i] << 16);
    halves[3][i] = bits_to_float(b[i] << 16);
  }
  store(got, dot_pairs(load(words[0]), load(words[1]), load(start)));
  {
    FlushSubnormals flush(true);
    link(halves[0], halves[1], start, expected);
    link(halves[2], halves[3], expected, expected);
  }
  return differing(got, expected, kLanes);
}

constexpr uint32_t kStarts[] = {0,          0x80000000, 1,          0x807fffff, 0x00800000, 0x80800000, 0x00800001, 0x01000001,
                                0x3f800000, 0xbf800001, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x33800000};

int64_t edge_faults() {
  int64_t count = 0;
  for (uint32_t a_high : kEdges)
    for (uint32_t a_low : kEdges)
      for (uint32_t b_high : kEdges)
        for (uint32_t b_low : kEdges) {
          uint32_t a[kLanes], b[kLanes];
          for (int i = 0; i < kLanes; i++) a[i] = a_high << 16 | a_low, b[i] = b_high << 16 | b_low;
          count += faults(a, b, kStarts);
        }
  return count;
}

int64_t random_faults() {
  Random random;
  int64_t count = 0;
  for (int vector = 0; vector < 3 * kRandomVectors; vector++) {
    uint32_t a[kLanes], b[kLanes], c[kLanes];
    for (int i = 0; i < kLanes; i++) {
      if (vector % 3 == 0) {  // products and starts around 2^-126
        a[i] = random.bf16(50, 12) << 16 | random.bf16(50, 12);
        b[i] = random.bf16(60, 30) << 16 | random.bf16(60, 30);
        c[i] = (random.next() & 0x807fffffu) | random.next() % 4 << 23;
      } else if (vector % 3 == 1) {  // sums that cancel and round
        a[i] = random.bf16(120, 14) << 16 | random.bf16(120, 14);
        b[i] = random.bf16(120, 14) << 16 | random.bf16(120, 14);
        c[i] = (random.next() & 0x807fffffu) | (110 + random.next() % 40) << 23;
      } else {
        a[i] = random.next();
        b[i] = random.next();
        c[i] = random.next();
      }
    }
    count += faults(a, b, c);
  }
  return count;
}

}  // namespace

// -1 without the instruction
EXPORT int64_t detcompile_pair_faults() { return kHasPairs ? edge_faults() + random_faults() : -1; }
