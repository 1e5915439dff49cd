// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Cost model, its fit and calibration, and tiers.
#include <doctest/doctest.h>

#include <kvblend/plan/calibration.hpp>
#include <kvblend/plan/cost_model.hpp>
#include <kvblend/plan/tier.hpp>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace kvblend;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

static_assert(CostModel<LinearCostModel>);

double squared_error(const LinearCostModel& model, const std::vector<CostSample>& samples) {
  double sum = 0.0;
  for (const CostSample& s : samples) {
    const double e = model.seconds(s.rows, s.context) / s.seconds - 1.0;
    sum += e * e;
  }
  return sum;
}

// A host whose layer takes what `truth` says, with a slow first run at every point and one slow run in three.
struct FakeHost {
  LinearCostModel truth;
  int runs = 0;
  int fail_at = -1;
  double broken_time = 0.0;
  int break_at = -1;

  Result<double> operator()(std::int32_t rows, std::int32_t context) {
    const int run = runs++;
    if (run == fail_at) return Status::error(StatusCode::host_error, "no memory").at("host");
    if (run == break_at) return broken_time;
    const bool slow = run < 6 || run / 6 % 3 == 0;
    return truth.seconds(rows, context) * (slow ? 7.0 : 1.0);
  }
};
static_assert(LayerTimer<FakeHost>);

}  // namespace

TEST_CASE("a linear cost is fixed + rows + rows times context, and nothing for no rows") {
  const LinearCostModel cost(1e-3, 2e-5, 3e-9);
  CHECK(cost.seconds(100, 2000) == doctest::Approx(1e-3 + 100 * 2e-5 + 100.0 * 2000.0 * 3e-9).epsilon(1e-14));
  CHECK(cost.seconds(0, 2000) == 0.0);
  CHECK(is_finite(cost.seconds(std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::max())));
}

TEST_CASE("coefficients out of range are refused by name") {
  for (const double bad : {kNan, -kNan, kInf, -kInf, -1e-9, 1e13}) {
    CAPTURE(bad);
    CHECK(std::string(LinearCostModel(bad, 1.0, 1.0).validate().where()) == "cost.fixed_s");
    CHECK(std::string(LinearCostModel(1.0, bad, 1.0).validate().where()) == "cost.per_row_s");
    CHECK(std::string(LinearCostModel(1.0, 1.0, bad).validate().where()) == "cost.per_pair_s");
  }
  CHECK(LinearCostModel(0.0, 0.0, 0.0).validate().code() == StatusCode::invalid_argument);
  CHECK(LinearCostModel(-0.0, 1e-9, 0.0).validate().ok());
}

TEST_CASE("a fit gives exact times back") {
  const unsigned seed = 31;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int round = 0; round < 200; ++round) {
    // Each term now and then absent.
    const LinearCostModel truth{round % 3 == 0 ? 0.0 : 1e-3 * uniform(random),
                                round % 4 == 0 ? 0.0 : 1e-5 * uniform(random), 1e-9 * (0.1 + uniform(random))};
    std::vector<CostSample> samples;
    for (int i = 0; i < 12; ++i) {
      const int context = 100 + static_cast<int>(random() % 8000);
      const int rows = 1 + static_cast<int>(random() % static_cast<unsigned>(context));
      samples.emplace_back(rows, context, truth.seconds(rows, context));
    }
    const Result<CostFit> fit = fit_linear_cost(samples);
    REQUIRE(fit.ok());
    REQUIRE(fit.value.model.validate().ok());
    REQUIRE(fit.value.relative_error < 1e-6);
    for (const int rows : {10, 500, 4000}) {
      REQUIRE(fit.value.model.seconds(rows, 5000) == doctest::Approx(truth.seconds(rows, 5000)).epsilon(1e-4));
    }
  }
}

TEST_CASE("a fit of noisy times is non-negative and no neighbour is better") {
  const unsigned seed = 32;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> noise(0.5, 1.5);
  for (int round = 0; round < 100; ++round) {
    const LinearCostModel truth(1e-4, 1e-6, 1e-10);
    std::vector<CostSample> samples;
    for (int i = 0; i < 8; ++i) {
      const int context = 100 + static_cast<int>(random() % 4000);
      const int rows = 1 + static_cast<int>(random() % static_cast<unsigned>(context));
      samples.emplace_back(rows, context, truth.seconds(rows, context) * noise(random));
    }
    const Result<CostFit> fit = fit_linear_cost(samples);
    REQUIRE(fit.ok());
    const LinearCostModel& model = fit.value.model;
    REQUIRE(model.validate().ok());
    const double error = squared_error(model, samples);
    REQUIRE(fit.value.relative_error == doctest::Approx(std::sqrt(error / 8.0)).epsilon(1e-9));
    for (int i = 0; i < 27; ++i) {  // steps of a thousandth of each term's scale, where they stay non-negative
      const auto step = [](int digit, double scale) { return (digit - 1) * 1e-3 * scale; };
      const LinearCostModel other((std::max)(0.0, model.fixed_s + step(i % 3, 1e-4)),
                                  (std::max)(0.0, model.per_row_s + step(i / 3 % 3, 1e-6)),
                                  (std::max)(0.0, model.per_pair_s + step(i / 9, 1e-10)));
      REQUIRE(squared_error(other, samples) >= error * (1.0 - 1e-9));
    }
  }
}

