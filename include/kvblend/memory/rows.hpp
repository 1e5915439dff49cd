// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows from plane to plane without a change of value: bits where both planes store numbers alike, else converted. Back
// ends copy values and merge fresh rows with it.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/copy.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/memory/transposed.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Whether two planes are views of the very same rows, by base and kind of layout, so that a move may overwrite what it
// has yet to read. Planes that overlap in any other way are the caller's mistake.
template <ReadablePlane P, ReadablePlane Q>
[[nodiscard]] KVBLEND_HOST_DEVICE bool same_rows(const P& source, const Q& destination) {
  if constexpr (std::same_as<typename P::layout_type, typename Q::layout_type>) {
    return source.base == destination.base;
  } else {
    return false;
  }
}

namespace detail {

// Copies byte runs, joining those that follow each other on both sides: a dense run of rows is one memmove.
class RunCopier {
 public:
  KVBLEND_HOST_DEVICE RunCopier() {}
  RunCopier(const RunCopier&) = delete;
  RunCopier& operator=(const RunCopier&) = delete;
  KVBLEND_HOST_DEVICE ~RunCopier() { flush(); }

  KVBLEND_HOST_DEVICE void add(const std::byte* source, std::byte* destination, std::int64_t bytes) {
    if (source != source_ + bytes_ || destination != destination_ + bytes_) {
      flush();
      source_ = source;
      destination_ = destination;
    }
    bytes_ += bytes;
  }
  KVBLEND_HOST_DEVICE void flush() {
    if (bytes_ > 0 && source_ != destination_) copy_bytes(source_, destination_, bytes_);
    bytes_ = 0;
  }

