// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// QualityGate on simulated traffic: what it lets pass, what it finds and how fast, and how it comes back.
#include <doctest/doctest.h>

#include <kvblend/plan/gate.hpp>
#include <kvblend/plan/quality.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gate_data.hpp"

using namespace kvblend;
using gate_data::Blends;
using gate_data::Fault;
using gate_data::kBlends;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

using Random = std::mt19937_64;

// KL of healthy requests. All have a typical KL of about .09.
struct LogNormal {
  double log_mean = -2.45, log_sd = 0.85;
  double operator()(Random& random) const {
    return std::exp(std::normal_distribution<double>(log_mean, log_sd)(random));
  }
};
// One in eight is far off, whatever is done.
struct WithFailures {
  double operator()(Random& random) const {
    if (random() % 8 == 0) return 1.3 + std::exponential_distribution<double>(1.0)(random);
    return LogNormal{-2.45, 0.7}(random);
  }
};
struct HeavyTailed {  // a t distribution of three degrees of freedom on the logarithm
  double operator()(Random& random) const {
    return std::exp(-2.45 + 0.5 * std::student_t_distribution<double>(3.0)(random));
  }
};
double draw(const double (&kls)[gate_data::kQuestions], Random& random) { return kls[random() % std::size(kls)]; }

double mean_log(const double (&kls)[gate_data::kQuestions]) {
  double sum = 0.0;
  for (const double kl : kls) sum += std::log(kl);
  return sum / gate_data::kQuestions;
}

template <std::size_t kIndex>
struct Measured {
  double operator()(Random& random) const { return draw(kBlends[kIndex].healthy, random); }
};

template <class Source>
HealthyKl calibrate_on(const Source& source, Random& random, int prompts) {
  std::vector<double> kls(static_cast<std::size_t>(prompts));
  for (double& kl : kls) kl = source(random);
  const Result<HealthyKl> healthy = healthy_kl(kls);
  REQUIRE(healthy.ok());
  return healthy.value;
}

GateOptions options_for(const HealthyKl& healthy, double limit = 4.0) {
  GateOptions options;
  options.healthy = healthy;
  options.limit_kl = limit * healthy.mean;
  return options;
}

// Of LogNormal{}, as if there had been endless prompts.
HealthyKl known_healthy() {
  HealthyKl healthy;
  healthy.log_mean = -2.45;
  healthy.log_sd = 0.85;
  healthy.mean = std::exp(-2.45 + 0.5 * 0.85 * 0.85);
  healthy.n = 1000;
  return healthy;
}

QualityGate make(const GateOptions& options) {
  Result<QualityGate> gate = QualityGate::make(options);
  REQUIRE_MESSAGE(gate.ok(), gate.status.where() << ": " << gate.status.message());
  return gate.value;
}

// The next sampled request: measured as the gate asks, with what `kl(level)` says.
template <class Kl>
void step(QualityGate& gate, std::uint64_t& request, Kl kl, double placement_error = 0.0) {
  ++request;
  const Result<GateDecision> decision = gate.decide(request, 0.15);
  REQUIRE(decision.ok());
  GateSample sample;
  sample.measured = decision.value.measure;
  sample.kl = kl(sample.measured);
  sample.placement_error = placement_error;
  REQUIRE(gate.observe(sample).ok());
}

std::string text_of(const QualityGate& gate) {
  std::vector<char> buffer(gate.print({}) + 1);
  gate.print(buffer);
  return buffer.data();
}

}  // namespace

TEST_CASE_TEMPLATE("healthy traffic of any shape raises false alarms in under 1 % of runs", Source, LogNormal,
                   WithFailures, HeavyTailed, Measured<0>, Measured<1>) {
  const unsigned seed = 20261130;
  INFO("seed ", seed);
  const Source source{};
  for (const int prompts : {12, 40}) {
    CAPTURE(prompts);
    Random random(seed);
    int alarms = 0;
    for (int run = 0; run < 2000; ++run) {
      // Calibrated anew each time: what few prompts get wrong is part of the rate.
      QualityGate gate = make(options_for(calibrate_on(source, random, prompts)));
      std::uint64_t request = 0;
      for (int i = 0; i < 1000 && gate.level() == GateLevel::base; ++i) {
        GateSample sample;
        sample.kl = source(random);
        sample.placement_error = 0.012;
        if (!gate.observe(sample).ok()) FAIL("refused");
        ++request;
      }
      alarms += gate.level() != GateLevel::base ? 1 : 0;
    }
    MESSAGE("false alarms: " << alarms << " of 2000 runs of 1000 samples");
    CHECK(alarms < 20);
  }
}

