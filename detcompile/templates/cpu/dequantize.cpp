// out[n, k] = round(float32(q[n, k] - z) * float32(s)): rows of a quantised matrix, as templates/quantized.py defines them.
#include "simd.h"

namespace {

constexpr int64_t kBlock = 128, kHalf = 64;  // k of a block of nibbles; bytes that hold it
enum Kind : int32_t { kNibbles = 0, kBytes = 1, kFloat8 = 2 };

// The arguments as templates/dequant_matmul.py packs them: rows [first, first + N) of w; zeros may be null.
struct Call {
  const uint8_t* w; int64_t w_stride;
  const void* scales; const int16_t* zeros; int64_t scales_stride;
  void* out;
  int64_t first, N, K, group, rows;
  int32_t kind, scales_dtype, out_dtype, num_threads;
};

// e4m3fn: four exponent bits of bias 7, three of mantissa, no infinities
float float8(uint8_t bits) {
  int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::nanf("");
  float value = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
  return bits & 128 ? -value : value;
}

struct Float8Table {
  float values[256];
  Float8Table() {
    for (int i = 0; i < 256; i++) values[i] = float8(uint8_t(i));
  }
};

// count values of a row from k on, k a multiple of kBlock
void take(const Call& c, const uint8_t* row, int64_t k, int64_t count, float* values) {
  if (c.kind == kNibbles) {
    const uint8_t* bytes = row + k / 2;
    for (int64_t i = 0; i < kHalf; i++) values[i] = float(bytes[i] & 15);
    for (int64_t i = 0; i < kHalf; i++) values[kHalf + i] = float(bytes[i] >> 4);
  } else if (c.kind == kBytes) {
    for (int64_t i = 0; i < count; i++) values[i] = float(int8_t(row[k + i]));
  } else {
    static const Float8Table table;
    for (int64_t i = 0; i < count; i++) values[i] = table.values[row[k + i]];
  }
}

float scale_at(const Call& c, int64_t place) {
  float value;
  store_some(&value, load_as(c.scales, c.scales_dtype, place, 1), 1);
  return value;
}

void dequantize_row(const Call& c, int64_t i) {
  const uint8_t* row = c.w + (c.first + i) * c.w_stride;
  float values[kBlock];
  for (int64_t k = 0; k < c.K; k += kBlock) {
    int64_t count = min64(kBlock, c.K - k);
    take(c, row, k, count, values);
    for (int64_t j = 0; j < count;) {
      int64_t group = (k + j) / c.group, end = min64(count, (group + 1) * c.group - k);
      int64_t place = group * c.scales_stride + (c.first + i) / c.rows;
      float scale = scale_at(c, place);
      float zero = c.zeros ? float(c.zeros[place]) : c.kind == kNibbles ? 8.0f : 0.0f;
      for (; j < end; j++) values[j] = (values[j] - zero) * scale;
    }
    store_row(c.out, c.out_dtype, i * c.K + k, values, count);
  }
}

}  // namespace

EXPORT void detcompile_dequantize(const void* packed) {
  const Call& call = *static_cast<const Call*>(packed);
#pragma omp parallel for schedule(static) num_threads(call.num_threads) if (call.num_threads > 1)
  for (int64_t i = 0; i < call.N; i++) dequantize_row(call, i);
}
