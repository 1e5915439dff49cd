// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Floating-point questions answered on the bits: -ffast-math lets a compiler assume that there is no NaN and no
// infinity, and our checks must hold in engines built that way.
#pragma once

#include <kvblend/core/config.hpp>

#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

[[nodiscard]] KVBLEND_HOST_DEVICE constexpr bool is_nan(double x) {
  return (__builtin_bit_cast(std::uint64_t, x) & 0x7fffffffffffffffu) > 0x7ff0000000000000u;
}
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr bool is_finite(double x) {
  return (__builtin_bit_cast(std::uint64_t, x) & 0x7ff0000000000000u) != 0x7ff0000000000000u;
}
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr bool is_nan(float x) {
  return (__builtin_bit_cast(std::uint32_t, x) & 0x7fffffffu) > 0x7f800000u;
}
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr bool is_finite(float x) {
  return (__builtin_bit_cast(std::uint32_t, x) & 0x7f800000u) != 0x7f800000u;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
