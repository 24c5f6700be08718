// Gradients of norms, softmaxes and log-probabilities of rows: float32 inside, sums in Row order, each output rounded once.
//
// Legend: M rows, R row length. x and g are contiguous.
#include "elementary.h"
#include "rowsum.h"

namespace {

thread_local Scratch row_scratch;
constexpr float kUnlikely = -1e30f;  // finite stand-in for log(0), which is multiplied by the probability 0

// Several float32 rows of R elements, padded so that whole vectors can be loaded
struct Rows {
  float* start;
  int64_t stride;
  Rows(int64_t count, int64_t R) : stride((R + kLanes - 1) / kLanes * kLanes) { start = row_scratch.floats(count * stride); }
  float* operator[](int64_t i) const { return start + i * stride; }
};

template <class Work>
void over_rows(int64_t M, int64_t R, int64_t scratch_rows, int32_t num_threads, Work work) {
  if (M * R < 16384) num_threads = 1;  // a parallel region costs more
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t m = 0; m < M; m++) work(m, Rows(scratch_rows, R));
}

inline float first_lane(Vec value) {
  float lanes[kLanes];
  store(lanes, value);
  return lanes[0];
}

// out[i] = f(i) for lanes from i on
template <class F>
inline void fill(float* out, int64_t R, F f) {
  for (int64_t i = 0; i < R; i += kLanes) store_some(out + i, f(i), R - i);
}

inline float largest(const float* row, int64_t R) {
  Vec best = splat(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= R; i += kLanes) best = max(best, load(row + i));
  float result = max_lanes(best);
  for (; i < R; i++) result = row[i] > result ? row[i] : result;
  return result;
}

// row / temperature -> (row - m) - log s in place, as detcompile_softmax computes it; exps is scratch
inline void log_softmax_row(float* row, float* exps, int64_t R, float temperature, const int64_t* radices, int64_t num_radices) {
  if (temperature != 1.0f) fill(row, R, [=](int64_t i) { return load_some(row + i, R - i) / splat(temperature); });
  Vec shift = splat(largest(row, R));
  fill(exps, R, [=](int64_t i) { return exp(load_some(row + i, R - i) - shift); });
  Vec log_total = splat(float(log_of(sum_row(exps, R, radices, num_radices, identity))));
  fill(row, R, [=](int64_t i) { return (load_some(row + i, R - i) - shift) - log_total; });
}

// -sum of p log p; entries with probability 0 add nothing
inline float entropy_of(const float* logprobs, float* terms, int64_t R, const int64_t* radices, int64_t num_radices) {
  fill(terms, R, [=](int64_t i) {
    float lanes[kLanes], products[kLanes];
    store(lanes, load_some(logprobs + i, R - i));
    store(products, exp(load(lanes)) * load(lanes));
    for (int lane = 0; lane < kLanes; lane++) products[lane] = lanes[lane] == -INFINITY ? 0.0f : products[lane];
    return load(products);
  });
  return -sum_row(terms, R, radices, num_radices, identity);
}

}  // namespace

// dx of x's dtype; weight_rows float32 (g times the weight's factor) or null
EXPORT void detcompile_rms_norm_backward(const void* g, const void* x, const void* weight, void* dx, float* weight_rows, double eps,
                                         int32_t round_before_weight, int64_t M, int64_t R, int32_t dtype, int32_t weight_dtype,
                                         int32_t num_threads) {
  over_rows(M, R, 3, num_threads, [=](int64_t m, Rows rows) {
    float *n = rows[0], *d = rows[1], *terms = rows[2];
    load_row(n, x, dtype, m * R, R);
    load_row(d, g, dtype, m * R, R);
    float squares = sum_row(n, R, [](Vec h) { return h * h; });
    Vec scale = splat(float(1.0 / std::sqrt(double(squares) / double(R) + eps)));
    fill(n, R, [=](int64_t i) { return load_some(n + i, R - i) * scale; });
    for (int64_t i = 0; weight_rows && i < R; i += kLanes) {
      Vec met = load_some(n + i, R - i);
      if (round_before_weight) met = round_to(dtype, met);
      store_some(weight_rows + m * R + i, load_some(d + i, R - i) * met, R - i);
    }
    if (weight) fill(d, R, [=](int64_t i) { return load_some(d + i, R - i) * load_as(weight, weight_dtype, i, R - i); });
    fill(terms, R, [=](int64_t i) { return load_some(d + i, R - i) * load_some(n + i, R - i); });
    Vec mean = splat(sum_row(terms, R, identity) / float(R));
    fill(d, R, [=](int64_t i) { return (load_some(d + i, R - i) - load_some(n + i, R - i) * mean) * scale; });
    store_row(dx, dtype, m * R, d, R);
  });
}

