// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scores made of others and rules about chunks, against picks written out by plain loops.
#include <doctest/doctest.h>

#include <kvblend/codec/floats.hpp>
#include <kvblend/memory/layouts.hpp>
#include <kvblend/select/budgets.hpp>
#include <kvblend/select/chunk_rules.hpp>
#include <kvblend/select/combine.hpp>
#include <kvblend/select/norm.hpp>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "select_support.hpp"

using namespace kvblend;
using test::PromptBuilder;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

static_assert(SumScore<FirstK, RandomScore>::timing == ScoreTiming::before_load);
static_assert(ProductScore<StoredScore<>, KeyDeviation>::timing == ScoreTiming::during_pass);
static_assert(UnionScore<AttentionMass, StoredScore<>>::timing == ScoreTiming::after_probe);
static_assert(SumScore<KeyDeviation, ValueDeviation>::uses_keys && SumScore<KeyDeviation, ValueDeviation>::uses_values);
static_assert(CoveringScore<StoredScore<>> && CoveringScore<ChunkFloor<StoredScore<>>>);
static_assert(Score<Fallback<StoredScore<>, FirstK>> && Score<SinksFirst<KeyValueDeviation>>);
static_assert(DeviationSelector<AttentionValueMass, RatioBudget>::weighs_values);
static_assert(!DeviationSelector<AttentionMass, RatioBudget>::weighs_values);
static_assert(!DeviationSelector<ValueDeviation, RatioBudget>::weighs_values);

// Scores of `rows` with scratch, as a selector lends it.
template <class S>
std::vector<float> score_rows(const S& score, const Prompt& prompt, const std::vector<Row>& rows,
                              const std::vector<float>& key = {}, const std::vector<float>& value = {}) {
  test::Scratch scratch(rows.size());
  std::vector<float> out(rows.size());
  ScoreInputs inputs{prompt, rows, key, value, key, 1};
  inputs.scratch = {scratch.keys, scratch.picked};
  const Status status = score(inputs, out);
  REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());
  return out;
}

// The same of deviations alone, which need no prompt.
template <class S>
std::vector<float> score_of(const S& score, const std::vector<float>& key, const std::vector<float>& value) {
  const Prompt prompt;
  std::vector<Row> rows;
  for (std::size_t i = 0; i < key.size(); ++i) rows.push_back(Row(static_cast<std::int32_t>(i)));
  return score_rows(score, prompt, rows, key, value);
}

std::vector<int> pick(const std::vector<float>& scores, int k) {
  test::Scratch scratch(scores.size());
  const std::span<ActiveIndex> out = std::span(scratch.picked).first(static_cast<std::size_t>(k));
  test::SortingBackend{}.top_k(scores, k, scratch.keys, out);
  return test::values(out);
}

std::vector<int> best_first(const std::vector<float>& scores) {
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  return order;
}

std::vector<float> random_scores(std::mt19937& random, std::size_t count) {
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  std::vector<float> out(count);
  for (float& x : out) x = random() % 4 == 0 ? 0.5f : uniform(random);  // ties among them
  return out;
}

}  // namespace

TEST_CASE("a sum and a product are of scores divided by their means") {
  const std::vector<float> key = {1.0f, 2.0f, 3.0f, 6.0f};             // mean 3
  const std::vector<float> value = {300.0f, 100.0f, 100.0f, 1500.0f};  // mean 500
  const auto sum = score_of(SumScore<KeyDeviation, ValueDeviation>{}, key, value);
  const auto product = score_of(ProductScore<KeyDeviation, ValueDeviation>{}, key, value);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(static_cast<double>(sum[i]) == doctest::Approx(key[i] / 3.0 + value[i] / 500.0).epsilon(1e-6));
    CHECK(static_cast<double>(product[i]) == doctest::Approx(key[i] / 3.0 * (value[i] / 500.0)).epsilon(1e-6));
  }
  // The sum of both deviations is what KeyValueDeviation computes by itself.
  const auto both = score_of(KeyValueDeviation{}, key, value);
  for (std::size_t i = 0; i < 4; ++i) CHECK(static_cast<double>(sum[i]) == doctest::Approx(both[i]).epsilon(1e-6));
}

