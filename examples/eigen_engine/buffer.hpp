// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Buffer: zeroed floats at a 64-byte boundary. The alignment is part of the arithmetic: vectorised sums start at aligned
// addresses, so buffers that differ in alignment would differ in the last bit.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace eigen_engine {

inline constexpr std::int64_t kAlignment = 64;                              // bytes
inline constexpr std::int64_t kAlignedFloats = kAlignment / sizeof(float);  // floats between aligned addresses

// Smallest row stride, in floats, that keeps every row aligned.
[[nodiscard]] constexpr std::int64_t aligned_stride(std::int64_t columns) {
  return (columns + kAlignedFloats - 1) / kAlignedFloats * kAlignedFloats;
}

class Buffer {
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;

 public:
  Buffer() = default;
  explicit Buffer(std::int64_t floats) : size_(floats) {
    if (floats <= 0) return;
    std::size_t bytes = static_cast<std::size_t>(aligned_stride(floats)) * sizeof(float);
    auto alignment = static_cast<std::size_t>(kAlignment);
    if (bytes >= kHugePage) {
      alignment = kHugePage;
      bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    }
    data_.reset(static_cast<float*>(std::aligned_alloc(alignment, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (bytes >= kHugePage) ::madvise(data_.get(), bytes, MADV_HUGEPAGE);  // weights and caches are read from end to end
#endif
    std::memset(data_.get(), 0, bytes);
  }

  [[nodiscard]] float* data() { return data_.get(); }
  [[nodiscard]] const float* data() const { return data_.get(); }
  [[nodiscard]] std::int64_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ <= 0; }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  std::int64_t size_ = 0;
};

}  // namespace eigen_engine
