// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How a run of numbers lies in memory: the Codec concept. Planes (memory/) say where a run lies, a codec what is in it.
#pragma once

#include <kvblend/core/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// A codec turns `count` consecutive stored values into floats and back.
//   dtype         what chunk identities and file formats call it
//   block_values  values that are stored together; runs start and end at multiples of it (1 for plain floats)
//   block_bytes   bytes of such a block
//   decode        bytes at `source` (any alignment) to floats
//   encode        floats to bytes at `destination` (any alignment), rounding to nearest, ties to even
// Decoding what was encoded, and encoding that again, gives the same bytes.
template <class C>
concept Codec = requires(const std::byte* source, std::byte* destination, const float* values, float* out,
                         std::int64_t n) {
  { C::dtype } -> std::convertible_to<DType>;
  { C::block_values } -> std::convertible_to<std::int32_t>;
  { C::block_bytes } -> std::convertible_to<std::int32_t>;
  { C::decode(source, out, n) } -> std::same_as<void>;
  { C::encode(values, destination, n) } -> std::same_as<void>;
};

// Bytes of `values` consecutive values, a multiple of C::block_values.
template <Codec C>
[[nodiscard]] constexpr std::int64_t bytes_of(std::int64_t values) {
  return values / C::block_values * C::block_bytes;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
