// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Budgets: how many rows they keep, at the edges and over the layers.
#include <doctest/doctest.h>

#include <kvblend/select/budgets.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace kvblend;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

static_assert(Budget<RatioBudget> && Budget<CountBudget> && Budget<ThresholdBudget> && Budget<GradualBudget>);

// Rows kept of `reused` candidates at one layer.
template <class B>
std::int32_t rows_of(const B& budget, int reused, int layer = 1, int first = 1, int layers = 30) {
  const std::vector<float> scores(static_cast<std::size_t>(reused), 1.0f);
  BudgetInputs inputs;
  inputs.reused_rows = reused;
  inputs.layer = layer;
  inputs.first_layer = first;
  inputs.layers = layers;
  inputs.scores = scores;
  return budget.rows(inputs);
}

// Rows at each layer from `first` on, each choice among the rows kept before.
std::vector<std::int32_t> schedule(const GradualBudget& budget, int reused, int first, int layers) {
  std::vector<std::int32_t> out;
  std::int32_t kept = reused;
  for (int layer = first; layer < layers; ++layer) {
    if (layer == first || budget.narrows_at(layer, first)) {
      const std::vector<float> scores(static_cast<std::size_t>(kept), 1.0f);
      BudgetInputs inputs;
      inputs.reused_rows = reused;
      inputs.layer = layer;
      inputs.first_layer = first;
      inputs.layers = layers;
      inputs.scores = scores;
      kept = budget.rows(inputs);
    }
    out.push_back(kept);
  }
  return out;
}

}  // namespace

TEST_CASE("a ratio is rounded half up, and is none at 0 and all at 1") {
  struct Case {
    double ratio;
    int reused;
    int rows;
  };
  const std::vector<Case> cases = {
      {0.0, 1000, 0}, {-0.0, 1000, 0},   {1.0, 1000, 1000},  {0.15, 1000, 150},    {0.15, 1, 0}, {0.5, 1, 1},
      {0.5, 3, 2},    {0.15, 10, 2},     {0.14, 10, 1},      {0.25, 2, 1},         {0.24, 2, 0}, {0.15, 0, 0},
      {1.0, 0, 0},    {1e-300, 1000, 0}, {0.999, 1000, 999}, {0.9996, 1000, 1000},
  };
  for (const Case& c : cases) {
    CAPTURE(c.ratio);
    CAPTURE(c.reused);
    CHECK(RatioBudget(c.ratio).validate().ok());
    CHECK(rows_of(RatioBudget(c.ratio), c.reused) == c.rows);
    CHECK(RatioBudget(c.ratio).most_rows(c.reused) == c.rows);
  }
  CHECK(rows_of_ratio(1.0, std::numeric_limits<std::int32_t>::max()) == std::numeric_limits<std::int32_t>::max());
}

TEST_CASE("a share of rows given back as a ratio keeps as many rows") {
  for (int reused = 1; reused < 400; ++reused) {
    for (int k = 0; k <= reused; ++k) {
      REQUIRE(rows_of_ratio(static_cast<double>(k) / reused, reused) == k);
    }
  }
}

TEST_CASE("a ratio outside [0, 1] is refused by name") {
  for (const double bad : {kNan, -kNan, kInf, -kInf, -0.001, 1.0000001, 2.0, -1e-300}) {
    CAPTURE(bad);
    CHECK(RatioBudget(bad).validate().code() == StatusCode::invalid_argument);
    CHECK(std::string(RatioBudget(bad).validate().where()) == "ratio");
    CHECK(std::string(GradualBudget(bad).validate().where()) == "ratio");
  }
}

TEST_CASE("a count keeps that many, or all there are") {
  CHECK(rows_of(CountBudget(5), 10) == 5);
  CHECK(rows_of(CountBudget(50), 10) == 10);
  CHECK(rows_of(CountBudget(0), 10) == 0);
  CHECK(CountBudget(50).most_rows(10) == 10);
  CHECK(CountBudget(3).validate().ok());
  CHECK(std::string(CountBudget(-1).validate().where()) == "count");
}

