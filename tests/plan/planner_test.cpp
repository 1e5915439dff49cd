// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// RecomputePlanner: ratio against a sweep, tiers, modes, what it predicts, and numbers it must refuse.
#include <doctest/doctest.h>

#include <kvblend/plan/planner.hpp>

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

// Owns what a plan is written into.
struct Memory {
  std::vector<SegmentPlan> segments;
  std::vector<LayerPlan> layers;

  Memory(const Prompt& prompt, std::size_t layer_count) : segments(prompt.segments().size()), layers(layer_count) {}
  PlanMemory view() { return {segments, layers}; }
};

struct Setup {
  LinearCostModel cost{0.0, 1e-6, 0.0};  // 1 us a row and layer
  PlannerOptions options;
  std::vector<Tier> tiers = {Tier("disk", 1e9)};
  std::vector<TierMask> held_in;  // empty: cached segments lie in all tiers
  std::size_t layers = 30;

  [[nodiscard]] std::vector<TierMask> masks(const Prompt& prompt) const {
    if (!held_in.empty()) return held_in;
    return std::vector<TierMask>(prompt.segments().size(), (TierMask{1} << tiers.size()) - 1);
  }

  template <class Bytes>
  Result<Plan> plan(const Prompt& prompt, const Bytes& bytes, Memory& memory) const {
    const std::vector<TierMask> held = masks(prompt);
    return RecomputePlanner<LinearCostModel>(cost, options).plan(PlanInputs{prompt, tiers, held}, bytes, memory.view());
  }
};

// Bytes that differ from layer to layer.
struct ListedBytes {
  std::vector<std::int64_t> per_layer;
  std::int64_t operator()(std::int32_t layer) const { return per_layer[static_cast<std::size_t>(layer)]; }
};
static_assert(LayerBytes<ListedBytes> && LayerBytes<UniformBytes>);

// The smallest cost model there can be.
struct CostArchetype {
  double a_row;
  CostArchetype() = delete;
  explicit CostArchetype(double s) : a_row(s) {}
  CostArchetype(const CostArchetype&) = default;
  CostArchetype& operator=(const CostArchetype&) = delete;
  [[nodiscard]] double seconds(std::int32_t rows, std::int32_t) const { return a_row * rows; }
  [[nodiscard]] Status validate() const { return {}; }
};
struct BytesArchetype {
  BytesArchetype() = default;
  BytesArchetype(const BytesArchetype&) = delete;
  BytesArchetype& operator=(const BytesArchetype&) = delete;
  short operator()(std::int32_t) const { return 100; }
};

bool all_finite(const Plan& plan) {
  bool finite = is_finite(plan.ratio) && is_finite(plan.ttft_s) && is_finite(plan.full_ttft_s);
  for (const double t : plan.blend_ttft_s) finite = finite && is_finite(t);
  for (const SegmentPlan& s : plan.segments) finite = finite && is_finite(s.load_s);
  for (const LayerPlan& l : plan.layers) {
    finite = finite && is_finite(l.load_s) && is_finite(l.recompute_s) && is_finite(l.ready_s) && is_finite(l.done_s) &&
             is_finite(l.ratio);
  }
  return finite;
}

