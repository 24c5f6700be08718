// torch.ops.detcompile_direct: the operations that a step calls most, without Python between torch's dispatcher and the kernels.
// Each takes the arguments of its namesake in torch.ops.detcompile, and passes calls that are not plain to it: attention's rarer
// scores, tensors that must be copied first (norms copy by themselves), and invalid calls.
//
// It is in its own folder because it is compiled once, against torch, and not for each instruction set.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../kernels.h"
#include "../matmul_call.h"

namespace {

using at::ScalarType;
using at::Tensor;
using Optional = std::optional<Tensor>;

// kernels of an instruction set's library, in the order of OPS in templates/cpp_dispatch.py
struct Kernels {
  decltype(&detcompile_matmul) matmul;
  decltype(&detcompile_rms_norm) rms_norm;
  decltype(&detcompile_layer_norm) layer_norm;
  decltype(&detcompile_paged_attention) paged_attention;
} kernels;

// Calls of kernels in order, with the tensors that they read and write. Their memory stays where it is, so that the calls can be
// repeated on the tensors' new contents.
struct Recording {
  std::vector<std::function<bool()>> calls;  // each returns false if it failed
  std::vector<Tensor> tensors;
  std::vector<const void*> addresses;  // of the tensors' data
  int64_t bytes = 0;     // of results, without those of Inductor's kernels
  bool complete = true;  // no call was made that is not recorded
};
thread_local Recording* recording = nullptr;

template <class Repeat>
void record(std::initializer_list<Tensor> tensors, const Optional& first, const Optional& second, const Tensor& out,
            Repeat repeat) {
  if (!recording) return;
  recording->bytes += out.nbytes();
  recording->tensors.push_back(out);
  recording->tensors.insert(recording->tensors.end(), tensors);
  for (const Optional* tensor : {&first, &second})
    if (*tensor) recording->tensors.push_back(**tensor);
  recording->calls.emplace_back(repeat);
}

constexpr size_t kMostRadices = 16;            // _MOST_RADICES of templates/cpu/library.py
constexpr size_t kMostArguments = 64;          // MOST_ARGUMENTS of templates/recorded_calls.py
constexpr int64_t kMostLeaves = 1 << 20;       // _MOST_LEAVES there
constexpr int64_t kKeyBlock = 64;              // KV_BLOCK of orders/numerics.py
constexpr double kLog2E = 1.4426950408889634;  // _LOG2_E of templates/attention/op.py: the bits of scores depend on it

// at::empty goes through the dispatcher, whose code has been evicted from the caches by a product's weights.
Tensor new_tensor(at::IntArrayRef sizes, ScalarType dtype) { return at::detail::empty_cpu(sizes, dtype); }

// For calls that cannot be repeated
void leave_recording() {
  if (recording) recording->complete = false;
}

// The operation in Python: it handles calls that are not plain, and raises the exceptions
template <class Signature>
c10::TypedOperatorHandle<Signature> in_python(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// as DTYPE_CODES of templates/cpu/library.py; -1 for any other
int32_t code_of(ScalarType dtype) {
  if (dtype == at::kFloat) return 0;
  return dtype == at::kBFloat16 ? 1 : dtype == at::kHalf ? 2 : -1;
}
int32_t code_of(const Tensor& tensor) { return code_of(tensor.scalar_type()); }
int32_t code_of(const Optional& tensor) { return tensor ? code_of(*tensor) : 0; }

template <class T>
const T* read(const Tensor& tensor) { return static_cast<const T*>(tensor.const_data_ptr()); }
const void* read(const Optional& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
template <class T>
T* write(const Tensor& tensor) { return static_cast<T*>(tensor.mutable_data_ptr()); }

// Returns true if the storage is as large as sizes and strides require: it may have been freed
bool has_memory(const Tensor& tensor) {
  size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  return tensor.numel() == 0 || tensor.storage().nbytes() >= bytes;
}

bool is_vector(const Optional& tensor, int64_t length) {
  if (!tensor) return true;
  return tensor->dim() == 1 && tensor->size(0) == length && (length == 1 || tensor->stride(0) == 1) && code_of(tensor) >= 0 &&
         has_memory(*tensor);
}

bool is_residual(const Optional& tensor, int64_t M, int64_t N) {
  if (!tensor) return true;
  return tensor->dim() == 2 && tensor->size(0) == M && tensor->size(1) == N && tensor->stride(1) == 1 && code_of(tensor) >= 0 &&
         has_memory(*tensor);
}

bool divide(int64_t K, at::IntArrayRef radices) {
  int64_t rest = K;
  for (int64_t radix : radices) {
    if (radix < 1 || rest % radix != 0) return false;
    rest /= radix;
  }
  return radices.size() <= kMostRadices && K / rest <= kMostLeaves;
}

Tensor matmul(const Tensor& x, const Tensor& w, const Optional& bias, const Optional& residual, at::IntArrayRef radices,
              std::optional<ScalarType> out_dtype) {
  ScalarType to = out_dtype.value_or(x.scalar_type());
  bool plain = x.dim() == 2 && w.dim() == 2 && x.numel() > 0 && w.numel() > 0 && x.size(1) == w.size(1) &&
               x.scalar_type() == w.scalar_type() && code_of(x) >= 0 && code_of(to) >= 0 && x.stride(1) == 1 &&
               (w.stride(0) == 1 || w.stride(1) == 1) && is_vector(bias, w.size(0)) &&
               is_residual(residual, x.size(0), w.size(0)) && divide(x.size(1), radices) && has_memory(x) && has_memory(w);
  if (!plain) {
    leave_recording();
    static const auto op = in_python<decltype(matmul)>("detcompile::matmul");
    return op.call(x, w, bias, residual, radices, out_dtype);
  }
  Tensor out = new_tensor({x.size(0), w.size(0)}, to);
  Call call{.x = read<char>(x),
            .x_stride = x.stride(0),
            .w = read<char>(w),
            .w_n_stride = w.stride(0),
            .w_k_stride = w.stride(1),
            .bias = read(bias),
            .residual = read(residual),
            .residual_stride = residual ? residual->stride(0) : 0,
            .out = write<void>(out),
            .M = x.size(0),
            .N = w.size(0),
            .K = x.size(1),
            .radices = radices.data(),
            .num_radices = int64_t(radices.size()),
            .dtype = code_of(x),
            .bias_dtype = code_of(bias),
            .residual_dtype = code_of(residual),
            .out_dtype = code_of(to),
            .num_threads = at::get_num_threads()};
  kernels.matmul(&call);
  record({x, w}, bias, residual, out, [call, held = radices.vec()]() mutable {
    call.radices = held.data();
    call.num_threads = at::get_num_threads();
    kernels.matmul(&call);
    return true;
  });
  return out;
}

// Returns the stride between rows of x [..., R], or 0 if there is no single one or a row is not contiguous
int64_t row_stride(const Tensor& x) {
  int64_t last = x.dim() - 1, stride = 0, next = 0;  // next: the stride that the next outer dim must have
  if (x.size(last) != 1 && x.stride(last) != 1) return 0;
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
  explicit Rows(const Tensor& given)
      : x(row_stride(given) != 0 ? given : given.contiguous()), stride(row_stride(x)), R(x.size(-1)) {}
  int64_t count() const { return x.numel() / R; }
  void record_copy(const Tensor& given) const {
    if (!recording || x.is_same(given)) return;
    size_t place = recording->tensors.size();  // an index, since a captured Tensor would look like one that a caller holds
    recording->tensors.insert(recording->tensors.end(), {given, x});
    recording->calls.emplace_back([tensors = &recording->tensors, place] {
      (*tensors)[place + 1].copy_((*tensors)[place]);
      return true;
    });
  }
};

bool has_rows(const Tensor& x) { return x.dim() > 0 && x.numel() > 0 && code_of(x) >= 0 && has_memory(x); }

Tensor rms_norm(const Tensor& x, const Optional& weight, double eps, bool round_before_weight) {
  if (!has_rows(x) || !is_vector(weight, x.size(-1))) {
    leave_recording();
    static const auto op = in_python<decltype(rms_norm)>("detcompile::rms_norm");
    return op.call(x, weight, eps, round_before_weight);
  }
  Rows rows(x);
  Tensor out = new_tensor(x.sizes(), x.scalar_type());
  auto call = [=, from = read<void>(rows.x), by = read(weight), to = write<void>(out), stride = rows.stride, M = rows.count(),
               R = rows.R, dtype = code_of(x), weight_dtype = code_of(weight)] {
    kernels.rms_norm(from, stride, by, to, eps, round_before_weight, M, R, dtype, weight_dtype, at::get_num_threads());
    return true;
  };
  call();
  rows.record_copy(x);
  record({rows.x}, weight, {}, out, call);
  return out;
}

Tensor layer_norm(const Tensor& x, const Optional& weight, const Optional& bias, double eps) {
  if (!has_rows(x) || !is_vector(weight, x.size(-1)) || !is_vector(bias, x.size(-1))) {
    leave_recording();
    static const auto op = in_python<decltype(layer_norm)>("detcompile::layer_norm");
    return op.call(x, weight, bias, eps);
  }
  Rows rows(x);
  Tensor out = new_tensor(x.sizes(), x.scalar_type());
  auto call = [=, from = read<void>(rows.x), by = read(weight), plus = read(bias), to = write<void>(out), stride = rows.stride,
               M = rows.count(), R = rows.R, dtype = code_of(x), weight_dtype = code_of(weight), bias_dtype = code_of(bias)] {
    kernels.layer_norm(from, stride, by, plus, to, eps, M, R, dtype, weight_dtype, bias_dtype, at::get_num_threads());
    return true;
  };
  call();
  rows.record_copy(x);
  record({rows.x}, weight, bias, out, call);
  return out;
}

bool is_list(const Tensor& tensor, ScalarType dtype) {
  return tensor.dim() == 1 && tensor.scalar_type() == dtype && tensor.is_contiguous() && has_memory(tensor);
}

// As templates/attention/op.py declares the operands
bool heads_fit(const Tensor& q, const Tensor& k, const Tensor& v) {
  for (const Tensor* rows : {&q, &k, &v}) {
    if (rows->dim() != 3 || rows->numel() == 0 || rows->stride(2) != 1) return false;
    if (rows->size(0) != q.size(0) || rows->scalar_type() != q.scalar_type() || !has_memory(*rows)) return false;
  }
  return code_of(q) >= 0 && k.size(1) == v.size(1) && k.size(2) == q.size(2) && q.size(1) % k.size(1) == 0;
}
bool caches_fit(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v) {
  if (k_cache.dim() != 4 || v_cache.dim() != 4) return false;
  if (k_cache.scalar_type() != v_cache.scalar_type() || code_of(k_cache) < 0) return false;
  if (k_cache.const_data_ptr() == v_cache.const_data_ptr()) return false;
  for (const Tensor* cache : {&k_cache, &v_cache})  // other tensors may have elements that share memory
    if (!cache->is_non_overlapping_and_dense() || !has_memory(*cache)) return false;
  return k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1) && k_cache.size(2) == k.size(1) &&
         v_cache.size(2) == v.size(1) && k_cache.size(3) == k.size(2) && v_cache.size(3) == v.size(2) && k_cache.stride(3) == 1 &&
         v_cache.stride(3) == 1;
}
bool metadata_fits(const Tensor& slots, const Tensor& cu_seqlens, const Tensor& seq_lens, const Tensor& table, int64_t T) {
  if (table.dim() != 2 || table.scalar_type() != at::kInt || !table.is_contiguous() || !has_memory(table)) return false;
  return is_list(slots, at::kLong) && slots.size(0) > 0 && slots.size(0) % T == 0 && is_list(cu_seqlens, at::kInt) &&
         cu_seqlens.size(0) == table.size(0) + 1 && is_list(seq_lens, at::kInt) && seq_lens.size(0) == table.size(0);
}

Tensor paged_attention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& k_cache, Tensor& v_cache, const Tensor& slots,
                       const Tensor& cu_seqlens, const Tensor& seq_lens, const Tensor& table, double scale, int64_t window,
                       int64_t kv_chunk, double softcap, const Optional& sinks, const Optional& slopes, int64_t attention_chunk,
                       const Optional& relative) {
  static const auto op = in_python<decltype(paged_attention)>("detcompile::paged_attention");
  auto call_python = [&] {
    leave_recording();
    return op.call(q, k, v, k_cache, v_cache, slots, cu_seqlens, seq_lens, table, scale, window, kv_chunk, softcap, sinks, slopes,
                   attention_chunk, relative);
  };
  bool plain_scores = softcap == 0 && !sinks && !slopes && !relative && std::isfinite(scale);
  bool visible = window >= 0 && attention_chunk >= 0 && (window == 0 || attention_chunk == 0);
  bool plain = plain_scores && visible && kv_chunk > 0 && kv_chunk % kKeyBlock == 0 && heads_fit(q, k, v) &&
               caches_fit(k_cache, v_cache, k, v) && metadata_fits(slots, cu_seqlens, seq_lens, table, q.size(0));
  if (!plain) return call_python();
  Tensor out = new_tensor({q.size(0), q.size(1), v.size(2)}, q.scalar_type());
  // in the order of attention.cpp
  auto strides = std::to_array<int64_t>({q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                                         k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), v_cache.stride(0),
                                         v_cache.stride(1), v_cache.stride(2)});
  auto sizes = std::to_array<int64_t>({q.size(0), table.size(0), q.size(1), k.size(1), q.size(2), v.size(2), k_cache.size(0),
                                       k_cache.size(1), table.size(1), window, kv_chunk, attention_chunk, 0, slots.size(0)});
  auto scalars = std::to_array<float>({float(scale * kLog2E), 0.0f, 1.0f});
  auto call = [=, q_data = read<char>(q), k_data = read<char>(k), v_data = read<char>(v), k_to = write<char>(k_cache),
               v_to = write<char>(v_cache), slot = read<int64_t>(slots), starts = read<int32_t>(cu_seqlens),
               lengths = read<int32_t>(seq_lens), blocks = read<int32_t>(table), to = write<char>(out), dtype = code_of(q),
               cache_dtype = code_of(k_cache)] {
    int64_t where;
    return kernels.paged_attention(q_data, k_data, v_data, k_to, v_to, slot, starts, lengths, blocks, to, strides.data(),
                                   sizes.data(), scalars.data(), nullptr, nullptr, nullptr, dtype, cache_dtype,
                                   at::get_num_threads(), &where) == 0;
  };
  if (!call()) return call_python();  // nothing was written, and Python raises the error
  record({q, k, v, k_cache, v_cache, slots, cu_seqlens, seq_lens, table}, {}, {}, out, call);
  return out;
}

