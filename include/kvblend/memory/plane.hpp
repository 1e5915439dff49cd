// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Plane: one layer's keys, or one layer's values, in the engine's own memory. Layout says where a row lies, Codec what
// is in it. A plane is a view: trivially copyable, passed by value, owns nothing.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// A layout maps (row, head, tile) to a signed 64-bit byte offset. A head's head_dim values lie in tiles() runs of
// tile_values() consecutive values each; plain layouts have one tile, x-packed ones several.
//   contains(row)  whether the row has memory: false past the end, or where a block table has no block
//   contains_rows(first, count)  (optional) whether all of them have, where that is known without asking each
//   lists_rows(first, count)     (optional) whether the layout says of all of them where they are, without its tables
//                                being read: what the host can ask of tables in a device's memory
//   skips(row)     (optional) whether the row is padding, as a negative slot is: it is passed over, and is no error
template <class L>
concept Layout = std::is_trivially_copyable_v<L> && requires(const L layout, std::int64_t row, std::int32_t i) {
  { layout.heads() } -> std::same_as<std::int32_t>;
  { layout.head_dim() } -> std::same_as<std::int32_t>;
  { layout.tiles() } -> std::same_as<std::int32_t>;
  { layout.tile_values() } -> std::same_as<std::int32_t>;
  { layout.contains(row) } -> std::same_as<bool>;
  { layout.offset(row, i, i) } -> std::same_as<std::int64_t>;
};

// Whether operations pass over `row`.
template <Layout L>
[[nodiscard]] KVBLEND_HOST_DEVICE bool skips_row(const L& layout, std::int64_t row) {
  if constexpr (requires { layout.skips(row); }) {
    return layout.skips(row);
  } else {
    return false;
  }
}

// Byte is std::byte for planes that are written, const std::byte for those that are only read.
template <Codec C, Layout L, class Byte = std::byte>
struct Plane {
  using codec_type = C;
  using layout_type = L;
  using byte = Byte;

  Byte* base = nullptr;
  L layout{};
  [[no_unique_address]] C codec{};

  Plane() = default;
  KVBLEND_HOST_DEVICE Plane(Byte* b, L l, C c = C{}) : base(b), layout(l), codec(c) {}
  // A writable plane may stand wherever a read-only one is asked for.
  // (A template, since for a writable plane it would else be the copy constructor.)
  template <class Other>
  requires(std::is_const_v<Byte>&& std::same_as<Other, std::remove_const_t<Byte>>) KVBLEND_HOST_DEVICE
      Plane(const Plane<C, L, Other>& other)
      : base(other.base), layout(other.layout), codec(other.codec) {}

  // First byte of a run of layout.tile_values() values.
  [[nodiscard]] KVBLEND_HOST_DEVICE Byte* at(std::int64_t row, std::int32_t head, std::int32_t tile = 0) const {
    return base + layout.offset(row, head, tile);
  }
};

template <class P>
concept ReadablePlane = Codec<typename P::codec_type> && Layout<typename P::layout_type> &&
    std::same_as<P, Plane<typename P::codec_type, typename P::layout_type, typename P::byte>>;

template <class P>
concept WritablePlane = ReadablePlane<P> && !std::is_const_v<typename P::byte>;

// Reads values [first, last) of one head of one row into last - first floats. Both are multiples of the codec's block.
template <ReadablePlane P>
KVBLEND_HOST_DEVICE void decode_values(const P& plane, std::int64_t row, std::int32_t head, std::int32_t first,
                                       std::int32_t last, float* values) {
  const auto codec = codec_at(plane.codec, row, head);
  const std::int32_t run = plane.layout.tile_values();
  for (std::int32_t at = first; at < last;) {
    const std::int32_t tile = at / run;
    const std::int32_t within = at - tile * run;
    const std::int32_t count = detail::smaller(run - within, last - at);
    codec.decode(plane.at(row, head, tile) + bytes_of<typename P::codec_type>(within), values + (at - first), count);
    at += count;
  }
}

// Writes last - first floats, through `codec`, to values [first, last) of one head of one row.
template <WritablePlane P, RunCodec C>
KVBLEND_HOST_DEVICE void encode_values(const P& plane, const C& codec, std::int64_t row, std::int32_t head,
                                       std::int32_t first, std::int32_t last, const float* values) {
  const std::int32_t run = plane.layout.tile_values();
  for (std::int32_t at = first; at < last;) {
    const std::int32_t tile = at / run;
    const std::int32_t within = at - tile * run;
    const std::int32_t count = detail::smaller(run - within, last - at);
    codec.encode(values + (at - first), plane.at(row, head, tile) + bytes_of<typename P::codec_type>(within), count);
    at += count;
  }
}

// The same, with the codec that the plane has there: a scale that stands is kept.
template <WritablePlane P>
KVBLEND_HOST_DEVICE void encode_values(const P& plane, std::int64_t row, std::int32_t head, std::int32_t first,
                                       std::int32_t last, const float* values) {
  encode_values(plane, codec_at(plane.codec, row, head), row, head, first, last, values);
}