std::string text_of(const Plan& plan) {
  std::vector<char> buffer(print(plan, {}) + 1);
  print(plan, buffer);
  return buffer.data();
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("a planner is made from archetypes") {
  PromptBuilder builder;
  builder.fresh(1).cached(10).fresh(1);
  const Prompt prompt = builder.make();
  Memory memory(prompt, 2);
  const std::vector<Tier> tiers = {Tier("disk", 1e9)};
  const std::vector<TierMask> held = {0, 1, 0};
  const RecomputePlanner<CostArchetype> planner(CostArchetype(1e-3));
  const Result<Plan> plan = planner.plan(PlanInputs{prompt, tiers, held}, BytesArchetype{}, memory.view());
  REQUIRE(plan.ok());
  CHECK(plan.value.mode == PlanMode::blend);
}

// vLLM #33398, kineto PR110.
TEST_CASE("a layer of 256 tokens of 4096 bytes takes 131.07 us at 8 GB/s") {
  PromptBuilder builder;
  builder.fresh(16).cached(256).fresh(16);
  const Prompt prompt = builder.make();
  Setup setup;
  setup.tiers = {Tier("disk", 8e9)};
  Memory memory(prompt, setup.layers);
  const Result<Plan> plan = setup.plan(prompt, UniformBytes(4096), memory);
  REQUIRE(plan.ok());
  REQUIRE(plan.value.mode == PlanMode::blend);
  for (const LayerPlan& layer : plan.value.layers) CHECK(std::abs(layer.load_s - 131.072e-6) < 1e-12);
  CHECK(plan.value.segments[1].load_s == doctest::Approx(30 * 131.072e-6).epsilon(1e-12));
  // 131 rows fit into that, of which 32 run anyway.
  CHECK(plan.value.rows_kept == 99);
  CHECK(plan.value.ratio == 99.0 / 256.0);
  CHECK(plan.value.active_rows == 131);
}

TEST_CASE("bandwidth 0 recomputes all and says which tier, infinite gives the least ratio, others are errors") {
  PromptBuilder builder;
  builder.fresh(16).cached(256).fresh(16);
  const Prompt prompt = builder.make();
  Setup setup;
  Memory memory(prompt, setup.layers);

  for (const double none : {0.0, -0.0, 1e-310}) {
    setup.tiers = {Tier("shelf", none)};
    const Result<Plan> plan = setup.plan(prompt, UniformBytes(4096), memory);
    REQUIRE(plan.ok());
    CHECK(plan.value.mode == PlanMode::full_recompute);
    CHECK(plan.value.ratio == 1.0);
    CHECK(plan.value.active_rows == 288);
    CHECK(contains(plan.value.reason, "shelf"));
    CHECK(contains(plan.value.reason, "bandwidth_bytes_per_s"));
    CHECK(contains(plan.value.reason, "segment 1"));
    CHECK_FALSE(plan.value.allows(ScoreTiming::before_load));
    CHECK(all_finite(plan.value));
  }

  setup.tiers = {Tier("memory", kInf)};
  const Result<Plan> plan = setup.plan(prompt, UniformBytes(4096), memory);
  REQUIRE(plan.ok());
  CHECK(plan.value.mode == PlanMode::blend);
  CHECK(plan.value.ratio == 0.15);
  CHECK(plan.value.rows_kept == 38);
  CHECK(all_finite(plan.value));

  for (const double bad : {kNan, -kNan, -1.0, -kInf}) {
    setup.tiers = {Tier("memory", 1e9), Tier("disk", bad)};
    const Result<Plan> refused = setup.plan(prompt, UniformBytes(4096), memory);
    CHECK(refused.status.code() == StatusCode::invalid_argument);
    CHECK(std::string(refused.status.where()) == "tiers[1].bandwidth_bytes_per_s");
  }
  for (const double bad : {kNan, kInf, -1.0}) {
    setup.tiers = {Tier("disk", 1e9, bad)};
    CHECK(std::string(setup.plan(prompt, UniformBytes(4096), memory).status.where()) == "tiers[0].latency_s");
  }
}

TEST_CASE("the ratio is the best of a sweep over rows") {
  const unsigned seed = 606;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  int raised = 0;
  int lost = 0;
  for (int round = 0; round < 400; ++round) {
    PromptBuilder builder;
    const int head = 1 + static_cast<int>(random() % 20);
    const int tail = static_cast<int>(random() % 20);
    builder.fresh(head).cached(1 + static_cast<int>(random() % 300)).cached(static_cast<int>(random() % 300));
    builder.fresh(tail);
    const Prompt prompt = builder.make();
    Setup setup;
    setup.layers = 1 + random() % 40;
    setup.cost = LinearCostModel{1e-5 * uniform(random), 1e-6, 1e-9 * uniform(random)};
    setup.tiers = {Tier{"disk", std::pow(10.0, 9.0 + 1.5 * uniform(random)), 1e-6 * uniform(random)}};
    setup.options.r_min = round % 5 == 0 ? 0.0 : 0.3 * uniform(random);
    Memory memory(prompt, setup.layers);
    const Result<Plan> result = setup.plan(prompt, UniformBytes(4096), memory);
    REQUIRE(result.ok());
    const Plan& plan = result.value;
    REQUIRE(all_finite(plan));

    const int reused = prompt.reused_rows();
    const int mandatory = head + tail + (tail == 0 ? 1 : 0);
    double load = 0.0;
    for (const Segment& s : prompt.segments()) {
      if (s.kind == SegmentKind::cached) load += setup.tiers[0].load_seconds(s.size() * 4096.0);
    }
    const auto recompute = [&](int kept) {
      return setup.cost.seconds((std::min)(mandatory + kept, prompt.rows()), prompt.rows());
    };
    int best = static_cast<int>(std::floor(setup.options.r_min * reused + 0.5));
    for (int kept = best; kept <= reused; ++kept) {
      if (recompute(kept) <= load) best = kept;
    }
    const double layers = static_cast<double>(setup.layers);
    const double ttft = load + (layers - 1.0) * (std::max)(load, recompute(best)) + recompute(best);
    const double full = layers * setup.cost.seconds(prompt.rows(), prompt.rows());
    CAPTURE(reused);
    CAPTURE(best);
    CAPTURE(ttft);
    CAPTURE(full);
    CAPTURE(plan.reason);
    REQUIRE(plan.full_ttft_s == doctest::Approx(full).epsilon(1e-12));
    if (best >= reused || ttft >= full) {
      REQUIRE(plan.mode == PlanMode::full_recompute);
      REQUIRE(plan.ratio == 1.0);
      ++lost;
      continue;
    }
    REQUIRE(plan.mode == (best == 0 ? PlanMode::reuse : PlanMode::blend));
    REQUIRE(plan.rows_kept == best);
    REQUIRE(rows_of_ratio(plan.ratio, reused) == best);  // a RatioBudget of it keeps as many
    REQUIRE(plan.ratio >= setup.options.r_min);
    REQUIRE(plan.ttft_s == doctest::Approx(ttft).epsilon(1e-9));
    for (const LayerPlan& layer : plan.layers) REQUIRE(layer.ratio == doctest::Approx(plan.ratio).epsilon(1e-12));
    raised += plan.ratio > setup.options.r_min ? 1 : 0;
  }
  CHECK(raised > 50);  // all outcomes were met
  CHECK(lost > 20);
}

TEST_CASE("layers of different bytes: one ratio for all, and one each that never rises") {
  PromptBuilder builder;
  builder.fresh(1).cached(1000).fresh(9);
  const Prompt prompt = builder.make();
  Setup setup;
  setup.layers = 4;
  setup.options.r_min = 0.05;
  setup.cost = LinearCostModel(0.0, 1.0000001e-6, 0.0);
  Memory memory(prompt, 4);
  // 400, 200, 300 and 0 us a layer.
  const Result<Plan> plan = setup.plan(prompt, ListedBytes{{400, 200, 300, 0}}, memory);
  REQUIRE(plan.ok());
  REQUIRE(plan.value.mode == PlanMode::blend);
  CHECK(plan.value.rows_kept == 214);  // 225 us in the mean, less the 10 rows that run anyway, less the edge
  CHECK(plan.value.layers[0].ratio == 389.0 / 1000.0);
  CHECK(plan.value.layers[1].ratio == 189.0 / 1000.0);
  CHECK(plan.value.layers[2].ratio == 189.0 / 1000.0);
  CHECK(plan.value.layers[3].ratio == 0.05);
  CHECK(plan.value.layers[3].load_s == 0.0);
  CHECK(std::string(setup.plan(prompt, ListedBytes{{1, 2, -3, 4}}, memory).status.where()) ==
        "bytes_per_token, layer 2");
}

TEST_CASE("the cheapest tier that hides its loading is taken, else the fastest") {
  PromptBuilder builder;
  builder.fresh(10).cached(500).cached(500).fresh(40);
  const Prompt prompt = builder.make();
  Setup setup;
  setup.options.r_min = 0.2;  // 250 rows a layer: 250 us, of which each segment may take half
  setup.tiers = {Tier("bucket", 1e7), Tier("disk", 5e8), Tier("memory", 1e11, 0.0, true)};
  Memory memory(prompt, setup.layers);
  struct Case {
    std::int64_t bytes;  // a token and layer
    std::vector<TierMask> held_in;
    int first;
    int second;
  };
  const std::vector<Case> cases = {
      {2, {0, 7, 7, 0}, 0, 0},    // 100 us from the bucket
      {3, {0, 7, 7, 0}, 1, 1},    // 150 us
      {100, {0, 7, 7, 0}, 1, 1},  // 100 us from disk
      {200, {0, 7, 7, 0}, 2, 2},  // 200 us
      {200, {0, 3, 6, 0}, 1, 2},  // not in memory: nothing hides it, disk is fastest
      {100, {0, 1, 2, 0}, 0, 1},  // only the bucket has it
      {2, {0, 6, 4, 0}, 1, 2},    // it lies nowhere cheaper
  };
  for (const Case& c : cases) {
    CAPTURE(c.bytes);
    setup.held_in = c.held_in;
    const Result<Plan> plan = setup.plan(prompt, UniformBytes(c.bytes), memory);
    REQUIRE(plan.ok());
    if (plan.value.mode == PlanMode::full_recompute) {
      CHECK(c.held_in[1] == 1);  // 5 ms a layer from the bucket
      continue;
    }
    CHECK(plan.value.segments[0].tier == -1);
    CHECK(plan.value.segments[1].tier == c.first);
    CHECK(plan.value.segments[2].tier == c.second);
    CHECK(plan.value.segments[3].tier == -1);
  }
}

TEST_CASE("reads stand in one queue, or in one per tier") {
  PromptBuilder builder;
  builder.fresh(10).cached(100).cached(200).cached(300).fresh(10);
  const Prompt prompt = builder.make();
  Setup setup;
  setup.cost = LinearCostModel(0.0, 1e-3, 0.0);
  setup.tiers = {Tier("disk", 1e6, 1e-4), Tier("far", 1e6, 1e-4)};
  setup.held_in = {0, 1, 1, 2, 0};
  Memory memory(prompt, setup.layers);
  const Result<Plan> queue = setup.plan(prompt, UniformBytes(10), memory);
  REQUIRE(queue.ok());
  CHECK(queue.value.layers[7].load_s == doctest::Approx(1.1e-3 + 2.1e-3 + 3.1e-3).epsilon(1e-12));
  setup.options.tiers_in_parallel = true;
  const Result<Plan> parallel = setup.plan(prompt, UniformBytes(10), memory);
  REQUIRE(parallel.ok());
  CHECK(parallel.value.layers[7].load_s == doctest::Approx(3.2e-3).epsilon(1e-12));
}

TEST_CASE("modes at the edges") {
  Setup setup;
  const auto plan = [&](PromptBuilder& builder, std::int64_t bytes = 100) {
    static std::vector<Memory> keep;  // the plan's spans point here
    const Prompt prompt = builder.make();
    keep.emplace_back(prompt, setup.layers);
    Result<Plan> result = setup.plan(prompt, UniformBytes(bytes), keep.back());
    REQUIRE_MESSAGE(result.ok(), result.status.where() << ": " << result.status.message());
    REQUIRE(all_finite(result.value));
    return result.value;
  };

  SUBCASE("an empty prompt: nothing to do") {
    PromptBuilder none;
    CHECK(plan(none).mode == PlanMode::nothing);
    PromptBuilder hollow;
    hollow.fresh(0).cached(0);
    CHECK(plan(hollow).mode == PlanMode::nothing);
  }
  SUBCASE("nothing cached: full recompute of what is not resident") {
    PromptBuilder builder;
    builder.resident(10).fresh(5);
    const Plan p = plan(builder);
    CHECK(p.mode == PlanMode::full_recompute);
    CHECK(p.active_rows == 5);
    CHECK(p.ttft_s == doctest::Approx(30 * 5e-6));
    CHECK(contains(p.reason, "no segment is cached"));
  }
  SUBCASE("all resident: the last row still runs, for its logits") {
    PromptBuilder builder;
    builder.resident(10);
    CHECK(plan(builder).active_rows == 1);
  }
  SUBCASE("one exact chunk and a question: prefix caching") {
    PromptBuilder builder;
    builder.cached(1000).fresh(20);
    const Plan p = plan(builder);
    CHECK(p.mode == PlanMode::prefix);
    CHECK(p.active_rows == 20);
    CHECK(p.reused_rows == 0);
    CHECK(p.segments[0].tier == 0);
    CHECK(p.ttft_s == doctest::Approx(30 * 1e-4 + 2e-5));  // load bound
    CHECK(plan(builder, 100000).mode == PlanMode::full_recompute);
  }
  SUBCASE("only an exact chunk: its last row runs again") {
    PromptBuilder builder;
    builder.cached(1000);
    CHECK(plan(builder).mode == PlanMode::prefix);
    CHECK(plan(builder).active_rows == 1);
  }
  SUBCASE("all cached, the last chunk moved: its last row runs in any case") {
    PromptBuilder builder;
    builder.cached(1000).cached(1000);
    setup.options.r_min = 0.0;
    setup.tiers = {Tier("memory", kInf)};
    const Plan p = plan(builder);
    CHECK(p.mode == PlanMode::reuse);
    CHECK(p.ratio == 0.0);
    CHECK(p.reused_rows == 1000);
    CHECK(p.active_rows == 1);
    CHECK_FALSE(p.stored_scores);
  }
  SUBCASE("ratio 1 is full recompute") {
    PromptBuilder builder;
    builder.fresh(1).cached(1000).fresh(20);
    setup.options.r_min = 1.0;
    CHECK(plan(builder).mode == PlanMode::full_recompute);
    CHECK(contains(plan(builder).reason, "r_min"));
  }
  SUBCASE("loading as slow as recomputing is full recompute") {
    PromptBuilder builder;
    builder.fresh(1).cached(1000).fresh(20);
    CHECK(plan(builder, 990).mode == PlanMode::full_recompute);  // 97 % would hide it, but the pipeline must fill
    CHECK(contains(plan(builder, 990).reason, "a blend would take"));
    CHECK(plan(builder, 10000).mode == PlanMode::full_recompute);
    CHECK(contains(plan(builder, 10000).reason, "every row"));
    CHECK(plan(builder, 500).mode == PlanMode::blend);
  }
  SUBCASE("what calibration advises against is not blended, but an exact prefix stays") {
    setup.options.blending_allowed = false;
    PromptBuilder moved;
    moved.fresh(1).cached(1000).fresh(20);
    CHECK(plan(moved).mode == PlanMode::full_recompute);
    CHECK(contains(plan(moved).reason, "calibration"));
    CHECK_FALSE(plan(moved).allows(ScoreTiming::before_load));
    PromptBuilder behind;
    behind.cached(1000).cached(1000).fresh(20);
    const Plan p = plan(behind);
    CHECK(p.mode == PlanMode::prefix);
    CHECK(p.active_rows == 1020);
    CHECK(p.ratio == 1.0);
    CHECK(p.segments[0].tier == 0);
    CHECK(p.segments[1].tier == -1);
  }
  SUBCASE("a chunk in no tier is recomputed") {
    setup.held_in = {0, 0, 0};
    PromptBuilder builder;
    builder.fresh(1).cached(1000).fresh(20);
    CHECK(plan(builder).mode == PlanMode::full_recompute);
    CHECK(contains(plan(builder).reason, "segment 1 lies in no tier"));
  }
  SUBCASE("an empty cached segment need not lie anywhere") {
    setup.held_in = {0, 1, 0, 0};
    PromptBuilder builder;
    builder.fresh(1).cached(1000).cached(0).fresh(20);
    CHECK(plan(builder).mode == PlanMode::blend);
  }
}

TEST_CASE("the check layer of a selector that scores during the pass is part of the prediction") {
  PromptBuilder builder;
  builder.fresh(10).cached(1000).fresh(40);
  const Prompt prompt = builder.make();
  Setup setup;
  setup.options.timing = ScoreTiming::during_pass;
  setup.options.r_min = 0.2;
  Memory memory(prompt, setup.layers);
  const Result<Plan> plan = setup.plan(prompt, UniformBytes(100), memory);  // 100 us a layer: hidden
  REQUIRE(plan.ok());
  REQUIRE(plan.value.mode == PlanMode::blend);
  // All 1050 rows at layer 0, a tenth of a layer for those dropped at layer 1, then 250.
  CHECK(plan.value.layers[0].recompute_s == doctest::Approx(1050e-6));
  CHECK(plan.value.layers[1].recompute_s == doctest::Approx(250e-6 + 80e-6));
  CHECK(plan.value.layers[2].recompute_s == doctest::Approx(250e-6));
  CHECK(plan.value.ttft_s == doctest::Approx(100e-6 + 1050e-6 + 330e-6 + 28 * 250e-6));
  CHECK(plan.value.blend_ttft_s[0] == doctest::Approx(100e-6 + 30 * 250e-6));
  CHECK(plan.value.blend_ttft_s[1] == plan.value.ttft_s);

  setup.options.r_min = 0.0;
  const Result<Plan> reuse = setup.plan(prompt, UniformBytes(10), memory);
  REQUIRE(reuse.ok());
  CHECK(reuse.value.mode == PlanMode::reuse);  // chooses nothing, so nothing runs for the choice
  CHECK(reuse.value.layers[0].recompute_s == doctest::Approx(50e-6));
}

TEST_CASE("recompute that takes just as long as loading is taken along") {
  PromptBuilder builder;
  builder.fresh(10).cached(100);
  const Prompt prompt = builder.make();
  Setup setup;
  setup.cost = LinearCostModel(0.0, 0.5, 0.0);
  setup.tiers = {Tier("disk", 4.0)};  // 25 s a layer: 50 rows, of which the ten fresh and the last run anyway
  Memory memory(prompt, setup.layers);
  const Result<Plan> plan = setup.plan(prompt, UniformBytes(1), memory);
  REQUIRE(plan.ok());
  REQUIRE(plan.value.mode == PlanMode::blend);
  CHECK(plan.value.rows_kept == 39);
}

TEST_CASE("the exact prefix alone may come from a slower tier than a blend's segments") {
  PromptBuilder builder;
  builder.cached(100).cached(900).fresh(10);
  const Prompt prompt = builder.make();
  Setup setup;
  setup.options.blending_allowed = false;
  setup.tiers = {Tier("disk", 2e7), Tier("memory", 1e10)};  // 500 us for the prefix, the rest recomputes in 910 us
  Memory memory(prompt, setup.layers);
  const Result<Plan> plan = setup.plan(prompt, UniformBytes(100), memory);
  REQUIRE(plan.ok());
  REQUIRE(plan.value.mode == PlanMode::prefix);
  CHECK(plan.value.segments[0].tier == 0);
  CHECK(plan.value.segments[1].tier == -1);
}

TEST_CASE("a probe needs the KV in memory and hides no loading") {
  PromptBuilder builder;
  builder.fresh(10).cached(1000).fresh(40);
  const Prompt prompt = builder.make();
  Setup setup;
  setup.options.timing = ScoreTiming::after_probe;
  setup.tiers = {Tier("disk", 1e10), Tier("memory", 1e9, 0.0, true)};
  Memory memory(prompt, setup.layers);

  const Result<Plan> plan = setup.plan(prompt, UniformBytes(200), memory);
  REQUIRE(plan.ok());
  REQUIRE(plan.value.mode == PlanMode::blend);
  CHECK(plan.value.segments[1].tier == 1);  // in memory, though disk would be faster
  CHECK(plan.value.ratio == 0.15);          // 200 us of loading hide behind nothing
  CHECK(plan.value.ttft_s == doctest::Approx(30 * (200e-6 + 50e-6 + 200e-6)));
  CHECK(plan.value.allows(ScoreTiming::after_probe));
  CHECK(plan.value.allows(ScoreTiming::before_load));

  setup.options.r_min = 0.0;  // nothing to choose, nothing to ask
  const Result<Plan> reuse = setup.plan(prompt, UniformBytes(200), memory);
  REQUIRE(reuse.ok());
  CHECK(reuse.value.ttft_s == doctest::Approx(30 * (200e-6 + 50e-6)));
  setup.options.r_min = 0.15;

  setup.held_in = {0, 1, 0};
  const Result<Plan> outside = setup.plan(prompt, UniformBytes(200), memory);
  REQUIRE(outside.ok());
  CHECK(outside.value.mode == PlanMode::full_recompute);
  CHECK(contains(outside.value.reason, "segment 1"));
  CHECK_FALSE(outside.value.allows(ScoreTiming::after_probe));
  CHECK(outside.value.allows(ScoreTiming::before_load));
  CHECK(outside.value.allows(ScoreTiming::during_pass));
}

TEST_CASE("stored scores are reported only where every reused chunk has them") {
  Setup setup;
  PromptBuilder some;
  some.fresh(1).cached(2, {1.0f, 2.0f}).cached(2).fresh(1);
  PromptBuilder all;
  all.cached(2).fresh(1).cached(2, {1.0f, 2.0f}).fresh(1);  // the first is exact and needs none
  const Prompt some_prompt = some.make();
  const Prompt all_prompt = all.make();
  Memory memory(some_prompt, setup.layers);
  CHECK_FALSE(setup.plan(some_prompt, UniformBytes(1), memory).value.stored_scores);
  CHECK(setup.plan(all_prompt, UniformBytes(1), memory).value.stored_scores);
}

TEST_CASE("options, cost and shapes out of range are refused by name") {
  PromptBuilder builder;
  builder.fresh(10).cached(100).fresh(4);
  const Prompt prompt = builder.make();
  const auto where = [&](auto change) {
    Setup setup;
    Memory memory(prompt, setup.layers);
    change(setup, memory);
    const Result<Plan> plan = setup.plan(prompt, UniformBytes(100), memory);
    CHECK_FALSE(plan.ok());
    return std::string(plan.status.where());
  };
  for (const double bad : {kNan, -kNan, -0.1, 1.0000001, kInf, -kInf}) {
    CHECK(where([&](Setup& s, Memory&) { s.options.r_min = bad; }) == "r_min");
    CHECK(where([&](Setup& s, Memory&) { s.options.projection_share = bad; }) == "projection_share");
  }
  for (const double bad : {kNan, kInf, -1.0}) {
    CHECK(where([&](Setup& s, Memory&) { s.cost.per_row_s = bad; }) == "cost.per_row_s");
  }
  CHECK(where([&](Setup& s, Memory&) { s.cost = LinearCostModel(); }) == "cost");
  CHECK(where([&](Setup& s, Memory&) { s.options.check_layer = -1; }) == "check_layer");
  CHECK(where([&](Setup& s, Memory&) {
          s.options.check_layer = 30;
          s.options.timing = ScoreTiming::during_pass;
        }) == "check_layer");
  CHECK(where([&](Setup& s, Memory&) { s.options.staging_layers = -1; }) == "staging_layers");
  CHECK(where([&](Setup& s, Memory&) { s.held_in = {0, 1}; }) == "held_in");
  CHECK(where([&](Setup& s, Memory&) { s.held_in = {0, 2, 0}; }) == "held_in, segment 1");
  CHECK(where([&](Setup& s, Memory&) {
          s.tiers.assign(33, Tier("x", 1.0));
          s.held_in = {0, 1, 0};
        }) == "tiers");
  CHECK(where([&](Setup&, Memory& m) { m.segments.resize(2); }) == "memory.segments");
  CHECK(where([&](Setup&, Memory& m) { m.layers.clear(); }) == "memory.layers");

  // A cost model of the host's own that breaks its word.
  const std::vector<Tier> tiers(32, Tier("disk", 1e9));
  const std::vector<TierMask> held = {0, 0xffffffffu, 0};
  for (const double bad : {kNan, kInf, -1.0}) {
    Memory memory(prompt, 3);
    const Result<Plan> plan = RecomputePlanner<CostArchetype>(CostArchetype(bad))
                                  .plan(PlanInputs{prompt, tiers, held}, UniformBytes(1), memory.view());
    CHECK(std::string(plan.status.where()) == "cost.seconds");
  }
  // At the far end of what is allowed, everything is still finite.
  Memory memory(prompt, 3);
  const std::vector<Tier> slow = {Tier("slow", 1e-9, 1e9)};
  const std::vector<TierMask> in_slow = {0, 1, 0};
  const Result<Plan> plan = RecomputePlanner<LinearCostModel>(LinearCostModel(1e12, 1e12, 1e12))
                                .plan(PlanInputs{prompt, slow, in_slow},
                                      UniformBytes(std::numeric_limits<std::int64_t>::max()), memory.view());
  REQUIRE(plan.ok());
  CHECK(all_finite(plan.value));
}

TEST_CASE("random situations: a plan is finite, within bounds, and never slower than full recompute") {
  const unsigned seed = 909;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int round = 0; round < 1500; ++round) {
    PromptBuilder builder;
    if (random() % 3 == 0) builder.resident(static_cast<int>(random() % 50));
    const std::size_t parts = random() % 6;
    for (std::size_t i = 0; i < parts; ++i) {
      const int tokens = static_cast<int>(random() % 200);
      if (random() % 3 == 0) {
        builder.fresh(tokens / 5);
      } else {
        builder.cached(tokens);
      }
    }
    const Prompt prompt = builder.make();
    Setup setup;
    setup.layers = 1 + random() % 12;
    setup.cost = LinearCostModel{1e-5 * uniform(random), 1e-6 * uniform(random), 1e-9 * (1e-3 + uniform(random))};
    setup.tiers.clear();
    const std::size_t tiers = 1 + random() % 4;
    for (std::size_t t = 0; t < tiers; ++t) {
      double bandwidth = std::pow(10.0, 6.0 + 5.0 * uniform(random));
      if (random() % 8 == 0) bandwidth = 0.0;
      if (random() % 8 == 0) bandwidth = kInf;
      const double latency = random() % 2 == 0 ? 0.0 : 1e-4 * uniform(random);
      setup.tiers.emplace_back("tier", bandwidth, latency, random() % 3 == 0);
    }
    for (std::size_t s = 0; s < prompt.segments().size(); ++s) {
      setup.held_in.push_back(static_cast<TierMask>(random() % (std::uint64_t{1} << tiers)));
    }
    if (setup.held_in.empty()) setup.tiers.clear();
    setup.options.r_min = static_cast<double>(random() % 5) / 4.0 * uniform(random);
    setup.options.timing = static_cast<ScoreTiming>(random() % 3);
    setup.options.check_layer = static_cast<std::int32_t>(random() % setup.layers);
    setup.options.staging_layers = static_cast<std::int32_t>(random() % 3);
    setup.options.tiers_in_parallel = random() % 2 == 0;
    Memory memory(prompt, setup.layers);
    const Result<Plan> result = setup.plan(prompt, UniformBytes(static_cast<std::int64_t>(random() % 5000)), memory);
    REQUIRE_MESSAGE(result.ok(), result.status.where() << ": " << result.status.message());
    const Plan& plan = result.value;
    REQUIRE(all_finite(plan));
    REQUIRE((plan.ratio >= 0.0 && plan.ratio <= 1.0));
    REQUIRE(plan.ttft_s <= plan.full_ttft_s);
    REQUIRE(plan.rows_kept <= plan.reused_rows);
    REQUIRE(plan.active_rows <= (std::max)(prompt.rows() - prompt.resident_rows(), prompt.empty() ? 0 : 1));
    REQUIRE(std::string(plan.reason).size() > 5);
    const bool blended = plan.mode == PlanMode::blend || plan.mode == PlanMode::reuse;
    if (blended) {
      REQUIRE(plan.allows(plan.timing));
      REQUIRE(plan.ttft_s == plan.blend_ttft_s[static_cast<std::size_t>(plan.timing)]);
      REQUIRE(plan.ratio >= setup.options.r_min);
      REQUIRE(plan.rows_kept == rows_of_ratio(plan.ratio, plan.reused_rows));
    }
    if (!plan.layers.empty() && plan.mode != PlanMode::nothing) REQUIRE(plan.layers.back().done_s == plan.ttft_s);
    for (std::size_t s = 0; s < plan.segments.size(); ++s) {
      const SegmentPlan& segment = plan.segments[s];
      REQUIRE(segment.tokens == prompt.segments()[s].size());
      if (segment.tier < 0) continue;
      REQUIRE(((setup.held_in[s] >> segment.tier) & 1u) == 1u);
      REQUIRE(setup.tiers[static_cast<std::size_t>(segment.tier)].delivers());
    }
    text_of(plan);
  }
}

