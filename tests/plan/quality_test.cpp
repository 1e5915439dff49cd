// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a calibration's measurements come to: statistics against exact counts, ratios for a target, defaults,
// situations.
#include <doctest/doctest.h>

#include <kvblend/plan/quality.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "select/select_support.hpp"

using namespace kvblend;
using test::PromptBuilder;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<KlPoint> points_of(const std::vector<double>& ratios, const std::vector<double>& kls, int n = 10) {
  std::vector<KlPoint> points;
  for (std::size_t i = 0; i < ratios.size(); ++i) {
    KlPoint point;
    point.ratio = ratios[i];
    point.kl_mean = kls[i];
    point.n = n;
    points.push_back(point);
  }
  return points;
}

}  // namespace

TEST_CASE("a paired comparison counts wins and has the sign test's exact p") {
  const std::vector<double> a = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0};
  const std::vector<double> b = {2.0, 3.0, 4.0, 5.0, 6.0, 5.5};
  const Result<PairedComparison> pair = compare(a, b);
  REQUIRE(pair.ok());
  CHECK(pair.value.wins == 5);
  CHECK(pair.value.losses == 1);
  CHECK(pair.value.mean_difference == doctest::Approx(-4.5 / 6.0));
  CHECK(pair.value.standard_error == doctest::Approx(0.25));  // of -1 five times and 0.5
  CHECK(pair.value.p_value == doctest::Approx(7.0 / 64.0).epsilon(1e-12));
  CHECK(compare(b, a).value.p_value == doctest::Approx(63.0 / 64.0).epsilon(1e-12));
  CHECK(compare(a, a).value.p_value == 1.0);
  CHECK(compare(a, a).value.ties == 6);

  // A thousand pairs, whose terms begin at 2^-1000: half of the tail at the middle, and half the middle term.
  CHECK(detail::binomial_tail(1001, 501) == doctest::Approx(0.5).epsilon(1e-10));
  CHECK(detail::binomial_tail(4001, 2001) == doctest::Approx(0.5).epsilon(1e-10));

  // Against a count over all outcomes.
  for (int trials = 1; trials <= 14; ++trials) {
    for (int wins = 0; wins <= trials; ++wins) {
      int at_least = 0;
      for (unsigned outcome = 0; outcome < 1u << trials; ++outcome) {
        at_least += __builtin_popcount(outcome) >= wins ? 1 : 0;
      }
      CHECK(detail::binomial_tail(trials, wins) == doctest::Approx(at_least / std::exp2(trials)).epsilon(1e-10));
    }
  }
}

TEST_CASE("rank correlation is that of the places and ties share theirs") {
  const std::vector<double> a = {10.0, 20.0, 30.0, 40.0, 50.0};
  CHECK(rank_correlation(a, std::vector<double>{1.0, 2.0, 4.0, 8.0, 1e6}).value.rho == doctest::Approx(1.0));
  CHECK(rank_correlation(a, std::vector<double>{5.0, 4.0, 3.0, 2.0, 1.0}).value.rho == doctest::Approx(-1.0));
  // Differences of places 0, 1, 1, 0, 0: 1 - 6·2/(5·24).
  CHECK(rank_correlation(a, std::vector<double>{1.0, 3.0, 2.0, 4.0, 5.0}).value.rho == doctest::Approx(0.9));
  // Places 0.5, 0.5, 2, 3, 4 against 0 … 4: √0.95.
  CHECK(rank_correlation(a, std::vector<double>{1.0, 1.0, 2.0, 3.0, 4.0}).value.rho ==
        doctest::Approx(std::sqrt(0.95)));
  CHECK(rank_correlation(a, std::vector<double>(5, 1.0)).value.p_value == 1.0);
  CHECK(std::string(rank_correlation(a, std::vector<double>{1.0}).status.where()) == "a");
  CHECK(std::string(rank_correlation(a, std::vector<double>{1.0, 2.0, kNan, 4.0, 5.0}).status.where()) == "b[2]");

  // Unrelated lists are taken for related about as often as they say.
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  int low = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<double> x(25);
    std::vector<double> y(25);
    for (double& v : x) v = uniform(random);
    for (double& v : y) v = uniform(random);
    low += rank_correlation(x, y).value.p_value < 0.05 ? 1 : 0;
  }
  CHECK(std::abs(low - 100) < 40);
}

