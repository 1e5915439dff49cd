// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The index spaces and scalar types every part shares. An index names its space, so that a row cannot be passed where a
// position is meant.
#pragma once

#include <kvblend/core/config.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// An integer that counts within one space. Spaces do not mix; `value` is the way out.
template <class Space>
struct Index {
  std::int32_t value = 0;

  constexpr Index() = default;
  KVBLEND_HOST_DEVICE constexpr explicit Index(std::int32_t v) : value(v) {}

  // Written out, as device code cannot call the standard library's orderings; <=> is what a default of a struct with
  // such a member asks for.
  KVBLEND_HOST_DEVICE friend constexpr bool operator==(Index a, Index b) { return a.value == b.value; }
  KVBLEND_HOST_DEVICE friend constexpr bool operator<(Index a, Index b) { return a.value < b.value; }
  KVBLEND_HOST_DEVICE friend constexpr bool operator>(Index a, Index b) { return a.value > b.value; }
  KVBLEND_HOST_DEVICE friend constexpr bool operator<=(Index a, Index b) { return a.value <= b.value; }
  KVBLEND_HOST_DEVICE friend constexpr bool operator>=(Index a, Index b) { return a.value >= b.value; }
  friend constexpr std::strong_ordering operator<=>(Index a, Index b) { return a.value <=> b.value; }
  KVBLEND_HOST_DEVICE friend constexpr Index operator+(Index a, std::int32_t n) { return Index(a.value + n); }
  KVBLEND_HOST_DEVICE friend constexpr std::int32_t operator-(Index a, Index b) { return a.value - b.value; }
  KVBLEND_HOST_DEVICE constexpr Index& operator++() {
    ++value;
    return *this;
  }
};

using Row = Index<struct RowSpace>;            // a token's place in the prompt, and its row in the host's KV cache
using Position = Index<struct PositionSpace>;  // what RoPE and attention masks use
using ActiveIndex = Index<struct ActiveIndexSpace>;  // a token's place in the set of rows a layer computes

using TokenId = std::int32_t;

// The most values a head may have. One head is staged in an array of this size on the stack, never on the heap.
inline constexpr std::int32_t kMaxHeadDim = 1024;

// 16-bit floats by their bits; codec/ converts them. Kept free of arithmetic: these are what lies in memory.
struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// What a cache stores. The numbers stand in digests and never change. q8_0 and q4_0 are ggml's blocks of 32 values.
enum class DType : std::uint8_t { f32, f16, bf16, f8_e4m3, f8_e5m2, q8_0, q4_0 };

inline constexpr DType kAllDTypes[] = {DType::f32,     DType::f16,  DType::bf16, DType::f8_e4m3,
                                       DType::f8_e5m2, DType::q8_0, DType::q4_0};

// Values that are stored together, and bytes of such a block.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr std::int32_t block_values(DType dtype) {
  return dtype == DType::q8_0 || dtype == DType::q4_0 ? 32 : 1;
}
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr std::int32_t block_bytes(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::f16: return 2;
    case DType::bf16: return 2;
    case DType::f8_e4m3: return 1;
    case DType::f8_e5m2: return 1;
    case DType::q8_0: return 34;
    case DType::q4_0: return 18;
  }
  return 0;
}

[[nodiscard]] constexpr const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::f8_e4m3: return "f8_e4m3";
    case DType::f8_e5m2: return "f8_e5m2";
    case DType::q8_0: return "q8_0";
    case DType::q4_0: return "q4_0";
  }
  return "unknown";
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
