// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Norms of rows, and how far the rows of one cache are from those of another: what attention is weighed by, and what a
// gate checks placed rows with. Sums have one order and one rounding, wherever they are made.
#pragma once

#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/bits.hpp>
#include <kvblend/core/config.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/select/deviation.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

// sum + Σ values², in order. A float's square is exact in double.
[[nodiscard]] KVBLEND_HOST_DEVICE inline double add_squares(const float* values, std::int32_t count, double sum) {
  for (std::int32_t i = 0; i < count; ++i) {
    sum = rounded_sum(sum, static_cast<double>(values[i]) * static_cast<double>(values[i]));
  }
  return sum;
}

// sum + mass · norm: what a layer of a probe pass adds to a row's score.
[[nodiscard]] KVBLEND_HOST_DEVICE inline float add_weighed(float sum, float mass, float norm) {
  return rounded_sum(sum, rounded_product(mass, norm));
}

}  // namespace detail

// ‖row‖₂ over all heads and values, in double, head by head. NaN if a value is NaN; 0 if the layout skips the row.
template <ReadablePlane P>
[[nodiscard]] float row_norm(const P& plane, std::int64_t row) {
  if (skips_row(plane.layout, row)) return 0;
  double sum = 0;
  for (std::int32_t head = 0; head < plane.layout.heads(); ++head) {
    alignas(64) float staged[kMaxHeadDim];
    const float* values = detail::head_floats(plane, row, head, staged);
    sum += detail::add_squares(values, plane.layout.head_dim(), 0);
  }
  return static_cast<float>(std::sqrt(sum));
}

// The largest ‖placed − exact‖₂/‖exact‖₂ over `rows`: NaN if a row cannot be judged, 0 without rows. A row of zeros
// counts as far off as the other side's is long.
// At layer 0 keys and values depend on the token and its position alone. So there a row that a blend placed differs
// from the one a full prefill computes by storage rounding only, however good or bad the blend: anything more is a
// fault of the stored KV or of its placement. Errors: planes of two shapes, or without such a row.
template <ReadablePlane P, ReadablePlane Q>
[[nodiscard]] Result<float> placement_error(const P& placed, const Q& exact, std::span<const Row> rows) {
  KVBLEND_RETURN_IF_ERROR(check_shape(placed, "placed"));
  KVBLEND_RETURN_IF_ERROR(check_shape(exact, "exact"));
  if (placed.layout.heads() != exact.layout.heads() || placed.layout.head_dim() != exact.layout.head_dim()) {
    return Status::error(StatusCode::mismatch, "%d heads of %d values, exact has %d of %d", placed.layout.heads(),
                         placed.layout.head_dim(), exact.layout.heads(), exact.layout.head_dim())
        .at("placed");
  }
  float largest = 0;
  for (const Row row : rows) {
    KVBLEND_RETURN_IF_ERROR(check_stored_rows(placed, row.value, 1, "placed"));
    KVBLEND_RETURN_IF_ERROR(check_stored_rows(exact, row.value, 1, "exact"));
    const float norm = row_norm(exact, row.value);
    const float distance = row_deviation(placed, row.value, exact, row.value);
    const float error = norm > 0 ? distance / norm : distance;
    if (is_nan(error)) return error;
    largest = (std::max)(largest, error);
  }
  return largest;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