TEST_CASE("of a real model's faults placement shows each at the first sample and KL only those that ruin answers") {
  const unsigned seed = 42;
  INFO("seed ", seed);
  Random random(seed);
  for (const Blends& blends : kBlends) {
    CAPTURE(blends.selector);
    const auto base = [&](Random& r) { return draw(blends.healthy, r); };
    const auto healthy = [&](GateLevel level) {
      return draw(level == GateLevel::base ? blends.healthy : blends.raised, random);
    };
    for (const Fault& fault : blends.faults) {
      CAPTURE(fault.name);
      const auto broken = [&](GateLevel) { return draw(fault.kl, random); };
      int by_kl = 0;
      std::vector<int> back;
      for (int run = 0; run < 200; ++run) {
        QualityGate gate = make(options_for(calibrate_on(base, random, 24)));
        std::uint64_t request = static_cast<std::uint64_t>(run) * 10000;
        for (int i = 0; i < 100; ++i) step(gate, request, healthy, gate_data::kHealthyPlacement);
        REQUIRE(gate.level() == GateLevel::base);
        QualityGate blind = gate;  // to placement

        step(gate, request, broken, fault.placement_error);
        REQUIRE(gate.level() == GateLevel::full);
        REQUIRE(gate.reason() == GateReason::misplaced);
        for (back.push_back(0); gate.level() != GateLevel::base && back.back() < 1000; ++back.back()) {
          step(gate, request, healthy, gate_data::kHealthyPlacement);
        }
        REQUIRE(gate.level() == GateLevel::base);
        REQUIRE(gate.reason() == GateReason::healthy);

        for (int i = 0; i < 20; ++i) step(blind, request, broken);
        by_kl += blind.level() == GateLevel::base ? 0 : 1;
      }
      std::sort(back.begin(), back.end());
      const double worse = std::exp(mean_log(fault.kl) - mean_log(blends.healthy));
      MESSAGE(std::string(blends.selector) << ", " << std::string(fault.name) << ": KL " << worse
                                           << " times the healthy one, alone finds it within 20 samples in " << by_kl
                                           << " of 200 runs; mended, the gate is back after " << back[100]
                                           << " samples (median), at most " << back.back());
      CHECK(back[100] < 200);
      if (worse > 15.0) CHECK(by_kl > 150);
      if (worse < 3.0) CHECK(by_kl < 20);
    }
  }
}

TEST_CASE("an alarm at the limit takes about as long as expected and is not expected where there is none") {
  const unsigned seed = 48;
  INFO("seed ", seed);
  Random random(seed);
  struct Case {
    double limit;
    int prompts;
  };
  for (const Case& c : {Case{2.0, 100}, Case{4.0, 24}, Case{4.0, 100}}) {
    CAPTURE(c.limit);
    CAPTURE(c.prompts);
    std::vector<double> expected;
    std::vector<double> found;
    for (int run = 0; run < 300; ++run) {
      QualityGate gate = make(options_for(calibrate_on(LogNormal{}, random, c.prompts), c.limit));
      expected.push_back(gate.expected_delay());
      int samples = 0;
      for (; gate.level() == GateLevel::base && samples < 2000; ++samples) {
        GateSample sample;
        sample.kl = c.limit * LogNormal{}(random);
        REQUIRE(gate.observe(sample).ok());
      }
      found.push_back(samples);
    }
    std::sort(expected.begin(), expected.end());
    std::sort(found.begin(), found.end());
    MESSAGE("expected " << expected[150] << ", median " << found[150]);
    CHECK(found[150] == doctest::Approx(expected[150]).epsilon(0.25));
  }
  CHECK(make(options_for(known_healthy(), 1.01)).expected_delay() == kInf);
  CHECK(QualityGate().expected_delay() == kInf);
}

