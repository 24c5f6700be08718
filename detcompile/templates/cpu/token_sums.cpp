// Exact sums over tokens, which do not depend on the order (orders.Exact): a leaf's float32 sum is rounded to a multiple of the
// grid, to nearest even, and multiples are added in float64.
//
// Legend: T rows, N K features, V rows of a table, D its width.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "matmul_call.h"
#include "simd.h"

namespace {

constexpr int64_t kStrip = 256;              // columns that are summed together
constexpr int64_t kScratchFloats = 1 << 20;  // of a leaf's product at a time
constexpr int64_t kLeastRows = 256;          // rows of the product that make packing its other operand worthwhile
constexpr int64_t kWorthThreads = 1 << 16;   // elements; below, a parallel region costs more

// Adding 1.5 * 2^(52 + grid) to a double removes bits finer than the grid; `limit` bounds the sum of magnitudes.
struct Grid {
  double magic, limit;

  // infinite if the value exceeds `most`, NaN if it is not finite
  double round(float value, double most) const {
    double rounded = (double(value) + magic) - magic, infinite = double(value - value) + INFINITY;
    return std::fabs(double(value)) <= most ? rounded : infinite;
  }
};

// Exact sums of a strip of columns, fed row by row
struct Strip {
  const Grid& grid;
  double sums[kStrip] = {}, magnitudes[kStrip] = {};

  void add(const void* rows, int32_t dtype, int64_t index, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      float lanes[kLanes];
      store(lanes, load_as(rows, dtype, index + i, count - i));
      for (int64_t lane = 0; lane < kLanes; lane++) {  // lanes past the last column are zeros and unused
        double rounded = grid.round(lanes[lane], grid.limit);
        sums[i + lane] += rounded;
        magnitudes[i + lane] += std::fabs(rounded);
      }
    }
  }
  void finish(double* out, int64_t count) const {
    for (int64_t i = 0; i < count; i++) out[i] = magnitudes[i] <= grid.limit || sums[i] != sums[i] ? sums[i] : INFINITY;
  }
};

}  // namespace

// out [N, K] float64 = the sum over leaves of x [N, T] times w [K, T]; `packed` is a struct Call whose K is T and whose out is not
// read. Leaves [count + 1] count tokens of rows_a_token rows. Returns the index of the first invalid leaf, without writing anything;
// else -1.
EXPORT int64_t detcompile_token_matmul(const void* packed, const int32_t* leaves, int64_t count, int64_t rows_a_token, double magic,
                                       double limit, double* out) {
  Call call = *static_cast<const Call*>(packed);
  int64_t N = call.M, K = call.N, T = call.K;
  if (leaves[0] < 0) return 0;
  for (int64_t i = 0; i < count; i++)
    if (leaves[i + 1] < leaves[i] || leaves[i + 1] * rows_a_token > T) return i;
  if (N * K == 0) return -1;
  std::memset(out, 0, N * K * sizeof(double));
  if (count == 0) return -1;
  Grid grid{magic, limit};
  double most = limit / double(count);
  int64_t height = std::min(N, std::max(kLeastRows, kScratchFloats / K));
  std::vector<float> product(height * K);
  for (int64_t row = 0; row < N; row += height) {
    int64_t rows = std::min(height, N - row), elements = rows * K;
    for (int64_t i = 0; i < count; i++) {
      int64_t first = leaves[i] * rows_a_token;
      Call leaf = call;
      leaf.M = rows;
      leaf.K = leaves[i + 1] * rows_a_token - first;
      if (leaf.K == 0) continue;
      leaf.x += (row * call.x_stride + first) * item_size(call.dtype);
      leaf.w += first * call.w_k_stride * item_size(call.dtype);
      leaf.out = product.data();
      leaf.out_dtype = kFloat32;
      detcompile_matmul(&leaf);
      double* sums = out + row * K;
      int32_t num_threads = elements < kWorthThreads ? 1 : call.num_threads;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
      for (int64_t j = 0; j < elements; j++) sums[j] += grid.round(product[j], most);
    }
  }
  return -1;
}

// g [T, N] -> out [N] float64; a leaf is a row
EXPORT void detcompile_token_sum(const void* g, int64_t g_stride, double* out, int64_t T, int64_t N, double magic, double limit,
                                 int32_t dtype, int32_t num_threads) {
  Grid grid{magic, limit};
  if (T * N < kWorthThreads) num_threads = 1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t first = 0; first < N; first += kStrip) {
    int64_t count = std::min(kStrip, N - first);
    Strip strip{grid};
    for (int64_t t = 0; t < T; t++) strip.add(g, dtype, t * g_stride + first, count);
    strip.finish(out + first, count);
  }
}

// g [T, D] by ids [T] -> out [V, D] float64. Returns the index of the first id outside [0, V), without writing anything; else -1.
EXPORT int64_t detcompile_token_scatter(const void* g, int64_t g_stride, const int64_t* ids, double* out, int64_t T, int64_t V,
                                        int64_t D, double magic, double limit, int32_t dtype, int32_t num_threads) {
  for (int64_t t = 0; t < T; t++)
    if (ids[t] < 0 || ids[t] >= V) return t;
  if (V * D == 0) return -1;
  std::memset(out, 0, V * D * sizeof(double));
  std::vector<int64_t> order(T), starts;
  for (int64_t t = 0; t < T; t++) order[t] = t;
  std::sort(order.begin(), order.end(), [=](int64_t a, int64_t b) { return ids[a] != ids[b] ? ids[a] < ids[b] : a < b; });
  for (int64_t i = 0; i < T; i++)
    if (i == 0 || ids[order[i]] != ids[order[i - 1]]) starts.push_back(i);
  starts.push_back(T);
  Grid grid{magic, limit};
  if (T * D < kWorthThreads) num_threads = 1;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
  for (int64_t s = 0; s < int64_t(starts.size()) - 1; s++)
    for (int64_t first = 0; first < D; first += kStrip) {
      int64_t count = std::min(kStrip, D - first);
      Strip strip{grid};
      for (int64_t i = starts[s]; i < starts[s + 1]; i++) strip.add(g, dtype, order[i] * g_stride + first, count);
      strip.finish(out + ids[order[starts[s]]] * D + first, count);
    }
  return -1;
}