TEST_CASE("a plan prints what it decided, and cut text is whole up to the cut") {
  PromptBuilder builder;
  builder.resident(8).fresh(10).cached(512).cached(256).fresh(40);
  const Prompt prompt = builder.make();
  Setup setup;
  setup.tiers = {Tier("disk", 1.2e9, 1e-5), Tier("memory", kInf)};
  setup.held_in = {0, 0, 1, 2, 0};
  Memory memory(prompt, setup.layers);
  const Result<Plan> plan = setup.plan(prompt, UniformBytes(100), memory);
  REQUIRE(plan.ok());
  const std::string text = text_of(plan.value);
  CAPTURE(text);
  for (const char* part :
       {"plan: blend, ratio 0.15: 115 of 768 reused rows, 165 active rows a layer", "segment 0: 8 tokens resident",
        "segment 1: 10 tokens fresh", "segment 2: 512 tokens from disk (1.2 GB/s, 10 us a read)",
        "segment 3: 256 tokens from memory (unlimited)", "layers 0-29, each: load 52.7 us, recompute 165 us"}) {
    CHECK_MESSAGE(contains(text, part), part);
  }

  for (std::size_t room = 1; room <= text.size() + 2; ++room) {
    std::vector<char> buffer(room + 1, '#');
    CHECK(print(plan.value, std::span<char>(buffer).first(room)) == text.size());
    REQUIRE(std::string(buffer.data()) == text.substr(0, room - 1));
    REQUIRE(buffer[room] == '#');
  }
  CHECK(print(plan.value, {}) == text.size());
  char nothing[64];
  print(Plan{}, nothing);
  CHECK(contains(nothing, "plan: nothing to do"));
}
