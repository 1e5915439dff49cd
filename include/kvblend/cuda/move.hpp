// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Functors that move rows from plane to plane: keys turned, values copied, bits kept where nothing changes. An item is
// a few neighbouring values of one head, 16 bytes of them where the codec allows, so that threads side by side read and
// write memory side by side, each byte once.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/rotate.hpp>
#include <kvblend/rope/spec.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// Row `i` of a move: where it comes from and where it goes; items start at row `first`. Consecutive rows, but for those
// with computed[row] != 0 (by destination row; null: all move), which somebody else writes.
struct RunRows {
  std::int64_t first = 0;
  std::int64_t sources = 0;       // row 0's
  std::int64_t destinations = 0;  // row 0's
  const std::uint8_t* computed = nullptr;

  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t source(std::int64_t i) const { return sources + i; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t destination(std::int64_t i) const { return destinations + i; }
  [[nodiscard]] KVBLEND_HOST_DEVICE bool moves(std::int64_t i) const {
    return computed == nullptr || computed[destinations + i] == 0;
  }
};

// Row i goes to rows[i].
struct ListedRows {
  static constexpr std::int64_t first = 0;
  const Row* rows = nullptr;

  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t source(std::int64_t i) const { return i; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t destination(std::int64_t i) const { return rows[i].value; }
  [[nodiscard]] KVBLEND_HOST_DEVICE bool moves(std::int64_t) const { return true; }
};

namespace detail {

// Blocks of the heads of many rows, numbered from 0.
struct BlockItems {
  std::int32_t heads = 0;
  std::int32_t blocks = 0;  // of a head

  struct Place {
    std::int64_t row;
    std::int32_t head;
    std::int32_t block;
  };
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int64_t of(std::int64_t rows) const { return rows * heads * blocks; }
  [[nodiscard]] KVBLEND_HOST_DEVICE Place at(std::int64_t item) const {
    const std::int64_t row_blocks = std::int64_t{heads} * blocks;
    const std::int64_t row = item / row_blocks;
    const auto rest = static_cast<std::int32_t>(item - row * row_blocks);
    return {row, rest / blocks, rest % blocks};
  }
};

[[nodiscard]] KVBLEND_HOST_DEVICE constexpr std::int32_t blocks_of(std::int32_t values, std::int32_t block) {
  return (values + block - 1) / block;
}

// Whether the layout has memory for a row. Tables of blocks lie on the device, where the host cannot check them: rows
// that they have no block for are passed over, as padding is.
template <ReadablePlane P>
[[nodiscard]] KVBLEND_HOST_DEVICE bool has_row(const P& plane, std::int64_t row) {
  return !skips_row(plane.layout, row) && plane.layout.contains(row) && covers_row(plane.codec, row);
}
template <ReadablePlane P, ReadablePlane Q>
[[nodiscard]] KVBLEND_HOST_DEVICE bool have_rows(const P& a, std::int64_t a_row, const Q& b, std::int64_t b_row) {
  return has_row(a, a_row) && has_row(b, b_row);
}

// Values of a head that one item takes: whole blocks of both codecs, and 16 bytes of either.
template <StoredFormat From, StoredFormat To>
inline constexpr std::int32_t kItemValues = kvblend::detail::larger(
    kvblend::detail::larger(std::int32_t{From::block_values}, std::int32_t{To::block_values}),
    kvblend::detail::larger(16 / std::int32_t{From::block_bytes}, 16 / std::int32_t{To::block_bytes}));

// Values [first, last) of a head as they are, at most `kMost`: bits where both planes store them alike, else converted.
// Whole blocks of both codecs.
template <std::int32_t kMost, ReadablePlane P, WritablePlane Q>
KVBLEND_HOST_DEVICE void keep_block(const P& source, std::int64_t source_row, const Q& destination,
                                    std::int64_t destination_row, std::int32_t head, std::int32_t first,
                                    std::int32_t last) {
  using From = typename P::codec_type;
  using To = typename Q::codec_type;
  if constexpr (SameFormat<From, To>) {
    if (stores_alike(source.codec, destination.codec)) {
      kvblend::detail::RunCopier copier;
      kvblend::detail::copy_value_bits(source, source_row, destination, destination_row, head, first, last, copier);
      return;
    }
  }
  if (last - first == kMost && source.layout.tiles() == 1 && destination.layout.tiles() == 1) {
    // The number is known when this is compiled: all stays in registers.
    alignas(16) float values[std::size_t{kMost}];
    codec_at(source.codec, source_row, head)
        .decode(source.at(source_row, head) + bytes_of<From>(first), values, std::int64_t{kMost});
    codec_at(destination.codec, destination_row, head)
        .encode(values, destination.at(destination_row, head) + bytes_of<To>(first), std::int64_t{kMost});
    return;
  }
  alignas(16) float values[std::size_t{kMost}];
  decode_values(source, source_row, head, first, last, values);
  encode_values(destination, destination_row, head, first, last, values);
}

}  // namespace detail

// An item: a block of one head of one row, as it is. A row's scales go along where its bits do.
template <ReadablePlane P, WritablePlane Q, class Rows>
struct CopyBlocks {
  static constexpr std::int32_t kValues = detail::kItemValues<typename P::codec_type, typename Q::codec_type>;

