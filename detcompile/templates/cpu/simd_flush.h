// FlushSubnormals on x86: while it lives, subnormal operands and results of this thread's AVX arithmetic count as zeros.
// A compiler knows nothing of that: what is to be flushed belongs into functions that are not inlined into its scope.
#pragma once

#include <immintrin.h>

namespace {

class FlushSubnormals {
 public:
  explicit FlushSubnormals(bool wanted) : before_(_mm_getcsr()) {
    if (wanted) _mm_setcsr(before_ | 0x8040);  // FTZ and DAZ
  }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned before_;
};

}  // namespace
