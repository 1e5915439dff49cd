// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How a run of numbers lies in memory: the Codec concept. Planes (memory/) say where a run lies, a codec what is in it.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// What every codec says of its bytes:
//   dtype         what chunk identities and file formats call it
//   block_values  values that are stored together; runs start and end at multiples of it (1 for plain floats)
//   block_bytes   bytes of such a block
template <class C>
concept StoredFormat = std::is_trivially_copyable_v<C> && requires {
  { C::dtype } -> std::convertible_to<DType>;
  { C::block_values } -> std::convertible_to<std::int32_t>;
  { C::block_bytes } -> std::convertible_to<std::int32_t>;
};

// Turns `count` consecutive stored values into floats and back.
//   decode        bytes at `source` (any alignment) to floats
//   encode        floats to bytes at `destination` (any alignment), rounding as the format's own quantiser does
// Decoding what was encoded, and encoding that again, gives the same bytes for plain floats.
template <class C>
concept RunCodec = StoredFormat<C> && requires(const C codec, const std::byte* source, std::byte* destination,
                                               const float* values, float* out, std::int64_t n) {
  { codec.decode(source, out, n) } -> std::same_as<void>;
  { codec.encode(values, destination, n) } -> std::same_as<void>;
};

// A codec that needs to know which row and head it turns, for the scale that goes with them: `at` gives the codec of
// that place.
template <class C>
concept LocatedCodec = StoredFormat<C> && requires(const C codec, std::int64_t row, std::int32_t head) {
  { codec.at(row, head) } -> RunCodec;
};

// Optional members:
//   check(heads)         a Status: whether it can serve planes of so many heads, say whether its scales are there
//   covers(row)          whether there is memory for what belongs to the row besides its bytes (true where absent)
//   check_row(row)       a Status: whether that is there to be read
//   stores_like(other)   whether bytes mean the same under both, so that they may be copied; other may be of another
//                        type. Where absent, codecs of one type do.
template <class C>
concept Codec = RunCodec<C> || LocatedCodec<C>;

// A codec that makes its scales from what it stores, one for each row or for each row and head:
//   scale_per_head()                             which of the two
//   fitted(amax)                                 the run codec whose scale suits values up to `amax` in magnitude
//   put_scale(row, head, run)                    stores the scale of such a run codec
//   copy_scale(row, head, other, row, head)      stores the scale that `other` has at its row and head
template <class C>
concept SelfScalingCodec = LocatedCodec<C> &&
    requires(const C codec, float amax, std::int64_t row, std::int32_t head, const C& other) {
  { codec.scale_per_head() } -> std::same_as<bool>;
  { codec.fitted(amax) } -> RunCodec;
  { codec.put_scale(row, head, codec.fitted(amax)) } -> std::same_as<void>;
  { codec.copy_scale(row, head, other, row, head) } -> std::same_as<void>;
};

// Bytes of `values` consecutive values, a multiple of C::block_values.
template <StoredFormat C>
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr std::int64_t bytes_of(std::int64_t values) {
  return values / C::block_values * C::block_bytes;
}

// The codec of one head of one row.
template <Codec C>
[[nodiscard]] KVBLEND_HOST_DEVICE auto codec_at(const C& codec, std::int64_t row, std::int32_t head) {
  if constexpr (LocatedCodec<C>) {
    return codec.at(row, head);
  } else {
    return codec;
  }
}

// Whether there may be two codecs C and D under which bytes mean the same.
template <class C, class D>
concept SameFormat = std::same_as<C, D> || requires(const C a, const D b) {
  { a.stores_like(b) } -> std::same_as<bool>;
};

// Whether bytes mean the same under both, so that they may be copied from one to the other.
template <Codec C, Codec D>
[[nodiscard]] KVBLEND_HOST_DEVICE bool stores_alike(const C& a, const D& b) {
  if constexpr (requires { a.stores_like(b); }) {
    return a.stores_like(b);
  } else {
    return std::same_as<C, D>;
  }
}

// Whether the row has memory for its scales, if there are such.
template <Codec C>
[[nodiscard]] KVBLEND_HOST_DEVICE bool covers_row(const C& codec, std::int64_t row) {
  if constexpr (requires { codec.covers(row); }) {
    return codec.covers(row);
  } else {
    return true;
  }
}

// Whether `codec` can serve planes of so many heads.
template <Codec C>
Status check_codec(const C& codec, std::int32_t heads) {
  if constexpr (requires { codec.check(heads); }) {
    return codec.check(heads);
  } else {
    return {};
  }
}

namespace detail {

// The largest magnitude among `count` values. NaN counts as none.
[[nodiscard]] KVBLEND_HOST_DEVICE inline float largest_magnitude(const float* values, std::int32_t count) {
  float largest = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const float magnitude = values[i] < 0 ? -values[i] : values[i];
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
