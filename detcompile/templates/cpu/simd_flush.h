// FlushSubnormals on x86: while it lives, subnormal operands and results of this thread's AVX arithmetic count as zeros.
// A compiler knows nothing of that: what is to be flushed belongs into functions that are not inlined into its scope.
#pragma once

#include <immintrin.h>

namespace {

class FlushSubnormals {
 public:
  explicit FlushSubnormals(bool wanted) : wanted_(wanted), before_(wanted ? _mm_getcsr() : 0) {
    if (wanted_) _mm_setcsr(before_ | 0x8040);  // FTZ and DAZ
  }
  ~FlushSubnormals() {
    if (wanted_) _mm_setcsr(before_);  // the pipeline drains: not where nothing changed
  }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  bool wanted_;
  unsigned before_;
};

}  // namespace
