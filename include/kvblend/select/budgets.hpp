// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The budget policies: a share of the reused rows, a number of rows, a least score, and a schedule that starts wide and
// narrows over the layers. Rows that were never cached are recomputed anyway and stand outside all of them.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/select/budget.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Rows that a share of `reused` rows is: floor(ratio·reused + 0.5), so halves round up; none at 0, all at 1.
[[nodiscard]] inline std::int32_t rows_of_ratio(double ratio, std::int32_t reused) {
  return static_cast<std::int32_t>(std::floor(ratio * reused + 0.5));
}

namespace detail {

inline Status check_share(double x, const char* field) {
  if (!is_nan(x) && x >= 0.0 && x <= 1.0) return {};
  return Status::error(StatusCode::invalid_argument, "%.9g is not in [0, 1]", x).at("%s", field);
}

inline std::int32_t at_most_candidates(std::int32_t rows, const BudgetInputs& inputs) {
  return (std::min)(rows, static_cast<std::int32_t>(inputs.scores.size()));
}

}  // namespace detail

// The same share of the reused rows at every layer.
struct RatioBudget {
  static constexpr bool reads_scores = false;
  double ratio = 0.15;  // in [0, 1]

  RatioBudget() = default;
  explicit RatioBudget(double share) : ratio(share) {}

  [[nodiscard]] Status validate() const { return detail::check_share(ratio, "ratio"); }
  [[nodiscard]] std::int32_t rows(const BudgetInputs& inputs) const {
    return detail::at_most_candidates(rows_of_ratio(ratio, inputs.reused_rows), inputs);
  }
  [[nodiscard]] std::int32_t most_rows(std::int32_t reused) const { return rows_of_ratio(ratio, reused); }
  [[nodiscard]] bool narrows_at(std::int32_t, std::int32_t) const { return false; }
};

// A number of rows; all, where there are fewer.
struct CountBudget {
  static constexpr bool reads_scores = false;
  std::int32_t count = 0;  // >= 0

  CountBudget() = default;
  explicit CountBudget(std::int32_t n) : count(n) {}

  [[nodiscard]] Status validate() const {
    if (count >= 0) return {};
    return Status::error(StatusCode::invalid_argument, "%d is negative", count).at("count");
  }
  [[nodiscard]] std::int32_t rows(const BudgetInputs& inputs) const {
    return detail::at_most_candidates(count, inputs);
  }
  [[nodiscard]] std::int32_t most_rows(std::int32_t reused) const { return (std::min)(count, reused); }
  [[nodiscard]] bool narrows_at(std::int32_t, std::int32_t) const { return false; }
};

// Rows that score above a threshold, and those that score NaN: what cannot be judged is recomputed.
struct ThresholdBudget {
  static constexpr bool reads_scores = true;
  float threshold = 0.0f;  // finite, in the unit of the score

  ThresholdBudget() = default;
  explicit ThresholdBudget(float t) : threshold(t) {}

  [[nodiscard]] Status validate() const {
    if (is_finite(threshold)) return {};
    return Status::error(StatusCode::invalid_argument, "%g is not finite", static_cast<double>(threshold))
        .at("threshold");
  }
  [[nodiscard]] std::int32_t rows(const BudgetInputs& inputs) const {
    std::int32_t above = 0;
    for (const float score : inputs.scores) above += is_nan(score) || score > threshold ? 1 : 0;
    return above;
  }
  [[nodiscard]] std::int32_t most_rows(std::int32_t reused) const { return reused; }
  [[nodiscard]] bool narrows_at(std::int32_t, std::int32_t) const { return false; }
};

// Starts wide, falls linearly and goes on at a constant share: early layers choose with poor scores, so they keep more
// (CacheBlend, arXiv 2405.16444, section 4.3). With n layers from the first on, r the ratio, i = 0 … n-1 and
// m = min(span, n - 1):
//   share(i) = s + (f - s)·min(i, m)/m     s = min(1, wide·r)
//   f such that the mean of share(0 … n-1) is r: f = (r - s·(1 - w))/w, w = the mean of min(i, m)/m
// As w >= 1/2 and wide <= 2, 0 <= f <= r <= s <= 1: the schedule always reaches its mean and only narrows. Rounded to
// rows, the mean is within half a row of r times the reused rows. With one layer there is no schedule: its share is r.
struct GradualBudget {
  static constexpr bool reads_scores = false;
  double ratio = 0.15;    // in [0, 1], the mean over the layers
  double wide = 1.6;      // in [1, 2], the first share in units of the ratio
  std::int32_t span = 8;  // layers from the first share to the last, >= 1

  GradualBudget() = default;
  explicit GradualBudget(double mean_ratio, double wide_factor = 1.6, std::int32_t layers = 8)
      : ratio(mean_ratio), wide(wide_factor), span(layers) {}

  [[nodiscard]] Status validate() const {
    KVBLEND_RETURN_IF_ERROR(detail::check_share(ratio, "ratio"));
    if (is_nan(wide) || !(wide >= 1.0 && wide <= 2.0)) {
      return Status::error(StatusCode::invalid_argument, "%.9g is not in [1, 2]", wide).at("wide");
    }
    if (span >= 1) return {};
    return Status::error(StatusCode::invalid_argument, "%d is not >= 1", span).at("span");
  }

  // The share at the `step`-th of `steps` layers, in [0, 1].
  [[nodiscard]] double share(std::int32_t step, std::int32_t steps) const {
    const std::int32_t fall = (std::min)(span, steps - 1);
    if (fall < 1) return ratio;
    const double first = (std::min)(1.0, wide * ratio);
    // Sum of min(i, m)/m over the steps: (m + 1)/2 up to i = m, then 1 each.
    const double weight = (0.5 * (fall + 1.0) + (steps - 1.0 - fall)) / steps;
    const double last = std::clamp((ratio - first * (1.0 - weight)) / weight, 0.0, first);
    if (step >= fall) return last;
    return first + (last - first) * (static_cast<double>(step) / fall);
  }

  [[nodiscard]] std::int32_t rows(const BudgetInputs& inputs) const {
    const double now = share(inputs.layer - inputs.first_layer, inputs.layers - inputs.first_layer);
    return detail::at_most_candidates(rows_of_ratio(now, inputs.reused_rows), inputs);
  }
  [[nodiscard]] std::int32_t most_rows(std::int32_t reused) const {
    return rows_of_ratio((std::min)(1.0, wide * ratio), reused);
  }
  [[nodiscard]] bool narrows_at(std::int32_t layer, std::int32_t first_layer) const {
    return layer > first_layer && layer - first_layer <= span;
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
