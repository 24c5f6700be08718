// exact_linear: rows quantized, multiplied by a quantized weight in exact integers, and scaled (docs/exact.md).
#include <vector>

#include "linear_panels.h"

using exact::Linear;

namespace {

template <int MR, int NR>
void tile(const Linear& p, int64_t m, int64_t n) {
  int64_t t[MR][NR] = {};
  for (int64_t part = 0, k = 0; k < p.K; part++, k += exact::kLongest) {
    int64_t count = min64(p.K - k, exact::kLongest);
    auto add = [&](int32_t x_digit, int32_t w_digit, int64_t factor) {
      const int32_t* sums = p.sums_of_x + (x_digit * p.parts + part) * p.T + m;
      exact::add_dots<MR, NR>(p.x + (x_digit * p.M + m) * p.P + k, p.P, sums, p.w + (w_digit * p.N + n) * p.K + k, p.K, count,
                              factor, t);
    };
    add(0, 0, p.x_digits == 2 ? 256 : 1);
    if (p.x_digits == 2) add(1, 0, 1);
    if (p.w_digits == 2) add(0, 1, 1);
  }
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NR; j++) {
      if (p.totals) {
        p.totals[(m + i) * p.N + n + j] = t[i][j];
        continue;
      }
      float y = (float(t[i][j]) * p.x_scale[m + i]) * p.w_scale[n + j];
      p.out[(m + i) * p.N + n + j] = p.bias ? y + p.bias[n + j] : y;
    }
}

template <int NR>
void column(const Linear& p, int64_t n) {
  int64_t m = 0;
  for (; m + 4 <= p.M; m += 4) tile<4, NR>(p, m, n);
  for (; m < p.M; m++) tile<1, NR>(p, m, n);
}

}  // namespace

// x [M, K] float32, w [w_digits, N, K], w_scale [N], bias [N] or null -> out [M, N]; all contiguous
// Of a part of K: peaks [M], peak_bits of whole rows, and the integers go to totals [M, N]. Else both are null.
EXPORT void detcompile_exact_linear(const float* x, const int8_t* w, const float* w_scale, const float* bias, float* out,
                                    const int32_t* peaks, int64_t* totals, int64_t M, int64_t N, int64_t K, int32_t x_digits,
                                    int32_t w_digits, int32_t num_threads) {
  int64_t P = exact::padded(K), T = (M + kLanes - 1) / kLanes * kLanes, parts = (K + exact::kLongest - 1) / exact::kLongest;
  std::vector<int8_t> digits(x_digits * M * P, 0);
  std::vector<int32_t> sums(x_digits * parts * T);
  std::vector<float> scales(M);
  Linear p = {digits.data(), w, sums.data(), scales.data(), w_scale, bias, out, totals, M, N, K, P, T, parts,
              x_digits, w_digits};
  const int64_t panels = M >= exact::kFewestTokens && parts == 1 ? N / exact::kPanel : 0;
  const int64_t tiles = panels ? x_digits * exact::token_tiles(p) : 0;
  std::vector<char> packed(tiles * exact::tile_bytes(p));
  auto panel = x_digits == 1 ? exact::multiply_panel<1, false> : w_digits == 1 ? exact::multiply_panel<2, false>
                                                                               : exact::multiply_panel<2, true>;
  if (M * N * K < 65536) num_threads = 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < M; m++) {
      int8_t *high = digits.data() + m * P, *low = high + (x_digits - 1) * M * P;
      int32_t peak = peaks ? peaks[m] : exact::peak_bits(x + m * K, K);
      scales[m] = exact::quantize_row(x + m * K, K, peak, x_digits, exact::kTop[x_digits], high, low);
      for (int64_t part = 0; part < parts; part++) {
        int64_t k = part * exact::kLongest, count = min64(K - k, exact::kLongest);
        sums[part * T + m] = exact::sum_of(high + k, count);
        if (x_digits == 2) sums[(parts + part) * T + m] = exact::sum_of(low + k, count);
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiles; i++) exact::pack_tile(p, i, packed.data() + i * exact::tile_bytes(p));
    if (panels) {
      Tiles configured;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < panels; i++) panel(p, i * exact::kPanel, packed.data());
    }
#pragma omp for schedule(static)
    for (int64_t n = panels * exact::kPanel / 4; n < N / 4; n++) column<4>(p, 4 * n);
  }
  for (int64_t n = N / 4 * 4; n < N; n++) column<1>(p, n);
}
