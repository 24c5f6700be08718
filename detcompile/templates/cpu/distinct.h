// Check that the places a step writes are distinct: otherwise threads would decide which token is written last.
#pragma once

#include <cstdint>
#include <vector>

namespace {

// Return the index of the first place that repeats an earlier one, or -1. Places are below `bound`; negative ones are ignored.
template <class T>
int64_t first_repeat(const T* places, int64_t count, int64_t bound) {
  static thread_local std::vector<uint64_t> taken;  // one bit per place; all are 0 between calls
  if (count < 2) return -1;
  if (int64_t(taken.size()) <= bound / 64) taken.resize(bound / 64 + 1);
  int64_t repeat = -1, seen = 0;
  for (; seen < count && repeat < 0; seen++) {
    if (places[seen] < 0) continue;
    uint64_t bit = uint64_t{1} << places[seen] % 64, &bits = taken[places[seen] / 64];
    if (bits & bit) repeat = seen;
    bits |= bit;
  }
  for (int64_t i = 0; i < seen; i++)
    if (places[i] >= 0) taken[places[i] / 64] = 0;
  return repeat;
}

}  // namespace
