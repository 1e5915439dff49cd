// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows into or out of transposed memory, which keeps a value of many rows side by side. Copied row by row each value
// would touch a cache line of its own; here some rows go together.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/memory/plane.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace detail {

// Whether rows of P can be copied into Q value by value at fixed strides: decided by type, and for two planes.
template <ReadablePlane P, WritablePlane Q>
inline constexpr bool kCopiesValues =
    SameFormat<typename P::codec_type, typename Q::codec_type>&& P::codec_type::block_values == 1 &&
    !SelfScalingCodec<typename Q::codec_type> && std::is_base_of_v<HeadShape, typename P::layout_type> &&
    std::is_base_of_v<HeadShape, typename Q::layout_type>;

[[nodiscard]] inline bool is_transposed(const HeadShape& shape) {
  return shape.tile_size == 1 && shape.head_values > 1;
}

template <ReadablePlane P, WritablePlane Q>
[[nodiscard]] bool transposes(const P& source, const Q& destination) {
  if constexpr (kCopiesValues<P, Q>) {
    return is_transposed(source.layout) != is_transposed(destination.layout) &&
           (source.layout.tiles() == 1 || is_transposed(source.layout)) &&
           (destination.layout.tiles() == 1 || is_transposed(destination.layout)) &&
           stores_alike(source.codec, destination.codec);
  } else {
    return false;
  }
}

inline constexpr std::int64_t kRowsTogether = 64;

// At most kRowsTogether rows, of two planes that transposes().
template <ReadablePlane P, WritablePlane Q>
void transpose_rows(const P& source, std::int64_t source_row, const Q& destination, std::int64_t destination_row,
                    std::int64_t count) {
  constexpr std::size_t kBytes = P::codec_type::block_bytes;
  const auto step_of = [](const HeadShape& shape) {
    return is_transposed(shape) ? shape.tile_stride : static_cast<std::int64_t>(kBytes);
  };
  const std::int64_t read_step = step_of(source.layout);
  const std::int64_t write_step = step_of(destination.layout);
  const std::byte* from[kRowsTogether];
  std::byte* to[kRowsTogether];
  for (std::int32_t head = 0; head < source.layout.heads(); ++head) {
    std::int64_t rows = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      if (skips_row(source.layout, source_row + i) || skips_row(destination.layout, destination_row + i)) continue;
      from[rows] = source.at(source_row + i, head);
      to[rows] = destination.at(destination_row + i, head);
      ++rows;
    }
    for (std::int32_t value = 0; value < source.layout.head_dim(); ++value) {
      for (std::int64_t i = 0; i < rows; ++i) {
        std::memcpy(to[i] + value * write_step, from[i] + value * read_step, kBytes);
      }
    }
  }
}

}  // namespace detail
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
