// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// QualityGate: watches what blending costs in quality while it is in use, and says for each request whether to blend,
// at which ratio, or to recompute in full. Pure logic: it has no thread, no clock and no memory of its own making.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/plan/plan.hpp>
#include <kvblend/plan/shift_detector.hpp>
#include <kvblend/select/budgets.hpp>
#include <kvblend/select/scores.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

enum class GateLevel : std::uint8_t {
  base,    // blend at the plan's ratio
  raised,  // blend at a raised ratio
  full,    // full recompute
};
inline constexpr std::size_t kGateLevels = 3;

enum class GateReason : std::uint8_t {
  healthy,         // nothing speaks against the plan
  kl_above_limit,  // typical KL at the base, or at the raised ratio, is above what is tolerated
  kl_far_off,      // it is so by far: no ratio short of 1 is trusted
  misplaced,       // reused KV is not what a full prefill computes where it must be
  recovering,      // quality at the raised ratio is back; at the base ratio it is not shown yet
  request_signal,  // this request's own signal is above its limit
};

[[nodiscard]] constexpr const char* to_string(GateLevel level) {
  switch (level) {
    case GateLevel::base: return "blend";
    case GateLevel::raised: return "blend at a raised ratio";
    case GateLevel::full: return "full recompute";
  }
  return "unknown";
}
[[nodiscard]] constexpr const char* to_string(GateReason reason) {
  switch (reason) {
    case GateReason::healthy: return "healthy";
    case GateReason::kl_above_limit: return "KL above the limit";
    case GateReason::kl_far_off: return "KL far above the limit";
    case GateReason::misplaced: return "reused KV is not what it should be";
    case GateReason::recovering: return "recovering";
    case GateReason::request_signal: return "this request's signal is above its limit";
  }
  return "unknown";
}

// Limits of a signal that is known for every request, higher being worse, from calibration (signal_limits() in
// quality.hpp). Infinity: none.
struct SignalLimits {
  double raise_at = std::numeric_limits<double>::infinity();
  double recompute_at = std::numeric_limits<double>::infinity();
};

struct GateOptions {
  HealthyKl healthy;            // at the base ratio
  double limit_kl = 0.0;        // mean KL that is not tolerated, nats per token; > healthy.mean
  double raise = 2.0;           // the raised ratio in units of the plan's, > 1
  double least_raised = 0.1;    // but at least this one, in (0, 1]: a plan may reuse all, at ratio 0
  double share = 0.02;          // of requests that are sampled, in (0, 1]
  std::uint64_t seed = 0;       // which ones
  double false_alarm = 0.005;   // probability of a wrong step up or down within `horizon` samples, in (0, 0.5]
  std::int32_t horizon = 1000;  // samples, >= 1
  // Placement error that storage alone does not make, > 0: a few times what healthy samples show. bf16 rounds .003,
  // q8_0 .012, f32 nothing; 4-bit blocks .2, which leaves little to see.
  double misplaced = 0.05;
  std::int32_t clean = 16;  // samples in a row, >= 1, that must be in order before a step back down
  SignalLimits signal;

  // Errors name the field.
  [[nodiscard]] Status validate() const;
};

// What the host measured of a sampled request: it blended at the decision's measure_ratio and recomputed in full.
struct GateSample {
  GateLevel measured = GateLevel::base;  // the decision's `measure`
  double kl = 0.0;                       // of the blend's predictions to full recompute's, mean over tokens; >= 0
  // Largest relative error of what must be equal: layer-0 keys and values of the reused rows (placement_error() in
  // select/norm.hpp), or of a chunk encoded anew and the stored one. 0 if nothing was compared.
  double placement_error = 0.0;
};

struct GateDecision {
  GateLevel level = GateLevel::base;
  GateReason reason = GateReason::healthy;
  double ratio = 0.0;                   // of the reused rows; 1 for full recompute
  bool sampled = false;                 // measure this request; its answer may as well be full recompute's
  GateLevel measure = GateLevel::base;  // never full
  double measure_ratio = 0.0;
};

// Running estimate of mean KL at a level, over about the last 64 samples. KL has heavy tails: take the interval as a
// rough one. The gate's decisions do not rest on it.
struct KlEstimate {
  double mean = 0.0;
  double low = 0.0;  // 95 % interval, normal approximation
  double high = 0.0;
  std::int64_t samples = 0;  // all that were ever seen at the level
};

