// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// QualityCalibration: what a model's blends cost in KL, per selector and ratio, and what follows from it: the least
// ratio for a wanted KL, the default selector of each situation, "do not blend", and what the gate compares with.
// Measuring and files are the host's; these are the data and the arithmetic.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/plan/cost_model.hpp>
#include <kvblend/plan/gate.hpp>
#include <kvblend/plan/planner.hpp>
#include <kvblend/plan/situation.hpp>
#include <kvblend/plan/statistics.hpp>
#include <kvblend/select/prior.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// A selector at a ratio, over n prompts.
struct KlPoint {
  double ratio = 0.0;    // in [0, 1]
  double kl_mean = 0.0;  // nats per token
  double kl_se = 0.0;    // of the mean
  std::int32_t n = 0;
};

inline constexpr std::size_t kMaxKlPoints = 32;

struct SelectorQuality {
  std::string name;  // as its score policy's
  ScoreTiming timing = ScoreTiming::before_load;
  bool needs_stored_scores = false;
  std::vector<KlPoint> points;  // ratios ascend strictly; at most kMaxKlPoints
};

// The default of a situation.
struct SelectorDefault {
  std::int32_t selector = -1;  // index into selectors; -1: recompute in full
  double r_min = 1.0;          // least ratio for the target KL
  HealthyKl healthy;           // there
};

struct QualityCalibration {
  std::string model;  // ModelIdentity's name and fingerprint
  std::string fingerprint;
  double target_kl = 0.0;  // > 0
  std::vector<SelectorQuality> selectors;
  std::array<SelectorDefault, kSituations> defaults;  // by Situation
  BinnedPrior prior;                                  // bins 0: none was measured
  LinearCostModel cost;
  std::string signal;  // what the limits are of; empty: none tells good requests from bad
  SignalLimits signal_limits;

  [[nodiscard]] const SelectorDefault& of(Situation s) const { return defaults[static_cast<std::size_t>(s)]; }
  // Whether any situation is worth blending.
  [[nodiscard]] bool blending_allowed() const {
    return std::any_of(defaults.begin(), defaults.end(), [](const SelectorDefault& d) { return d.selector >= 0; });
  }
  // `options` with the situation's r_min, timing and permission.
  [[nodiscard]] PlannerOptions planner_options(Situation s, PlannerOptions options = {}) const {
    const SelectorDefault& d = of(s);
    options.blending_allowed = d.selector >= 0;
    if (d.selector < 0) return options;
    options.r_min = d.r_min;
    options.timing = selectors[static_cast<std::size_t>(d.selector)].timing;
    return options;
  }
  // Errors name the field: of a file, say, that somebody edited.
  [[nodiscard]] Status validate() const;
};

// Mean and standard error of prompts' KL. Errors: no prompts, a KL that is negative or not finite.
[[nodiscard]] Result<KlPoint> kl_point(double ratio, std::span<const double> kls);

// Mean and sd of ln KL, with a standard error each on top for what the number of prompts leaves open: sd·(1 +
// 1/√(2(n - 1))), but at least kLeastLogSd, and mean + that sd/√n. Errors: fewer than 8 prompts, bad values, all 0.
inline constexpr double kLeastLogSd = 0.25;
[[nodiscard]] Result<HealthyKl> healthy_kl(std::span<const double> kls);

// KL at a ratio: points made to fall (isotonic regression weighted by n, as recomputing more rows is no worse), linear
// in between, and on to 0 at ratio 1, where a blend is exact. Errors: a bad point; a ratio below the first one's, of
// which nothing is known.
[[nodiscard]] Result<double> predicted_kl(std::span<const KlPoint> points, double ratio);

// The least ratio, from the first point's on, whose predicted KL is at most `target`. Errors: a bad point, and a target
// that is not finite and > 0.
[[nodiscard]] Result<double> least_ratio(std::span<const KlPoint> points, double target);

