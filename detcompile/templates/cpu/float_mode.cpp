// The floating-point mode of a step: rounding to nearest and subnormals kept, in the calling thread and in its OpenMP workers.
//
// The mode belongs to a thread, and new threads inherit it from the thread that starts them. So after a parallel region of two or
// more threads in the standard mode all threads of later regions have it, whatever their number: libgomp ends workers that a
// region does not need, and starts missing ones.
#include <atomic>
#include <cstdint>

#include "simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
extern "C" __attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);

namespace {

#if defined(__x86_64__)
constexpr uint64_t kMode = 0xe040;  // of MXCSR: flush to zero, rounding, denormals are zeros
inline uint64_t control() { return _mm_getcsr(); }
inline void set_control(uint64_t bits) { _mm_setcsr(uint32_t(bits)); }
#elif defined(__aarch64__)
constexpr uint64_t kMode = 0x7c80007;  // of FPCR: AHP, DN, FZ, RMode, FZ16; NEP, AH, FIZ
inline uint64_t control() {
  uint64_t bits;
  asm volatile("mrs %0, fpcr" : "=r"(bits));
  return bits;
}
inline void set_control(uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits)); }
#else
static_assert(FE_TONEAREST == 0, "the standard mode is no bits");
constexpr uint64_t kMode = ~uint64_t(0);
inline uint64_t control() { return uint64_t(std::fegetround()); }
inline void set_control(uint64_t bits) { std::fesetround(int(bits)); }
#endif

struct Thread {
  uint64_t before = 0;  // its previous mode bits; 0 is the standard mode
  // for callers only
  int depth = 0;                // nesting depth
  int covered = 0;              // threads that have the standard mode
  bool any = false;             // true if one of them had another mode
  Parallel of_torch = nullptr;  // as passed on entry
};
thread_local Thread self;

void take(void* any) {
  uint64_t bits = control();
  if (!(bits & kMode)) return;
  self.before = bits & kMode;
  set_control(bits & ~kMode);
  static_cast<std::atomic<bool>*>(any)->store(true, std::memory_order_relaxed);
}

void give_back(void*) {
  if (self.before) set_control((control() & ~kMode) | self.before);
  self.before = 0;
}

void on_all(void (*run)(void*), void* argument) {
  run(argument);
  if (self.covered == 1) return;
#pragma omp parallel num_threads(self.covered)
  run(argument);
  if (self.of_torch && self.of_torch != &GOMP_parallel) self.of_torch(run, argument, unsigned(self.covered), 0);
}

}  // namespace

// of_torch: GOMP_parallel of the OpenMP of torch's own operations, which may differ from ours; null if they use none
EXPORT void detcompile_enter_floats(int32_t num_threads, Parallel of_torch) {
  if (self.depth++ && num_threads <= self.covered) return;
  self.covered = num_threads;
  self.of_torch = of_torch;
  std::atomic<bool> any{false};
  on_all(take, &any);
  self.any |= any.load();
}

EXPORT void detcompile_leave_floats() {
  if (--self.depth) return;
  if (self.any) on_all(give_back, nullptr);
  self.any = false;
}
