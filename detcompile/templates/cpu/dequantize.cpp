// out[n, k] = round(float32(q[n, k] - z) * float32(s) + float32(m)): rows of a quantized matrix, as defined in
// templates/quantized/weights.py.
#include "simd.h"

namespace {

constexpr int64_t kBlock = 128, kHalf = 64;  // k of a block of nibbles; bytes of a block
enum Kind : int32_t { kNibbles = 0, kBytes = 1, kFloat8 = 2 };

// The arguments packed by templates/quantized/op.py: rows [first, first + N) of w; zeros and mins may be null.
struct Call {
  const uint8_t* w; int64_t w_stride;
  const void* scales; const int16_t* zeros; const void* mins; int64_t scales_stride;
  void* out;
  int64_t first, N, K, group, rows;
  int32_t kind, scales_dtype, mins_dtype, out_dtype, num_threads;
};

// e4m3fn: four exponent bits of bias 7, three of mantissa, no infinities; NaN becomes torch's NaN. Integer operations only, so
// that the loops are vectorized.
void take_float8(const uint8_t* bytes, int64_t count, float* values) {
  uint32_t bits[kBlock];
  for (int64_t i = 0; i < count; i++) values[i] = float(int32_t(bytes[i] & 127)) * 0x1p-9f;  // correct below 8: subnormals
  std::memcpy(bits, values, sizeof(float) * count);
  for (int64_t i = 0; i < count; i++) {
    uint32_t magnitude = bytes[i] & 127u, normal = (magnitude << 20) + (120u << 23);
    uint32_t value = magnitude < 8 ? bits[i] : magnitude == 127 ? 0x7ff00000u : normal;
    bits[i] = value | (bytes[i] & 128u) << 24;
  }
  std::memcpy(values, bits, sizeof(float) * count);
}

// dequantize count values of a row from k on; k is a multiple of kBlock
void take(const Call& c, const uint8_t* row, int64_t k, int64_t count, float* values) {
  if (c.kind == kNibbles) {
    const uint8_t* bytes = row + k / 2;
    for (int64_t i = 0; i < kHalf; i++) values[i] = float(bytes[i] & 15);
    for (int64_t i = 0; i < kHalf; i++) values[kHalf + i] = float(bytes[i] >> 4);
  } else if (c.kind == kBytes) {
    for (int64_t i = 0; i < count; i++) values[i] = float(int8_t(row[k + i]));
  } else {
    take_float8(row + k, count, values);
  }
}

float float_at(const void* values, int32_t dtype, int64_t place) {
  float value;
  store_some(&value, load_as(values, dtype, place, 1), 1);
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
      float scale = float_at(c.scales, c.scales_dtype, place);
      if (c.mins) {
        float min = float_at(c.mins, c.mins_dtype, place);
        for (; j < end; j++) values[j] = values[j] * scale + min;
      } else {
        float zero = c.zeros ? float(c.zeros[place]) : c.kind == kNibbles ? 8.0f : 0.0f;
        for (; j < end; j++) values[j] = (values[j] - zero) * scale;
      }
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