// What a selector cost per prompt at one ratio: the same prompts for all.
struct SelectorTrial {
  std::span<const double> kls;
  ScoreTiming timing = ScoreTiming::before_load;
  bool needs_stored_scores = false;
};

// Index of the default for a situation among trials in the caller's order of preference (cheaper, or better known,
// first): the first that suits, unless a later one has a lower mean and wins pairs of prompts with p < alpha in a sign
// test, which then takes its place. -1 if none suits. Errors: trials of different lengths, bad values.
[[nodiscard]] Result<std::int32_t> choose_default(std::span<const SelectorTrial> trials, Situation situation,
                                                  double alpha = 0.05);

// Fills in `defaults` from one trial per selector of `calibration.selectors`, all at one of their measured ratios: the
// default of each situation, its least ratio for target_kl, and what is healthy there. That takes the spread of ln KL
// to be the same at both ratios and moves its mean by the predicted KL. A situation whose default needs more than
// `most_ratio` is not worth blending. Errors: trials of another number than the selectors, fewer than 8 prompts, bad
// values.
Status settle_defaults(QualityCalibration& calibration, double trial_ratio, std::span<const SelectorTrial> trials,
                       double most_ratio = 0.5, double alpha = 0.05);

// Limits of a signal from prompts with known KL: of requests like them the share `raised` is blended at a raised ratio
// or recomputed, of those the share `recomputed` of all. No limits if the signal's rank correlation with KL is not
// above 0 with p < alpha. Errors: lists of two lengths, bad values, shares outside 0 <= recomputed <= raised <= 1.
[[nodiscard]] Result<SignalLimits> signal_limits(std::span<const double> signals, std::span<const double> kls,
                                                 double raised, double recomputed, double alpha = 0.05);

// What a signal was per prompt, higher being worse: the same prompts for all.
struct SignalTrial {
  std::string_view name;
  std::span<const double> values;
};

// Fills in `signal` and `signal_limits` by the trial whose rank correlation with KL is highest. As it is the best of
// several, it must be significant at alpha / their number (Bonferroni); if it is not, there is no signal. The first of
// equals is taken. Errors, which leave the calibration as it was: signal_limits()'s.
Status settle_signal(QualityCalibration& calibration, std::span<const SignalTrial> trials, std::span<const double> kls,
                     double raised, double recomputed, double alpha = 0.05);

// ---------------------------------------------------------------------------------------------------------------------

inline Result<KlPoint> kl_point(double ratio, std::span<const double> kls) {
  KVBLEND_RETURN_IF_ERROR(detail::check_share(ratio, "ratio"));
  KVBLEND_RETURN_IF_ERROR(detail::check_values(kls, "kls"));
  if (kls.empty()) return Status::error(StatusCode::invalid_argument, "no prompts").at("kls");
  KlPoint point;
  const auto n = static_cast<double>(kls.size());
  for (const double kl : kls) point.kl_mean += kl / n;
  double squares = 0.0;
  for (const double kl : kls) squares += (kl - point.kl_mean) * (kl - point.kl_mean);
  point.ratio = ratio;
  point.n = static_cast<std::int32_t>(kls.size());
  if (point.n > 1) point.kl_se = std::sqrt(squares / (n - 1.0) / n);
  return point;
}

inline Result<HealthyKl> healthy_kl(std::span<const double> kls) {
  const Result<KlPoint> all = kl_point(0.0, kls);
  KVBLEND_RETURN_IF_ERROR(all.status);
  if (all.value.n < 8) {
    return Status::error(StatusCode::invalid_argument, "%d prompts, at least 8 are needed", all.value.n).at("kls");
  }
  if (!(all.value.kl_mean > 0.0)) return Status::error(StatusCode::invalid_argument, "all are 0").at("kls");
  HealthyKl healthy;
  healthy.mean = all.value.kl_mean;
  healthy.n = all.value.n;
  healthy.log_sd = 1.0;  // plain logarithms, to begin with
  const auto n = static_cast<double>(kls.size());
  double mean = 0.0;
  for (const double kl : kls) mean += healthy.standardized(kl) / n;
  double squares = 0.0;
  for (const double kl : kls) squares += (healthy.standardized(kl) - mean) * (healthy.standardized(kl) - mean);
  const double sd = std::sqrt(squares / (n - 1.0)) * (1.0 + 1.0 / std::sqrt(2.0 * (n - 1.0)));
  healthy.log_sd = (std::max)(sd, kLeastLogSd);
  healthy.log_mean = mean + healthy.log_sd / std::sqrt(n);
  return healthy;
}