TEST_CASE("broken rows stay broken in a combination and leave the others alone") {
  const std::vector<float> key = {1.0f, kNan, 3.0f, 2.0f};
  const std::vector<float> value = {4.0f, 2.0f, kInf, 0.0f};
  const auto sum = score_of(SumScore<KeyDeviation, ValueDeviation>{}, key, value);
  CHECK(is_nan(sum[1]));
  CHECK(sum[2] == kInf);
  CHECK(static_cast<double>(sum[0]) == doctest::Approx(1.0 / 2.0 + 4.0 / 2.0).epsilon(1e-6));
  CHECK(static_cast<double>(sum[3]) == doctest::Approx(2.0 / 2.0).epsilon(1e-6));
  CHECK(pick(score_of(UnionScore<KeyDeviation, ValueDeviation>{}, key, value), 2) == std::vector<int>{1, 2});
}

TEST_CASE("combinations nest in either part") {
  const std::vector<float> key = {1.0f, 2.0f, 6.0f};         // mean 3
  const std::vector<float> value = {4.0f, 1.0f, 1.0f};       // mean 2
  using Inner = ProductScore<KeyDeviation, ValueDeviation>;  // of 2/3, 1/3, 1: mean 2/3
  const std::vector<double> inner = {2.0 / 3.0, 1.0 / 3.0, 1.0};
  const auto left = score_of(SumScore<Inner, KeyDeviation>{}, key, value);
  const auto right = score_of(SumScore<KeyDeviation, Inner>{}, key, value);
  const auto deep = score_of(SumScore<ValueDeviation, SumScore<KeyDeviation, ValueDeviation>>{}, key, value);
  for (std::size_t i = 0; i < 3; ++i) {
    const double expected = inner[i] * 1.5 + key[i] / 3.0;
    CHECK(static_cast<double>(left[i]) == doctest::Approx(expected).epsilon(1e-6));
    CHECK(static_cast<double>(right[i]) == doctest::Approx(expected).epsilon(1e-6));
    const double sum = key[i] / 3.0 + value[i] / 2.0;  // mean 2
    CHECK(static_cast<double>(deep[i]) == doctest::Approx(value[i] / 2.0 + sum / 2.0).epsilon(1e-6));
  }
}

TEST_CASE("a union takes turns between the two scores' best") {
  const unsigned seed = 71;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 100; ++round) {
    const std::size_t n = 1 + random() % 60;
    const std::vector<float> a = random_scores(random, n);
    const std::vector<float> b = random_scores(random, n);
    const std::vector<float> scores = score_of(UnionScore<KeyDeviation, ValueDeviation>{}, a, b);
    const std::vector<int> by_a = best_first(a);
    const std::vector<int> by_b = best_first(b);
    // Both lists walked at one pace: those of a step stand alike and come by row.
    std::vector<int> order;
    for (std::size_t step = 0; step < n; ++step) {
      std::vector<int> pair = {by_a[step], by_b[step]};
      std::sort(pair.begin(), pair.end());
      for (const int row : pair) {
        if (std::find(order.begin(), order.end(), row) == order.end()) order.push_back(row);
      }
    }
    for (std::size_t k = 0; k <= n; ++k) {
      std::vector<int> expected(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k));
      std::sort(expected.begin(), expected.end());
      REQUIRE(pick(scores, static_cast<int>(k)) == expected);
    }
  }
}

namespace {

// A score that writes wherever it can, and 2 for each row if it was lent scratch, else 1.
struct Silent : KeyDeviation {
  Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    for (std::uint64_t& key : inputs.scratch.keys) key = ~std::uint64_t{0};
    for (float& x : out) x = inputs.scratch.keys.empty() ? 1.0f : 2.0f;
    return {};
  }
};
struct Announced : Silent {
  static constexpr std::int32_t held = kAllScratch;
};

}  // namespace

TEST_CASE("scratch goes to scores that say they use it") {
  const std::vector<float> key = {1.0f, 2.0f, 6.0f};  // mean 3
  // What the sum keeps of its first part is out of a silent score's reach, which writes 1 for every row.
  const auto sum = score_of(SumScore<KeyDeviation, Silent>{}, key, key);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(static_cast<double>(sum[i]) == doctest::Approx(key[i] / 3.0 + 1.0).epsilon(1e-6));
  }
  CHECK(pick(score_of(UnionScore<KeyDeviation, Silent>{}, key, key), 1) == std::vector<int>{0});
  PromptBuilder builder;
  builder.fresh(1).cached(3);
  const Prompt prompt = builder.make();
  const std::vector<Row> rows = test::reused_rows(prompt);
  CHECK(score_rows(SinksFirst<Announced>(Announced{}, 0), prompt, rows) == std::vector<float>(3, 2.0f));
  CHECK(score_rows(SinksFirst<Silent>(Silent{}, 0), prompt, rows) == std::vector<float>(3, 1.0f));
}

