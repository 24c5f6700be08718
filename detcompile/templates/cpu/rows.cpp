// Sums, moments and norms of rows: float32 inside, sums in Row order, each output rounded once.
//
// Legend: M rows, R row length.
#include "kernels.h"
#include "rowsum.h"

namespace {

struct Moments { float mean, centered_squares; };

// two passes: the mean, then the squares of the differences
inline Moments moments(const float* row, int64_t R) {
  float mean = sum_row(row, R, identity) / float(R);
  Vec mean_lanes = splat(mean);
  auto centered_square = [mean_lanes](Vec x) { return (x - mean_lanes) * (x - mean_lanes); };
  return {mean, sum_row(row, R, centered_square)};
}

// 1 / sqrt(total / R + eps), rounded to float32 once
inline float reciprocal_root(float total, int64_t R, double eps) { return float(1.0 / std::sqrt(double(total) / double(R) + eps)); }

template <class F>
inline void map_row(float* row, int64_t R, F f) {
  for (int64_t i = 0; i < R; i += kLanes) store_some(row + i, f(load_some(row + i, R - i), i), R - i);
}

}  // namespace

EXPORT void detcompile_row_sum(const void* x, int64_t x_stride, void* out, int64_t M, int64_t R, int32_t dtype, int32_t out_dtype,
                               int32_t num_threads) {
  for_each_row(x, dtype, x_stride, M, R, num_threads, [=](int64_t m, float* row) {
    store_as(out, out_dtype, m, splat(sum_row(row, R, identity)), 1);
  });
}

EXPORT void detcompile_row_var_mean(const void* x, int64_t x_stride, float* var, float* mean, float divisor, int64_t M, int64_t R,
                                    int32_t dtype, int32_t num_threads) {
  for_each_row(x, dtype, x_stride, M, R, num_threads, [=](int64_t m, float* row) {
    Moments of_row = moments(row, R);
    mean[m] = of_row.mean;
    var[m] = of_row.centered_squares / divisor;
  });
}

// out is contiguous, of x's dtype; weight may be null
EXPORT void detcompile_rms_norm(const void* x, int64_t x_stride, const void* weight, void* out, double eps,
                                int32_t round_before_weight, int64_t M, int64_t R, int32_t dtype, int32_t weight_dtype,
                                int32_t num_threads) {
  for_each_row(x, dtype, x_stride, M, R, num_threads, [=](int64_t m, float* row) {
    float squares = sum_row(row, R, [](Vec h) { return h * h; });
    Vec scale = splat(reciprocal_root(squares, R, eps));
    map_row(row, R, [=](Vec h, int64_t i) {
      Vec n = h * scale;
      if (round_before_weight) n = round_to(dtype, n);
      return weight ? n * load_as(weight, weight_dtype, i, R - i) : n;
    });
    store_row(out, dtype, m * R, row, R);
  });
}

// out is contiguous, of x's dtype; weight and bias may be null
EXPORT void detcompile_layer_norm(const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, double eps,
                                  int64_t M, int64_t R, int32_t dtype, int32_t weight_dtype, int32_t bias_dtype,
                                  int32_t num_threads) {
  for_each_row(x, dtype, x_stride, M, R, num_threads, [=](int64_t m, float* row) {
    Moments of_row = moments(row, R);
    Vec mean = splat(of_row.mean), scale = splat(reciprocal_root(of_row.centered_squares, R, eps));
    map_row(row, R, [=](Vec h, int64_t i) {
      Vec n = (h - mean) * scale;
      Vec weight_lanes = weight ? load_as(weight, weight_dtype, i, R - i) : splat(1.0f);
      return bias ? fma(n, weight_lanes, load_as(bias, bias_dtype, i, R - i)) : n * weight_lanes;
    });
    store_row(out, dtype, m * R, row, R);
  });
}
