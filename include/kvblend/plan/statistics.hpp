// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The statistics of a calibration: paired sign test, rank correlation, quantile, normal and binomial tails. Plain sums
// over the caller's numbers, without memory of their own; for the hundreds of prompts that a calibration has.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// a - b, pair by pair.
struct PairedComparison {
  double mean_difference = 0.0;
  double standard_error = 0.0;
  std::int32_t wins = 0;  // pairs with a < b: lower is better
  std::int32_t losses = 0;
  std::int32_t ties = 0;
  double p_value = 1.0;  // sign test, one-sided, without the ties: of so many wins or more if neither were better
};

namespace detail {

// P(X >= successes) for X of Binomial(trials, 1/2), successes >= 0. Summed by logarithms, one term from the one before:
// neither the counts nor 2^-trials need fit a double, and lgamma() would write to a variable of the whole process.
inline double binomial_tail(std::int32_t trials, std::int32_t successes) {
  double term = -trials * std::log(2.0);  // P(X = i)'s, from i = 0 on
  double tail = 0.0;
  for (std::int32_t i = 0; i <= trials; ++i) {
    if (i >= successes) tail += std::exp(term);
    term += std::log((trials - i) / (i + 1.0));  // at i = trials -infinity, which nothing reads
  }
  return tail > 1.0 ? 1.0 : tail;
}

inline double normal_tail(double z) { return 0.5 * std::erfc(z / std::sqrt(2.0)); }

inline Status check_values(std::span<const double> values, const char* field) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!is_finite(values[i]) || !(values[i] >= 0.0)) {
      return Status::error(StatusCode::invalid_argument, "%g is not finite and >= 0", values[i])
          .at("%s[%zu]", field, i);
    }
  }
  return {};
}

inline Status check_pairs(std::span<const double> a, std::span<const double> b, const char* a_name,
                          const char* b_name) {
  if (a.size() != b.size()) {
    return Status::error(StatusCode::mismatch, "%zu values, %s has %zu", a.size(), b_name, b.size()).at("%s", a_name);
  }
  KVBLEND_RETURN_IF_ERROR(check_values(a, a_name));
  return check_values(b, b_name);
}

// Place of values[at] among them, from 0; equal ones share the mean of their places.
inline double rank_of(std::span<const double> values, std::size_t at) {
  double below = 0.0;
  double equal = -1.0;
  for (const double x : values) {
    below += x < values[at] ? 1.0 : 0.0;
    equal += x == values[at] ? 1.0 : 0.0;
  }
  return below + 0.5 * equal;
}

}  // namespace detail

// Errors: lists of two lengths, a value that is negative or not finite.
[[nodiscard]] inline Result<PairedComparison> compare(std::span<const double> a, std::span<const double> b) {
  KVBLEND_RETURN_IF_ERROR(detail::check_pairs(a, b, "a", "b"));
  PairedComparison out;
  const auto n = static_cast<double>(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    out.mean_difference += (a[i] - b[i]) / n;
    out.wins += a[i] < b[i] ? 1 : 0;
    out.losses += a[i] > b[i] ? 1 : 0;
    out.ties += a[i] == b[i] ? 1 : 0;
  }
  double squares = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double e = a[i] - b[i] - out.mean_difference;
    squares += e * e;
  }
  if (a.size() > 1) out.standard_error = std::sqrt(squares / (n - 1.0) / n);
  if (out.wins + out.losses > 0) out.p_value = detail::binomial_tail(out.wins + out.losses, out.wins);
  return out;
}

struct RankCorrelation {
  double rho = 0.0;      // Spearman's, ties sharing their places; 0 where a list is constant
  double p_value = 1.0;  // one-sided, of a rho so high by chance: normal approximation, rough below ten pairs
};

// Errors: as compare(). O(n²).
[[nodiscard]] inline Result<RankCorrelation> rank_correlation(std::span<const double> a, std::span<const double> b) {
  KVBLEND_RETURN_IF_ERROR(detail::check_pairs(a, b, "a", "b"));
  RankCorrelation out;
  const double middle = 0.5 * (static_cast<double>(a.size()) - 1.0);
  double product = 0.0;
  double of_a = 0.0;
  double of_b = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = detail::rank_of(a, i) - middle;
    const double y = detail::rank_of(b, i) - middle;
    product += x * y;
    of_a += x * x;
    of_b += y * y;
  }
  if (!(of_a > 0.0 && of_b > 0.0)) return out;
  out.rho = product / std::sqrt(of_a * of_b);
  out.p_value = detail::normal_tail(out.rho * std::sqrt(static_cast<double>(a.size()) - 1.0));
  return out;
}

// The least of `values` that at most share·n of them exceed; share in [0, 1]. 0 without values. O(n²).
[[nodiscard]] inline double upper_quantile(std::span<const double> values, double share) {
  double best = 0.0;
  bool found = false;
  for (const double candidate : values) {
    double above = 0.0;
    for (const double x : values) above += x > candidate ? 1.0 : 0.0;
    // Divided, not multiplied: 29 of 100 are as many as 0.29 says, though 0.29·100 rounds to less.
    if (above / static_cast<double>(values.size()) > share || (found && candidate >= best)) continue;
    best = candidate;
    found = true;
  }
  return best;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
