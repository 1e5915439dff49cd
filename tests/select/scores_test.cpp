// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Score policies and position priors against formulas written out by hand.
#include <doctest/doctest.h>

#include <kvblend/select/prior.hpp>
#include <kvblend/select/scores.hpp>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "select_support.hpp"

using namespace kvblend;
using test::PromptBuilder;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// The scores of all reused rows, by a policy that looks at the prompt alone.
template <class S>
std::vector<float> scores_of(const S& score, const Prompt& prompt) {
  const std::vector<Row> rows = test::reused_rows(prompt);
  std::vector<float> out(rows.size());
  const Status status = score(ScoreInputs{prompt, rows, {}, {}, {}, 0}, out);
  REQUIRE_MESSAGE(status.ok(), status.message());
  return out;
}

std::vector<float> deviation_scores(const std::vector<float>& key, const std::vector<float>& value) {
  const Prompt prompt;
  std::vector<Row> rows;
  for (std::size_t i = 0; i < key.size(); ++i) rows.push_back(Row(static_cast<std::int32_t>(i)));
  std::vector<float> out(key.size());
  REQUIRE(KeyValueDeviation{}(ScoreInputs{prompt, rows, key, value, {}, 1}, out).ok());
  return out;
}

static_assert(Score<StoredScore<>> && Score<StoredScore<NoPrior>> && Score<StoredScore<BinnedPrior>>);
static_assert(Score<FirstK> && Score<RandomScore> && Score<KeyDeviation> && Score<ValueDeviation>);
static_assert(Score<KeyValueDeviation> && Score<AttentionMass>);
static_assert(PositionPrior<PowerLawPrior> && PositionPrior<NoPrior> && PositionPrior<BinnedPrior>);
static_assert(StoredScore<>::timing == ScoreTiming::before_load && FirstK::timing == ScoreTiming::before_load);
static_assert(KeyDeviation::timing == ScoreTiming::during_pass && KeyDeviation::uses_keys &&
              !KeyDeviation::uses_values);
static_assert(!ValueDeviation::uses_keys && ValueDeviation::uses_values);
static_assert(AttentionMass::timing == ScoreTiming::after_probe);

}  // namespace

TEST_CASE("a stored score is multiplied by the prior of its distance to the last position") {
  PromptBuilder builder;
  builder.fresh(3).cached(2, {5.0f, 7.0f}).cached(0).cached_part(4, 1, 2, {1.0f, 2.0f, 3.0f, 4.0f}).fresh(5);
  const Prompt prompt = builder.make();  // 12 rows, question at position 11
  const std::vector<float> stored = {5.0f, 7.0f, 2.0f, 3.0f};
  const std::vector<int> distance = {8, 7, 6, 5};

  const std::vector<float> with_prior = scores_of(StoredScore<>{}, prompt);
  const std::vector<float> without = scores_of(StoredScore<NoPrior>{}, prompt);
  REQUIRE(with_prior.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    CHECK(without[i] == stored[i]);
    const double expected = static_cast<double>(stored[i]) * std::pow(distance[i] + 32.0, -0.7);
    CHECK(static_cast<double>(with_prior[i]) == doctest::Approx(expected).epsilon(1e-6));
  }
}

TEST_CASE("the distance is one of positions, not of rows") {
  PromptBuilder builder;
  builder.cached(1, {1.0f}, Position(10)).fresh(1, Position(1000));
  const std::vector<float> scores = scores_of(StoredScore<PowerLawPrior>{}, builder.make());
  CHECK(static_cast<double>(scores[0]) == doctest::Approx(std::pow(990.0 + 32.0, -0.7)).epsilon(1e-6));
}

TEST_CASE("a chunk without stored scores is an error that names its segment") {
  PromptBuilder builder;
  builder.fresh(2).cached(2, {1.0f, 2.0f}).cached(3).fresh(1);
  const Prompt prompt = builder.make();
  const std::vector<Row> rows = test::reused_rows(prompt);
  std::vector<float> out(rows.size());
  const Status status = StoredScore<>{}(ScoreInputs{prompt, rows, {}, {}, {}, 0}, out);
  CHECK(status.code() == StatusCode::not_found);
  CHECK(std::string(status.where()) == "segment 2");
}

