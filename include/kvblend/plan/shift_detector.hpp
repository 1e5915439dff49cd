// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ShiftDetector: whether a stream of numbers is still what it was calibrated to be, with a bound on false alarms that
// asks for no normal distribution. The statistics behind the gate (gate.hpp).
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// KL of healthy requests as calibration found it, by its logarithm, which is far closer to normal than KL itself.
// log_mean and log_sd err on the high side where they come from few prompts (healthy_kl() in quality.hpp).
struct HealthyKl {
  double log_mean = 0.0;  // of ln KL, nats per token
  double log_sd = 0.0;    // > 0
  double mean = 0.0;      // of KL, > 0, as measured
  std::int32_t n = 0;     // prompts

  [[nodiscard]] Status validate() const {
    const auto bad = [](double x, const char* field) {
      return Status::error(StatusCode::invalid_argument, "%g is out of range", x).at("healthy.%s", field);
    };
    if (!is_finite(log_mean) || !(std::abs(log_mean) <= 100.0)) return bad(log_mean, "log_mean");
    if (!is_finite(log_sd) || !(log_sd > 0.0 && log_sd <= 100.0)) return bad(log_sd, "log_sd");
    if (!is_finite(mean) || !(mean > 0.0)) return bad(mean, "mean");
    if (n < 2) return Status::error(StatusCode::invalid_argument, "%d is not >= 2", n).at("healthy.n");
    return {};
  }

  // In standard deviations from the healthy mean. A KL of 0 is as good as 1e-9.
  [[nodiscard]] double standardized(double kl) const { return (std::log((std::max)(kl, 1e-9)) - log_mean) / log_sd; }
};

// A one-sided CUSUM of bets: with y = min(x, kCap), W = max(0, W + bet·y - price) over the samples so far, and an alarm
// at W >= threshold.
// Guarantee. Let samples x be independent, of any shape, with a mean <= 0 and a variance <= 1: an alarm comes within n
// of them with a probability of at most n·e^-threshold. For suppose a mean of 0, so that E x² <= 1. As (e^u - 1 - u)/u²
// grows with u, E e^(bet·y) <= 1 + c = e^price with c = (e^(bet·kCap) - 1 - bet·kCap)/kCap². So the product of
// e^(bet·y - price) from any sample on is a supermartingale that starts at 1, and by Ville's inequality reaches
// e^threshold with a probability of at most e^-threshold; W is the logarithm of the largest of the n of them. A sample
// of mean -m < 0 is one of mean 0 less m, which only makes its y smaller.
// The cap bounds what one sample can say: no single one, however bad, is enough.
// Power: under a mean of `shift` an alarm takes about threshold/(bet·shift - price) samples; the bet is the one for
// which that is least.
class ShiftDetector {
 public:
  static constexpr double kCap = 3.0;  // standard deviations

  ShiftDetector() = default;
  // Both > 0.
  ShiftDetector(double shift, double threshold) : threshold_(threshold) {
    double best = 0.0;
    for (int step = 1; step <= 40; ++step) {
      const double bet = 0.025 * step;
      const double gain = bet * (std::min)(shift, kCap) - price(bet);
      if (step > 1 && gain <= best) continue;
      best = gain;
      bet_ = bet;
    }
    price_ = price(bet_);
  }

  // Whether the alarm is raised after this sample.
  bool add(double x) {
    const double moved = evidence_ + bet_ * (std::min)(x, kCap) - price_;
    if (moved <= 0.0) {
      reset();
      return false;
    }
    evidence_ = moved;
    sum_ += x;
    ++count_;
    return raised();
  }
  void reset() {
    evidence_ = 0.0;
    sum_ = 0.0;
    count_ = 0;
  }

  [[nodiscard]] bool raised() const { return evidence_ >= threshold_; }
  [[nodiscard]] double evidence() const { return evidence_; }  // nats
  [[nodiscard]] double threshold() const { return threshold_; }
  // The mean of samples under which the evidence neither grows nor falls, but for the cap.
  [[nodiscard]] double neutral() const { return price_ / bet_; }
  // Of the samples that the evidence comes from.
  [[nodiscard]] double mean() const { return count_ == 0 ? 0.0 : sum_ / count_; }
  // Samples to an alarm, roughly, of that mean; infinity: the evidence does not grow under it.
  [[nodiscard]] double expected_delay(double mean) const {
    const double gain = bet_ * (std::min)(mean, kCap) - price_;
    return gain > 0.0 ? threshold_ / gain : std::numeric_limits<double>::infinity();
  }

 private:
  static double price(double bet) {
    const double u = bet * kCap;
    return std::log1p((std::exp(u) - 1.0 - u) / (kCap * kCap));
  }

  double threshold_ = 0.0;
  double bet_ = 1.0;
  double price_ = 0.0;
  double evidence_ = 0.0;
  double sum_ = 0.0;
  std::int32_t count_ = 0;
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
