// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rotates the keys of a run, row by row and head by head, from one plane into another: the loops under every CPU back
// end, with the arithmetic of a few pairs left to a policy.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/spec.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Pairs that are decoded, turned and encoded at a time: a register or two of any CPU, and whole blocks of either codec.
template <RunCodec From, RunCodec To>
inline constexpr std::int32_t kPairsAtOnce =
    detail::larger(std::int32_t{16}, detail::larger(std::int32_t{From::block_values}, std::int32_t{To::block_values}));

// A rotation turns `pairs` pairs, whole blocks of both codecs, on their way from bytes to bytes, each by its cosine and
// sine. The output may be the very memory of the input; else they do not overlap.
//   halves       pair i is value i of the run at in_a and value i of the one at in_b (neox)
//   neighbours   pair i is values 2i and 2i + 1 of the run at `in` (interleaved)
// This one is plain loops; LaneRotation (lane_rotation.hpp) is what CPU back ends use.
struct PortableRotation {
  template <RunCodec From, RunCodec To>
  KVBLEND_HOST_DEVICE static void halves(const From& from, const To& to, const float* cosines, const float* sines,
                                         std::int32_t pairs, const std::byte* in_a, const std::byte* in_b,
                                         std::byte* out_a, std::byte* out_b) {
    constexpr std::int32_t kStep = kPairsAtOnce<From, To>;
    for (std::int32_t at = 0; at < pairs; at += kStep) {
      const std::int32_t count = detail::smaller(kStep, pairs - at);
      const std::byte* const a = in_a + bytes_of<From>(at);
      const std::byte* const b = in_b + bytes_of<From>(at);
      if (KVBLEND_ON_DEVICE && count == kStep) {  // a copy with a known number, for registers
        turn_halves(from, to, cosines + at, sines + at, kStep, a, b, out_a + bytes_of<To>(at),
                    out_b + bytes_of<To>(at));
      } else {
        turn_halves(from, to, cosines + at, sines + at, count, a, b, out_a + bytes_of<To>(at),
                    out_b + bytes_of<To>(at));
      }
    }
  }

  template <RunCodec From, RunCodec To>
  KVBLEND_HOST_DEVICE static void neighbours(const From& from, const To& to, const float* cosines, const float* sines,
                                             std::int32_t pairs, const std::byte* in, std::byte* out) {
    constexpr std::int32_t kStep = kPairsAtOnce<From, To>;
    for (std::int32_t at = 0; at < pairs; at += kStep) {
      const std::int32_t count = detail::smaller(kStep, pairs - at);
      const std::byte* const from_here = in + bytes_of<From>(2 * at);
      std::byte* const to_here = out + bytes_of<To>(2 * at);
      if (KVBLEND_ON_DEVICE && count == kStep) {
        turn_neighbours(from, to, cosines + at, sines + at, kStep, from_here, to_here);
      } else {
        turn_neighbours(from, to, cosines + at, sines + at, count, from_here, to_here);
      }
    }
  }

  KVBLEND_HOST_DEVICE static void turn(float cosine, float sine, float& a, float& b) {
    const float was_a = a;
    a = was_a * cosine - b * sine;
    b = b * cosine + was_a * sine;
  }

 private:
  // At most kPairsAtOnce of them. Where `count` is known when this is compiled, a device keeps them in registers.
  template <class From, class To>
  KVBLEND_HOST_DEVICE static void turn_halves(const From& from, const To& to, const float* cosines, const float* sines,
                                              std::int32_t count, const std::byte* in_a, const std::byte* in_b,
                                              std::byte* out_a, std::byte* out_b) {
    float a[std::size_t{kPairsAtOnce<From, To>}];
    float b[std::size_t{kPairsAtOnce<From, To>}];
    from.decode(in_a, a, count);
    from.decode(in_b, b, count);
    for (std::int32_t i = 0; i < count; ++i) turn(cosines[i], sines[i], a[i], b[i]);
    to.encode(a, out_a, count);
    to.encode(b, out_b, count);
  }
  template <class From, class To>
  KVBLEND_HOST_DEVICE static void turn_neighbours(const From& from, const To& to, const float* cosines,
                                                  const float* sines, std::int32_t count, const std::byte* in,
                                                  std::byte* out) {
    float values[2 * std::size_t{kPairsAtOnce<From, To>}];
    from.decode(in, values, 2 * count);
    for (std::int32_t i = 0; i < count; ++i) turn(cosines[i], sines[i], values[2 * i], values[2 * i + 1]);
    to.encode(values, out, 2 * count);
  }
};

