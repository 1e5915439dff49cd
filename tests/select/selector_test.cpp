// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// DeviationSelector: when it chooses, and that exactly the rows it should come out.
#include <doctest/doctest.h>

#include <kvblend/select/budgets.hpp>
#include <kvblend/select/scores.hpp>
#include <kvblend/select/selector.hpp>
#include <kvblend/select/top_k.hpp>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "select_support.hpp"

using namespace kvblend;
using test::PromptBuilder;
using test::Scratch;
using test::SortingBackend;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// The smallest types that satisfy the concepts.
struct ScoreArchetype {
  static constexpr ScoreTiming timing = ScoreTiming::during_pass;
  static constexpr bool uses_keys = false;
  static constexpr bool uses_values = true;
  static constexpr const char* name = "archetype";
  ScoreArchetype() = delete;
  explicit ScoreArchetype(int) {}
  ScoreArchetype(const ScoreArchetype&) = default;
  ScoreArchetype& operator=(const ScoreArchetype&) = delete;
  Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = -inputs.value_deviation[i];
    return {};
  }
};
struct BudgetArchetype {
  BudgetArchetype() = delete;
  explicit BudgetArchetype(int) {}
  BudgetArchetype(const BudgetArchetype&) = default;
  BudgetArchetype& operator=(const BudgetArchetype&) = delete;
  [[nodiscard]] Status validate() const { return {}; }
  [[nodiscard]] std::int32_t rows(const BudgetInputs&) const { return 2; }
  [[nodiscard]] std::int32_t most_rows(std::int32_t) const { return 2; }
  [[nodiscard]] bool narrows_at(std::int32_t, std::int32_t) const { return false; }
};
struct BackendArchetype {
  BackendArchetype() = default;
  BackendArchetype(const BackendArchetype&) = delete;
  BackendArchetype& operator=(const BackendArchetype&) = delete;
  void top_k(std::span<const float> scores, std::int32_t k, std::span<std::uint64_t> scratch,
             std::span<ActiveIndex> out) const {
    SortingBackend{}.top_k(scores, k, scratch, out);
  }
};
static_assert(Score<ScoreArchetype> && Budget<BudgetArchetype> && !ValidatedScore<ScoreArchetype>);

// The library's own pick.
struct LibraryBackend {
  void top_k(std::span<const float> scores, std::int32_t k, std::span<std::uint64_t> scratch,
             std::span<ActiveIndex> out) const {
    select_top_k(scores, k, scratch, out);
  }
};

template <class Backend, class Selector>
std::vector<int> choose(const Selector& selector, const Prompt& prompt, const std::vector<float>& deviation,
                        int layer = 1) {
  const std::vector<Row> rows = test::reused_rows(prompt);
  Scratch scratch(rows.size());
  const auto chosen =
      selector.choose(Backend{}, ScoreInputs{prompt, rows, deviation, deviation, deviation, layer}, 30, scratch.view());
  REQUIRE_MESSAGE(chosen.ok(), chosen.status.where() << ": " << chosen.status.message());
  return test::values(chosen.value);
}

}  // namespace

TEST_CASE("archetypes make a selector") {
  PromptBuilder builder;
  builder.fresh(1).cached(4);
  const DeviationSelector<ScoreArchetype, BudgetArchetype> selector(ScoreArchetype(0), BudgetArchetype(0));
  CHECK(selector.validate(2).ok());
  CHECK(selector.first_layer() == 1);
  CHECK(choose<BackendArchetype>(selector, builder.make(), {4.0f, 1.0f, 3.0f, 2.0f}) == std::vector<int>{1, 3});
}

TEST_CASE("a selector chooses at layer 0, or at its check layer, and where the budget narrows") {
  const DeviationSelector<FirstK, RatioBudget> before(FirstK{}, RatioBudget(0.1), 5);
  CHECK(before.first_layer() == 0);
  CHECK(before.chooses_at(0));
  CHECK_FALSE(before.chooses_at(1));
  CHECK(before.validate(3).ok());  // its check layer is never used

  const DeviationSelector<AttentionMass, RatioBudget> probe;
  CHECK(probe.first_layer() == 0);

  const DeviationSelector<KeyDeviation, GradualBudget> during(KeyDeviation{}, GradualBudget(0.1, 1.6, 2));
  CHECK(during.first_layer() == 1);
  CHECK_FALSE(during.chooses_at(0));
  CHECK(during.chooses_at(1));
  CHECK(during.chooses_at(2));
  CHECK(during.chooses_at(3));
  CHECK_FALSE(during.chooses_at(4));
  CHECK((during.uses_keys && !during.uses_values && during.timing == ScoreTiming::during_pass));
}