TEST_CASE("a point is mean and standard error and a healthy distribution errs on the high side") {
  const std::vector<double> kls = {0.1, 0.2, 0.3, 0.4};
  const Result<KlPoint> point = kl_point(0.15, kls);
  REQUIRE(point.ok());
  CHECK(point.value.kl_mean == doctest::Approx(0.25));
  CHECK(point.value.kl_se == doctest::Approx(std::sqrt(0.05 / 3.0 / 4.0)));
  CHECK(point.value.n == 4);
  CHECK(std::string(kl_point(1.5, kls).status.where()) == "ratio");
  CHECK(std::string(kl_point(0.1, {}).status.where()) == "kls");
  CHECK(std::string(kl_point(0.1, std::vector<double>{0.1, kInf}).status.where()) == "kls[1]");

  std::vector<double> many;
  for (int i = 0; i < 4; ++i) many.insert(many.end(), {0.1, 1.0, 10.0});
  const Result<HealthyKl> healthy = healthy_kl(many);
  REQUIRE(healthy.ok());
  const double sd = std::log(10.0) * std::sqrt(8.0 / 11.0) * (1.0 + 1.0 / std::sqrt(22.0));
  CHECK(healthy.value.log_sd == doctest::Approx(sd));
  CHECK(healthy.value.log_mean == doctest::Approx(sd / std::sqrt(12.0)));
  CHECK(healthy.value.mean == doctest::Approx(3.7));
  CHECK(healthy_kl(std::vector<double>(8, 0.1)).value.log_sd == kLeastLogSd);
  CHECK(std::string(healthy_kl(kls).status.where()) == "kls");
  CHECK(std::string(healthy_kl(std::vector<double>(9, 0.0)).status.where()) == "kls");
}

TEST_CASE("KL falls with the ratio and reaches 0 at 1 whatever the noise") {
  const auto points = points_of({0.0, 0.1, 0.2, 0.4}, {0.20, 0.10, 0.14, 0.06});
  // 0.10 and 0.14 pool to 0.12.
  const std::vector<std::pair<double, double>> expected = {{0.0, 0.20},  {0.05, 0.16}, {0.1, 0.12},
                                                           {0.15, 0.12}, {0.2, 0.12},  {0.3, 0.09},
                                                           {0.4, 0.06},  {0.7, 0.03},  {1.0, 0.0}};
  for (const auto& at : expected) {
    CAPTURE(at.first);
    CHECK(predicted_kl(points, at.first).value == doctest::Approx(at.second));
  }
  const std::vector<std::pair<double, double>> least = {{0.3, 0.0},  {0.20, 0.0}, {0.16, 0.05}, {0.1200001, 0.1},
                                                        {0.09, 0.3}, {0.03, 0.7}, {1e-12, 1.0}};
  for (const auto& at : least) {
    CAPTURE(at.first);
    CHECK(least_ratio(points, at.first).value == doctest::Approx(at.second).epsilon(1e-5));
  }
  // Weighted by prompts, and pooled as often as it takes.
  auto rising = points_of({0.1, 0.2, 0.3}, {0.1, 0.2, 0.3});
  rising[2].n = 20;
  CHECK(predicted_kl(rising, 0.25).value == doctest::Approx((1.0 + 2.0 + 6.0) / 40.0));
  CHECK(predicted_kl(rising, 0.1).value == doctest::Approx(0.225));
  CHECK(std::string(predicted_kl(rising, 0.05).status.where()) == "ratio");  // where nothing was measured
  CHECK(least_ratio(rising, 0.3).value == 0.1);
  const auto exact = points_of({0.5, 1.0}, {0.1, 0.0});
  CHECK(predicted_kl(exact, 0.75).value == doctest::Approx(0.05));
}