 private:
  const std::byte* source_ = nullptr;
  std::byte* destination_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Bits of values [first, last) of one head. Both are multiples of the codec's block.
template <ReadablePlane P, WritablePlane Q>
KVBLEND_HOST_DEVICE void copy_value_bits(const P& source, std::int64_t source_row, const Q& destination,
                                         std::int64_t destination_row, std::int32_t head, std::int32_t first,
                                         std::int32_t last, RunCopier& copier) {
  using C = typename P::codec_type;
  const std::int32_t from_run = source.layout.tile_values();
  const std::int32_t to_run = destination.layout.tile_values();
  for (std::int32_t at = first; at < last;) {
    const std::int32_t from = at % from_run;
    const std::int32_t to = at % to_run;
    const std::int32_t count = smaller(smaller(from_run - from, to_run - to), last - at);
    copier.add(source.at(source_row, head, at / from_run) + bytes_of<C>(from),
               destination.at(destination_row, head, at / to_run) + bytes_of<C>(to), bytes_of<C>(count));
    at += count;
  }
}

// The floats of a head where they can be read or written in place; nullptr where they must be staged.
template <ReadablePlane P>
[[nodiscard]] auto floats_in_place(const P& plane, std::int64_t row, std::int32_t head) {
  using Float = std::conditional_t<std::is_const_v<typename P::byte>, const float, float>;
  if constexpr (std::same_as<typename P::codec_type, F32Codec>) {
    typename P::byte* const bytes = plane.at(row, head);
    const bool aligned = reinterpret_cast<std::uintptr_t>(bytes) % alignof(float) == 0;
    return plane.layout.tiles() == 1 && aligned ? reinterpret_cast<Float*>(bytes) : static_cast<Float*>(nullptr);
  } else {
    return static_cast<Float*>(nullptr);
  }
}

// A head's floats: where they are, or decoded into `staged`.
template <ReadablePlane P>
[[nodiscard]] const float* head_floats(const P& plane, std::int64_t row, std::int32_t head, float* staged) {
  const float* in_place = floats_in_place(plane, row, head);
  if (in_place != nullptr) return in_place;
  decode_head(plane, row, head, staged);
  return staged;
}

// Writes a row of a plane that makes its scales from what it stores: produce(head, values) gives a head's floats, and
// is asked twice where the heads share a scale. The old scale stands until all that it may be needed for was read.
template <WritablePlane Q, class Produce>
KVBLEND_HOST_DEVICE void write_scaled_row(const Q& destination, std::int64_t row, const Produce& produce) {
  const std::int32_t heads = destination.layout.heads();
  const std::int32_t head_dim = destination.layout.head_dim();
  const std::int32_t group = destination.codec.scale_per_head() ? 1 : heads;
  alignas(64) float values[kMaxHeadDim];
  for (std::int32_t first = 0; first < heads; first += group) {
    float amax = 0;
    for (std::int32_t head = first; head < first + group; ++head) {
      produce(head, values);
      amax = larger(amax, largest_magnitude(values, head_dim));
    }
    const auto codec = destination.codec.fitted(amax);
    for (std::int32_t head = first; head < first + group; ++head) {
      if (group > 1) produce(head, values);
      encode_values(destination, codec, row, head, 0, head_dim, values);
    }
    destination.codec.put_scale(row, first, codec);
  }
}

// The scales of a row whose bits were copied.
template <ReadablePlane P, WritablePlane Q>
KVBLEND_HOST_DEVICE void copy_scales(const P& source, std::int64_t source_row, const Q& destination,
                                     std::int64_t destination_row) {
  const std::int32_t scales = destination.codec.scale_per_head() ? destination.layout.heads() : 1;
  for (std::int32_t head = 0; head < scales; ++head) {
    destination.codec.copy_scale(destination_row, head, source.codec, source_row, head);
  }
}

template <ReadablePlane P>
struct DecodeHead {
  const P& plane;
  std::int64_t row;
  KVBLEND_HOST_DEVICE void operator()(std::int32_t head, float* values) const { decode_head(plane, row, head, values); }
};

template <ReadablePlane P, WritablePlane Q>
KVBLEND_HOST_DEVICE void copy_row(const P& source, std::int64_t source_row, const Q& destination,
                                  std::int64_t destination_row, RunCopier& copier) {
  if (skips_row(source.layout, source_row) || skips_row(destination.layout, destination_row)) return;
  const std::int32_t head_dim = source.layout.head_dim();
  if constexpr (SameFormat<typename P::codec_type, typename Q::codec_type>) {
    if (stores_alike(source.codec, destination.codec)) {
      for (std::int32_t head = 0; head < source.layout.heads(); ++head) {
        copy_value_bits(source, source_row, destination, destination_row, head, 0, head_dim, copier);
      }
      if constexpr (SelfScalingCodec<typename Q::codec_type>) {
        copy_scales(source, source_row, destination, destination_row);
      }
      return;
    }
  }
  if constexpr (SelfScalingCodec<typename Q::codec_type>) {
    write_scaled_row(destination, destination_row, DecodeHead<P>{source, source_row});
  } else {
    alignas(64) float values[kMaxHeadDim];
    for (std::int32_t head = 0; head < source.layout.heads(); ++head) {
      decode_head(source, source_row, head, values);
      encode_head(destination, destination_row, head, values);
    }
  }
}

}  // namespace detail

// Row `source_row` to row `destination_row`, all heads. Shapes agree, head_dim is at most kMaxHeadDim. A row that
// either layout skips is left alone.
template <ReadablePlane P, WritablePlane Q>
KVBLEND_HOST_DEVICE void copy_row(const P& source, std::int64_t source_row, const Q& destination,
                                  std::int64_t destination_row) {
  detail::RunCopier copier;
  detail::copy_row(source, source_row, destination, destination_row, copier);
}

// `count` rows. Within one plane the two ranges may overlap: no row is overwritten before it is read.
template <ReadablePlane P, WritablePlane Q>
void copy_rows(const P& source, std::int64_t source_row, const Q& destination, std::int64_t destination_row,
               std::int64_t count) {
  if constexpr (detail::kCopiesValues<P, Q>) {
    if (detail::transposes(source, destination)) {
      for (std::int64_t i = 0; i < count; i += detail::kRowsTogether) {
        detail::transpose_rows(source, source_row + i, destination, destination_row + i,
                               detail::smaller(detail::kRowsTogether, count - i));
      }
      return;
    }
  }
  detail::RunCopier copier;
  if (same_rows(source, destination) && destination_row > source_row) {
    for (std::int64_t i = count - 1; i >= 0; --i) {
      detail::copy_row(source, source_row + i, destination, destination_row + i, copier);
      copier.flush();
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      detail::copy_row(source, source_row + i, destination, destination_row + i, copier);
    }
  }
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
