// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Runs of stored values one by one, 16 bytes of them at a time where they are aligned: what a thread of a device does
// with the few values that are its own. Where `count` is known when this is compiled, they stay in its registers.
#pragma once

#include <kvblend/core/config.hpp>
#include <kvblend/core/copy.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

inline constexpr std::int64_t kEachBytes = 16;

// `one` turns a stored value into a float.
template <class Stored, class One>
KVBLEND_HOST_DEVICE void decode_each(const std::byte* source, float* values, std::int64_t count, const One& one) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(Stored));
  constexpr std::int64_t kGroup = kEachBytes / kSize;
  if (address(source) % kEachBytes == 0 && count % kGroup == 0) {
    for (std::int64_t at = 0; at < count; at += kGroup) {
      alignas(kEachBytes) Stored stored[std::size_t{kGroup}];
      copy_units<kEachBytes>(source + at * kSize, reinterpret_cast<std::byte*>(stored), kEachBytes);
      KVBLEND_UNROLL
      for (std::int64_t i = 0; i < kGroup; ++i) values[at + i] = one(stored[i]);
    }
    return;
  }
  for (std::int64_t at = 0; at < count; ++at) {
    alignas(kEachBytes) Stored stored;
    read_bytes<kSize>(source + at * kSize, &stored);
    values[at] = one(stored);
  }
}

// `one` turns a float into a stored value.
template <class One>
KVBLEND_HOST_DEVICE void encode_each(const float* values, std::byte* destination, std::int64_t count, const One& one) {
  using Stored = decltype(one(0.0f));
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(Stored));
  constexpr std::int64_t kGroup = kEachBytes / kSize;
  if (address(destination) % kEachBytes == 0 && count % kGroup == 0) {
    for (std::int64_t at = 0; at < count; at += kGroup) {
      alignas(kEachBytes) Stored stored[std::size_t{kGroup}];
      KVBLEND_UNROLL
      for (std::int64_t i = 0; i < kGroup; ++i) stored[i] = one(values[at + i]);
      copy_units<kEachBytes>(reinterpret_cast<const std::byte*>(stored), destination + at * kSize, kEachBytes);
    }
    return;
  }
  for (std::int64_t at = 0; at < count; ++at) {
    alignas(kEachBytes) const Stored stored = one(values[at]);
    write_bytes<kSize>(&stored, destination + at * kSize);
  }
}

// A float that is stored as it is.
struct Unchanged {
  KVBLEND_HOST_DEVICE float operator()(float value) const { return value; }
};

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