TEST_CASE("a random curve: the least ratio is where a scan finds it") {
  const unsigned seed = 8;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int round = 0; round < 200; ++round) {
    std::vector<KlPoint> points;
    double ratio = round % 2 == 0 ? 0.0 : 0.2 * uniform(random);
    for (int i = 0; i < 6; ++i) {
      KlPoint point;
      point.ratio = ratio;
      point.kl_mean = uniform(random);
      point.n = 1 + static_cast<int>(random() % 20);
      points.push_back(point);
      ratio += 0.01 + 0.15 * uniform(random);
    }
    const double target = 0.01 + uniform(random);
    const Result<double> least = least_ratio(points, target);
    REQUIRE(least.ok());
    REQUIRE(least.value >= points[0].ratio);
    double before = kInf;
    for (int i = 0; i <= 1000; ++i) {
      const Result<double> predicted = predicted_kl(points, i / 1000.0);
      REQUIRE(predicted.ok() == (i / 1000.0 >= points[0].ratio));
      if (!predicted.ok()) continue;
      const double kl = predicted.value;
      REQUIRE(kl <= before + 1e-12);
      before = kl;
      if (i / 1000.0 < least.value - 1e-9) REQUIRE(kl > target - 1e-9);
      if (i / 1000.0 > least.value + 1e-9) REQUIRE(kl <= target + 1e-9);
    }
  }
}

TEST_CASE("points and targets out of range are refused by name") {
  const auto good = points_of({0.0, 0.1}, {0.2, 0.1});
  struct Case {
    void (*spoil)(std::vector<KlPoint>&);
    const char* where;
  };
  const std::vector<Case> cases = {
      {[](std::vector<KlPoint>& p) { p.clear(); }, "points"},
      {[](std::vector<KlPoint>& p) { p.resize(33, p[0]); }, "points"},
      {[](std::vector<KlPoint>& p) { p[1].ratio = 0.0; }, "points[1].ratio"},
      {[](std::vector<KlPoint>& p) { p[0].ratio = kNan; }, "points[0].ratio"},
      {[](std::vector<KlPoint>& p) { p[0].kl_mean = -0.1; }, "points[0].kl_mean"},
      {[](std::vector<KlPoint>& p) { p[1].kl_se = kInf; }, "points[1].kl_se"},
      {[](std::vector<KlPoint>& p) { p[1].n = 0; }, "points[1].n"},
  };
  for (const Case& c : cases) {
    auto points = good;
    c.spoil(points);
    CHECK(std::string(predicted_kl(points, 0.1).status.where()) == c.where);
    CHECK(std::string(least_ratio(points, 0.1).status.where()) == c.where);
  }
  CHECK(std::string(predicted_kl(good, 1.1).status.where()) == "ratio");
  for (const double bad : {kNan, 0.0, -1.0, kInf}) {
    CHECK(std::string(least_ratio(good, bad).status.where()) == "target");
  }
}

