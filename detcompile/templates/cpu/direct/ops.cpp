// torch.ops.detcompile_direct: the operations that a step calls most, without Python between torch's dispatcher and their
// kernels. Each takes the arguments of its namesake in torch.ops.detcompile, and hands it whatever is not plain: tensors to be
// copied first, attention's rarer scores, and all that is to be refused.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "../matmul_call.h"

namespace {

using at::ScalarType;
using at::Tensor;
using Optional = std::optional<Tensor>;

// of the library for an instruction set, in the order of templates/direct_ops.py
struct Kernels {
  void (*matmul)(const void*);
  void (*rms_norm)(const void*, int64_t, const void*, void*, double, int32_t, int64_t, int64_t, int32_t, int32_t, int32_t);
  void (*layer_norm)(const void*, int64_t, const void*, const void*, void*, double, int64_t, int64_t, int32_t, int32_t, int32_t,
                     int32_t);
  int64_t (*paged_attention)(const void*, const void*, const void*, void*, void*, const void*, const void*, const void*,
                             const void*, void*, const int64_t*, const int64_t*, const float*, const float*, const float*,
                             const float*, int32_t, int32_t, int32_t, int64_t*);
} kernels;

constexpr size_t kMostRadices = 16;
constexpr int64_t kKeyBlock = 64;
constexpr double kLog2E = 1.4426950408889634;

// The operation in Python: it does what is not plain, and its exceptions say what is wrong
template <class Signature>
c10::TypedOperatorHandle<Signature> in_python(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// as DTYPE_CODES of templates/cpu_library.py; -1 for any other
int32_t code_of(ScalarType dtype) {
  if (dtype == at::kFloat) return 0;
  return dtype == at::kBFloat16 ? 1 : dtype == at::kHalf ? 2 : -1;
}
int32_t code_of(const Optional& tensor) { return tensor ? code_of(tensor->scalar_type()) : 0; }
const void* address_of(const Optional& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

bool is_vector(const Optional& tensor, int64_t length) {
  return !tensor || (tensor->dim() == 1 && tensor->size(0) == length && (tensor->stride(0) == 1 || length == 1) && code_of(tensor) >= 0);
}

Tensor matmul(const Tensor& x, const Tensor& w, const Optional& bias, const Optional& residual, at::IntArrayRef radices,
              std::optional<ScalarType> out_dtype) {
  ScalarType to = out_dtype.value_or(x.scalar_type());
  bool plain = x.dim() == 2 && w.dim() == 2 && x.numel() > 0 && w.numel() > 0 && x.size(1) == w.size(1) &&
               x.scalar_type() == w.scalar_type() && code_of(x.scalar_type()) >= 0 && code_of(to) >= 0 && x.stride(1) == 1 &&
               (w.stride(0) == 1 || w.stride(1) == 1) && is_vector(bias, w.size(0)) && radices.size() <= kMostRadices;
  if (plain && residual)
    plain = residual->dim() == 2 && residual->size(0) == x.size(0) && residual->size(1) == w.size(0) && residual->stride(1) == 1 &&
            code_of(residual) >= 0;
  int64_t leaves = 1;
  for (int64_t radix : radices) {
    plain = plain && radix >= 1 && radix <= x.size(1);
    leaves *= plain ? radix : 1;
    plain = plain && x.size(1) % leaves == 0;
  }
  if (!plain) {
    static const auto op = in_python<decltype(matmul)>("detcompile::matmul");
    return op.call(x, w, bias, residual, radices, out_dtype);
  }
  Tensor out = at::empty({x.size(0), w.size(0)}, x.options().dtype(to));
  Call call{static_cast<const char*>(x.const_data_ptr()), x.stride(0), static_cast<const char*>(w.const_data_ptr()), w.stride(0),
            w.stride(1), address_of(bias), address_of(residual), residual ? residual->stride(0) : 0, out.mutable_data_ptr(),
            x.size(0), w.size(0), x.size(1), radices.data(), int64_t(radices.size()), code_of(x.scalar_type()), code_of(bias),
            code_of(residual), code_of(to), at::get_num_threads()};
  kernels.matmul(&call);
  return out;
}

// What lies between two rows of x [..., R], or 0 if that is not one number or a row is not contiguous
int64_t row_stride(const Tensor& x) {
  int64_t last = x.dim() - 1, stride = 0, next = 0;  // next: what the dim further out has to be
  if (x.stride(last) != 1) return 0;
  for (int64_t i = last - 1; i >= 0; i--) {
    if (x.size(i) == 1) continue;
    if (x.stride(i) == 0 || (stride != 0 && x.stride(i) != next)) return 0;
    if (stride == 0) stride = x.stride(i);
    next = x.stride(i) * x.size(i);
  }
  return stride != 0 ? stride : x.size(last);
}

struct Rows {
  Tensor x;
  int64_t stride, R;
  explicit Rows(const Tensor& given) : x(row_stride(given) != 0 ? given : given.contiguous()), stride(row_stride(x)), R(x.size(-1)) {}
  int64_t count() const { return x.numel() / R; }
  int32_t code() const { return code_of(x.scalar_type()); }
};

bool has_rows(const Tensor& x) { return x.dim() > 0 && x.numel() > 0 && code_of(x.scalar_type()) >= 0; }

Tensor rms_norm(const Tensor& x, const Optional& weight, double eps, bool round_before_weight) {
  if (!has_rows(x) || !is_vector(weight, x.size(-1))) {
    static const auto op = in_python<decltype(rms_norm)>("detcompile::rms_norm");
    return op.call(x, weight, eps, round_before_weight);
  }
  Rows rows(x);
  Tensor out = at::empty(x.sizes(), x.options());
  kernels.rms_norm(rows.x.const_data_ptr(), rows.stride, address_of(weight), out.mutable_data_ptr(), eps, round_before_weight,
                   rows.count(), rows.R, rows.code(), code_of(weight), at::get_num_threads());
  return out;
}

Tensor layer_norm(const Tensor& x, const Optional& weight, const Optional& bias, double eps) {
  if (!has_rows(x) || !is_vector(weight, x.size(-1)) || !is_vector(bias, x.size(-1))) {
    static const auto op = in_python<decltype(layer_norm)>("detcompile::layer_norm");
    return op.call(x, weight, bias, eps);
  }
  Rows rows(x);
  Tensor out = at::empty(x.sizes(), x.options());
  kernels.layer_norm(rows.x.const_data_ptr(), rows.stride, address_of(weight), address_of(bias), out.mutable_data_ptr(), eps,
                     rows.count(), rows.R, rows.code(), code_of(weight), code_of(bias), at::get_num_threads());
  return out;
}

bool is_list(const Tensor& tensor, ScalarType dtype, int64_t length) {
  return tensor.dim() == 1 && tensor.scalar_type() == dtype && tensor.size(0) == length && tensor.is_contiguous();
}
bool is_cache(const Tensor& cache, const Tensor& rows) {
  return cache.dim() == 4 && cache.size(2) == rows.size(1) && cache.size(3) == rows.size(2) && cache.stride(3) == 1 &&
         code_of(cache.scalar_type()) >= 0;
}
bool is_rows(const Tensor& rows, const Tensor& q) {
  return rows.dim() == 3 && rows.numel() > 0 && rows.stride(2) == 1 && rows.size(0) == q.size(0) && rows.scalar_type() == q.scalar_type();
}

Tensor paged_attention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& k_cache, Tensor& v_cache, const Tensor& slots,
                       const Tensor& cu_seqlens, const Tensor& seq_lens, const Tensor& table, double scale, int64_t window,
                       int64_t kv_chunk, double softcap, const Optional& sinks, const Optional& slopes, int64_t attention_chunk,
                       const Optional& relative) {
  bool plain = softcap == 0 && !sinks && !slopes && !relative && std::isfinite(scale) && window >= 0 && attention_chunk >= 0 &&
               (window == 0 || attention_chunk == 0) && kv_chunk > 0 && kv_chunk % kKeyBlock == 0 && q.dim() == 3 &&
               is_rows(q, q) && is_rows(k, q) && is_rows(v, q) && code_of(q.scalar_type()) >= 0 && k.size(1) == v.size(1) &&
               k.size(2) == q.size(2) && q.size(1) % k.size(1) == 0 && is_cache(k_cache, k) && is_cache(v_cache, v) &&
               k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1) &&
               k_cache.scalar_type() == v_cache.scalar_type() && table.dim() == 2 && table.scalar_type() == at::kInt &&
               table.is_contiguous() && is_list(cu_seqlens, at::kInt, table.size(0) + 1) &&
               is_list(seq_lens, at::kInt, table.size(0)) && slots.numel() > 0 && is_list(slots, at::kLong, slots.numel()) &&
               slots.numel() % q.size(0) == 0;
  static const auto op = in_python<decltype(paged_attention)>("detcompile::paged_attention");
  auto call_python = [&] {
    return op.call(q, k, v, k_cache, v_cache, slots, cu_seqlens, seq_lens, table, scale, window, kv_chunk, softcap, sinks, slopes,
                   attention_chunk, relative);
  };
  if (!plain) return call_python();
  Tensor out = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
  int64_t strides[] = {q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                       k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), v_cache.stride(0), v_cache.stride(1), v_cache.stride(2)};
  int64_t sizes[] = {q.size(0), table.size(0), q.size(1), k.size(1), q.size(2), v.size(2), k_cache.size(0), k_cache.size(1),
                     table.size(1), window, kv_chunk, attention_chunk, 0, slots.numel()};
  float scalars[] = {float(scale * kLog2E), 0.0f, 1.0f};
  int64_t where;
  int64_t fault = kernels.paged_attention(
      q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(), k_cache.mutable_data_ptr(), v_cache.mutable_data_ptr(),
      slots.const_data_ptr(), cu_seqlens.const_data_ptr(), seq_lens.const_data_ptr(), table.const_data_ptr(), out.mutable_data_ptr(),
      strides, sizes, scalars, nullptr, nullptr, nullptr, code_of(q.scalar_type()), code_of(k_cache.scalar_type()),
      at::get_num_threads(), &where);
  return fault ? call_python() : out;  // nothing was written
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void detcompile_bind(const Kernels* bound) { kernels = *bound; }

TORCH_LIBRARY_IMPL(detcompile_direct, CPU, library) {
  library.impl("matmul", matmul);
  library.impl("rms_norm", rms_norm);
  library.impl("layer_norm", layer_norm);
  library.impl("paged_attention", paged_attention);
}
