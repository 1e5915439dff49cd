// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Calibration: a LinearCostModel from measured times, and the measuring itself by running the host's layer.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/plan/cost_model.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// One measurement: a layer took `seconds` for `rows` rows spread over a prompt of `context` tokens.
struct CostSample {
  std::int32_t rows = 0;
  std::int32_t context = 0;
  double seconds = 0.0;

  CostSample() = default;
  CostSample(std::int32_t r, std::int32_t c, double s) : rows(r), context(c), seconds(s) {}
};

struct CostFit {
  LinearCostModel model;
  double relative_error = 0.0;  // root mean square of (predicted - measured)/measured
};

// Non-negative least squares of the relative errors (a short and a long run count alike).
// Errors: fewer than three samples; rows, context or seconds of a sample out of range (names the index).
[[nodiscard]] Result<CostFit> fit_linear_cost(std::span<const CostSample> samples);

struct CalibrationOptions {
  std::int32_t max_context = 2048;  // tokens, >= 64: the longest prompt the host can run now
  std::int32_t repeats = 5;         // in [1, kMaxRepeats], of which the median counts

  static constexpr std::int32_t kMaxRepeats = 31;

  [[nodiscard]] Status validate() const {
    if (max_context < 64) {
      return Status::error(StatusCode::invalid_argument, "%d is not >= 64", max_context).at("max_context");
    }
    if (repeats < 1 || repeats > kMaxRepeats) {
      return Status::error(StatusCode::invalid_argument, "%d is not in [1, %d]", repeats, kMaxRepeats).at("repeats");
    }
    return {};
  }
};

// run(rows, context): the seconds one layer of a blend takes for `rows` rows spread evenly over `context` tokens: bringing
// the reused rows into the cache (LayerwiseFusor::place), project and attend.
template <class R>
concept LayerTimer = requires(R& run, std::int32_t rows, std::int32_t context) {
  { run(rows, context) } -> std::same_as<Result<double>>;
};

// Measures six points: contexts max/4 and max, each with 1/16, 1/4 and all of its rows. The first run of each point
// only warms up. Points take turns, so that a busy moment of the machine touches all of them and the medians shed it.
// Errors: options out of range; whatever run returns; a time that is not finite and > 0.
template <LayerTimer Run>
[[nodiscard]] Result<CostFit> calibrate(Run&& run, const CalibrationOptions& options = {}) {
  KVBLEND_RETURN_IF_ERROR(options.validate());
  constexpr std::size_t kPoints = 6;
  std::array<CostSample, kPoints> samples;
  for (std::size_t p = 0; p < kPoints; ++p) {
    const std::int32_t context = p < 3 ? options.max_context / 4 : options.max_context;
    samples[p].context = context;
    samples[p].rows = p % 3 == 0 ? context / 16 : p % 3 == 1 ? context / 4 : context;
  }
  std::array<std::array<double, CalibrationOptions::kMaxRepeats>, kPoints> times{};
  for (std::int32_t round = -1; round < options.repeats; ++round) {
    for (std::size_t p = 0; p < kPoints; ++p) {
      Result<double> time = run(samples[p].rows, samples[p].context);
      KVBLEND_RETURN_IF_ERROR(time.status);
      if (!is_finite(time.value) || !(time.value > 0.0)) {
        return Status::error(StatusCode::host_error, "a run took %g s", time.value)
            .at("rows %d, context %d", samples[p].rows, samples[p].context);
      }
      if (round >= 0) times[p][static_cast<std::size_t>(round)] = time.value;
    }
  }
  for (std::size_t p = 0; p < kPoints; ++p) {
    const auto middle = times[p].begin() + options.repeats / 2;
    std::nth_element(times[p].begin(), middle, times[p].begin() + options.repeats);
    samples[p].seconds = *middle;
  }
  return fit_linear_cost(samples);
}

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr std::size_t kCostTerms = 4;

// Normal equations of the cost's terms as columns, scaled to unit diagonal. With so few, non-negative least squares is a
// look at every subset of columns: the best of those whose solution is non-negative is the optimum.
struct CostNormal {
  std::array<std::array<double, kCostTerms>, kCostTerms> gram{};
  std::array<double, kCostTerms> right{};
  double target = 0.0;  // sum of squares of the right side

