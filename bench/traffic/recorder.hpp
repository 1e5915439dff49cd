// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Recorder: which memory a kernel touches. Code compiled with -fsanitize=thread calls back before each of its loads and
// stores; here those calls count sectors of the memory under watch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace bench {

// A GPU's memory moves in sectors of 32 bytes, and its threads in warps of 32.
inline constexpr std::size_t kSectorBytes = 32;
inline constexpr std::int64_t kWarpItems = 32;
// Warps for which caches are trusted to keep a sector: as many as one multiprocessor runs at once.
inline constexpr std::uint32_t kCachedWarps = 64;

struct Bytes {
  std::int64_t read = 0;
  std::int64_t written = 0;

  [[nodiscard]] std::int64_t both() const { return read + written; }
  Bytes& operator+=(const Bytes& other) {
    read += other.read;
    written += other.written;
    return *this;
  }
};

struct Traffic {
  Bytes memory;  // each sector that is touched, again where none of the kCachedWarps before did, or another launch
  Bytes warps;   // each sector that a warp touches, once for each warp
};

namespace recorder {

// Accesses outside `memory` are not counted: stacks, and the functors themselves. Counts start at 0.
void watch(std::span<const std::byte> memory);
[[nodiscard]] Traffic traffic();

void begin_launch();
void begin_item(std::int64_t item);  // the accesses that follow are those of thread `item`
void end_launch();
void add(const Bytes& bytes);  // of work that is not watched

}  // namespace recorder

}  // namespace bench
