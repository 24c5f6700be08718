// The arguments of a matrix product, packed by templates/matmul/op.py, templates/collectives/op.py and direct/ops.cpp.
#pragma once

#include <cstdint>

namespace {

// Strides count elements; w_k_stride == 1 or w_n_stride == 1; residual and bias may be null; K is a multiple of prod(radices).
struct Call {
  const char* x; int64_t x_stride;
  const char* w; int64_t w_n_stride, w_k_stride;
  const void* bias; const void* residual; int64_t residual_stride;
  void* out;
  int64_t M, N, K;
  const int64_t* radices; int64_t num_radices;
  int32_t dtype, bias_dtype, residual_dtype, out_dtype, num_threads;
};

}  // namespace