  P source;
  Q destination;
  Rows rows;
  detail::BlockItems items{source.layout.heads(), detail::blocks_of(source.layout.head_dim(), kValues)};

  KVBLEND_HOST_DEVICE void operator()(std::int64_t item) const {
    auto place = items.at(item);
    place.row += rows.first;
    if (!rows.moves(place.row)) return;
    const std::int64_t from = rows.source(place.row);
    const std::int64_t to = rows.destination(place.row);
    if (!detail::have_rows(source, from, destination, to)) return;
    const std::int32_t first = place.block * kValues;
    const std::int32_t last = kvblend::detail::smaller(first + kValues, source.layout.head_dim());
    detail::keep_block<kValues>(source, from, destination, to, place.head, first, last);
    if constexpr (SelfScalingCodec<typename Q::codec_type> &&
                  SameFormat<typename P::codec_type, typename Q::codec_type>) {
      if (place.head == 0 && place.block == 0) kvblend::detail::copy_scales(source, from, destination, to);
    }
  }
};

// An item: a block of pairs of one head of one row of a run, turned; or, behind those, a block of values that do not
// turn. `table` lies on the device.
template <ReadablePlane P, WritablePlane Q>
struct TurnBlocks {
  using From = typename P::codec_type;
  using To = typename Q::codec_type;
  static constexpr std::int32_t kPairs = kvblend::detail::larger(std::int32_t{8}, detail::kItemValues<From, To>);
  static constexpr std::int32_t kBlock =
      kvblend::detail::larger(std::int32_t{From::block_values}, std::int32_t{To::block_values});

  P source;
  Q destination;
  RunRows rows;
  RopeShape shape;
  RotationTable table;
  std::int32_t turned = detail::blocks_of(shape.pairs(), kPairs);
  std::int32_t kept_before = detail::blocks_of(shape.rotary_offset, kPairs);
  std::int32_t kept_behind = detail::blocks_of(shape.head_dim - shape.rotary_offset - shape.rotary_dim, kPairs);
  detail::BlockItems items{source.layout.heads(), turned + kept_before + kept_behind};

  // Whether the pairs of `shape` and what lies beside them are whole blocks of both codecs.
  [[nodiscard]] static bool serves(const RopeShape& shape) {
    const std::int32_t run = shape.pairing == RopePairing::neox ? shape.pairs() : shape.rotary_dim;
    return kBlock == 1 || (shape.rotary_offset % kBlock == 0 && run % kBlock == 0);
  }

  KVBLEND_HOST_DEVICE void operator()(std::int64_t item) const {
    auto place = items.at(item);
    place.row += rows.first;
    if (!rows.moves(place.row)) return;
    const std::int64_t from = rows.source(place.row);
    const std::int64_t to = rows.destination(place.row);
    if (!detail::have_rows(source, from, destination, to)) return;
    if (place.block < turned) {
      const std::int32_t at = place.block * kPairs;
      const std::int32_t count = kvblend::detail::smaller(std::int32_t{kPairs}, shape.pairs() - at);
      const bool in_place = source.layout.tiles() == 1 && destination.layout.tiles() == 1;
      if (count == kPairs && in_place) {
        turn_whole_block(place, from, to, at);
      } else {
        turn_block(place, from, to, at, count);
      }
      return;
    }
    const std::int32_t kept = place.block - turned;
    const std::int32_t begin = kept < kept_before ? 0 : shape.rotary_offset + shape.rotary_dim;
    const std::int32_t end = kept < kept_before ? shape.rotary_offset : shape.head_dim;
    const std::int32_t first = begin + (kept < kept_before ? kept : kept - kept_before) * kPairs;
    detail::keep_block<kPairs>(source, from, destination, to, place.head, first,
                               kvblend::detail::smaller(first + kPairs, end));
  }

