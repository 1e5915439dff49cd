// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Deviation: how far a freshly computed row lies from the reused one, which says how much the row would gain from being
// recomputed (CacheBlend, arXiv 2405.16444, section 4.2).
#pragma once

#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/memory/rows.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// sum + Σ (a[i] − b[i])² in double, in order: the bits are the same wherever it runs, and for a head in parts.
struct PortableDistance {
  KVBLEND_HOST_DEVICE static double squared(const float* a, const float* b, std::int32_t count, double sum = 0) {
    for (std::int32_t i = 0; i < count; ++i) {
      const double difference = static_cast<double>(a[i]) - static_cast<double>(b[i]);
      sum = detail::rounded_sum(sum, detail::rounded_product(difference, difference));
    }
    return sum;
  }
};

// ‖fresh row − reused row‖₂ over all heads and values. NaN if a value is NaN; 0 if a layout skips its row, which then
// has nothing to compare. The planes have one shape.
template <class Distance = PortableDistance, ReadablePlane P, ReadablePlane Q>
[[nodiscard]] float row_deviation(const P& fresh, std::int64_t fresh_row, const Q& reused, std::int64_t reused_row) {
  if (skips_row(fresh.layout, fresh_row) || skips_row(reused.layout, reused_row)) return 0;
  const std::int32_t head_dim = fresh.layout.head_dim();
  double sum = 0;
  for (std::int32_t head = 0; head < fresh.layout.heads(); ++head) {
    alignas(64) float staged_fresh[kMaxHeadDim];
    alignas(64) float staged_reused[kMaxHeadDim];
    const float* a = detail::head_floats(fresh, fresh_row, head, staged_fresh);
    const float* b = detail::head_floats(reused, reused_row, head, staged_reused);
    sum += Distance::squared(a, b, head_dim);
  }
  return static_cast<float>(std::sqrt(sum));
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
