// Operands of small matrix products (brgemm), and memory for them.

#pragma once

#include "vectors.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

namespace {

// Memory of one thread, aligned to a cache line; it grows and is reused by later calls.
template <typename T>
class Buffer {
 public:
  T* get(int64_t size) {
    if (size > size_) {
      size_ = 0;  // of what is left if there is no memory
      data_.reset();
      data_.reset(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64)));
      if (!data_) throw std::bad_alloc();
      size_ = size;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

// The right operand of a brgemm: bf16 has two successive rows of a column side by side ("VNNI"), fp32 is as usual.
template <typename T>
constexpr int64_t PAIR = std::is_same_v<T, bf16> ? 2 : 1;

// from (rows, cols) with stride `ld` -> right operand of `rows` x `cols`; rows is even.
template <typename T>
void pack(const T* from, int64_t ld, int64_t rows, int64_t cols, T* to) {
  if constexpr (PAIR<T> == 1) {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * cols, from + i * ld, cols * sizeof(T));
  } else {
    for (int64_t i = 0; i < rows; i += 2) {
      const auto* a = reinterpret_cast<const uint16_t*>(from + i * ld);
      const auto* b = reinterpret_cast<const uint16_t*>(from + (i + 1) * ld);
      auto* out = reinterpret_cast<uint32_t*>(to + i * cols);
#pragma omp simd
      for (int64_t j = 0; j < cols; ++j) out[j] = a[j] | (static_cast<uint32_t>(b[j]) << 16);
    }
  }
}

}  // namespace