TEST_CASE("KL alone finds what makes blends clearly worse") {
  const unsigned seed = 43;
  INFO("seed ", seed);
  Random random(seed);
  struct Case {
    double factor;
    int within;
  };
  for (const Case& c : {Case{60.0, 20}, Case{20.0, 30}}) {
    CAPTURE(c.factor);
    int late = 0;
    for (int run = 0; run < 500; ++run) {
      QualityGate gate = make(options_for(calibrate_on(LogNormal{}, random, 24)));
      std::uint64_t request = 0;
      for (int i = 0; i < 50; ++i) step(gate, request, [&](GateLevel) { return LogNormal{}(random); });
      int found = 0;
      for (int i = 1; i <= 200 && found == 0; ++i) {
        step(gate, request, [&](GateLevel) { return c.factor * LogNormal{}(random); });
        if (gate.level() != GateLevel::base) found = i;
      }
      late += found == 0 || found > c.within ? 1 : 0;
    }
    CHECK(late <= 5);
  }
}

TEST_CASE("KL above the limit raises the ratio first and a raised ratio that does not help ends in full recompute") {
  Random random(5);
  QualityGate gate = make(options_for(known_healthy()));
  std::uint64_t request = 0;
  int samples = 0;
  while (gate.level() == GateLevel::base) {
    step(gate, request, [&](GateLevel) { return 6.0 * LogNormal{-2.45, 0.3}(random); });
    REQUIRE(++samples < 100);
  }
  REQUIRE(gate.level() == GateLevel::raised);
  CHECK(gate.reason() == GateReason::kl_above_limit);
  const Result<GateDecision> raised = gate.decide(7, 0.15);
  REQUIRE(raised.ok());
  CHECK(raised.value.ratio == doctest::Approx(0.3));
  CHECK(gate.decide(7, 0.7).value.ratio == 1.0);
  CHECK(gate.decide(7, 0.0).value.ratio == 0.1);  // twice nothing would raise nothing
  CHECK(gate.decide(7, 0.01).value.ratio == 0.1);

  for (samples = 0; gate.level() == GateLevel::raised;) {
    step(gate, request, [&](GateLevel) { return 6.0 * LogNormal{-2.45, 0.3}(random); });
    REQUIRE(++samples < 200);
  }
  CHECK(gate.level() == GateLevel::full);
  CHECK(gate.decide(7, 0.15).value.ratio == 1.0);
  CHECK(gate.decide(7, 0.15).value.measure == GateLevel::raised);  // the way back is what is measured
}

TEST_CASE("KL far above the limit goes to full recompute at once") {
  QualityGate gate = make(options_for(known_healthy()));
  std::uint64_t request = 0;
  int samples = 0;
  while (gate.level() == GateLevel::base) {
    step(gate, request, [](GateLevel) { return 6.0; });
    REQUIRE(++samples <= 20);
  }
  CHECK(samples > 1);  // no sample alone is enough
  CHECK(gate.level() == GateLevel::full);
  CHECK(gate.reason() == GateReason::kl_far_off);
}

TEST_CASE("after a fault is mended the gate comes back level by level and stays") {
  const unsigned seed = 44;
  INFO("seed ", seed);
  Random random(seed);
  for (int run = 0; run < 100; ++run) {
    QualityGate gate = make(options_for(known_healthy()));
    std::uint64_t request = static_cast<std::uint64_t>(run) * 100000;
    const auto healthy = [&](GateLevel) { return LogNormal{}(random); };
    step(gate, request, healthy, 0.32);
    REQUIRE(gate.level() == GateLevel::full);
    // Still broken: it does not come back, however good KL looks.
    for (int i = 0; i < 200; ++i) step(gate, request, healthy, i % 5 == 4 ? 0.32 : 0.0);
    REQUIRE(gate.level() == GateLevel::full);
    int to_raised = 0;
    int to_base = 0;
    for (; gate.level() == GateLevel::full && to_raised < 1000; ++to_raised) step(gate, request, healthy);
    REQUIRE(gate.level() == GateLevel::raised);
    CHECK(gate.reason() == GateReason::recovering);
    for (; gate.level() == GateLevel::raised && to_base < 1000; ++to_base) step(gate, request, healthy);
    REQUIRE(gate.level() == GateLevel::base);
    CHECK(gate.reason() == GateReason::healthy);
    CHECK(to_raised >= 16);
    CHECK(to_base >= 16);
    CHECK(to_raised + to_base < 400);
    for (int i = 0; i < 300; ++i) step(gate, request, healthy);
    CHECK(gate.level() == GateLevel::base);
  }
}