TEST_CASE("a selector's fields out of range are refused by name") {
  using Selector = DeviationSelector<KeyDeviation, RatioBudget>;
  CHECK(Selector{}.validate(2).ok());
  CHECK(std::string(Selector{}.validate(1).where()) == "check_layer");
  CHECK(std::string(Selector(KeyDeviation{}, RatioBudget(0.1), -1).validate(30).where()) == "check_layer");
  CHECK(std::string(Selector(KeyDeviation{}, RatioBudget(2.0)).validate(30).where()) == "ratio");
  CHECK(std::string(Selector{}.validate(0).where()) == "layers");
  PowerLawPrior prior;
  prior.offset = -1.0;
  const DeviationSelector<StoredScore<>, RatioBudget> stored{StoredScore<>(prior)};
  CHECK(std::string(stored.validate(30).where()) == "prior.offset");
}

TEST_CASE("the highest scores are kept, by row ascending, at every ratio") {
  PromptBuilder builder;
  builder.fresh(2).cached(3).fresh(1).cached(2).fresh(1);
  const Prompt prompt = builder.make();
  const std::vector<float> deviation = {1.0f, 9.0f, 3.0f, 9.0f, 2.0f};
  struct Case {
    double ratio;
    std::vector<int> kept;
  };
  const std::vector<Case> cases = {
      {0.0, {}}, {-0.0, {}}, {0.2, {1}}, {0.4, {1, 3}}, {0.6, {1, 2, 3}}, {0.8, {1, 2, 3, 4}}, {1.0, {0, 1, 2, 3, 4}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.ratio);
    const DeviationSelector<KeyDeviation, RatioBudget> selector(KeyDeviation{}, RatioBudget(c.ratio));
    CHECK(choose<SortingBackend>(selector, prompt, deviation) == c.kept);
    CHECK(choose<LibraryBackend>(selector, prompt, deviation) == c.kept);
    CHECK(selector.most_rows(5) == static_cast<int>(c.kept.size()));
  }
}

TEST_CASE("an empty prompt and one without reused rows choose nothing and score nothing") {
  const DeviationSelector<StoredScore<>, RatioBudget> selector(StoredScore<>{}, RatioBudget(1.0));
  CHECK(choose<SortingBackend>(selector, Prompt{}, {}).empty());
  PromptBuilder exact;
  exact.cached(4).fresh(2);  // at position 0 behind nothing: exact, so its missing scores do not matter
  CHECK(choose<SortingBackend>(selector, exact.make(), {}).empty());
}

TEST_CASE("a budget of no rows asks for no score") {
  PromptBuilder builder;
  builder.fresh(1).cached(3);  // no stored scores: scoring would fail
  const DeviationSelector<StoredScore<>, RatioBudget> selector(StoredScore<>{}, RatioBudget(0.0));
  CHECK(choose<SortingBackend>(selector, builder.make(), {}).empty());
}

// sglang PR30645, vLLM #52109.
TEST_CASE("ties and infinities give k distinct rows, the lowest first") {
  PromptBuilder builder;
  builder.fresh(1).cached(5000).fresh(1);
  const Prompt prompt = builder.make();
  std::vector<float> deviation(5000, 0.0f);
  const std::vector<int> ones = {17, 900, 901, 2500, 3333, 4998, 4999};
  for (const int i : ones) deviation[static_cast<std::size_t>(i)] = 1.0f;
  const DeviationSelector<KeyDeviation, CountBudget> selector(KeyDeviation{}, CountBudget(1500));

  const auto expect = [](std::vector<int> best) {  // then the lowest others
    std::vector<bool> kept(5000, false);
    for (const int i : best) kept[static_cast<std::size_t>(i)] = true;
    std::size_t count = best.size();
    for (std::size_t i = 0; i < 5000 && count < 1500; ++i) {
      if (kept[i]) continue;
      kept[i] = true;
      ++count;
    }
    std::vector<int> out;
    for (int i = 0; i < 5000; ++i) {
      if (kept[static_cast<std::size_t>(i)]) out.push_back(i);
    }
    return out;
  };
  CHECK(choose<LibraryBackend>(selector, prompt, deviation) == expect(ones));
  deviation[4000] = kInf;
  std::vector<int> with_inf = ones;
  with_inf.push_back(4000);
  CHECK(choose<LibraryBackend>(selector, prompt, deviation) == expect(with_inf));
  CHECK(choose<LibraryBackend>(DeviationSelector<KeyDeviation, CountBudget>(KeyDeviation{}, CountBudget(1)), prompt,
                               deviation) == std::vector<int>{4000});
  deviation[4500] = kNan;
  CHECK(choose<LibraryBackend>(DeviationSelector<KeyDeviation, CountBudget>(KeyDeviation{}, CountBudget(1)), prompt,
                               deviation) == std::vector<int>{4500});
}

TEST_CASE("one broken row does not drag others along") {
  PromptBuilder builder;
  builder.fresh(1).cached(6);
  const DeviationSelector<KeyValueDeviation, CountBudget> selector(KeyValueDeviation{}, CountBudget(3));
  CHECK(choose<LibraryBackend>(selector, builder.make(), {1.0f, 5.0f, kNan, 2.0f, kInf, 4.0f}) ==
        std::vector<int>{1, 2, 4});
}