// Numbers and addresses are passed alike, in registers or on the stack
template <size_t... I>
void call_with(int64_t function, const int64_t* arguments, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype(int64_t(I))...)>(function)(arguments[I]...);
}

template <size_t Count = kMostArguments>
bool call_kernel(int64_t function, const std::vector<int64_t>& arguments) {
  if (arguments.size() == Count) {
    call_with(function, arguments.data(), std::make_index_sequence<Count>());
    return true;
  }
  if constexpr (Count > 0) return call_kernel<Count - 1>(function, arguments);
  return false;
}

// Records a kernel of Inductor, which the caller calls: numbers, and addresses of data of `tensors`
void record_kernel(int64_t function, at::TensorList tensors, at::IntArrayRef arguments) {
  if (!recording) return;
  recording->tensors.insert(recording->tensors.end(), tensors.begin(), tensors.end());
  recording->calls.emplace_back([function, held = arguments.vec()] { return call_kernel(function, held); });
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void detcompile_bind(const Kernels* bound) { kernels = *bound; }

// Begins to record this thread's calls
EXPORT Recording* detcompile_begin_recording() { return recording = new Recording; }

// Returns the bytes of the calls' results, or -1 if a call was not recorded
EXPORT int64_t detcompile_end_recording() {
  Recording* ended = std::exchange(recording, nullptr);
  for (const Tensor& tensor : ended->tensors) ended->addresses.push_back(tensor.const_data_ptr());
  return ended->complete ? ended->bytes : -1;
}

// Fills the tensors that nothing but the recording holds with bytes that no call has written
EXPORT void detcompile_spoil_results(const Recording* kept) {
  std::unordered_map<at::StorageImpl*, std::unordered_map<at::TensorImpl*, size_t>> held;
  for (const Tensor& tensor : kept->tensors) held[tensor.storage().unsafeGetStorageImpl()][tensor.unsafeGetTensorImpl()]++;
  for (const Tensor& tensor : kept->tensors) {
    const auto& views = held[tensor.storage().unsafeGetStorageImpl()];
    bool alone = tensor.storage().use_count() == views.size();
    for (auto [view, count] : views) alone &= c10::raw::intrusive_ptr::use_count(view) == count;
    if (alone) std::memset(tensor.storage().mutable_data(), 0xff, tensor.storage().nbytes());
  }
}

// Repeats the calls. Returns false if a tensor has moved, or a call has failed or raised an exception.
EXPORT bool detcompile_repeat(const Recording* kept) {
  for (size_t i = 0; i < kept->tensors.size(); i++)
    if (kept->tensors[i].const_data_ptr() != kept->addresses[i]) return false;
  try {
    for (const auto& call : kept->calls)
      if (!call()) return false;
    return true;
  } catch (...) {
    return false;
  }
}

EXPORT void detcompile_drop_recording(Recording* kept) { delete kept; }

TORCH_LIBRARY_IMPL(detcompile_direct, CPU, library) {
  library.impl("record_kernel", record_kernel);
  library.impl("matmul", matmul);
  library.impl("rms_norm", rms_norm);
  library.impl("layer_norm", layer_norm);
  library.impl("paged_attention", paged_attention);
}