namespace detail {

inline Status check_points(std::span<const KlPoint> points) {
  if (points.empty() || points.size() > kMaxKlPoints) {
    return Status::error(StatusCode::invalid_argument, "%zu, not in [1, %zu]", points.size(), kMaxKlPoints)
        .at("points");
  }
  for (std::size_t i = 0; i < points.size(); ++i) {
    const auto bad = [i](double x, const char* field) {
      return Status::error(StatusCode::invalid_argument, "%g is out of range", x).at("points[%zu].%s", i, field);
    };
    const KlPoint& p = points[i];
    if (is_nan(p.ratio) || !(p.ratio >= 0.0 && p.ratio <= 1.0)) return bad(p.ratio, "ratio");
    if (i > 0 && !(p.ratio > points[i - 1].ratio)) return bad(p.ratio, "ratio");
    if (!is_finite(p.kl_mean) || !(p.kl_mean >= 0.0)) return bad(p.kl_mean, "kl_mean");
    if (!is_finite(p.kl_se) || !(p.kl_se >= 0.0)) return bad(p.kl_se, "kl_se");
    if (p.n < 1) return bad(p.n, "n");
  }
  return {};
}

// KL over ratio, made to fall.
struct FallingKl {
  std::array<double, kMaxKlPoints + 1> ratio{};
  std::array<double, kMaxKlPoints + 1> kl{};
  std::size_t count = 0;

  explicit FallingKl(std::span<const KlPoint> points) {
    // Pool adjacent violators: blocks of points with one mean, each block below the one before.
    std::array<double, kMaxKlPoints> mean{};
    std::array<double, kMaxKlPoints> weight{};
    std::array<std::size_t, kMaxKlPoints> size{};
    std::size_t blocks = 0;
    for (const KlPoint& p : points) {
      mean[blocks] = p.kl_mean;
      weight[blocks] = p.n;
      size[blocks++] = 1;
      for (; blocks > 1 && mean[blocks - 1] >= mean[blocks - 2]; --blocks) {
        const double sum = weight[blocks - 1] + weight[blocks - 2];
        mean[blocks - 2] += (mean[blocks - 1] - mean[blocks - 2]) * weight[blocks - 1] / sum;
        weight[blocks - 2] = sum;
        size[blocks - 2] += size[blocks - 1];
      }
    }
    for (std::size_t b = 0; b < blocks; ++b) {
      for (std::size_t i = 0; i < size[b]; ++i, ++count) {
        ratio[count] = points[count].ratio;
        kl[count] = mean[b];
      }
    }
    if (ratio[count - 1] < 1.0) ratio[count++] = 1.0;  // its KL is 0
  }
};

}  // namespace detail

inline Result<double> predicted_kl(std::span<const KlPoint> points, double ratio) {
  KVBLEND_RETURN_IF_ERROR(detail::check_points(points));
  KVBLEND_RETURN_IF_ERROR(detail::check_share(ratio, "ratio"));
  const detail::FallingKl curve(points);
  if (ratio < curve.ratio[0]) {
    return Status::error(StatusCode::out_of_range, "%g, measured from %g on", ratio, curve.ratio[0]).at("ratio");
  }
  if (ratio == curve.ratio[0]) return curve.kl[0];
  std::size_t right = 1;
  while (right < curve.count && curve.ratio[right] < ratio) ++right;
  const double along = (ratio - curve.ratio[right - 1]) / (curve.ratio[right] - curve.ratio[right - 1]);
  return curve.kl[right - 1] + (curve.kl[right] - curve.kl[right - 1]) * along;
}

