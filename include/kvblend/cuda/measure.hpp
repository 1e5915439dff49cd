// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Functors that measure deviations and norms, with the bits of the CPU: squares of each head summed in double and in
// order by one item, the heads of a row by another.
#pragma once

#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/cuda/move.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/select/deviation.hpp>
#include <kvblend/select/norm.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// squares[i * heads + head] = ‖head of fresh row which[i] − that of reused row rows[i]‖²; 0 without memory to compare.
template <ReadablePlane P, ReadablePlane Q>
struct HeadSquares {
  static constexpr std::int32_t kValues = detail::kItemValues<typename P::codec_type, typename Q::codec_type>;

  P fresh;
  Q reused;
  const ActiveIndex* which;
  const Row* rows;
  double* squares;
  std::int32_t heads = fresh.layout.heads();

  KVBLEND_HOST_DEVICE void operator()(std::int64_t item) const {
    const std::int64_t i = item / heads;
    const auto head = static_cast<std::int32_t>(item - i * heads);
    const std::int64_t a_row = which[i].value;
    const std::int64_t b_row = rows[i].value;
    double sum = 0;
    if (detail::have_rows(fresh, a_row, reused, b_row)) {
      const std::int32_t head_dim = fresh.layout.head_dim();
      const bool in_place = fresh.layout.tiles() == 1 && reused.layout.tiles() == 1;
      std::int32_t first = 0;
      for (; in_place && first + kValues <= head_dim; first += kValues) {
        sum = add_whole_block(a_row, b_row, head, first, sum);
      }
      for (; first < head_dim; first += kValues) {
        sum = add_block(a_row, b_row, head, first, kvblend::detail::smaller(first + kValues, head_dim), sum);
      }
    }
    squares[item] = sum;
  }

 private:
  // kValues is known when this is compiled: all stays in registers.
  KVBLEND_HOST_DEVICE double add_whole_block(std::int64_t a_row, std::int64_t b_row, std::int32_t head,
                                             std::int32_t first, double sum) const {
    alignas(16) float a[std::size_t{kValues}];
    alignas(16) float b[std::size_t{kValues}];
    codec_at(fresh.codec, a_row, head)
        .decode(fresh.at(a_row, head) + bytes_of<typename P::codec_type>(first), a, kValues);
    codec_at(reused.codec, b_row, head)
        .decode(reused.at(b_row, head) + bytes_of<typename Q::codec_type>(first), b, kValues);
    return PortableDistance::squared(a, b, kValues, sum);
  }

  KVBLEND_HOST_DEVICE double add_block(std::int64_t a_row, std::int64_t b_row, std::int32_t head, std::int32_t first,
                                       std::int32_t last, double sum) const {
    alignas(16) float a[std::size_t{kValues}];
    alignas(16) float b[std::size_t{kValues}];
    decode_values(fresh, a_row, head, first, last, a);
    decode_values(reused, b_row, head, first, last, b);
    return PortableDistance::squared(a, b, last - first, sum);
  }
};

// squares[i * heads + head] = ‖head of row rows[i]‖²; 0 without memory for it.
template <ReadablePlane P>
struct HeadNorms {
  static constexpr std::int32_t kValues = detail::kItemValues<typename P::codec_type, typename P::codec_type>;

  P plane;
  const Row* rows;
  double* squares;
  std::int32_t heads = plane.layout.heads();

  KVBLEND_HOST_DEVICE void operator()(std::int64_t item) const {
    const std::int64_t i = item / heads;
    const auto head = static_cast<std::int32_t>(item - i * heads);
    const std::int64_t row = rows[i].value;
    double sum = 0;
    if (detail::has_row(plane, row)) {
      const std::int32_t head_dim = plane.layout.head_dim();
      alignas(16) float values[std::size_t{kValues}];
      std::int32_t first = 0;
      for (; plane.layout.tiles() == 1 && first + kValues <= head_dim; first += kValues) {
        codec_at(plane.codec, row, head)
            .decode(plane.at(row, head) + bytes_of<typename P::codec_type>(first), values, std::int64_t{kValues});
        sum = kvblend::detail::add_squares(values, kValues, sum);
      }
      for (; first < head_dim; first += kValues) {
        const std::int32_t last = kvblend::detail::smaller(first + kValues, head_dim);
        decode_values(plane, row, head, first, last, values);
        sum = kvblend::detail::add_squares(values, last - first, sum);
      }
    }
    squares[item] = sum;
  }
};

// out[i] = the root of row i's squares
struct RowRoots {
  const double* squares;
  std::int32_t heads;
  float* out;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    double sum = 0;
    for (std::int32_t head = 0; head < heads; ++head) sum += squares[i * heads + head];
    out[i] = static_cast<float>(std::sqrt(sum));
  }
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