TEST_CASE("a row of no cached segment is refused") {
  PromptBuilder builder;
  builder.fresh(2).cached(2, {1.0f, 2.0f});
  const Prompt prompt = builder.make();
  const std::vector<Row> fresh = {Row(1)};
  const std::vector<Row> behind = {Row(4)};
  std::vector<float> out(1);
  CHECK(StoredScore<>{}(ScoreInputs{prompt, fresh, {}, {}, {}, 0}, out).code() == StatusCode::invalid_argument);
  CHECK(StoredScore<>{}(ScoreInputs{prompt, behind, {}, {}, {}, 0}, out).code() == StatusCode::invalid_argument);
  CHECK(FirstK{}(ScoreInputs{prompt, behind, {}, {}, {}, 0}, out).code() == StatusCode::invalid_argument);
}

TEST_CASE("an empty prompt and an empty list of rows score nothing") {
  const Prompt prompt;
  CHECK(scores_of(StoredScore<>{}, prompt).empty());
  CHECK(scores_of(FirstK{}, prompt).empty());
  CHECK(scores_of(RandomScore{}, prompt).empty());
}

TEST_CASE("first-k counts from the start of each segment and passes over empty ones") {
  PromptBuilder builder;
  builder.fresh(1).cached(3).cached(0).cached_part(6, 2, 2).fresh(1);
  const std::vector<float> scores = scores_of(FirstK{}, builder.make());
  CHECK(scores == std::vector<float>{0.0f, -1.0f, -2.0f, 0.0f, -1.0f});
}

TEST_CASE("random scores are uniform, and a function of seed and row alone") {
  PromptBuilder builder;
  builder.fresh(1).cached(4000);
  const Prompt prompt = builder.make();
  const std::vector<float> a = scores_of(RandomScore(1), prompt);
  CHECK(a == scores_of(RandomScore(1), prompt));
  CHECK(a != scores_of(RandomScore(2), prompt));
  double sum = 0.0;
  std::vector<int> histogram(10);
  for (const float x : a) {
    REQUIRE((x >= 0.0f && x < 1.0f));
    sum += static_cast<double>(x);
    ++histogram[static_cast<std::size_t>(x * 10.0f)];
  }
  CHECK(sum / 4000.0 == doctest::Approx(0.5).epsilon(0.05));
  for (const int count : histogram) CHECK((count > 300 && count < 500));

  // The same rows among others score the same, so that sets chosen at two layers nest.
  const std::vector<Row> some = {Row(7), Row(900)};
  std::vector<float> out(2);
  REQUIRE(RandomScore(1)(ScoreInputs{prompt, some, {}, {}, {}, 5}, out).ok());
  CHECK(out == std::vector<float>{a[6], a[899]});
}

TEST_CASE("deviations and attention mass are scores as they are") {
  const Prompt prompt;
  const std::vector<Row> rows = {Row(0), Row(1), Row(2)};
  const std::vector<float> key = {1.0f, kNan, 3.0f};
  const std::vector<float> value = {4.0f, 5.0f, kInf};
  const std::vector<float> mass = {0.5f, 0.0f, 0.25f};
  const ScoreInputs inputs{prompt, rows, key, value, mass, 1};
  std::vector<float> out(3);
  REQUIRE(KeyDeviation{}(inputs, out).ok());
  CHECK(out[0] == 1.0f);
  CHECK(is_nan(out[1]));
  REQUIRE(ValueDeviation{}(inputs, out).ok());
  CHECK(out[1] == 5.0f);
  CHECK(!is_finite(out[2]));
  REQUIRE(AttentionMass{}(inputs, out).ok());
  CHECK(out == mass);
}