inline Result<double> least_ratio(std::span<const KlPoint> points, double target) {
  KVBLEND_RETURN_IF_ERROR(detail::check_points(points));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(target, is_finite(target) && target > 0.0, "target"));
  const detail::FallingKl curve(points);
  for (std::size_t i = 0; i < curve.count; ++i) {
    if (curve.kl[i] > target) continue;
    if (i == 0) return curve.ratio[0];
    const double along = (curve.kl[i - 1] - target) / (curve.kl[i - 1] - curve.kl[i]);
    return curve.ratio[i - 1] + (curve.ratio[i] - curve.ratio[i - 1]) * along;
  }
  return 1.0;
}

inline Result<std::int32_t> choose_default(std::span<const SelectorTrial> trials, Situation situation, double alpha) {
  std::int32_t chosen = -1;
  for (std::size_t t = 0; t < trials.size(); ++t) {
    if (!suits(situation, trials[t].timing, trials[t].needs_stored_scores)) continue;
    if (chosen < 0) {
      KVBLEND_RETURN_IF_ERROR(detail::check_values(trials[t].kls, "kls"));
      chosen = static_cast<std::int32_t>(t);
      continue;
    }
    const Result<PairedComparison> pair = compare(trials[t].kls, trials[static_cast<std::size_t>(chosen)].kls);
    if (!pair.ok()) {
      return Status::error(pair.status.code(), "%s: %s", pair.status.where(), pair.status.message())
          .at("trials[%zu]", t);
    }
    if (pair.value.mean_difference < 0.0 && pair.value.p_value < alpha) chosen = static_cast<std::int32_t>(t);
  }
  return chosen;
}

inline Status settle_defaults(QualityCalibration& calibration, double trial_ratio,
                              std::span<const SelectorTrial> trials, double most_ratio, double alpha) {
  KVBLEND_RETURN_IF_ERROR(detail::check_share(most_ratio, "most_ratio"));
  if (trials.size() != calibration.selectors.size()) {
    return Status::error(StatusCode::mismatch, "%zu for %zu selectors", trials.size(), calibration.selectors.size())
        .at("trials");
  }
  std::array<SelectorDefault, kSituations> defaults;
  for (std::size_t s = 0; s < kSituations; ++s) {
    const Result<std::int32_t> chosen = choose_default(trials, static_cast<Situation>(s), alpha);
    KVBLEND_RETURN_IF_ERROR(chosen.status);
    if (chosen.value < 0) continue;
    const auto c = static_cast<std::size_t>(chosen.value);
    const std::vector<KlPoint>& points = calibration.selectors[c].points;
    const Result<double> ratio = least_ratio(points, calibration.target_kl);
    KVBLEND_RETURN_IF_ERROR(ratio.status);
    Result<HealthyKl> healthy = healthy_kl(trials[c].kls);
    KVBLEND_RETURN_IF_ERROR(healthy.status);
    const Result<double> there = predicted_kl(points, ratio.value);
    KVBLEND_RETURN_IF_ERROR(there.status);
    const Result<double> tried = predicted_kl(points, trial_ratio);
    KVBLEND_RETURN_IF_ERROR(tried.status);
    if (ratio.value > most_ratio) continue;
    const double factor = there.value > 0.0 && tried.value > 0.0 ? there.value / tried.value : 1.0;
    healthy.value.mean *= factor;
    healthy.value.log_mean += std::log(factor);
    defaults[s].selector = chosen.value;
    defaults[s].r_min = ratio.value;
    defaults[s].healthy = healthy.value;
  }
  calibration.defaults = defaults;
  return {};
}

