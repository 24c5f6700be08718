// Calls kernels by requests on standard input, so that Python can run those of an emulated machine (see driver.py).
//
// A request is a function's index (int64) and its arguments: a number is its bytes, an array the count of its bytes
// (int64; -1: null) and the bytes. The answer holds the bytes of the arrays that are not const.
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <type_traits>
#include <vector>

#include "declarations.h"  // written by driver.py: prototypes, and their names as KERNELS

namespace {

void receive(void* to, size_t count) {
  if (std::fread(to, 1, count, stdin) != count) std::exit(0);  // Python has closed the pipe
}

template <class T>
struct Argument {
  T value;
  Argument() { receive(&value, sizeof value); }
  T given() { return value; }
  void answer() {}
};

template <class T>
struct Argument<T*> {
  std::vector<char> bytes;
  bool null;
  Argument() {
    int64_t count;
    receive(&count, sizeof count);
    null = count < 0;
    bytes.resize(null ? 0 : count);
    receive(bytes.data(), bytes.size());
  }
  T* given() { return null ? nullptr : reinterpret_cast<T*>(bytes.data()); }
  void answer() {
    if (!std::is_const_v<T>) std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  }
};

template <class... T>
void call(void (*kernel)(T...)) {
  std::tuple<Argument<T>...> arguments{Argument<T>()...};  // braces: from left to right
  std::apply([&](auto&... each) { kernel(each.given()...); }, arguments);
  std::apply([&](auto&... each) { (each.answer(), ...); }, arguments);
  std::fflush(stdout);
}

}  // namespace

// single operations, which Inductor compiles in a model
EXPORT void elementwise_add(const float* x, const float* y, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i++) out[i] = x[i] + y[i];
}
EXPORT void elementwise_multiply(const float* x, const float* y, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i++) out[i] = x[i] * y[i];
}

int main() {
  for (;;) {
    int64_t index;
    receive(&index, sizeof index);
    int64_t at = 0;
#define KERNEL(name) \
  if (index == at++) call(name);
    KERNELS
  }
}