TEST_CASE("key and value deviation are each divided by their mean") {
  const unsigned seed = 20240527;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  std::vector<float> key(500);
  std::vector<float> value(500);
  for (float& x : key) x = 100.0f * uniform(random);
  for (float& x : value) x = 1e-3f * uniform(random);
  long double key_mean = 0.0L;
  long double value_mean = 0.0L;
  for (const float x : key) key_mean += static_cast<long double>(x) / 500.0L;
  for (const float x : value) value_mean += static_cast<long double>(x) / 500.0L;
  const std::vector<float> scores = deviation_scores(key, value);
  for (std::size_t i = 0; i < 500; ++i) {
    const long double expected =
        static_cast<long double>(key[i]) / key_mean + static_cast<long double>(value[i]) / value_mean;
    REQUIRE(static_cast<double>(scores[i]) == doctest::Approx(static_cast<double>(expected)).epsilon(1e-6));
  }
}

TEST_CASE("a side without deviation says nothing, NaN and infinity stay in their own row") {
  CHECK(deviation_scores({0.0f, 0.0f}, {1.0f, 3.0f}) == std::vector<float>{0.5f, 1.5f});
  CHECK(deviation_scores({2.0f, 6.0f}, {0.0f, 0.0f}) == std::vector<float>{0.5f, 1.5f});
  CHECK(deviation_scores({0.0f, 0.0f}, {0.0f, 0.0f}) == std::vector<float>{0.0f, 0.0f});
  CHECK(deviation_scores({}, {}).empty());
  CHECK(deviation_scores({2e-38f, 2e-38f}, {2e-38f, 2e-38f}) == std::vector<float>{2.0f, 2.0f});

  const std::vector<float> scores = deviation_scores({kNan, 1.0f, 3.0f, 2.0f}, {1.0f, 1.0f, 1.0f, kInf});
  CHECK(is_nan(scores[0]));
  CHECK(scores[1] == 1.5f);
  CHECK(scores[2] == 2.5f);
  CHECK((!is_nan(scores[3]) && !is_finite(scores[3])));
}

TEST_CASE("a binned prior is log-linear between its bins and constant outside") {
  const std::vector<double> centres = {1.0, 10.0, 100.0};
  const std::vector<double> measured = {8.0, 4.0, 1.0};
  const Result<BinnedPrior> prior = BinnedPrior::make(centres, measured);
  REQUIRE(prior.ok());
  CHECK(prior.value(0) == 8.0);
  CHECK(prior.value(1) == 8.0);
  CHECK(prior.value(10) == doctest::Approx(4.0).epsilon(1e-12));
  CHECK(prior.value(100) == doctest::Approx(1.0).epsilon(1e-12));
  CHECK(prior.value(2147483647) == 1.0);
  // A quarter and a half of the way from 10 to 100, in log d.
  CHECK(prior.value(18) == doctest::Approx(4.0 * std::pow(0.25, std::log10(1.8))).epsilon(1e-12));
  CHECK(prior.value(50) == doctest::Approx(4.0 * std::pow(0.25, std::log10(5.0))).epsilon(1e-12));

  // Bins of a power law give the power law back.
  std::vector<double> d;
  std::vector<double> c;
  for (int i = 0; i < 15; ++i) {
    d.push_back(std::pow(2.0, i));
    c.push_back(std::pow(d.back(), -0.7));
  }
  const Result<BinnedPrior> law = BinnedPrior::make(d, c);
  REQUIRE(law.ok());
  for (const int x : {1, 3, 77, 5000, 16384}) CHECK(law.value(x) == doctest::Approx(std::pow(x, -0.7)).epsilon(1e-10));

  const Result<BinnedPrior> single = BinnedPrior::make(std::vector<double>{5.0}, std::vector<double>{2.0});
  REQUIRE(single.ok());
  CHECK(single.value(1) == 2.0);
  CHECK(single.value(9) == 2.0);
}