// Two tests on sampled requests, which see different faults:
//   KL       Typical KL against the calibrated one (shift_detector.hpp, on ln KL). Finds drift and whatever makes
//            blends clearly worse: by limit_kl/healthy.mean within expected_delay() samples or so, by more sooner. One
//            bad answer in eight is part of a healthy distribution and raises no alarm; no one sample can.
//   placement   At layer 0, KV depends on token and position alone, so what a blend placed there equals a full
//            prefill's up to storage rounding. One sample beyond `misplaced` means that keys were moved by a wrong
//            angle, that rows or chunks were mixed up, or that a chunk is stale. KL hardly sees these: a rotation one
//            position too far or a stale chunk moves it by less than its own spread (tests/plan). Only rows that were
//            placed and not computed show it: a blend by deviation computes layer 0 for all rows, so there it is
//            measured on a full reuse of the same chunks.
// Guarantee: independent samples, whose ln KL has a mean <= log_mean and a variance <= log_sd² and is otherwise of any
// distribution, with placement errors within `misplaced`, leave the base level within `horizon` samples with a
// probability of at most false_alarm. The bound is a wide one, which pays for what a calibration on few
// prompts gets wrong: simulated with calibrations on 12 prompts, log-normal KL, t-distributed ln KL and KL with one
// failure in eight all stay under 1 % in runs of 1000 samples (tests/plan/gate_test.cpp).
//
// base --KL above--> raised --KL above--> full; by far, or misplaced: base, raised --> full. Back down one level at a
// time: after `clean` samples in a row without misplacement, and once those measured at the level below show that their
// typical KL is under the one at which evidence for an alarm would begin to grow. Samples there that are independent,
// with ln KL of a variance <= log_sd² and a mean that is not under that one, lead down within `horizon` of them with a
// probability of at most false_alarm. Between where recovery shows and where the alarm begins lies the hysteresis:
// there each level stays. A relapse within `horizon` samples doubles `clean`, up to 16 times.
// To test the way back, sampled requests are measured at the level below: all of them at full, about half at raised.
class QualityGate {
 public:
  QualityGate() = default;
  // Errors: an option out of range.
  [[nodiscard]] static Result<QualityGate> make(const GateOptions& options);

  // Which requests to sample: a function of the seed and the request's number alone.
  [[nodiscard]] bool samples(std::uint64_t request) const;

  // What to do with a request that was planned at `ratio`, in [0, 1]. `signal`: its own, >= 0, or 0 while not known; it
  // may be asked again once it is. Errors: NaN or out of range, by name.
  [[nodiscard]] Result<GateDecision> decide(std::uint64_t request, double ratio, double signal = 0.0) const;

  // Takes in a measured sample. A sample of another level than those now measured, as of a request that was under way
  // during a change, only counts for its level's estimate and for placement. Errors leave the gate as it was: kl or
  // placement_error negative or not finite (a host whose logits or cache hold NaN has a fault that no sampling needs to
  // find), measured full.
  Status observe(const GateSample& sample);

  [[nodiscard]] GateLevel level() const { return level_; }
  [[nodiscard]] GateReason reason() const { return reason_; }
  // Of GateLevel::base or raised.
  [[nodiscard]] KlEstimate estimate(GateLevel level) const;
  // Samples to an alarm, roughly, once mean KL at the base ratio is limit_kl: what is healthy is known to 1/√n of a
  // standard deviation, and healthy_kl() errs by so much on the high side. Infinity: the calibration is too rough, or
  // the limit too close, for such a shift to show.
  [[nodiscard]] double expected_delay() const {
    return worse_.expected_delay(limit_ - margin_ - 1.0 / std::sqrt(static_cast<double>(options_.healthy.n)));
  }

  // The state as one line. As snprintf: cut where `out` does not suffice; returns the whole length.
  std::size_t print(std::span<char> out) const;

 private:
  static constexpr double kMostMargin = 0.5;  // standard deviations

  // Sums with weights that fade by kFade a sample.
  struct Fading {
    static constexpr double kFade = 1.0 - 1.0 / 64.0;
    double weight = 0.0, squared_weights = 0.0, sum = 0.0, squares = 0.0;
    std::int64_t samples = 0;
    void add(double x);
  };

  void enter(GateLevel level, GateReason reason);
  void watch(double x);
  void look_back(double x);

