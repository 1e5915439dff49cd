// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Position priors: how attention fades with the distance to the question. A stored score times the prior estimates what
// the question will attend to before anything is loaded.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// A prior is a copyable struct with
//   double operator()(std::int32_t distance) const   finite, >= 0; distance in positions, >= 0
//   Status validate() const                          names the field that is out of range
template <class P>
concept PositionPrior = requires(const P prior, std::int32_t distance) {
  { prior(distance) } -> std::same_as<double>;
  { prior.validate() } -> std::same_as<Status>;
};

// c(d) = (d + offset)^exponent. The defaults were fitted on two models under 1 B parameters and are for models without a
// calibration of their own; on larger models NoPrior can be better.
struct PowerLawPrior {
  double offset = 32.0;    // positions, in [1, 1e9]
  double exponent = -0.7;  // in [-4, 4]

  [[nodiscard]] double operator()(std::int32_t distance) const { return std::pow(distance + offset, exponent); }

  [[nodiscard]] Status validate() const {
    if (is_nan(offset) || !(offset >= 1.0 && offset <= 1e9)) {
      return Status::error(StatusCode::invalid_argument, "%g is not in [1, 1e9]", offset).at("prior.offset");
    }
    if (is_nan(exponent) || !(exponent >= -4.0 && exponent <= 4.0)) {
      return Status::error(StatusCode::invalid_argument, "%g is not in [-4, 4]", exponent).at("prior.exponent");
    }
    return {};
  }
};

// Near and far count alike.
struct NoPrior {
  [[nodiscard]] double operator()(std::int32_t) const { return 1.0; }
  [[nodiscard]] Status validate() const { return {}; }
};

// A model's own curve: values measured in bins of distance, log c linear in log d between the bins' centres, constant
// outside them. Centres spaced evenly in log d suit it best.
struct BinnedPrior {
  static constexpr std::int32_t kMaxBins = 32;

  std::array<double, kMaxBins> distance{};  // centres, > 0, strictly ascending
  std::array<double, kMaxBins> value{};     // > 0
  std::int32_t bins = 0;                    // of both, in [1, kMaxBins]

  BinnedPrior() = default;

  // Copies the two lists, which must be of one length; anything that validate() would refuse is an error.
  [[nodiscard]] static Result<BinnedPrior> make(std::span<const double> distances, std::span<const double> values) {
    if (distances.size() != values.size()) {
      return Status::error(StatusCode::mismatch, "%zu distances, %zu values", distances.size(), values.size())
          .at("prior");
    }
    if (distances.empty() || distances.size() > kMaxBins) {
      return Status::error(StatusCode::invalid_argument, "%zu bins, not in [1, %d]", distances.size(), kMaxBins)
          .at("prior.bins");
    }
    BinnedPrior prior;
    prior.bins = static_cast<std::int32_t>(distances.size());
    for (std::size_t i = 0; i < distances.size(); ++i) {
      prior.distance[i] = distances[i];
      prior.value[i] = values[i];
    }
    KVBLEND_RETURN_IF_ERROR(prior.validate());
    return prior;
  }

  // The mean of what was measured at each distance, in `count` bins of equal width in log d between the least and the
  // greatest; a centre is the middle of its bin, also in log d. Bins that are empty or come to 0 are left out. Errors:
  // lists of two lengths or none, a distance below 1, a value that is negative or not finite, all of them 0.
  [[nodiscard]] static Result<BinnedPrior> fit(std::span<const std::int32_t> distances, std::span<const double> values,
                                               std::int32_t count = 15);

  [[nodiscard]] double operator()(std::int32_t d) const {
    const auto last = static_cast<std::size_t>(bins - 1);
    if (d <= distance[0]) return value[0];
    if (d >= distance[last]) return value[last];
    std::size_t right = 1;
    while (distance[right] < d) ++right;
    const double along = std::log(d / distance[right - 1]) / std::log(distance[right] / distance[right - 1]);
    return value[right - 1] * std::pow(value[right] / value[right - 1], along);
  }

  [[nodiscard]] Status validate() const {
    if (bins < 1 || bins > kMaxBins) {
      return Status::error(StatusCode::invalid_argument, "%d bins, not in [1, %d]", bins, kMaxBins).at("prior.bins");
    }
    for (std::int32_t b = 0; b < bins; ++b) {
      const auto i = static_cast<std::size_t>(b);
      if (!is_finite(distance[i]) || !(distance[i] > (b == 0 ? 0.0 : distance[i - 1]))) {
        return Status::error(StatusCode::invalid_argument, "%g: distances must be finite, > 0 and ascend", distance[i])
            .at("prior.distance[%d]", b);
      }
      if (!is_finite(value[i]) || !(value[i] > 0.0)) {
        return Status::error(StatusCode::invalid_argument, "%g is not finite and > 0", value[i])
            .at("prior.value[%d]", b);
      }
    }
    return {};
  }
};

// ---------------------------------------------------------------------------------------------------------------------

inline Result<BinnedPrior> BinnedPrior::fit(std::span<const std::int32_t> distances, std::span<const double> values,
                                            std::int32_t count) {
  if (distances.size() != values.size()) {
    return Status::error(StatusCode::mismatch, "%zu distances, %zu values", distances.size(), values.size())
        .at("prior");
  }
  if (count < 1 || count > kMaxBins || distances.empty()) {
    return Status::error(StatusCode::invalid_argument, "%d bins, not in [1, %d], for %zu values", count, kMaxBins,
                         distances.size())
        .at("prior.bins");
  }
  double least = static_cast<double>(distances[0]);
  double greatest = least;
  for (std::size_t i = 0; i < distances.size(); ++i) {
    if (distances[i] < 1) {
      return Status::error(StatusCode::invalid_argument, "%d is not >= 1", distances[i]).at("distances[%zu]", i);
    }
    if (!is_finite(values[i]) || !(values[i] >= 0.0)) {
      return Status::error(StatusCode::invalid_argument, "%g is not finite and >= 0", values[i]).at("values[%zu]", i);
    }
    least = distances[i] < least ? distances[i] : least;
    greatest = distances[i] > greatest ? distances[i] : greatest;
  }
  const double width = std::log(greatest / least) / count;
  std::array<double, kMaxBins> sums{};
  std::array<double, kMaxBins> weights{};
  for (std::size_t i = 0; i < distances.size(); ++i) {
    const double along = width > 0.0 ? std::log(distances[i] / least) / width : 0.0;
    const auto bin = static_cast<std::size_t>(along < count - 1 ? along : count - 1);
    sums[bin] += values[i];
    weights[bin] += 1.0;
  }
  BinnedPrior prior;
  for (std::size_t bin = 0; bin < static_cast<std::size_t>(count); ++bin) {
    if (!(sums[bin] > 0.0)) continue;
    const auto next = static_cast<std::size_t>(prior.bins++);
    prior.distance[next] = least * std::exp(width * (static_cast<double>(bin) + 0.5));
    prior.value[next] = sums[bin] / weights[bin];
  }
  if (prior.bins == 0) return Status::error(StatusCode::invalid_argument, "all are 0").at("values");
  KVBLEND_RETURN_IF_ERROR(prior.validate());
  return prior;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