TEST_CASE("between where an alarm begins and where recovery shows each level stays") {
  const unsigned seed = 45;
  INFO("seed ", seed);
  for (const double limit : {2.0, 4.0, 16.0}) {
    CAPTURE(limit);
    Random random(seed);
    int left = 0;
    int back = 0;
    for (int run = 0; run < 100; ++run) {
      // A little under half way to the limit, on the logarithm; 0.4 of its spread, as the mean of a few tokens has.
      const double factor = std::pow(limit, 0.45);
      const auto between = [&](GateLevel) { return factor * LogNormal{-2.45, 0.35}(random); };
      std::uint64_t request = static_cast<std::uint64_t>(run) * 100000;
      QualityGate gate = make(options_for(known_healthy(), limit));
      for (int i = 0; i < 200; ++i) step(gate, request, between);
      left += gate.level() != GateLevel::base ? 1 : 0;

      QualityGate raised = make(options_for(known_healthy(), limit));
      while (raised.level() == GateLevel::base) {
        step(raised, request, [&](GateLevel) { return 1.1 * limit * std::exp(-2.45); });
      }
      REQUIRE(raised.level() == GateLevel::raised);
      for (int i = 0; i < 200; ++i) step(raised, request, between);
      back += raised.level() == GateLevel::base ? 1 : 0;
    }
    CHECK(left <= 5);
    CHECK(back <= 5);
  }
}

TEST_CASE("a level that is not good enough is not gone back to within the horizon") {
  const unsigned seed = 49;
  INFO("seed ", seed);
  for (const double limit : {2.0, 4.0}) {
    CAPTURE(limit);
    // The typical KL from which evidence for an alarm grows, and the calibrated spread about it.
    const GateOptions options = options_for(known_healthy(), limit);
    const double at_limit = std::log(limit) / 0.85;
    const double margin = (std::min)(at_limit / 3.0, 0.5);
    const double turn = margin + ShiftDetector(at_limit - margin, std::log(1000 / 0.005)).neutral();
    Random random(seed);
    int back = 0;
    for (int run = 0; run < 400; ++run) {
      QualityGate gate = make(options);
      std::uint64_t request = static_cast<std::uint64_t>(run) * 100000;
      step(
          gate, request, [](GateLevel) { return 0.09; }, 1.0);
      REQUIRE(gate.level() == GateLevel::full);
      for (int i = 0; i < 1000 && gate.level() == GateLevel::full; ++i) {
        step(gate, request, [&](GateLevel) { return LogNormal{-2.45 + 0.85 * turn, 0.85}(random); });
      }
      back += gate.level() != GateLevel::full ? 1 : 0;
    }
    MESSAGE("back down: " << back << " of 400 runs");
    CHECK(back <= 6);  // at most 2 on average
  }
}

TEST_CASE("a raised ratio that helps is kept while the base ratio is still bad") {
  Random random(46);
  QualityGate gate = make(options_for(known_healthy()));
  std::uint64_t request = 0;
  const auto kl = [&](GateLevel level) {
    return (level == GateLevel::base ? 6.0 : 1.0) * LogNormal{-2.45, 0.3}(random);
  };
  for (int i = 0; i < 50; ++i) step(gate, request, kl);
  REQUIRE(gate.level() == GateLevel::raised);
  for (int i = 0; i < 1000; ++i) {
    step(gate, request, kl);
    REQUIRE(gate.level() == GateLevel::raised);
  }
  CHECK(gate.estimate(GateLevel::base).mean > 3.0 * gate.estimate(GateLevel::raised).mean);
}