  GateOptions options_;
  // In standard deviations from healthy.log_mean: the limit; what is still healthy; where evidence begins to grow.
  double limit_ = 0.0;
  double margin_ = 0.0;
  double turn_ = 0.0;
  ShiftDetector worse_;
  ShiftDetector better_;
  GateLevel level_ = GateLevel::base;
  GateReason reason_ = GateReason::healthy;
  std::int64_t samples_ = 0;  // in all
  std::int64_t since_ = 0;    // of them, when the level was entered
  bool came_down_ = false;    // from the level above
  std::int32_t clean_ = 0;    // in a row
  std::int32_t needed_ = 0;   // of them, for a step down
  double error_ = 0.0;        // the last placement error that was too large
  std::array<Fading, kGateLevels - 1> seen_;
};

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

inline Status check_range(double x, bool inside, const char* field) {
  if (!is_nan(x) && inside) return {};
  return Status::error(StatusCode::invalid_argument, "%.9g is out of range", x).at("%s", field);
}

}  // namespace detail

inline Status GateOptions::validate() const {
  KVBLEND_RETURN_IF_ERROR(healthy.validate());
  KVBLEND_RETURN_IF_ERROR(detail::check_range(limit_kl, is_finite(limit_kl) && limit_kl > healthy.mean, "limit_kl"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(raise, raise > 1.0 && raise <= 1e6, "raise"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(least_raised, least_raised > 0.0 && least_raised <= 1.0, "least_raised"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(share, share > 0.0 && share <= 1.0, "share"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(false_alarm, false_alarm > 0.0 && false_alarm <= 0.5, "false_alarm"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(horizon, horizon >= 1, "horizon"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(misplaced, is_finite(misplaced) && misplaced > 0.0, "misplaced"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(clean, clean >= 1 && clean <= 1 << 20, "clean"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(signal.raise_at, signal.raise_at >= 0.0, "signal.raise_at"));
  return detail::check_range(signal.recompute_at, signal.recompute_at >= signal.raise_at, "signal.recompute_at");
}

inline Result<QualityGate> QualityGate::make(const GateOptions& options) {
  KVBLEND_RETURN_IF_ERROR(options.validate());
  QualityGate gate;
  gate.options_ = options;
  gate.limit_ = std::log(options.limit_kl / options.healthy.mean) / options.healthy.log_sd;
  gate.margin_ = (std::min)(gate.limit_ / 3.0, kMostMargin);
  const double threshold = std::log(options.horizon / options.false_alarm);
  gate.worse_ = ShiftDetector(gate.limit_ - gate.margin_, threshold);
  gate.turn_ = gate.margin_ + gate.worse_.neutral();
  gate.better_ = ShiftDetector(gate.turn_, threshold);
  gate.needed_ = options.clean;
  return gate;
}

inline bool QualityGate::samples(std::uint64_t request) const {
  return static_cast<double>(detail::mix(options_.seed, request) >> 11) * 0x1p-53 < options_.share;
}

inline Result<GateDecision> QualityGate::decide(std::uint64_t request, double ratio, double signal) const {
  KVBLEND_RETURN_IF_ERROR(detail::check_range(ratio, ratio >= 0.0 && ratio <= 1.0, "ratio"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(signal, signal >= 0.0, "signal"));
  const auto ratio_of = [&](GateLevel level) {
    if (level == GateLevel::full) return 1.0;
    if (level == GateLevel::base) return ratio;
    return (std::min)(1.0, (std::max)(ratio * options_.raise, options_.least_raised));
  };
  GateDecision decision;
  decision.level = level_;
  decision.reason = reason_;
  const GateLevel own = signal > options_.signal.recompute_at ? GateLevel::full
                        : signal > options_.signal.raise_at   ? GateLevel::raised
                                                              : GateLevel::base;
  if (own > level_) {
    decision.level = own;
    decision.reason = GateReason::request_signal;
  }
  decision.ratio = ratio_of(decision.level);
  decision.sampled = samples(request);
  const bool tests_base = level_ == GateLevel::raised && (detail::mix(~options_.seed, request) & 1u) != 0;
  decision.measure = level_ == GateLevel::base || tests_base ? GateLevel::base : GateLevel::raised;
  decision.measure_ratio = ratio_of(decision.measure);
  return decision;
}

inline void QualityGate::enter(GateLevel level, GateReason reason) {
  if (level > level_ && came_down_) {
    const bool relapse = samples_ - since_ <= options_.horizon;
    needed_ = relapse ? (std::min)(2 * needed_, 16 * options_.clean) : options_.clean;
  }
  came_down_ = level < level_;
  level_ = level;
  reason_ = reason;
  since_ = samples_;
  clean_ = 0;
  worse_.reset();
  better_.reset();
}

// Of the level in use: whether it got worse.
inline void QualityGate::watch(double x) {
  if (!worse_.add(x - margin_)) return;
  const bool far_off = worse_.mean() + margin_ >= 2.0 * limit_;
  if (far_off || level_ == GateLevel::raised) {
    enter(GateLevel::full, far_off ? GateReason::kl_far_off : GateReason::kl_above_limit);
  } else {
    enter(GateLevel::raised, GateReason::kl_above_limit);
  }
}

// Of the level below: whether it is good enough to go back to.
inline void QualityGate::look_back(double x) {
  if (!better_.add(turn_ - x) || clean_ < needed_) return;
  if (level_ == GateLevel::full) {
    enter(GateLevel::raised, GateReason::recovering);
  } else {
    enter(GateLevel::base, GateReason::healthy);
  }
}

inline Status QualityGate::observe(const GateSample& sample) {
  KVBLEND_RETURN_IF_ERROR(detail::check_range(sample.kl, is_finite(sample.kl) && sample.kl >= 0.0, "sample.kl"));
  KVBLEND_RETURN_IF_ERROR(detail::check_range(sample.placement_error,
                                              is_finite(sample.placement_error) && sample.placement_error >= 0.0,
                                              "sample.placement_error"));
  if (sample.measured == GateLevel::full) {
    return Status::error(StatusCode::invalid_argument, "full recompute is what a sample is measured against")
        .at("sample.measured");
  }
  ++samples_;
  seen_[static_cast<std::size_t>(sample.measured)].add(sample.kl);
  if (sample.placement_error > options_.misplaced) {
    error_ = sample.placement_error;
    if (level_ != GateLevel::full || reason_ != GateReason::misplaced) {
      enter(GateLevel::full, GateReason::misplaced);
    }
    clean_ = 0;
    better_.reset();
    return {};
  }
  if (clean_ < needed_) ++clean_;
  const double x = options_.healthy.standardized(sample.kl);
  if (level_ != GateLevel::full && sample.measured == level_) {
    watch(x);
  } else if (static_cast<int>(sample.measured) + 1 == static_cast<int>(level_)) {
    look_back(x);
  }
  return {};
}

inline void QualityGate::Fading::add(double x) {
  weight = kFade * weight + 1.0;
  squared_weights = kFade * kFade * squared_weights + 1.0;
  sum = kFade * sum + x;
  squares = kFade * squares + x * x;
  ++samples;
}

inline KlEstimate QualityGate::estimate(GateLevel level) const {
  KlEstimate estimate;
  if (level == GateLevel::full) return estimate;  // KL of full recompute to itself
  const Fading& seen = seen_[static_cast<std::size_t>(level)];
  estimate.samples = seen.samples;
  if (seen.samples == 0) return estimate;
  const double count = seen.weight * seen.weight / seen.squared_weights;  // as many equal weights would say
  estimate.mean = seen.sum / seen.weight;
  const double variance = (std::max)(0.0, seen.squares / seen.weight - estimate.mean * estimate.mean);
  const double error = count > 1.5 ? std::sqrt(variance / (count - 1.0)) : estimate.mean;
  estimate.low = (std::max)(0.0, estimate.mean - 1.96 * error);
  estimate.high = estimate.mean + 1.96 * error;
  return estimate;
}

inline std::size_t QualityGate::print(std::span<char> out) const {
  detail::TextWriter text(out);
  text.append("gate: %s, %s", to_string(level_), to_string(reason_));
  if (reason_ == GateReason::misplaced) text.append(" (placement error %.3g, limit %.3g)", error_, options_.misplaced);
  if (level_ != GateLevel::base) text.append(", for %lld samples", static_cast<long long>(samples_ - since_));
  for (const GateLevel level : {GateLevel::base, GateLevel::raised}) {
    const KlEstimate kl = estimate(level);
    if (kl.samples == 0) continue;
    text.append("; KL %s %.3g (%.3g to %.3g, %lld samples)", level == GateLevel::base ? "at the ratio" : "raised",
                kl.mean, kl.low, kl.high, static_cast<long long>(kl.samples));
  }
  text.append("; limit %.3g, calibrated %.3g", options_.limit_kl, options_.healthy.mean);
  return text.length();
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