TEST_CASE("the situation follows from tiers and stored scores") {
  PromptBuilder scored;
  scored.fresh(1).cached(2, {1.0f, 2.0f}).cached(0).fresh(1);
  PromptBuilder bare;
  bare.fresh(1).cached(2, {1.0f, 2.0f}).cached(2).fresh(1);
  const Prompt with = scored.make();
  const Prompt without = bare.make();
  const std::vector<Tier> tiers = {Tier("disk", 1e9), Tier("memory", kInf, 0.0, true)};
  const std::vector<TierMask> both = {0, 3, 3, 0};
  const std::vector<TierMask> disk = {0, 3, 1, 0};
  CHECK(situation_of(with, tiers, both).value == Situation::kv_in_memory);
  CHECK(situation_of(without, tiers, both).value == Situation::kv_in_memory);
  CHECK(situation_of(with, tiers, std::vector<TierMask>{0, 1, 1, 0}).value == Situation::hide_loading);
  CHECK(situation_of(with, tiers, disk).value == Situation::kv_in_memory);  // what is not there has no tokens
  CHECK(situation_of(without, tiers, disk).value == Situation::no_stored_scores);
  for (const std::size_t count : {0u, 3u, 5u, 64u}) {
    CHECK(std::string(situation_of(with, tiers, std::vector<TierMask>(count)).status.where()) == "held_in");
  }
  CHECK(situation_of(with, std::vector<Tier>(32), both).ok());
  CHECK(std::string(situation_of(with, std::vector<Tier>(33), both).status.where()) == "tiers");

  CHECK(suits(Situation::kv_in_memory, ScoreTiming::after_probe, false));
  CHECK_FALSE(suits(Situation::kv_in_memory, ScoreTiming::before_load, true));  // `without` above is one such
  CHECK_FALSE(suits(Situation::hide_loading, ScoreTiming::after_probe, false));
  CHECK(suits(Situation::hide_loading, ScoreTiming::before_load, true));
  CHECK_FALSE(suits(Situation::no_stored_scores, ScoreTiming::before_load, true));
  CHECK(suits(Situation::no_stored_scores, ScoreTiming::during_pass, false));
}

namespace {

// Attention, saliency, deviation, first-k: KL of ten prompts each, at 15 %.
struct Trials {
  std::vector<std::vector<double>> kls = {{}, {}, {}, {}};
  QualityCalibration calibration;

  Trials() {
    for (int i = 0; i < 10; ++i) {
      const double hard = 0.5 + 0.1 * i;
      kls[0].push_back(0.08 * hard);
      kls[1].push_back(0.10 * hard);
      kls[2].push_back(i < 8 ? 0.09 * hard : 0.5);  // more wins than saliency, but a worse mean
      kls[3].push_back(0.12 * hard);
    }
    calibration.target_kl = 0.05;
    calibration.cost = LinearCostModel(0.0, 1e-6, 0.0);
    const std::vector<ScoreTiming> timings = {ScoreTiming::after_probe, ScoreTiming::before_load,
                                              ScoreTiming::during_pass, ScoreTiming::before_load};
    for (std::size_t s = 0; s < 4; ++s) {
      SelectorQuality quality;
      quality.name = "selector";
      quality.timing = timings[s];
      quality.needs_stored_scores = s == 1;
      for (const double ratio : {0.0, 0.15, 0.3}) {
        const double factor = ratio == 0.0 ? 2.0 : ratio == 0.15 ? 1.0 : 0.5;
        std::vector<double> at = kls[s];
        for (double& kl : at) kl *= factor;
        quality.points.push_back(kl_point(ratio, at).value);
      }
      calibration.selectors.push_back(quality);
    }
  }

  [[nodiscard]] std::vector<SelectorTrial> trials() const {
    std::vector<SelectorTrial> out;
    for (std::size_t s = 0; s < 4; ++s) {
      SelectorTrial trial;
      trial.kls = kls[s];
      trial.timing = calibration.selectors[s].timing;
      trial.needs_stored_scores = calibration.selectors[s].needs_stored_scores;
      out.push_back(trial);
    }
    return out;
  }
};

}  // namespace

TEST_CASE("a default is the preferred one unless another is better beyond doubt") {
  const Trials t;
  std::vector<SelectorTrial> trials = t.trials();
  CHECK(choose_default(trials, Situation::kv_in_memory).value == 0);
  CHECK(choose_default(std::span(trials).subspan(1), Situation::kv_in_memory).value == 1);  // no score may be stored
  CHECK(choose_default(trials, Situation::hide_loading).value == 1);
  CHECK(choose_default(trials, Situation::no_stored_scores).value == 2);  // first-k's mean is lower, but not its pairs
  std::reverse(trials.begin(), trials.end());
  CHECK(choose_default(trials, Situation::kv_in_memory).value == 3);      // every pair: attention replaces first-k
  CHECK(choose_default(trials, Situation::no_stored_scores).value == 0);  // the deviation does not
  CHECK(choose_default(std::span(trials).subspan(2, 1), Situation::no_stored_scores).value == -1);
  std::vector<double> few(9, 0.1);
  trials[1].kls = few;
  CHECK(std::string(choose_default(trials, Situation::kv_in_memory).status.where()) == "trials[1]");
}

