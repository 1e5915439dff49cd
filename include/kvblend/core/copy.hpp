// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Copies of bytes of any alignment for functions that run on host and device. A device's memcpy of unknown alignment
// goes byte by byte: these look at the addresses first.
#pragma once

#include <kvblend/core/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

[[nodiscard]] KVBLEND_HOST_DEVICE inline std::uintptr_t address(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

// Units of a power of two of bytes that both sides are aligned to.
template <int unit>
KVBLEND_HOST_DEVICE void copy_units(const std::byte* from, std::byte* to, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += unit) {
    std::memcpy(__builtin_assume_aligned(to + at, unit), __builtin_assume_aligned(from + at, unit), unit);
  }
}

// The same by the largest unit that the bits of `addresses`, and the number of bytes, allow.
KVBLEND_HOST_DEVICE inline void copy_by_alignment(std::uintptr_t addresses, const std::byte* from, std::byte* to,
                                                  std::int64_t bytes) {
  const std::uintptr_t bits = addresses | static_cast<std::uintptr_t>(bytes);
  if (bits % 16 == 0) {
    copy_units<16>(from, to, bytes);
  } else if (bits % 8 == 0) {
    copy_units<8>(from, to, bytes);
  } else if (bits % 4 == 0) {
    copy_units<4>(from, to, bytes);
  } else if (bits % 2 == 0) {
    copy_units<2>(from, to, bytes);
  } else {
    copy_units<1>(from, to, bytes);
  }
}

// The same for a few bytes, whose number is known when this is compiled.
template <int bytes, int unit = 16>
KVBLEND_HOST_DEVICE void copy_few(std::uintptr_t addresses, const std::byte* from, std::byte* to) {
  if constexpr (bytes % unit != 0) {
    copy_few<bytes, unit / 2>(addresses, from, to);
  } else {
    if constexpr (unit > 1) {
      if (addresses % unit != 0) return copy_few<bytes, unit / 2>(addresses, from, to);
    }
    KVBLEND_UNROLL
    for (int at = 0; at < bytes; at += unit) copy_units<unit>(from + at, to + at, unit);
  }
}

// From memory of any alignment to a local variable, which is aligned for any unit; and back.
template <int bytes>
KVBLEND_HOST_DEVICE void read_bytes(const std::byte* from, void* local) {
#if KVBLEND_ON_DEVICE
  copy_few<bytes>(address(from), from, static_cast<std::byte*>(local));
#else
  std::memcpy(local, from, std::size_t{bytes});
#endif
}
template <int bytes>
KVBLEND_HOST_DEVICE void write_bytes(const void* local, std::byte* to) {
#if KVBLEND_ON_DEVICE
  copy_few<bytes>(address(to), static_cast<const std::byte*>(local), to);
#else
  std::memcpy(to, local, std::size_t{bytes});
#endif
}

// Bytes that do not overlap, or are the very same on the device; on the host, any.
KVBLEND_HOST_DEVICE inline void copy_bytes(const std::byte* from, std::byte* to, std::int64_t bytes) {
#if KVBLEND_ON_DEVICE
  copy_by_alignment(address(from) | address(to), from, to, bytes);
#else
  std::memmove(to, from, static_cast<std::size_t>(bytes));
#endif
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
