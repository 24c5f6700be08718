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

// scales or mins of a group, for `count` rows from `i` on
void take_parts(const Call& c, const void* parts, int32_t dtype, int64_t group, int64_t i, int64_t count, float* values) {
  int64_t place = group * c.scales_stride;
  if (c.rows == 1) return store(values, load_as(parts, dtype, place + c.first + i, count));
  for (int64_t r = 0; r < count; r++)
    store_some(values + r, load_as(parts, dtype, place + (c.first + i + r) / c.rows, 1), 1);
}

void take_offsets(const Call& c, int64_t group, int64_t i, int64_t count, float* values) {
  if (c.mins) return take_parts(c, c.mins, c.mins_dtype, group, i, count, values);
  float without = c.kind == kNibbles ? 8.0f : 0.0f;
  for (int64_t r = 0; r < count; r++)
    values[r] = c.zeros ? float(c.zeros[group * c.scales_stride + (c.first + i + r) / c.rows]) : without;
}

// at most kLanes rows from i on: scales of successive rows are neighbours in memory
void dequantize_rows(const Call& c, int64_t i, int64_t count) {
  float values[kLanes][kBlock], scales[kLanes], offsets[kLanes];
  for (int64_t k = 0; k < c.K; k += kBlock) {
    int64_t width = min64(kBlock, c.K - k);
    for (int64_t r = 0; r < count; r++) take(c, c.w + (c.first + i + r) * c.w_stride, k, width, values[r]);
    for (int64_t j = 0, end; j < width; j = end) {
      int64_t group = (k + j) / c.group;
      end = min64(width, (group + 1) * c.group - k);
      take_parts(c, c.scales, c.scales_dtype, group, i, count, scales);
      take_offsets(c, group, i, count, offsets);
      for (int64_t r = 0; r < count; r++) {
        Vec scale = splat(scales[r]), offset = splat(offsets[r]);
        for (int64_t at = j; at < end; at += kLanes) {
          Vec q = load_some(values[r] + at, end - at);
          store_some(values[r] + at, c.mins ? q * scale + offset : (q - offset) * scale, end - at);
        }
      }
    }
    for (int64_t r = 0; r < count; r++) store_row(c.out, c.out_dtype, (i + r) * c.K + k, values[r], width);
  }
}

}  // namespace

EXPORT void detcompile_dequantize(const void* packed) {
  const Call& call = *static_cast<const Call*>(packed);
#pragma omp parallel for schedule(static) num_threads(call.num_threads) if (call.num_threads > 1)
  for (int64_t i = 0; i < call.N; i += kLanes) dequantize_rows(call, i, min64(kLanes, call.N - i));
}