TEST_CASE("settled defaults have the target's ratio and what is healthy there or refuse to blend") {
  Trials t;
  const std::vector<SelectorTrial> trials = t.trials();
  REQUIRE(settle_defaults(t.calibration, 0.15, trials).ok());
  REQUIRE(t.calibration.validate().ok());
  const SelectorDefault& memory = t.calibration.of(Situation::kv_in_memory);
  CHECK(memory.selector == 0);
  // Mean 0.076 at 15 %, 0.038 at 30 %.
  CHECK(memory.r_min == doctest::Approx(0.15 + 0.15 * (0.076 - 0.05) / 0.038));
  const HealthyKl tried = healthy_kl(t.kls[0]).value;
  CHECK(memory.healthy.mean == doctest::Approx(0.05));
  CHECK(memory.healthy.log_mean == doctest::Approx(tried.log_mean + std::log(0.05 / 0.076)));
  CHECK(memory.healthy.log_sd == doctest::Approx(tried.log_sd));
  const PlannerOptions options = t.calibration.planner_options(Situation::kv_in_memory);
  CHECK(options.r_min == memory.r_min);
  CHECK(options.timing == ScoreTiming::after_probe);
  CHECK(options.blending_allowed);
  CHECK(t.calibration.planner_options(Situation::hide_loading).timing == ScoreTiming::before_load);

  t.calibration.target_kl = 0.001;
  REQUIRE(settle_defaults(t.calibration, 0.15, trials).ok());
  CHECK_FALSE(t.calibration.blending_allowed());
  CHECK_FALSE(t.calibration.planner_options(Situation::kv_in_memory).blending_allowed);
  CHECK(t.calibration.validate().ok());
  CHECK(std::string(settle_defaults(t.calibration, 0.15, std::span(trials).first(3)).where()) == "trials");
}

TEST_CASE("a calibration that does not fit together is refused by name") {
  Trials t;
  REQUIRE(settle_defaults(t.calibration, 0.15, t.trials()).ok());
  struct Case {
    void (*spoil)(QualityCalibration&);
    const char* where;
  };
  const std::vector<Case> cases = {
      {[](QualityCalibration& c) { c.target_kl = kNan; }, "target_kl"},
      {[](QualityCalibration& c) { c.selectors[2].points[1].n = 0; }, "selectors[2]"},
      {[](QualityCalibration& c) { c.defaults[1].selector = 4; }, "defaults[1]"},
      {[](QualityCalibration& c) { c.defaults[1].selector = 0; }, "defaults[1]"},  // chooses after a probe
      {[](QualityCalibration& c) { c.defaults[1].r_min = 1.5; }, "defaults[1]"},
      {[](QualityCalibration& c) { c.defaults[0].healthy.log_sd = -1.0; }, "defaults[0]"},
      {[](QualityCalibration& c) { c.prior.bins = 40; }, "prior.bins"},
      {[](QualityCalibration& c) { c.cost.per_row_s = kNan; }, "cost.per_row_s"},
      {[](QualityCalibration& c) { c.signal_limits.recompute_at = -1.0; }, "signal_limits.recompute_at"},
  };
  for (const Case& c : cases) {
    QualityCalibration calibration = t.calibration;
    c.spoil(calibration);
    CAPTURE(c.where);
    CHECK(std::string(calibration.validate().where()) == std::string(c.where));
  }
}

