// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A fuzzer's input as a source of numbers, and the way a broken promise ends the program. Past the end of the input
// all is zero, which callers take for the usual value.
#pragma once

#include <kvblend/core/status.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace fuzz {

inline void require(bool promise, const char* what, const char* detail = "") {
  if (promise) return;
  std::fprintf(stderr, "fuzz: broken promise: %s %s\n", what, detail);
  std::abort();
}

// An error must say where it is and what is wrong.
inline bool is_ok(const kvblend::Status& status) {
  if (status.ok()) return true;
  require(status.where()[0] != '\0', "an error names the field", status.message());
  require(status.message()[0] != '\0', "an error says what is wrong", status.where());
  return false;
}

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] const std::uint8_t* rest() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }

  template <class T>
  T take() {
    T value{};
    const std::size_t count = sizeof value < size_ ? sizeof value : size_;
    if (count > 0) std::memcpy(static_cast<void*>(&value), data_, count);
    data_ += count;
    size_ -= count;
    return value;
  }
  std::uint8_t byte() { return take<std::uint8_t>(); }
  bool flag() { return (byte() & 1) != 0; }
  // In [0, count).
  std::int32_t below(std::int32_t count) { return byte() % count; }
  // True once in about eight times.
  bool seldom() { return byte() >= 224; }

  // Any number, mostly a small one, often one at an edge.
  std::int32_t odd32() {
    constexpr std::int32_t kMost = (std::numeric_limits<std::int32_t>::max)();
    constexpr std::int32_t kEdges[] = {0, -1, kMost, -kMost - 1, kMost - 15, 1 << 30, 65535, 1025};
    const std::uint8_t kind = byte();
    if (kind < 160) return kind;
    if (kind < 176) return take<std::int8_t>();
    if (kind < 192) return take<std::int16_t>();
    if (kind < 224) return kEdges[kind % 8];
    return take<std::int32_t>();
  }
  std::int64_t odd64() {
    constexpr std::int64_t kMost = (std::numeric_limits<std::int64_t>::max)();
    constexpr std::int64_t kEdges[] = {
        kMost, -kMost - 1, kMost / 2, kMost / 16 + 1, std::int64_t{1} << 31, std::int64_t{1} << 32, kMost / 1024, -1};
    const std::uint8_t kind = byte();
    if (kind < 192) return odd32();
    if (kind < 224) return kEdges[kind % 8];
    return take<std::int64_t>();
  }
  // `usual`, or seldom any number.
  std::int32_t mostly(std::int32_t usual) { return seldom() ? odd32() : usual; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

}  // namespace fuzz