TEST_CASE("priors out of range are refused by name") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  PowerLawPrior law;
  CHECK(law.validate().ok());
  for (const double bad : {nan, inf, -inf, 0.0, -1.0}) {
    PowerLawPrior p;
    p.offset = bad;
    CHECK(std::string(p.validate().where()) == "prior.offset");
  }
  for (const double bad : {nan, inf, -inf, 5.0}) {
    PowerLawPrior p;
    p.exponent = bad;
    CHECK(std::string(p.validate().where()) == "prior.exponent");
    StoredScore<> score;
    score.prior = p;
    CHECK(std::string(score.validate().where()) == "prior.exponent");
  }

  struct Case {
    std::vector<double> distance;
    std::vector<double> value;
    const char* where;
  };
  const std::vector<Case> cases = {
      {{1.0, 2.0}, {1.0}, "prior"},
      {{}, {}, "prior.bins"},
      {std::vector<double>(33, 1.0), std::vector<double>(33, 1.0), "prior.bins"},
      {{0.0, 1.0}, {1.0, 1.0}, "prior.distance[0]"},
      {{2.0, 2.0}, {1.0, 1.0}, "prior.distance[1]"},
      {{1.0, nan}, {1.0, 1.0}, "prior.distance[1]"},
      {{1.0, inf}, {1.0, 1.0}, "prior.distance[1]"},
      {{1.0, 2.0}, {1.0, 0.0}, "prior.value[1]"},
      {{1.0, 2.0}, {nan, 1.0}, "prior.value[0]"},
      {{1.0, 2.0}, {1.0, inf}, "prior.value[1]"},
  };
  for (const Case& c : cases) {
    const Result<BinnedPrior> prior = BinnedPrior::make(c.distance, c.value);
    CHECK_FALSE(prior.ok());
    CHECK(std::string(prior.status.where()) == c.where);
  }
  CHECK(std::string(BinnedPrior{}.validate().where()) == "prior.bins");
}

TEST_CASE("a fitted prior is the mean of each bin and gives a power law back") {
  // Bins of a factor of 10: [1, 10) and [10, 100].
  const std::vector<std::int32_t> distances = {1, 2, 9, 10, 100};
  const std::vector<double> values = {6.0, 3.0, 3.0, 1.0, 0.0};
  const Result<BinnedPrior> two = BinnedPrior::fit(distances, values, 2);
  REQUIRE(two.ok());
  REQUIRE(two.value.bins == 2);
  CHECK(two.value.distance[0] == doctest::Approx(std::sqrt(10.0)));
  CHECK(two.value.distance[1] == doctest::Approx(std::sqrt(1000.0)));
  CHECK(two.value.value[0] == doctest::Approx(4.0));
  CHECK(two.value.value[1] == doctest::Approx(0.5));

  std::vector<std::int32_t> all;
  std::vector<double> law;
  for (std::int32_t d = 8; d < 2048; ++d) {
    all.push_back(d);
    law.push_back(std::pow(d, -0.7));
  }
  const Result<BinnedPrior> fitted = BinnedPrior::fit(all, law);
  REQUIRE(fitted.ok());
  CHECK(fitted.value.bins == 15);
  for (const int d : {20, 77, 500, 1500}) CHECK(fitted.value(d) == doctest::Approx(std::pow(d, -0.7)).epsilon(0.02));

  const std::vector<std::int32_t> one = {7, 7};
  CHECK(BinnedPrior::fit(one, std::vector<double>{1.0, 2.0}).value(3) == doctest::Approx(1.5));
  CHECK(std::string(BinnedPrior::fit(one, std::vector<double>{1.0}).status.where()) == "prior");
  CHECK(std::string(BinnedPrior::fit(one, std::vector<double>{1.0, -1.0}).status.where()) == "values[1]");
  CHECK(std::string(BinnedPrior::fit(one, std::vector<double>{0.0, 0.0}).status.where()) == "values");
  CHECK(std::string(BinnedPrior::fit(one, std::vector<double>{1.0, 2.0}, 33).status.where()) == "prior.bins");
  const std::vector<std::int32_t> bad = {3, 0};
  CHECK(std::string(BinnedPrior::fit(bad, std::vector<double>{1.0, 2.0}).status.where()) == "distances[1]");
}