 private:
  using Place = detail::BlockItems::Place;

  // kPairs is known when this is compiled: all stays in registers.
  KVBLEND_HOST_DEVICE void turn_whole_block(const Place& place, std::int64_t from, std::int64_t to,
                                            std::int32_t at) const {
    const auto decoder = codec_at(source.codec, from, place.head);
    const auto encoder = codec_at(destination.codec, to, place.head);
    const float* const cosines = table.cosines(static_cast<std::int32_t>(place.row)) + at;
    const float* const sines = table.sines(static_cast<std::int32_t>(place.row)) + at;
    const std::byte* const in = source.at(from, place.head) + bytes_of<From>(shape.rotary_offset);
    std::byte* const out = destination.at(to, place.head) + bytes_of<To>(shape.rotary_offset);
    if (shape.pairing == RopePairing::neox) {
      const std::int32_t b = shape.pairs() + at;
      PortableRotation::halves(decoder, encoder, cosines, sines, kPairs, in + bytes_of<From>(at),
                               in + bytes_of<From>(b), out + bytes_of<To>(at), out + bytes_of<To>(b));
    } else {
      PortableRotation::neighbours(decoder, encoder, cosines, sines, kPairs, in + bytes_of<From>(2 * at),
                                   out + bytes_of<To>(2 * at));
    }
  }

  // Values in tiles, and what is left of a head.
  KVBLEND_HOST_DEVICE void turn_block(const Place& place, std::int64_t from, std::int64_t to, std::int32_t at,
                                      std::int32_t count) const {
    alignas(16) float values[2 * std::size_t{kPairs}];
    const float* const cosines = table.cosines(static_cast<std::int32_t>(place.row)) + at;
    const float* const sines = table.sines(static_cast<std::int32_t>(place.row)) + at;
    const bool neox = shape.pairing == RopePairing::neox;
    // One run of values, or two.
    const std::int32_t first = shape.rotary_offset + (neox ? at : 2 * at);
    const std::int32_t size = neox ? count : 2 * count;
    const std::int32_t second = first + shape.pairs();
    decode_values(source, from, place.head, first, first + size, values);
    if (neox) decode_values(source, from, place.head, second, second + size, values + kPairs);
    for (std::int32_t i = 0; i < count; ++i) {
      float& a = values[neox ? i : 2 * i];
      float& b = values[neox ? kPairs + i : 2 * i + 1];
      PortableRotation::turn(cosines[i], sines[i], a, b);
    }
    encode_values(destination, to, place.head, first, first + size, values);
    if (neox) encode_values(destination, to, place.head, second, second + size, values + kPairs);
  }
};

// An item: one row, all heads, by the loops of the CPU back ends. For rows whose scales are made as they are written,
// and for heads in which blocks of a codec are cut by the rotated part. A thread stages a head: slow, but right.
template <ReadablePlane P, WritablePlane Q, class Rows>
struct WholeRows {
  P source;
  Q destination;
  Rows rows;
  RopeShape shape;
  RotationTable table;  // turns(): rows are turned; else copied

  KVBLEND_HOST_DEVICE void operator()(std::int64_t item) const {
    const std::int64_t i = rows.first + item;
    if (!rows.moves(i)) return;
    const std::int64_t from = rows.source(i);
    const std::int64_t to = rows.destination(i);
    if (!detail::have_rows(source, from, destination, to)) return;
    if (table.turns()) {
      const auto row = static_cast<std::int32_t>(i);
      kvblend::detail::rotate_row<PortableRotation>(shape, table.cosines(row), table.sines(row), source, from,
                                                    destination, to);
    } else {
      copy_row(source, from, destination, to);
    }
  }
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