namespace detail {

template <StoredFormat From, StoredFormat To>
inline constexpr std::int32_t kBlockOfBoth = larger(std::int32_t{From::block_values}, std::int32_t{To::block_values});

// Values [first, last) of a head that do not turn: bits where both planes store them alike, else converted.
template <ReadablePlane P, WritablePlane Q, RunCodec To>
KVBLEND_HOST_DEVICE void keep_values(const P& source, std::int64_t source_row, const Q& destination, const To& to,
                                     std::int64_t destination_row, std::int32_t head, std::int32_t first,
                                     std::int32_t last) {
  if (first >= last) return;
  if constexpr (SameFormat<typename P::codec_type, typename Q::codec_type>) {
    if (stores_alike(source.codec, destination.codec)) {
      RunCopier copier;
      copy_value_bits(source, source_row, destination, destination_row, head, first, last, copier);
      return;
    }
  }
  alignas(64) float values[kMaxHeadDim];
  decode_values(source, source_row, head, first, last, values);
  encode_values(destination, to, destination_row, head, first, last, values);
}

// The rotated part of one head, [0, head_dim) at `in` and at `out`.
template <class Rotation, RunCodec From, RunCodec To>
KVBLEND_HOST_DEVICE void rotate_part(const RopeShape& shape, const From& from, const To& to, const float* cosines,
                                     const float* sines, const std::byte* in, std::byte* out) {
  const std::int32_t half = shape.pairs();
  in += bytes_of<From>(shape.rotary_offset);
  out += bytes_of<To>(shape.rotary_offset);
  if (shape.pairing == RopePairing::neox) {
    Rotation::halves(from, to, cosines, sines, half, in, in + bytes_of<From>(half), out, out + bytes_of<To>(half));
  } else {
    Rotation::neighbours(from, to, cosines, sines, half, in, out);
  }
}

// One head in floats, in place.
template <class Rotation>
KVBLEND_HOST_DEVICE void rotate_floats(const RopeShape& shape, const float* cosines, const float* sines,
                                       float* values) {
  auto* const bytes = reinterpret_cast<std::byte*>(values);
  rotate_part<Rotation>(shape, F32Codec{}, F32Codec{}, cosines, sines, bytes, bytes);
}

template <class Rotation, ReadablePlane P, WritablePlane Q>
KVBLEND_HOST_DEVICE void rotate_head(const RopeShape& shape, const float* cosines, const float* sines, const P& source,
                                     std::int64_t source_row, const Q& destination, std::int64_t destination_row,
                                     std::int32_t head) {
  const auto from = codec_at(source.codec, source_row, head);
  const auto to = codec_at(destination.codec, destination_row, head);
  using From = std::remove_const_t<decltype(from)>;
  using To = std::remove_const_t<decltype(to)>;
  constexpr std::int32_t kBlock = kBlockOfBoth<From, To>;
  static_assert(kBlock % From::block_values == 0 && kBlock % To::block_values == 0,
                "kvblend: of two block sizes one must be a multiple of the other");
  const std::int32_t lo = shape.rotary_offset;
  const std::int32_t hi = lo + shape.rotary_dim;

  // Where pairs are whole blocks of one run of bytes, they turn as they pass through the registers.
  const std::int32_t run = shape.pairing == RopePairing::neox ? shape.pairs() : shape.rotary_dim;
  if (source.layout.tiles() == 1 && destination.layout.tiles() == 1 && lo % kBlock == 0 && run % kBlock == 0) {
    rotate_part<Rotation>(shape, from, to, cosines, sines, source.at(source_row, head),
                          destination.at(destination_row, head));
    keep_values(source, source_row, destination, to, destination_row, head, 0, lo);
    keep_values(source, source_row, destination, to, destination_row, head, hi, shape.head_dim);
    return;
  }

  // Else all blocks that a rotated value lies in are staged.
  const std::int32_t first = lo / kBlock * kBlock;
  const std::int32_t last = smaller((hi + kBlock - 1) / kBlock * kBlock, shape.head_dim);
  alignas(64) float staged[kMaxHeadDim];
#if !KVBLEND_ON_DEVICE
  std::fill_n(staged, shape.head_dim, 0.0f);  // for g++, which does not see that what is read was decoded
#endif
  decode_values(source, source_row, head, first, last, staged + first);
  rotate_floats<Rotation>(shape, cosines, sines, staged);
  encode_values(destination, to, destination_row, head, first, last, staged + first);
  keep_values(source, source_row, destination, to, destination_row, head, 0, first);
  keep_values(source, source_row, destination, to, destination_row, head, last, shape.head_dim);
}

template <class Rotation, ReadablePlane P>
struct RotateHead {
  const RopeShape& shape;
  const float* cosines;
  const float* sines;
  const P& source;
  std::int64_t row;
  KVBLEND_HOST_DEVICE void operator()(std::int32_t head, float* values) const {
    decode_head(source, row, head, values);
    rotate_floats<Rotation>(shape, cosines, sines, values);
  }
};

template <class Rotation, ReadablePlane P, WritablePlane Q>
KVBLEND_HOST_DEVICE void rotate_row(const RopeShape& shape, const float* cosines, const float* sines, const P& source,
                                    std::int64_t source_row, const Q& destination, std::int64_t destination_row) {
  if (skips_row(source.layout, source_row) || skips_row(destination.layout, destination_row)) return;
  if constexpr (SelfScalingCodec<typename Q::codec_type>) {
    write_scaled_row(destination, destination_row, RotateHead<Rotation, P>{shape, cosines, sines, source, source_row});
  } else {
    for (std::int32_t head = 0; head < source.layout.heads(); ++head) {
      rotate_head<Rotation>(shape, cosines, sines, source, source_row, destination, destination_row, head);
    }
  }
}

// Whether whole heads turn, each in one run of bytes and in whole blocks: what most engines have.
template <ReadablePlane P, WritablePlane Q>
[[nodiscard]] KVBLEND_HOST_DEVICE bool whole_heads_turn(const RopeShape& shape, const P& source, const Q& destination) {
  constexpr std::int32_t kBlock = kBlockOfBoth<typename P::codec_type, typename Q::codec_type>;
  return shape.rotary_dim == shape.head_dim && source.layout.tiles() == 1 && destination.layout.tiles() == 1 &&
         (shape.pairing == RopePairing::neox ? shape.pairs() : shape.rotary_dim) % kBlock == 0;
}

// Asks for `bytes` bytes that lie `ahead` bytes behind `here`: the rows that follow, where they follow in memory. Heads
// are turned faster than the hardware foresees that, above all for what is written. A hint: any address will do.
template <int write>
void prefetch(const void* here, std::int64_t ahead, std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  const auto first = reinterpret_cast<std::uintptr_t>(here) + static_cast<std::uintptr_t>(ahead);
  for (std::int64_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + static_cast<std::uintptr_t>(at)), write);
  }
}
inline constexpr std::int64_t kReadAhead = 2048;
inline constexpr std::int64_t kWriteAhead = 2048;

