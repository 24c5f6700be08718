// Kernels that direct/ops.cpp also calls.
#pragma once

#include <cstdint>

extern "C" {

// matmul.cpp; a struct Call of matmul_call.h
void detcompile_matmul(const void* packed);

// rows.cpp
void detcompile_rms_norm(const void* x, int64_t x_stride, const void* weight, void* out, double eps, int32_t round_before_weight,
                         int64_t M, int64_t R, int32_t dtype, int32_t weight_dtype, int32_t num_threads);
void detcompile_layer_norm(const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, double eps, int64_t M,
                           int64_t R, int32_t dtype, int32_t weight_dtype, int32_t bias_dtype, int32_t num_threads);

// attention.cpp
int64_t detcompile_paged_attention(const char* q, const char* k, const char* v, char* k_cache, char* v_cache,
                                   const int64_t* slot_mapping, const int32_t* cu_seqlens, const int32_t* seq_lens,
                                   const int32_t* block_table, char* out, const int64_t* strides, const int64_t* sizes,
                                   const float* scalars, const float* slopes, const float* sinks, const float* relative,
                                   int32_t dtype, int32_t cache_dtype, int32_t num_threads, int64_t* where);

}