TEST_CASE("without scratch a combination is refused") {
  const Prompt prompt;
  const std::vector<Row> rows = {Row(0), Row(1)};
  const std::vector<float> x = {1.0f, 2.0f};
  std::vector<float> out(2);
  const ScoreInputs inputs{prompt, rows, x, x, {}, 1};
  const Status status = SumScore<KeyDeviation, ValueDeviation>{}(inputs, out);
  CHECK(status.code() == StatusCode::insufficient_space);
  CHECK(std::string(status.where()) == "score scratch");
}

TEST_CASE("a floor gives every chunk its share at every budget and the rest to the best") {
  const unsigned seed = 72;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 80; ++round) {
    PromptBuilder builder;
    builder.fresh(1);
    std::vector<float> stored;
    std::vector<std::size_t> chunk_of;
    std::vector<std::size_t> sizes;
    const std::size_t chunks = 1 + random() % 5;
    for (std::size_t c = 0; c < chunks; ++c) {
      sizes.push_back(random() % 50);
      std::vector<float> scores = random_scores(random, sizes.back());
      for (float& x : scores) x += static_cast<float>(c);  // each chunk above all before it
      for (const float x : scores) {
        stored.push_back(x);
        chunk_of.push_back(c);
      }
      builder.cached(static_cast<int>(scores.size()), scores);
    }
    builder.fresh(2);
    const Prompt prompt = builder.make();
    const std::size_t n = stored.size();
    const std::size_t permille = round % 5 == 0 ? 0 : round % 5 == 1 ? 1000 : random() % 1000;
    const double share = static_cast<double>(permille) / 1000.0;
    const auto scores =
        score_rows(ChunkFloor<StoredScore<NoPrior>>(StoredScore<NoPrior>{}, share), prompt, test::reused_rows(prompt));
    CAPTURE(share);
    for (std::size_t k = 0; k <= n; ++k) {
      const std::vector<int> kept = pick(scores, static_cast<int>(k));
      std::vector<std::size_t> count(chunks, 0);
      for (const int i : kept) ++count[chunk_of[static_cast<std::size_t>(i)]];
      for (std::size_t c = 0; c < chunks; ++c) {
        CAPTURE(k);
        CAPTURE(c);
        if (n > 0) REQUIRE(count[c] >= permille * k * sizes[c] / (1000 * n));
        // Of a chunk its own best.
        for (std::size_t i = 0; i < n; ++i) {
          const bool in = std::find(kept.begin(), kept.end(), static_cast<int>(i)) != kept.end();
          if (chunk_of[i] != c || in) continue;
          for (const int j : kept) {
            const auto other = static_cast<std::size_t>(j);
            if (chunk_of[other] == c) REQUIRE(stored[other] >= stored[i]);
          }
        }
      }
      if (share == 0.0) {
        std::vector<int> best = best_first(stored);
        best.resize(k);
        std::sort(best.begin(), best.end());
        REQUIRE(kept == best);
      }
    }
  }
}

TEST_CASE("a floor of 1 splits evenly by length") {
  PromptBuilder builder;
  builder.fresh(1).cached(4, {1.0f, 4.0f, 3.0f, 2.0f}).cached(8, {8.0f, 9.0f, 7.0f, 6.0f, 9.5f, 5.0f, 5.0f, 5.0f});
  const Prompt prompt = builder.make();
  using Stored = StoredScore<NoPrior>;
  const auto scores = score_rows(ChunkFloor<Stored>(Stored{}, 1.0), prompt, test::reused_rows(prompt));
  CHECK(pick(scores, 3) == std::vector<int>{1, 5, 8});
  CHECK(pick(scores, 6) == std::vector<int>{1, 2, 4, 5, 6, 8});
}

TEST_CASE("a floor out of range is refused by name") {
  for (const double bad : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(std::string(ChunkFloor<FirstK>(FirstK{}, bad).validate().where()) == "share");
  }
  CHECK(ChunkFloor<FirstK>(FirstK{}, 1.0).validate().ok());
  CHECK(std::string(SinksFirst<FirstK>(FirstK{}, -1).validate().where()) == "tokens");
  PowerLawPrior prior;
  prior.offset = 0.0;
  using Stored = StoredScore<>;
  CHECK(std::string(ChunkFloor<Stored>(Stored(prior)).validate().where()) == "prior.offset");
  CHECK(std::string(SumScore<FirstK, Stored>(FirstK{}, Stored(prior)).validate().where()) == "prior.offset");
  CHECK(std::string(Fallback<Stored, FirstK>(Stored(prior)).validate().where()) == "prior.offset");
}

