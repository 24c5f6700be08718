// Shared inner loops: packing sixteen rows side by side, and the register block of fused multiply-adds.
#pragma once

#include <cstdlib>
#include <utility>

#include "simd.h"

namespace {

// a thread's scratch memory, kept between calls, aligned to cache lines
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  float* floats(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = (count + 1023) / 1024 * 1024;
      data_ = static_cast<float*>(std::aligned_alloc(64, capacity_ * sizeof(float)));
      if (!data_) std::abort();
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t capacity_ = 0;
};

// Storing sixteen rows as columns: panel[k * panel_stride + lane] = rows[lane][k]
inline void unpack_words(Vec words, float* panel, int64_t, float) { store(panel, words); }
template <class T>
inline void unpack_words(Vec words, float* panel, int64_t panel_stride, T type) {
  store(panel, low_half(words, type));
  store(panel + panel_stride, high_half(words, type));
}

template <class T>
inline void pack_rows(const T* const rows[kLanes], int64_t num_k, float* panel, int64_t panel_stride) {
  constexpr int64_t per_word = 4 / sizeof(T);
  int64_t k = 0;
  for (; k + kLanes * per_word <= num_k; k += kLanes * per_word) {
    Vec words[kLanes];
    transpose_words(rows, k * int64_t(sizeof(T)), words);
    for (int i = 0; i < kLanes; i++)
      unpack_words(words[i], panel + (k + i * per_word) * panel_stride, panel_stride, T{});
  }
  for (; k < num_k; k++)
    for (int lane = 0; lane < kLanes; lane++) panel[k * panel_stride + lane] = to_float(rows[lane][k]);
}

// c[i, n] = fma(a[i, k], b[k, n], c[i, n]) for k ascending; starts from zero if `fresh`, else from c.
// a[i, k] lies at a[i * RowStride + k * KStride].
template <int Rows, int Vecs, int RowStride, int KStride>
inline void fma_block(const float* a, const float* b, int64_t b_stride, int64_t num_k, float* c, int64_t c_stride, bool fresh) {
  Vec sum[Rows * Vecs];  // stays in registers if every enclosing loop is unrolled early
#pragma GCC unroll 32
  for (int i = 0; i < Rows * Vecs; i++) sum[i] = fresh ? splat(0.0f) : load(c + i / Vecs * c_stride + i % Vecs * kLanes);
  for (int64_t k = 0; k < num_k; k++) {
    Vec b_k[Vecs];
#pragma GCC unroll 32
    for (int j = 0; j < Vecs; j++) b_k[j] = load(b + k * b_stride + j * kLanes);
#pragma GCC unroll 32
    for (int i = 0; i < Rows * Vecs; i++)
      sum[i] = fma(splat(a[i / Vecs * RowStride + k * KStride]), b_k[i % Vecs], sum[i]);
  }
#pragma GCC unroll 32
  for (int i = 0; i < Rows * Vecs; i++) store(c + i / Vecs * c_stride + i % Vecs * kLanes, sum[i]);
}

using BlockKernel = void (*)(const float*, const float*, int64_t, int64_t, float*, int64_t, bool);

// a packed as [k][rows]
template <int Vecs, int... I>
inline BlockKernel packed_kernel(int64_t rows, std::integer_sequence<int, I...>) {
  static const BlockKernel table[] = {fma_block<I + 1, Vecs, 1, I + 1>...};
  return table[rows - 1];
}
template <int Vecs>
inline BlockKernel packed_kernel(int64_t rows) {
  return packed_kernel<Vecs>(rows, std::make_integer_sequence<int, kMaxRows>());
}

// a stored by rows, RowStride apart
template <int Vecs, int RowStride, int... I>
inline BlockKernel spread_kernel(int64_t rows, std::integer_sequence<int, I...>) {
  static const BlockKernel table[] = {fma_block<I + 1, Vecs, RowStride, 1>...};
  return table[rows - 1];
}
template <int Vecs, int RowStride>
inline BlockKernel spread_kernel(int64_t rows) {
  return spread_kernel<Vecs, RowStride>(rows, std::make_integer_sequence<int, kMaxRows>());
}

// splits rows into ceil(rows / kMaxRows) tiles of nearly equal height; sizes cannot change bits
struct RowTiles {
  int64_t rows, count;
  explicit RowTiles(int64_t num_rows) : rows(num_rows), count((num_rows + kMaxRows - 1) / kMaxRows) {}
  int64_t begin(int64_t tile) const { return rows * tile / count; }
};

}  // namespace