inline Result<SignalLimits> signal_limits(std::span<const double> signals, std::span<const double> kls, double raised,
                                          double recomputed, double alpha) {
  KVBLEND_RETURN_IF_ERROR(detail::check_share(raised, "raised"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(recomputed, recomputed >= 0.0 && recomputed <= raised, "recomputed"));
  KVBLEND_RETURN_IF_ERROR(detail::check_pairs(signals, kls, "signals", "kls"));
  const Result<RankCorrelation> correlation = rank_correlation(signals, kls);
  KVBLEND_RETURN_IF_ERROR(correlation.status);
  SignalLimits limits;
  if (!(correlation.value.p_value < alpha)) return limits;
  if (raised > 0.0) limits.raise_at = upper_quantile(signals, raised);
  if (recomputed > 0.0) limits.recompute_at = upper_quantile(signals, recomputed);
  return limits;
}

inline Status settle_signal(QualityCalibration& calibration, std::span<const SignalTrial> trials,
                            std::span<const double> kls, double raised, double recomputed, double alpha) {
  SignalTrial best;
  SignalLimits limits;
  double highest = -2.0;
  for (std::size_t t = 0; t < trials.size(); ++t) {
    const Result<RankCorrelation> correlation = rank_correlation(trials[t].values, kls);
    if (!correlation.ok()) {
      return Status::error(correlation.status.code(), "%s: %s", correlation.status.where(),
                           correlation.status.message())
          .at("trials[%zu]", t);
    }
    if (!(correlation.value.rho > highest)) continue;
    highest = correlation.value.rho;
    best = trials[t];
  }
  if (!trials.empty()) {
    const Result<SignalLimits> own =
        signal_limits(best.values, kls, raised, recomputed, alpha / static_cast<double>(trials.size()));
    KVBLEND_RETURN_IF_ERROR(own.status);
    limits = own.value;
  }
  calibration.signal_limits = limits;
  calibration.signal = limits.raise_at < SignalLimits().raise_at ? best.name : std::string_view();
  return {};
}

inline Status QualityCalibration::validate() const {
  const auto inside = [](const Status& status, const char* field, std::size_t index) {
    return Status::error(status.code(), "%s: %s", status.where(), status.message()).at("%s[%zu]", field, index);
  };
  KVBLEND_RETURN_IF_ERROR(detail::check_range(target_kl, is_finite(target_kl) && target_kl > 0.0, "target_kl"));
  for (std::size_t i = 0; i < selectors.size(); ++i) {
    if (Status status = detail::check_points(selectors[i].points); !status.ok()) return inside(status, "selectors", i);
  }
  for (std::size_t s = 0; s < kSituations; ++s) {
    const SelectorDefault& d = defaults[s];
    if (d.selector < 0) continue;
    if (static_cast<std::size_t>(d.selector) >= selectors.size()) {
      return Status::error(StatusCode::out_of_range, "names selector %d of %zu", d.selector, selectors.size())
          .at("defaults[%zu]", s);
    }
    const SelectorQuality& selector = selectors[static_cast<std::size_t>(d.selector)];
    if (!suits(static_cast<Situation>(s), selector.timing, selector.needs_stored_scores)) {
      return Status::error(StatusCode::invalid_argument, "%.60s cannot be used with %s", selector.name.c_str(),
                           to_string(static_cast<Situation>(s)))
          .at("defaults[%zu]", s);
    }
    if (Status status = detail::check_share(d.r_min, "r_min"); !status.ok()) return inside(status, "defaults", s);
    if (Status status = d.healthy.validate(); !status.ok()) return inside(status, "defaults", s);
  }
  if (prior.bins != 0) KVBLEND_RETURN_IF_ERROR(prior.validate());
  KVBLEND_RETURN_IF_ERROR(cost.validate());
  KVBLEND_RETURN_IF_ERROR(
      detail::check_range(signal_limits.raise_at, signal_limits.raise_at >= 0.0, "signal_limits.raise_at"));
  return detail::check_range(signal_limits.recompute_at, signal_limits.recompute_at >= signal_limits.raise_at,
                             "signal_limits.recompute_at");
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