TEST_CASE("a threshold keeps exactly the rows above it") {
  PromptBuilder builder;
  builder.fresh(1).cached(6);
  const DeviationSelector<ValueDeviation, ThresholdBudget> selector(ValueDeviation{}, ThresholdBudget(2.0f));
  CHECK(choose<LibraryBackend>(selector, builder.make(), {1.0f, 5.0f, kNan, 2.0f, kInf, 4.0f}) ==
        std::vector<int>{1, 2, 4, 5});
}

TEST_CASE("first-k shares its rows evenly among chunks, the odd one to the first") {
  PromptBuilder builder;
  builder.fresh(1).cached(4).cached(1).cached(4).fresh(1);
  const DeviationSelector<FirstK, CountBudget> selector(FirstK{}, CountBudget(6));
  CHECK(choose<LibraryBackend>(selector, builder.make(), {}, 0) == std::vector<int>{0, 1, 2, 4, 5, 6});
}

TEST_CASE("random prompts: both picks agree, and each layer's rows are among those before") {
  const unsigned seed = 4096;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    PromptBuilder builder;
    builder.fresh(1);
    std::size_t reused = 0;
    for (int s = 0; s < 4; ++s) {
      const int tokens = static_cast<int>(random() % 40);
      builder.cached(tokens).fresh(static_cast<int>(random() % 3));
      reused += static_cast<std::size_t>(tokens);
    }
    const Prompt prompt = builder.make();
    REQUIRE(static_cast<std::size_t>(prompt.reused_rows()) == reused);
    const double ratio = static_cast<double>(random() % 101) / 100.0;
    const DeviationSelector<KeyDeviation, GradualBudget> selector(KeyDeviation{}, GradualBudget(ratio, 1.6, 5));
    std::vector<Row> rows = test::reused_rows(prompt);
    for (int layer = 1; layer < 30 && !rows.empty(); ++layer) {
      if (!selector.chooses_at(layer)) continue;
      std::vector<float> deviation(rows.size());
      for (float& x : deviation) {  // few different values: ties, and now and then a broken one
        const auto pick = static_cast<unsigned>(random() % 12);
        x = pick == 0 ? kNan : pick == 1 ? kInf : static_cast<float>(pick % 5);
      }
      Scratch a(rows.size());
      Scratch b(rows.size());
      const ScoreInputs inputs{prompt, rows, deviation, {}, {}, layer};
      const auto library = selector.choose(LibraryBackend{}, inputs, 30, a.view());
      const auto sorted = selector.choose(SortingBackend{}, inputs, 30, b.view());
      REQUIRE(library.ok());
      REQUIRE(sorted.ok());
      REQUIRE(test::values(library.value) == test::values(sorted.value));
      std::vector<Row> kept;
      for (const ActiveIndex i : library.value) {
        kept.push_back(rows[static_cast<std::size_t>(i.value)]);
        REQUIRE((kept.size() < 2 || kept[kept.size() - 2] < kept.back()));
      }
      REQUIRE(kept.size() <= rows.size());
      rows = kept;
    }
  }
}

TEST_CASE("missing inputs and short scratch are errors that name the field") {
  PromptBuilder builder;
  builder.fresh(1).cached(4);
  const Prompt prompt = builder.make();
  const std::vector<Row> rows = test::reused_rows(prompt);
  const std::vector<float> four(4, 1.0f);
  const std::vector<float> three(3, 1.0f);
  const DeviationSelector<KeyValueDeviation, RatioBudget> selector(KeyValueDeviation{}, RatioBudget(0.5));
  const auto where = [&](std::span<const float> key, std::span<const float> value, std::size_t room) {
    Scratch scratch(room);
    const auto chosen =
        selector.choose(SortingBackend{}, ScoreInputs{prompt, rows, key, value, {}, 1}, 30, scratch.view());
    CHECK_FALSE(chosen.ok());
    return std::string(chosen.status.where());
  };
  CHECK(where({}, four, 4) == "key_deviation");
  CHECK(where(four, three, 4) == "value_deviation");
  CHECK(where(four, four, 3) == "scratch");

  const DeviationSelector<AttentionMass, RatioBudget> probe(AttentionMass{}, RatioBudget(0.5));
  Scratch scratch(4);
  const auto chosen = probe.choose(SortingBackend{}, ScoreInputs{prompt, rows, {}, {}, {}, 0}, 30, scratch.view());
  CHECK(std::string(chosen.status.where()) == "attention_mass");

  // A failing score passes through.
  const DeviationSelector<StoredScore<>, RatioBudget> stored(StoredScore<>{}, RatioBudget(0.5));
  const auto unscored = stored.choose(SortingBackend{}, ScoreInputs{prompt, rows, {}, {}, {}, 0}, 30, scratch.view());
  CHECK(std::string(unscored.status.where()) == "segment 1");
}