TEST_CASE("samples that cannot be are refused by index") {
  const CostSample good(10, 100, 1e-3);
  CHECK(std::string(fit_linear_cost(std::vector<CostSample>{good, good}).status.where()) == "samples");
  for (const CostSample& bad : {CostSample(0, 100, 1e-3), CostSample(101, 100, 1e-3), CostSample(10, 100, 0.0),
                                CostSample(10, 100, kNan), CostSample(10, 100, kInf), CostSample(10, 100, -1.0)}) {
    const Result<CostFit> fit = fit_linear_cost(std::vector<CostSample>{good, good, bad});
    CHECK(fit.status.code() == StatusCode::invalid_argument);
    CHECK(std::string(fit.status.where()) == "samples[2]");
  }
  // Three times the same point leaves the terms undetermined, but the point itself must come out.
  const Result<CostFit> same = fit_linear_cost(std::vector<CostSample>{good, good, good});
  REQUIRE(same.ok());
  CHECK(same.value.model.validate().ok());
  CHECK(same.value.model.seconds(10, 100) == doctest::Approx(1e-3).epsilon(1e-9));
}

TEST_CASE("calibration sheds warm-up and slow runs") {
  FakeHost host;
  host.truth = LinearCostModel(2e-4, 3e-6, 5e-10);
  const Result<CostFit> fit = calibrate(host);
  REQUIRE(fit.ok());
  CHECK(host.runs == 6 * (1 + 5));
  CHECK(fit.value.model.fixed_s == doctest::Approx(2e-4).epsilon(1e-6));
  CHECK(fit.value.model.per_row_s == doctest::Approx(3e-6).epsilon(1e-6));
  CHECK(fit.value.model.per_pair_s == doctest::Approx(5e-10).epsilon(1e-6));
}

TEST_CASE("calibration passes on what goes wrong") {
  FakeHost failing;
  failing.truth = LinearCostModel(0.0, 1e-6, 0.0);
  failing.fail_at = 9;
  CHECK(std::string(calibrate(failing).status.where()) == "host");
  CHECK(failing.runs == 10);
  for (const double bad : {kNan, kInf, 0.0, -1.0}) {
    FakeHost broken;
    broken.truth = failing.truth;
    broken.break_at = 1;
    broken.broken_time = bad;
    const Result<CostFit> fit = calibrate(broken);
    CHECK(fit.status.code() == StatusCode::host_error);
    CHECK(std::string(fit.status.where()) == "rows 128, context 512");
  }
  CalibrationOptions options;
  options.max_context = 63;
  CHECK(std::string(calibrate(failing, options).status.where()) == "max_context");
  options = {};
  options.repeats = 0;
  CHECK(std::string(calibrate(failing, options).status.where()) == "repeats");
  options.repeats = 32;
  CHECK(std::string(calibrate(failing, options).status.where()) == "repeats");
}

TEST_CASE("a tier's time is latency and bytes over bandwidth") {
  CHECK(Tier("disk", 8e9).load_seconds(256.0 * 4096.0) == doctest::Approx(131.072e-6).epsilon(1e-12));
  CHECK(Tier("disk", 1e9, 1e-3).load_seconds(1e6) == doctest::Approx(2e-3).epsilon(1e-12));
  CHECK(Tier("disk", 1e9, 1e-3).load_seconds(0.0) == 0.0);
  CHECK(Tier("memory", kInf, 1e-6).load_seconds(1e18) == 1e-6);
  CHECK(Tier("memory", kInf).delivers());
  CHECK_FALSE(Tier("gone", 0.0).delivers());
  CHECK_FALSE(Tier("gone", -0.0).delivers());
  CHECK_FALSE(Tier("gone", 1e-310).delivers());
}

TEST_CASE("a tier's numbers out of range are refused by name") {
  for (const double bad : {kNan, -kNan, -1.0, -kInf}) {
    CHECK(std::string(Tier("x", bad).validate(3).where()) == "tiers[3].bandwidth_bytes_per_s");
  }
  for (const double bad : {kNan, kInf, -1e-9, -kInf}) {
    CHECK(std::string(Tier("x", 1.0, bad).validate(0).where()) == "tiers[0].latency_s");
  }
  CHECK(std::string(Tier(nullptr, 1.0).validate(1).where()) == "tiers[1].name");
  CHECK(Tier("x", 0.0).validate(0).ok());
  CHECK(Tier("x", kInf).validate(0).ok());
}
