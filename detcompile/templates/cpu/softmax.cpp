// softmax, log_softmax and logsumexp over rows: float32 inside, the sum of exponentials in Row order.
//
// Legend: M rows, R row length.
#include "elementary.h"
#include "rowsum.h"

namespace {

enum Kind : int32_t { kSoftmax = 0, kLogSoftmax = 1, kLogSumExp = 2 };

inline float row_max(const float* row, int64_t R) {
  Vec best = splat(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= R; i += kLanes) best = max(best, load(row + i));
  float result = max_lanes(best);
  for (; i < R; i++) result = row[i] > result ? row[i] : result;
  return result;  // a NaN in the row reaches the output through the sum of exponentials
}

}  // namespace

// out is contiguous: [M, R], or [M] float32 for logsumexp
EXPORT void detcompile_softmax(int32_t kind, const void* x, int64_t x_stride, void* out, int64_t M, int64_t R,
                               const int64_t* radices, int64_t num_radices, int32_t dtype, int32_t out_dtype,
                               int32_t num_threads) {
  for_each_row(x, dtype, x_stride, M, R, num_threads, [=](int64_t m, float* row) {
    static thread_local Scratch scratch;
    float* exps = scratch.floats(R);
    float largest = row_max(row, R);
    if (kind == kLogSumExp && std::isinf(largest)) largest = 0.0f;  // as in torch, logsumexp of only -inf is -inf
    Vec shift = splat(largest);
    for (int64_t i = 0; i < R; i += kLanes) store_some(exps + i, exp(load_some(row + i, R - i) - shift), R - i);
    float total = sum_row(exps, R, radices, num_radices, identity);
    if (kind == kLogSumExp) {
      store_as(out, out_dtype, m, splat(float(double(largest) + log_of(total))), 1);
      return;
    }
    Vec divisor = splat(total), log_total = splat(float(log_of(total)));
    for (int64_t i = 0; i < R; i += kLanes) {
      Vec y = kind == kSoftmax ? load_some(exps + i, R - i) / divisor : (load_some(row + i, R - i) - shift) - log_total;
      store_as(out, out_dtype, m * R + i, y, R - i);
    }
  });
}
