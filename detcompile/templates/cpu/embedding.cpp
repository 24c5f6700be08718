// Rows of a table by id, copied as bytes.
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

inline int64_t id_at(const void* ids, int32_t id_bytes, int64_t i) {
  return id_bytes == 8 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

}  // namespace

// Returns the index of the first id outside [0, V), without writing anything; else -1, with out [T, row_bytes] filled.
EXPORT int64_t detcompile_embedding(const void* weight, int64_t weight_stride_bytes, const void* ids, int32_t id_bytes, void* out,
                                    int64_t T, int64_t V, int64_t row_bytes, int32_t num_threads) {
  for (int64_t t = 0; t < T; t++) {
    int64_t id = id_at(ids, id_bytes, t);
    if (id < 0 || id >= V) return t;
  }
  if (row_bytes == 0) return -1;
  if (T * row_bytes < 262144) num_threads = 1;  // a parallel region costs more
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t t = 0; t < T; t++)
    std::memcpy(static_cast<char*>(out) + t * row_bytes,
                static_cast<const char*>(weight) + id_at(ids, id_bytes, t) * weight_stride_bytes, row_bytes);
  return -1;
}