// rotate_row for such heads. All is local that stores of bytes might else be thought to change: this loop has to keep
// up with the memory.
template <class Rotation, bool neox, ReadablePlane P, WritablePlane Q>
void rotate_whole_heads(std::int32_t pairs, const float* cosines, const float* sines, P source, std::int64_t source_row,
                        Q destination, std::int64_t destination_row) {
  if (skips_row(source.layout, source_row) || skips_row(destination.layout, destination_row)) return;
  const std::int32_t heads = source.layout.heads();
  for (std::int32_t head = 0; head < heads; ++head) {
    const auto from = codec_at(source.codec, source_row, head);
    const auto to = codec_at(destination.codec, destination_row, head);
    using From = std::remove_const_t<decltype(from)>;
    using To = std::remove_const_t<decltype(to)>;
    const std::byte* in = source.at(source_row, head);
    std::byte* out = destination.at(destination_row, head);
    prefetch<0>(in, kReadAhead, bytes_of<From>(2 * pairs));
    prefetch<1>(out, kWriteAhead, bytes_of<To>(2 * pairs));
    if constexpr (neox) {
      Rotation::halves(from, to, cosines, sines, pairs, in, in + bytes_of<From>(pairs), out, out + bytes_of<To>(pairs));
    } else {
      Rotation::neighbours(from, to, cosines, sines, pairs, in, out);
    }
  }
}

}  // namespace detail

// Whether the rows of `run` must go one after the other, as some are read from where others are written.
template <ReadablePlane P, WritablePlane Q>
[[nodiscard]] KVBLEND_HOST_DEVICE bool run_overlaps(const ShiftRun& run, const P& source, const Q& destination) {
  const std::int64_t step = std::int64_t{run.destination.value} - run.source;
  return same_rows(source, destination) && step != 0 && step < run.count && -step < run.count;
}

// Rows [begin, end) of the run; where the table turns nothing they are copied. `shape` says which values make a pair.
// The table covers the whole run. Within one plane the rows read and written may overlap: they go in the order in which
// none is overwritten before it is read.
template <class Rotation, ReadablePlane P, WritablePlane Q>
void shift_rows(const RopeShape& shape, const RotationTable& table, const ShiftRun& run, std::int32_t begin,
                std::int32_t end, const P& source, const Q& destination) {
  const std::int64_t from = run.source;
  const std::int64_t to = run.destination.value;
  if (!table.turns()) {
    copy_rows(source, from + begin, destination, to + begin, end - begin);
    return;
  }
  const bool backwards = same_rows(source, destination) && to > from;
  const auto each_row = [begin, end, backwards](const auto& rotate) {
    for (std::int32_t i = begin; i < end; ++i) rotate(backwards ? begin + (end - 1 - i) : i);
  };
  if constexpr (!SelfScalingCodec<typename Q::codec_type>) {
    if (detail::whole_heads_turn(shape, source, destination)) {
      const std::int32_t pairs = shape.pairs();
      if (shape.pairing == RopePairing::neox) {
        each_row([&](std::int32_t row) {
          detail::rotate_whole_heads<Rotation, true>(pairs, table.cosines(row), table.sines(row), source, from + row,
                                                     destination, to + row);
        });
      } else {
        each_row([&](std::int32_t row) {
          detail::rotate_whole_heads<Rotation, false>(pairs, table.cosines(row), table.sines(row), source, from + row,
                                                      destination, to + row);
        });
      }
      return;
    }
  }
  each_row([&](std::int32_t row) {
    detail::rotate_row<Rotation>(shape, table.cosines(row), table.sines(row), source, from + row, destination,
                                 to + row);
  });
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
