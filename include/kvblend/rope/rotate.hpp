// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rotates the keys of a run, row by row and head by head, from one plane into another: the loops under every CPU back
// end, with the arithmetic of one head left to a policy.
#pragma once

#include <kvblend/core/types.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/spec.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Turns `pairs` pairs of floats, each by its cosine and sine; in, out and the table do not overlap.
struct PortableRotation {
  // Pair i is (in_a[i], in_b[i]).
  static void neox(const float* __restrict cosines, const float* __restrict sines, std::int32_t pairs,
                   const float* __restrict in_a, const float* __restrict in_b, float* __restrict out_a,
                   float* __restrict out_b) {
    for (std::int32_t i = 0; i < pairs; ++i) {
      const float a = in_a[i];
      const float b = in_b[i];
      out_a[i] = a * cosines[i] - b * sines[i];
      out_b[i] = b * cosines[i] + a * sines[i];
    }
  }

  // Pair i is (in[2i], in[2i + 1]).
  static void interleaved(const float* __restrict cosines, const float* __restrict sines, std::int32_t pairs,
                          const float* __restrict in, float* __restrict out) {
    for (std::int32_t i = 0; i < pairs; ++i) {
      const float a = in[2 * i];
      const float b = in[2 * i + 1];
      out[2 * i] = a * cosines[i] - b * sines[i];
      out[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
  }
};

namespace detail {

// One head. Where both planes store single floats alike, values outside the rotated part keep their very bits.
template <class Rotation, ReadablePlane P, WritablePlane Q>
void rotate_head(const RopeSpec& spec, const float* cosines, const float* sines, const P& source,
                 std::int64_t source_row, const Q& destination, std::int64_t destination_row, std::int32_t head) {
  constexpr bool kKeepsBits = std::same_as<typename P::codec, typename Q::codec> && P::codec::block_values == 1;
  const std::int32_t first = kKeepsBits ? spec.rotary_offset : 0;  // staged are values [first, last)
  const std::int32_t last = kKeepsBits ? spec.rotary_offset + spec.rotary_dim : spec.head_dim;
  alignas(64) float staged_in[kMaxHeadDim];
  alignas(64) float staged_out[kMaxHeadDim];

  const float* in = floats_in_place(source, source_row, head);
  float* out = floats_in_place(destination, destination_row, head);
  // In place, input and output are the same floats: stage the input, so that the loops never see them overlap.
  if (in == nullptr || in == out) {
    decode_values(source, source_row, head, first, last, staged_in + first);
    in = staged_in;
  }
  const bool staged = out == nullptr;
  if (staged) out = staged_out;

  const std::int32_t lo = spec.rotary_offset;
  const std::int32_t hi = lo + spec.rotary_dim;
  if (spec.pairing == RopePairing::neox) {
    const std::int32_t half = spec.rotary_dim / 2;
    Rotation::neox(cosines, sines, half, in + lo, in + lo + half, out + lo, out + lo + half);
  } else {
    Rotation::interleaved(cosines, sines, spec.rotary_dim / 2, in + lo, out + lo);
  }
  if constexpr (kKeepsBits) {
    RunCopier copier;
    copy_value_bits(source, source_row, destination, destination_row, head, 0, lo, copier);
    copy_value_bits(source, source_row, destination, destination_row, head, hi, spec.head_dim, copier);
  } else {
    std::copy(in, in + lo, out);
    std::copy(in + hi, in + spec.head_dim, out + hi);
  }
  if (staged) encode_values(destination, destination_row, head, first, last, staged_out + first);
}

}  // namespace detail

// Whether the keys of `run` keep their values: nothing to rotate, or nowhere to go.
[[nodiscard]] inline bool stays_put(const RopeSpec& spec, const ShiftRun& run) {
  return spec.rotary_dim == 0 || run.distance() == 0;
}

// Whether the rows of `run` must go one after the other, as some are read from where others are written.
template <ReadablePlane P, WritablePlane Q>
[[nodiscard]] bool run_overlaps(const ShiftRun& run, const P& source, const Q& destination) {
  const std::int64_t step = std::int64_t{run.destination.value} - run.source;
  return same_rows(source, destination) && step != 0 && step < run.count && -step < run.count;
}

// Rows [begin, end) of the run; what stays put is copied. The table covers the whole run. Within one plane the rows
// read and written may overlap: they go in the order in which none is overwritten before it is read.
template <class Rotation, ReadablePlane P, WritablePlane Q>
void shift_rows(const RopeSpec& spec, const RotationTable& table, const ShiftRun& run, std::int32_t begin,
                std::int32_t end, const P& source, const Q& destination) {
  const std::int64_t from = run.source;
  const std::int64_t to = run.destination.value;
  if (stays_put(spec, run)) {
    copy_rows(source, from + begin, destination, to + begin, end - begin);
    return;
  }
  const bool backwards = same_rows(source, destination) && to > from;
  for (std::int32_t i = begin; i < end; ++i) {
    const std::int32_t row = backwards ? begin + (end - 1 - i) : i;
    const float* cosines = table.cosines(row);
    const float* sines = table.sines(row);
    for (std::int32_t head = 0; head < source.layout.heads(); ++head) {
      detail::rotate_head<Rotation>(spec, cosines, sines, source, from + row, destination, to + row, head);
    }
  }
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