TEST_CASE("a threshold keeps what is above it and what is not a number") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> scores = {1.0f, 2.0f, nan, 1.5f, inf, -inf, 1.50001f, -nan};
  BudgetInputs inputs;
  inputs.reused_rows = 8;
  inputs.scores = scores;
  CHECK(ThresholdBudget(1.5f).rows(inputs) == 5);
  CHECK(ThresholdBudget(-1e38f).rows(inputs) == 7);
  CHECK(ThresholdBudget(3.0f).rows(inputs) == 3);
  CHECK(ThresholdBudget(1.5f).most_rows(8) == 8);
  CHECK(ThresholdBudget(0.0f).validate().ok());
  for (const float bad : {nan, inf, -inf}) CHECK(std::string(ThresholdBudget(bad).validate().where()) == "threshold");
}

TEST_CASE("only the gradual schedule chooses again, at the layers over which it falls") {
  CHECK_FALSE(RatioBudget().narrows_at(2, 1));
  CHECK_FALSE(CountBudget().narrows_at(2, 1));
  CHECK_FALSE(ThresholdBudget().narrows_at(2, 1));
  const GradualBudget budget(0.15, 1.6, 8);
  CHECK_FALSE(budget.narrows_at(0, 1));
  CHECK_FALSE(budget.narrows_at(1, 1));
  CHECK(budget.narrows_at(2, 1));
  CHECK(budget.narrows_at(9, 1));
  CHECK_FALSE(budget.narrows_at(10, 1));
}

TEST_CASE("the default schedule starts at 1.6 of the ratio and falls over 8 layers") {
  // 29 layers from layer 1 of a model of 30: f = (29 - 4.5·1.6)/24.5 of the ratio.
  const GradualBudget budget(0.15);
  CHECK(budget.share(0, 29) == doctest::Approx(0.24).epsilon(1e-12));
  const double last = 0.15 * (29.0 - 4.5 * 1.6) / 24.5;
  CHECK(budget.share(4, 29) == doctest::Approx(0.5 * (0.24 + last)).epsilon(1e-12));
  CHECK(budget.share(8, 29) == doctest::Approx(last).epsilon(1e-12));
  CHECK(budget.share(28, 29) == doctest::Approx(last).epsilon(1e-12));
}

TEST_CASE("the schedule's mean over the layers is the ratio, and it only narrows") {
  const unsigned seed = 77;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int round = 0; round < 4000; ++round) {
    double ratio = uniform(random);
    if (round % 10 == 0) ratio = 0.0;
    if (round % 10 == 1) ratio = 1.0;
    const double wide = round % 7 == 0 ? 2.0 : 1.0 + uniform(random);
    const int span = 1 + static_cast<int>(random() % 40);
    const int first = static_cast<int>(random() % 3);
    const int layers = first + 1 + static_cast<int>(random() % 60);
    const int reused = static_cast<int>(random() % 3000);
    const GradualBudget budget(ratio, wide, span);
    CAPTURE(ratio);
    CAPTURE(wide);
    CAPTURE(span);
    CAPTURE(layers - first);
    CAPTURE(reused);
    REQUIRE(budget.validate().ok());

    double mean = 0.0;
    for (int step = 0; step < layers - first; ++step) {
      const double share = budget.share(step, layers - first);
      REQUIRE(!is_nan(share));
      REQUIRE((share >= 0.0 && share <= 1.0));
      mean += share / (layers - first);
    }
    REQUIRE(mean == doctest::Approx(ratio).epsilon(1e-9));

    const std::vector<std::int32_t> rows = schedule(budget, reused, first, layers);
    double mean_rows = 0.0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      REQUIRE((rows[i] >= 0 && rows[i] <= reused));
      if (i > 0) REQUIRE(rows[i] <= rows[i - 1]);
      mean_rows += static_cast<double>(rows[i]) / static_cast<double>(rows.size());
    }
    REQUIRE(std::abs(mean_rows - ratio * reused) <= 0.5 + 1e-6);
    REQUIRE(rows.front() <= budget.most_rows(reused));
    if (ratio == 0.0) REQUIRE(rows.front() == 0);
    if (ratio == 1.0) REQUIRE(rows.back() == reused);
  }
}

TEST_CASE("schedules out of range are refused by name") {
  for (const double bad : {kNan, kInf, 0.99, 2.01, -1.0}) {
    CHECK(std::string(GradualBudget(0.15, bad).validate().where()) == "wide");
  }
  for (const int bad : {0, -1}) CHECK(std::string(GradualBudget(0.15, 1.6, bad).validate().where()) == "span");
  // Wider than everything: the first share is cut at 1, and the mean still holds.
  CHECK(GradualBudget(0.9, 2.0, 4).share(0, 20) == 1.0);
}
