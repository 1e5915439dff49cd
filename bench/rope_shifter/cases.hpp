// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What rope_shifter.cpp and its cases, compiled once for each target, share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace bench {

inline constexpr std::int32_t kHeads = 8;
inline constexpr std::int32_t kTokens = 4096;

struct Case {
  const char* target;
  const char* codec;
  std::int32_t head_dim;
  std::int32_t threads;
  const char* backend;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

// Two pieces of memory, larger together than any cache, of which each measurement takes the next part. The bytes are
// numbers near 1 in most codecs; no codec's speed depends on them.
class Arena {
 public:
  static constexpr std::size_t kBytes = std::size_t{512} << 20;

  Arena() {
    if (!ok()) return;
    std::memset(source_, 0x38, kBytes);
    std::memset(destination_, 0, kBytes);
  }
  ~Arena() {
    std::free(source_);
    std::free(destination_);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  [[nodiscard]] bool ok() const { return source_ != nullptr && destination_ != nullptr; }
  // Where the next `bytes` begin, in both pieces.
  [[nodiscard]] std::size_t next(std::size_t bytes) {
    if (at_ + bytes > kBytes) at_ = 0;
    const std::size_t begin = at_;
    at_ += (bytes + kPage - 1) / kPage * kPage;
    return begin;
  }
  [[nodiscard]] const std::byte* source(std::size_t at) const { return source_ + at; }
  [[nodiscard]] std::byte* destination(std::size_t at) const { return destination_ + at; }

 private:
  static constexpr std::size_t kPage = 4096;
  static std::byte* memory() { return static_cast<std::byte*>(std::aligned_alloc(kPage, kBytes)); }

  std::byte* source_ = memory();
  std::byte* destination_ = memory();
  std::size_t at_ = 0;
};

}  // namespace bench
