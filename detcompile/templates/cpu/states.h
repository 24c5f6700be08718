// The state of each sequence in a packed step, checked before anything is written.
#pragma once

#include "distinct.h"
#include "simd.h"

namespace {

enum StateFault : int64_t { kStatesFine = 0, kBadSequences = 1, kBadLength = 2, kBadSlot = 3, kSameSlot = 4 };

// slots[S]: -1 starts from zero and writes nothing. cu_seqlens[S + 1] and seq_lens[S] as in StepInputs.
struct StateSteps {
  const int32_t* slots;
  const int32_t* cu_seqlens;
  const int32_t* seq_lens;
  int64_t T, S, num_slots;

  int64_t first(int64_t s) const { return cu_seqlens[s]; }
  int64_t count(int64_t s) const { return int64_t(cu_seqlens[s + 1]) - cu_seqlens[s]; }
  bool continues(int64_t s) const { return slots[s] >= 0 && seq_lens[s] > count(s); }

  StateFault check(int64_t* where) const {
    for (int64_t s = 0; s < S; s++) {
      *where = s;
      if ((s == 0 && cu_seqlens[0] != 0) || count(s) < 0 || cu_seqlens[s + 1] > T) return kBadSequences;
      if (seq_lens[s] < count(s)) return kBadLength;
      if (slots[s] < -1 || slots[s] >= num_slots) return kBadSlot;
    }
    *where = first_repeat(slots, S, num_slots);
    return *where < 0 ? kStatesFine : kSameSlot;
  }

  // Zeros in the rows of out past the last sequence
  void clear_padding(void* out, int64_t row_bytes) const {
    int64_t used = S ? cu_seqlens[S] : 0, bytes = (T - used) * row_bytes;
    if (bytes > 0) std::memset(static_cast<char*>(out) + used * row_bytes, 0, bytes);
  }
};

}  // namespace