EXPORT void detcompile_layer_norm_backward(const void* g, const void* x, const void* weight, void* dx, float* weight_rows, double eps,
                                           int64_t M, int64_t R, int32_t dtype, int32_t weight_dtype, int32_t num_threads) {
  over_rows(M, R, 3, num_threads, [=](int64_t m, Rows rows) {
    float *n = rows[0], *d = rows[1], *terms = rows[2];
    load_row(n, x, dtype, m * R, R);
    load_row(d, g, dtype, m * R, R);
    Vec mean = splat(sum_row(n, R, identity) / float(R));
    float squares = sum_row(n, R, [mean](Vec h) { return (h - mean) * (h - mean); });
    Vec scale = splat(float(1.0 / std::sqrt(double(squares) / double(R) + eps)));
    fill(n, R, [=](int64_t i) { return (load_some(n + i, R - i) - mean) * scale; });
    for (int64_t i = 0; weight_rows && i < R; i += kLanes)
      store_some(weight_rows + m * R + i, load_some(d + i, R - i) * load_some(n + i, R - i), R - i);
    if (weight) fill(d, R, [=](int64_t i) { return load_some(d + i, R - i) * load_as(weight, weight_dtype, i, R - i); });
    fill(terms, R, [=](int64_t i) { return load_some(d + i, R - i) * load_some(n + i, R - i); });
    Vec along = splat(sum_row(terms, R, identity) / float(R)), middle = splat(sum_row(d, R, identity) / float(R));
    fill(d, R, [=](int64_t i) { return ((load_some(d + i, R - i) - middle) - load_some(n + i, R - i) * along) * scale; });
    store_row(dx, dtype, m * R, d, R);
  });
}

// y [M, R] a softmax
EXPORT void detcompile_softmax_backward(const void* g, const void* y, void* dx, int64_t M, int64_t R, int32_t dtype, int32_t out_dtype,
                                        int32_t num_threads) {
  over_rows(M, R, 3, num_threads, [=](int64_t m, Rows rows) {
    float *p = rows[0], *d = rows[1], *terms = rows[2];
    load_row(p, y, dtype, m * R, R);
    load_row(d, g, dtype, m * R, R);
    fill(terms, R, [=](int64_t i) { return load_some(d + i, R - i) * load_some(p + i, R - i); });
    Vec total = splat(sum_row(terms, R, identity));
    fill(d, R, [=](int64_t i) { return load_some(p + i, R - i) * (load_some(d + i, R - i) - total); });
    store_row(dx, out_dtype, m * R, d, R);
  });
}

// logits [M, R], targets [M] in [0, R) -> logprobs and entropies [M] float32
EXPORT void detcompile_token_logprobs(const void* logits, const int64_t* targets, float* logprobs, float* entropies, float temperature,
                                      int64_t M, int64_t R, const int64_t* radices, int64_t num_radices, int32_t dtype,
                                      int32_t num_threads) {
  over_rows(M, R, 2, num_threads, [=](int64_t m, Rows rows) {
    load_row(rows[0], logits, dtype, m * R, R);
    log_softmax_row(rows[0], rows[1], R, temperature, radices, num_radices);
    logprobs[m] = rows[0][targets[m]];
    entropies[m] = entropy_of(rows[0], rows[1], R, radices, num_radices);
  });
}

// g of the logprobs and g_entropy of the entropies, [M] float32, g_entropy may be null -> dlogits [M, R] of the logits' dtype
EXPORT void detcompile_token_logprobs_backward(const float* g, const float* g_entropy, const void* logits, const int64_t* targets,
                                               void* dlogits, float temperature, int64_t M, int64_t R, const int64_t* radices,
                                               int64_t num_radices, int32_t dtype, int32_t num_threads) {
  over_rows(M, R, 2, num_threads, [=](int64_t m, Rows rows) {
    float *row = rows[0], *scratch = rows[1];
    load_row(row, logits, dtype, m * R, R);
    log_softmax_row(row, scratch, R, temperature, radices, num_radices);
    float chosen = row[targets[m]], p = first_lane(exp(splat(chosen))), entropy = 0.0f, target = (1.0f - p) * g[m];
    if (g_entropy) {
      entropy = entropy_of(row, scratch, R, radices, num_radices);
      target = target - (p * ((chosen > kUnlikely ? chosen : kUnlikely) + entropy)) * g_entropy[m];
    }
    Vec of_logprob = splat(g[m]), of_entropy = splat(g_entropy ? g_entropy[m] : 0.0f);
    fill(row, R, [=](int64_t i) {
      Vec logprob = load_some(row + i, R - i), p = exp(logprob);
      Vec d = (splat(0.0f) - p) * of_logprob;
      return g_entropy ? d - (p * (max(logprob, splat(kUnlikely)) + splat(entropy))) * of_entropy : d;
    });
    row[targets[m]] = target;
    if (temperature != 1.0f) fill(row, R, [=](int64_t i) { return load_some(row + i, R - i) / splat(temperature); });
    store_row(dlogits, dtype, m * R, row, R);
  });
}