TEST_CASE("a relapse makes the way back longer") {
  QualityGate gate = make(options_for(known_healthy()));
  std::uint64_t request = 0;
  const auto good = [](GateLevel) { return 0.02; };
  std::vector<int> way;
  for (int relapse = 0; relapse < 3; ++relapse) {
    step(gate, request, good, 1.0);
    int samples = 0;
    for (; gate.level() != GateLevel::base; ++samples) step(gate, request, good);
    way.push_back(samples);
  }
  CHECK(way[0] >= 32);
  CHECK(way[1] >= 64);
  CHECK(way[1] > way[0]);
  CHECK(way[2] >= 128);
  for (int i = 0; i < 1100; ++i) step(gate, request, good);  // longer ago than the horizon
  step(gate, request, good, 1.0);
  int samples = 0;
  for (; gate.level() != GateLevel::base; ++samples) step(gate, request, good);
  CHECK(samples < way[1]);
}

TEST_CASE("which requests are sampled is a function of seed and number at the wanted share") {
  GateOptions options = options_for(known_healthy());
  options.share = 0.05;
  options.seed = 9;
  const QualityGate gate = make(options);
  const QualityGate same = make(options);
  options.seed = 10;
  const QualityGate other = make(options);
  int count = 0;
  int both = 0;
  for (std::uint64_t request = 0; request < 100000; ++request) {
    REQUIRE(gate.samples(request) == same.samples(request));
    REQUIRE(gate.decide(request, 0.15).value.sampled == gate.samples(request));
    count += gate.samples(request) ? 1 : 0;
    both += gate.samples(request) && other.samples(request) ? 1 : 0;
  }
  CHECK(std::abs(count - 5000) < 350);  // five standard deviations
  CHECK(std::abs(both - 250) < 80);
  options.share = 1.0;
  for (std::uint64_t request = 0; request < 1000; ++request) REQUIRE(make(options).samples(request));
}

TEST_CASE("a request's own signal raises its ratio or has it recomputed and changes nothing else") {
  GateOptions options = options_for(known_healthy());
  options.signal.raise_at = 1.0;
  options.signal.recompute_at = 2.0;
  const QualityGate gate = make(options);
  struct Case {
    double signal;
    GateLevel level;
    double ratio;
  };
  const std::vector<Case> cases = {{0.0, GateLevel::base, 0.15},   {1.0, GateLevel::base, 0.15},
                                   {1.01, GateLevel::raised, 0.3}, {2.0, GateLevel::raised, 0.3},
                                   {2.01, GateLevel::full, 1.0},   {kInf, GateLevel::full, 1.0}};
  for (const Case& c : cases) {
    CAPTURE(c.signal);
    const Result<GateDecision> decision = gate.decide(3, 0.15, c.signal);
    REQUIRE(decision.ok());
    CHECK(decision.value.level == c.level);
    CHECK(decision.value.ratio == doctest::Approx(c.ratio));
    CHECK((decision.value.reason == GateReason::request_signal) == (c.level != GateLevel::base));
    CHECK(decision.value.measure == GateLevel::base);
  }
  CHECK(gate.level() == GateLevel::base);
  for (const double bad : {kNan, -1.0}) {
    CHECK(std::string(gate.decide(3, 0.15, bad).status.where()) == "signal");
    CHECK(std::string(gate.decide(3, bad).status.where()) == "ratio");
  }
  CHECK(std::string(gate.decide(3, 1.1).status.where()) == "ratio");
}

TEST_CASE("samples that are no measurements are refused by name and change nothing") {
  QualityGate gate = make(options_for(known_healthy()));
  const std::string before = text_of(gate);
  for (const double bad : {kNan, -kNan, -1e-12, kInf, -kInf}) {
    GateSample sample;
    sample.kl = bad;
    CHECK(std::string(gate.observe(sample).where()) == "sample.kl");
    sample.kl = 0.1;
    sample.placement_error = bad;
    CHECK(std::string(gate.observe(sample).where()) == "sample.placement_error");
  }
  GateSample sample;
  sample.measured = GateLevel::full;
  CHECK(std::string(gate.observe(sample).where()) == "sample.measured");
  CHECK(text_of(gate) == before);
  sample.measured = GateLevel::base;
  sample.kl = 0.0;
  CHECK(gate.observe(sample).ok());
  sample.kl = std::numeric_limits<double>::max();
  CHECK(gate.observe(sample).ok());
}