TEST_CASE("the heads of chunks that were encoded alone come first") {
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6};
  const std::vector<TokenId> context = {9};
  ChunkInfo alone;
  alone.tokens = tokens;
  ChunkInfo behind = alone;
  behind.context = context;
  behind.first_position = Position(1);
  const std::vector<TokenId> question = {7};
  std::vector<Segment> segments = {fresh_segment(question), cached_segment(alone), cached_segment(behind),
                                   cached_segment(alone, 1, 3), fresh_segment(question)};
  const Result<Prompt> prompt = Prompt::make(segments, Position(100));
  REQUIRE(prompt.ok());
  const std::vector<Row> rows = test::reused_rows(prompt.value);
  const auto scores = score_rows(SinksFirst<RandomScore>(RandomScore(1), 2), prompt.value, rows);
  const auto plain = score_rows(RandomScore(1), prompt.value, rows);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(i);
    // Tokens 0 and 1 of the first chunk, none of the one with a context, token 1 of the part from there on.
    CHECK(scores[i] == (i == 0 || i == 1 || i == 12 ? kInf : plain[i]));
  }
}

TEST_CASE("a fallback scores all rows by the one or all by the other and says by which") {
  using Selector = DeviationSelector<Fallback<StoredScore<NoPrior>, FirstK>, CountBudget>;
  const Selector selector(Fallback<StoredScore<NoPrior>, FirstK>{}, CountBudget(2));
  PromptBuilder with;
  with.fresh(1).cached(3, {1.0f, 5.0f, 4.0f}).fresh(1);
  const Prompt stored = with.make();
  PromptBuilder without;
  without.fresh(1).cached(2, {1.0f, 5.0f}).cached(2).fresh(1);
  const Prompt missing = without.make();
  const auto choose = [&](const Prompt& prompt) {
    const std::vector<Row> rows = test::reused_rows(prompt);
    test::Scratch scratch(rows.size());
    const auto chosen =
        selector.choose(test::SortingBackend{}, ScoreInputs{prompt, rows, {}, {}, {}, 0}, 4, scratch.view());
    REQUIRE(chosen.ok());
    return test::values(chosen.value);
  };
  CHECK(choose(stored) == std::vector<int>{1, 2});
  CHECK(std::string(selector.name_for(stored)) == "stored_score");
  CHECK(choose(missing) == std::vector<int>{0, 2});
  CHECK(std::string(selector.name_for(missing)) == "first_k");
  CHECK(std::string(Selector::name) == "fallback(stored_score,first_k)");
  CHECK(std::string(UnionScore<SinksFirst<KeyDeviation>, StoredScore<>>::name) ==
        "union(sinks_first(key_deviation),stored_score)");
}

TEST_CASE("norms and placement errors of rows") {
  const std::vector<float> placed = {3.0f, 4.0f, 0.0f, 0.0f, 1.0f, 2.0f, 2.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  std::vector<float> exact = placed;
  exact[0] = 6.0f;  // row 0: off by 3 of √52
  const auto plane = [](const std::vector<float>& values, std::int32_t heads = 2) {
    return dense_plane<F32Codec>(reinterpret_cast<const std::byte*>(values.data()), 3, heads, 4 / heads);
  };
  CHECK(row_norm(plane(placed), 0) == 5.0f);
  CHECK(row_norm(plane(placed), 1) == 3.0f);
  const std::vector<Row> all = {Row(0), Row(1), Row(2)};
  const Result<float> error = placement_error(plane(placed), plane(exact), all);
  REQUIRE(error.ok());
  CHECK(static_cast<double>(error.value) == doctest::Approx(3.0 / std::sqrt(52.0)).epsilon(1e-6));
  CHECK(placement_error(plane(placed), plane(exact), std::span(all).subspan(1)).value == 0.0f);
  exact[9] = 0.5f;
  CHECK(static_cast<double>(placement_error(plane(placed), plane(exact), std::span(all).last(1)).value) ==
        doctest::Approx(1.0));
  CHECK(placement_error(plane(exact), plane(placed), std::span(all).last(1)).value == 0.5f);  // there is no length
  exact[4] = kNan;
  CHECK(is_nan(placement_error(plane(placed), plane(exact), all).value));
  const std::vector<Row> outside = {Row(3)};
  CHECK_FALSE(placement_error(plane(placed), plane(exact), outside).ok());
  CHECK(std::string(placement_error(plane(placed, 1), plane(exact), all).status.where()) == "placed");
}