// Reads one head of one row into head_dim floats.
template <ReadablePlane P>
KVBLEND_HOST_DEVICE void decode_head(const P& plane, std::int64_t row, std::int32_t head, float* values) {
  decode_values(plane, row, head, 0, plane.layout.head_dim(), values);
}

// Writes head_dim floats to one head of one row; a scale that stands is kept.
template <WritablePlane P>
KVBLEND_HOST_DEVICE void encode_head(const P& plane, std::int64_t row, std::int32_t head, const float* values) {
  encode_values(plane, row, head, 0, plane.layout.head_dim(), values);
}

namespace detail {

// check_shape() but for the codec's scales, which may be the device's.
template <ReadablePlane P>
Status check_heads(const P& plane, const char* name) {
  const std::int32_t head_dim = plane.layout.head_dim();
  const std::int32_t run = plane.layout.tile_values();
  if (plane.layout.heads() <= 0 || head_dim <= 0 || head_dim > kMaxHeadDim) {
    return Status::error(StatusCode::invalid_argument, "has %d heads of %d values (at most %d)", plane.layout.heads(),
                         head_dim, kMaxHeadDim)
        .at("%s", name);
  }
  if (run <= 0 || std::int64_t{run} * plane.layout.tiles() != head_dim) {
    return Status::error(StatusCode::invalid_argument, "%d tiles of %d values are not head_dim %d",
                         plane.layout.tiles(), run, head_dim)
        .at("%s", name);
  }
  if (run % P::codec_type::block_values != 0) {
    return Status::error(StatusCode::invalid_argument, "runs of %d values are not whole %s blocks of %d", run,
                         to_string(P::codec_type::dtype), static_cast<int>(P::codec_type::block_values))
        .at("%s", name);
  }
  return {};
}

}  // namespace detail

// Checks that a plane's shape makes sense: heads of head_dim values in whole tiles of whole codec blocks.
template <ReadablePlane P>
Status check_shape(const P& plane, const char* name) {
  KVBLEND_RETURN_IF_ERROR(detail::check_heads(plane, name));
  const Status status = check_codec(plane.codec, plane.layout.heads());
  if (!status.ok()) return Status::error(status.code(), "%s", status.message()).at("%s %s", name, status.where());
  return {};
}

// Checks that rows [first, first + count) have memory in `plane`, and for their scales; rows that the layout skips need
// none. `name` is what the error calls the plane.
template <ReadablePlane P>
Status check_rows(const P& plane, std::int64_t first, std::int64_t count, const char* name) {
  if (count > 0 && plane.base == nullptr) {
    return Status::error(StatusCode::invalid_argument, "plane has no memory").at("%s", name);
  }
  if constexpr (
      requires { plane.layout.contains_rows(first, count); } && !requires { plane.codec.covers(first); }) {
    if (plane.layout.contains_rows(first, count)) return {};  // else the loop finds which
  }
  for (std::int64_t row = first; row < first + count; ++row) {
    if (skips_row(plane.layout, row)) continue;
    if (!plane.layout.contains(row)) {
      return Status::error(StatusCode::out_of_range, "row %lld has no memory", static_cast<long long>(row))
          .at("%s", name);
    }
    if (!covers_row(plane.codec, row)) {
      return Status::error(StatusCode::out_of_range, "row %lld has no memory for its scales",
                           static_cast<long long>(row))
          .at("%s", name);
    }
  }
  return {};
}

// Checks besides that the rows can be read: that scales which they need are there.
template <ReadablePlane P>
Status check_stored_rows(const P& plane, std::int64_t first, std::int64_t count, const char* name) {
  KVBLEND_RETURN_IF_ERROR(check_rows(plane, first, count, name));
  if constexpr (requires { plane.codec.check_row(first); }) {
    for (std::int64_t row = first; row < first + count; ++row) {
      if (skips_row(plane.layout, row)) continue;
      const Status status = plane.codec.check_row(row);
      if (!status.ok()) return Status::error(status.code(), "%s", status.message()).at("%s %s", name, status.where());
    }
  }
  return {};
}

// The checks of planes in the host's memory, of which everything can be read, for functions that have others for other
// memory.
struct HostPlanes {
  template <ReadablePlane P>
  static Status check_shape(const P& plane, const char* name) {
    return kvblend::check_shape(plane, name);
  }
  template <ReadablePlane P>
  static Status check_rows(const P& plane, std::int64_t first, std::int64_t count, const char* name) {
    return kvblend::check_rows(plane, first, count, name);
  }
  template <ReadablePlane P>
  static Status check_stored_rows(const P& plane, std::int64_t first, std::int64_t count, const char* name) {
    return kvblend::check_stored_rows(plane, first, count, name);
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