TEST_CASE("a signal has limits only if it says something of KL") {
  std::mt19937 random(4);
  std::normal_distribution<double> normal(0.0, 1.0);
  std::vector<double> kls;
  std::vector<double> telling;
  std::vector<double> blind;
  for (int i = 0; i < 100; ++i) {
    const double hard = normal(random);
    kls.push_back(std::exp(hard));
    telling.push_back(std::exp(hard + normal(random)));
    blind.push_back(std::exp(-0.5 * hard + normal(random)));
  }
  const Result<SignalLimits> limits = signal_limits(telling, kls, 0.2, 0.05);
  REQUIRE(limits.ok());
  const auto above = [&](double limit) {
    return std::count_if(telling.begin(), telling.end(), [&](double x) { return x > limit; });
  };
  CHECK(above(limits.value.raise_at) == 20);
  CHECK(above(limits.value.recompute_at) == 5);
  CHECK(above(signal_limits(telling, kls, 0.2, 0.0).value.recompute_at) == 0);
  CHECK(signal_limits(blind, kls, 0.2, 0.05).value.raise_at == kInf);
  for (const double share : {0.29, 0.57, 0.58}) {  // times 100 they round to just below a whole number, or above
    CAPTURE(share);
    CHECK(above(upper_quantile(telling, share)) == std::lround(share * 100.0));
  }
  CHECK(std::string(signal_limits(telling, kls, 0.1, 0.2).status.where()) == "recomputed");
  CHECK(std::string(signal_limits(telling, kls, kNan, 0.0).status.where()) == "raised");
  CHECK(std::string(signal_limits(std::span(telling).first(5), kls, 0.2, 0.0).status.where()) == "signals");
}

TEST_CASE("the gate's signal is the best of its candidates if it is so beyond having looked at all of them") {
  // Places of ten prompts by each signal; with d the differences to KL's places, rho = 1 - 6·Σd²/990.
  const std::vector<double> kls = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const std::vector<double> weak = {5, 3, 4, 1, 2, 0, 6, 7, 8, 9};   // Σd² 66, rho .6, p .036
  const std::vector<double> good = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8};   // Σd² 10, rho .939, p .002
  const std::vector<double> worse = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0};  // the lower the worse: no signal
  const auto settled = [&](const std::vector<SignalTrial>& trials, double alpha = 0.05) {
    QualityCalibration calibration;
    calibration.signal = "an older one";
    calibration.signal_limits = {1.0, 2.0};
    REQUIRE(settle_signal(calibration, trials, kls, 0.2, 0.1, alpha).ok());
    CHECK((calibration.signal_limits.raise_at == kInf) == calibration.signal.empty());
    CHECK((calibration.signal_limits.recompute_at == kInf) == calibration.signal.empty());
    return calibration;
  };
  const SignalTrial weak_trial = {"weak", weak};
  const SignalTrial good_trial = {"good", good};
  const SignalTrial worse_trial = {"worse", worse};

  CHECK(settled({weak_trial}).signal == "weak");  // p < .05, but not < .05/2
  CHECK(settled({weak_trial, worse_trial}).signal.empty());
  CHECK(settled({worse_trial, weak_trial}, 0.1).signal == "weak");
  CHECK(settled({worse_trial}, 0.5).signal.empty());
  CHECK(settled({}).signal.empty());
  CHECK(settled({good_trial, {"as good", good}}).signal == "good");
  for (const std::vector<SignalTrial>& trials :
       {std::vector<SignalTrial>{weak_trial, good_trial, worse_trial}, {good_trial, worse_trial, weak_trial}}) {
    const QualityCalibration calibration = settled(trials);
    CHECK(calibration.signal == "good");
    CHECK(calibration.signal_limits.raise_at == 7.0);  // 8 and 9 are above
    CHECK(calibration.signal_limits.recompute_at == 8.0);
  }

  QualityCalibration kept;
  kept.signal = "kept";
  CHECK(std::string(settle_signal(kept, {{good_trial, {"short", std::span(weak).first(9)}}}, kls, 0.2, 0.1).where()) ==
        "trials[1]");
  CHECK(std::string(settle_signal(kept, {{worse_trial}}, kls, 0.1, 0.2).where()) == "recomputed");
  CHECK(kept.signal == "kept");
}