  // Solves for the columns in `subset`, a bit mask; false if they are dependent.
  [[nodiscard]] bool solve(unsigned subset, std::array<double, kCostTerms>& x) const {
    std::array<std::array<double, kCostTerms + 1>, kCostTerms> a{};
    for (std::size_t i = 0; i < kCostTerms; ++i) {
      for (std::size_t j = 0; j < kCostTerms; ++j) {
        const bool both = ((subset >> i) & 1u) != 0 && ((subset >> j) & 1u) != 0;
        a[i][j] = both ? gram[i][j] : (i == j ? 1.0 : 0.0);
      }
      a[i][kCostTerms] = ((subset >> i) & 1u) != 0 ? right[i] : 0.0;
    }
    for (std::size_t column = 0; column < kCostTerms;
         ++column) {  // the matrix is positive semi-definite: no pivoting needed
      if (!(a[column][column] > 1e-12)) return false;
      for (std::size_t i = 0; i < kCostTerms; ++i) {
        if (i == column) continue;
        const double factor = a[i][column] / a[column][column];
        for (std::size_t j = column; j <= kCostTerms; ++j) a[i][j] -= factor * a[column][j];
      }
    }
    for (std::size_t i = 0; i < kCostTerms; ++i) x[i] = a[i][kCostTerms] / a[i][i];
    return true;
  }

  [[nodiscard]] double residual(const std::array<double, kCostTerms>& x) const {
    double r = target;
    for (std::size_t i = 0; i < kCostTerms; ++i) {
      r -= 2.0 * x[i] * right[i];
      for (std::size_t j = 0; j < kCostTerms; ++j) r += x[i] * x[j] * gram[i][j];
    }
    return r;
  }
};

}  // namespace detail

inline Result<CostFit> fit_linear_cost(std::span<const CostSample> samples) {
  if (samples.size() < 3) {
    return Status::error(StatusCode::invalid_argument, "%zu samples, at least 3 are needed", samples.size())
        .at("samples");
  }
  detail::CostNormal normal;
  for (std::size_t s = 0; s < samples.size(); ++s) {
    const CostSample& sample = samples[s];
    if (sample.rows < 1 || sample.context < sample.rows) {
      return Status::error(StatusCode::invalid_argument, "%d rows over a context of %d", sample.rows, sample.context)
          .at("samples[%zu]", s);
    }
    if (!is_finite(sample.seconds) || !(sample.seconds >= 1e-12 && sample.seconds <= 1e9)) {
      return Status::error(StatusCode::invalid_argument, "%g s is not in [1e-12, 1e9]", sample.seconds)
          .at("samples[%zu]", s);
    }
    const double weight = 1.0 / sample.seconds;
    const std::array<double, detail::kCostTerms> row = {weight, weight * sample.rows,
                                                        weight * sample.rows * static_cast<double>(sample.context),
                                                        weight * sample.context};
    for (std::size_t i = 0; i < detail::kCostTerms; ++i) {
      for (std::size_t j = 0; j < detail::kCostTerms; ++j) normal.gram[i][j] += row[i] * row[j];
      normal.right[i] += row[i];
    }
    normal.target += 1.0;
  }
  std::array<double, detail::kCostTerms> scale{};
  for (std::size_t i = 0; i < detail::kCostTerms; ++i) scale[i] = 1.0 / std::sqrt(normal.gram[i][i]);
  for (std::size_t i = 0; i < detail::kCostTerms; ++i) {
    for (std::size_t j = 0; j < detail::kCostTerms; ++j) normal.gram[i][j] *= scale[i] * scale[j];
    normal.right[i] *= scale[i];
  }

  std::array<double, detail::kCostTerms> best{};
  double best_residual = normal.target;
  for (unsigned subset = 1; subset < 1u << detail::kCostTerms;
       ++subset) {  // larger subsets come later and must be better to win
    std::array<double, detail::kCostTerms> x{};
    if (!normal.solve(subset, x) || *std::min_element(x.begin(), x.end()) < 0.0) continue;
    const double r = normal.residual(x);
    if (r < best_residual) {
      best = x;
      best_residual = r;
    }
  }
  CostFit fit;
  fit.model = LinearCostModel(best[0] * scale[0], best[1] * scale[1], best[2] * scale[2], best[3] * scale[3]);
  double squares = 0.0;
  for (const CostSample& sample : samples) {
    const double e = fit.model.seconds(sample.rows, sample.context) / sample.seconds - 1.0;
    squares += e * e;
  }
  fit.relative_error = std::sqrt(squares / static_cast<double>(samples.size()));
  return fit;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