TEST_CASE("options out of range are refused by name") {
  struct Case {
    void (*spoil)(GateOptions&);
    const char* where;
  };
  const std::vector<Case> cases = {
      {[](GateOptions& o) { o.healthy.log_mean = kNan; }, "healthy.log_mean"},
      {[](GateOptions& o) { o.healthy.log_sd = 0.0; }, "healthy.log_sd"},
      {[](GateOptions& o) { o.healthy.mean = 0.0; }, "healthy.mean"},
      {[](GateOptions& o) { o.healthy.n = 1; }, "healthy.n"},
      {[](GateOptions& o) { o.limit_kl = o.healthy.mean; }, "limit_kl"},
      {[](GateOptions& o) { o.limit_kl = kInf; }, "limit_kl"},
      {[](GateOptions& o) { o.raise = 1.0; }, "raise"},
      {[](GateOptions& o) { o.least_raised = 0.0; }, "least_raised"},
      {[](GateOptions& o) { o.least_raised = kNan; }, "least_raised"},
      {[](GateOptions& o) { o.share = 0.0; }, "share"},
      {[](GateOptions& o) { o.share = kNan; }, "share"},
      {[](GateOptions& o) { o.false_alarm = 0.0; }, "false_alarm"},
      {[](GateOptions& o) { o.horizon = 0; }, "horizon"},
      {[](GateOptions& o) { o.misplaced = kNan; }, "misplaced"},
      {[](GateOptions& o) { o.clean = 0; }, "clean"},
      {[](GateOptions& o) { o.signal.raise_at = kNan; }, "signal.raise_at"},
      {[](GateOptions& o) { o.signal.recompute_at = 1.0; }, "signal.recompute_at"},
  };
  for (const Case& c : cases) {
    GateOptions options = options_for(known_healthy());
    c.spoil(options);
    CHECK(std::string(QualityGate::make(options).status.where()) == c.where);
  }
}

TEST_CASE("the running estimate follows the last samples and its interval is about the mean") {
  Random random(47);
  QualityGate gate = make(options_for(known_healthy()));
  CHECK(gate.estimate(GateLevel::base).samples == 0);
  const auto feed = [&](double scale, int count) {
    for (int i = 0; i < count; ++i) {
      GateSample sample;
      sample.kl = scale * LogNormal{}(random);
      REQUIRE(gate.observe(sample).ok());
    }
  };
  feed(1.0, 1);
  CHECK(gate.estimate(GateLevel::base).high >= 2.0 * gate.estimate(GateLevel::base).mean);
  feed(1.0, 999);
  const KlEstimate estimate = gate.estimate(GateLevel::base);
  CHECK(estimate.samples == 1000);
  CHECK(estimate.low < estimate.mean);
  CHECK(estimate.mean < estimate.high);
  // Half widths of 127 effective samples' mean.
  const double mean = known_healthy().mean;
  const double sd = mean * std::sqrt(std::exp(0.85 * 0.85) - 1.0);
  CHECK(estimate.mean == doctest::Approx(mean).epsilon(4.0 * sd / mean / std::sqrt(127.0)));
  CHECK(estimate.high - estimate.mean == doctest::Approx(1.96 * sd / std::sqrt(127.0)).epsilon(0.6));
  feed(0.1, 500);
  CHECK(gate.estimate(GateLevel::base).mean < 0.2 * mean);
}

TEST_CASE("the gate says in words where it stands") {
  QualityGate gate = make(options_for(known_healthy()));
  CHECK(text_of(gate).find("gate: blend, healthy") == 0);
  std::uint64_t request = 0;
  step(
      gate, request, [](GateLevel) { return 0.1; }, 0.32);
  const std::string text = text_of(gate);
  CHECK(text.find("gate: full recompute, reused KV is not what it should be (placement error 0.32, limit 0.05)") == 0);
  for (std::size_t room = 0; room <= text.size(); ++room) {
    std::vector<char> buffer(room + 1, '#');
    CHECK(gate.print(std::span<char>(buffer).first(room)) == text.size());
    CHECK(buffer[room] == '#');
  }
}
