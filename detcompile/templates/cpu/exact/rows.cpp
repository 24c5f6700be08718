// exact_function, exact_divide, exact norms and exact_quantize: functions and rows of docs/exact.md.
//
// Legend: M rows, R row length.
#include "steps.h"

namespace {

template <class F>
inline void map(const float* x, float* out, int64_t count, int32_t num_threads, F f) {
  if (count < 16384) num_threads = 1;  // a parallel region costs more
#pragma omp parallel for simd schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t i = 0; i < count; i++) out[i] = f(x[i]);
}

}  // namespace

// the order of the names in rows.py
EXPORT void detcompile_exact_function(const float* x, float* out, int64_t count, int32_t function, int32_t num_threads) {
  switch (function) {
    case 0: return map(x, out, count, num_threads, [](float v) { return exact::exp2(v); });
    case 1: return map(x, out, count, num_threads, [](float v) { return exact::exp(v); });
    case 2: return map(x, out, count, num_threads, [](float v) { return exact::log(v); });
    case 3: return map(x, out, count, num_threads, [](float v) { return exact::rsqrt(v); });
    case 4: return map(x, out, count, num_threads, [](float v) { return exact::sigmoid(v); });
    case 5: return map(x, out, count, num_threads, [](float v) { return exact::silu(v); });
    case 6: return map(x, out, count, num_threads, [](float v) { return exact::gelu_tanh(v); });
    case 7: return map(x, out, count, num_threads, [](float v) { return exact::exp2_short(v == v ? v : 0.0f); });
    case 8: return map(x, out, count, num_threads, [](float v) { return exact::bf16(v); });
    case 9: return map(x, out, count, num_threads, [](float v) { return exact::erf(v); });
    case 10: return map(x, out, count, num_threads, [](float v) { return exact::tanh(v); });
    case 11: return map(x, out, count, num_threads, [](float v) { return exact::log1p(v); });
    case 12: return map(x, out, count, num_threads, [](float v) { return exact::gelu(v); });
    case 13: return map(x, out, count, num_threads, [](float v) { return std::sqrt(v); });
    case 14: return map(x, out, count, num_threads, [](float v) { return exact::floor(v); });
  }
}

EXPORT void detcompile_exact_divide(const float* x, const float* y, float* out, int64_t count, int32_t num_threads) {
  if (count < 16384) num_threads = 1;
#pragma omp parallel for simd schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t i = 0; i < count; i++) out[i] = x[i] / y[i];
}

// x [M, R] -> out [M]: each row is added from its first element to its last
EXPORT void detcompile_exact_sum(const float* x, float* out, int64_t M, int64_t R, int32_t num_threads) {
  if (M * R < 16384) num_threads = 1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t m = 0; m < M; m++) {
    float total = x[m * R];
    for (int64_t i = 1; i < R; i++) total = total + x[m * R + i];
    out[m] = total;
  }
}

EXPORT void detcompile_exact_rms_norm(const float* x, const float* weight, float* out, float eps, int64_t M, int64_t R,
                                      int32_t num_threads) {
  if (M * R < 16384) num_threads = 1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t m = 0; m < M; m++) {
    const float* row = x + m * R;
    float* y = out + m * R;
    int32_t peak = exact::peak_bits(row, R);
    if (peak >= exact::kPoisonBits) {
      for (int64_t i = 0; i < R; i++) y[i] = NAN;
      continue;
    }
    int32_t exponent = peak >> 23 > 87 ? peak >> 23 : 87;
    float p = exact::from_bits(uint32_t(275 - exponent) << 23);  // 2^(21 - e)
    int64_t squares = 0;
    for (int64_t i = 0; i < R; i++) {
      int64_t n = exact::near(row[i] * p, 1.0f);
      squares += n * n;
    }
    float mean = float(squares) / float(R), scale = exact::rsqrt(mean + (eps * p) * p);
    for (int64_t i = 0; i < R; i++) y[i] = ((row[i] * p) * scale) * weight[i];
  }
}

EXPORT void detcompile_exact_layer_norm(const float* x, const float* weight, const float* bias, float* out, float eps,
                                        int64_t M, int64_t R, int32_t num_threads) {
  if (M * R < 16384) num_threads = 1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t m = 0; m < M; m++) {
    const float* row = x + m * R;
    float* y = out + m * R;
    int32_t peak = exact::peak_bits(row, R);
    if (peak >= exact::kPoisonBits) {
      for (int64_t i = 0; i < R; i++) y[i] = NAN;
      continue;
    }
    int32_t exponent = peak >> 23 > 87 ? peak >> 23 : 87;
    float p = exact::from_bits(uint32_t(274 - exponent) << 23);  // 2^(20 - e)
    int64_t sum = 0, squares = 0;
    for (int64_t i = 0; i < R; i++) sum += exact::near(row[i] * p, 1.0f);
    float mean = float(sum) / float(R);
    for (int64_t i = 0; i < R; i++) {
      y[i] = row[i] * p - mean;
      int64_t n = exact::near(y[i], 1.0f);
      squares += n * n;
    }
    float scale = exact::rsqrt(float(squares) / float(R) + (eps * p) * p);
    for (int64_t i = 0; i < R; i++) y[i] = (y[i] * scale) * weight[i] + bias[i];
  }
}

// digits [num_digits, M, R], scales [M]
EXPORT void detcompile_exact_quantize(const float* x, int8_t* digits, float* scales, float unit, int32_t num_digits, int64_t M,
                                      int64_t R, int32_t num_threads) {
  if (M * R < 16384) num_threads = 1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t m = 0; m < M; m++)
    scales[m] = exact::quantize_row(x + m * R, R, exact::peak_bits(x + m * R, R), num_digits, unit, digits + m * R,
                                    digits + (M + m) * R);
}
