// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A blend against the oracle of tiny_model.hpp: what ratio 1, ratio 0 and everything between must give.
#include <kvblend/eigen/backend.hpp>

#include "scene.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

using namespace kvblend;

using namespace tiny;

namespace {

std::vector<Config> configurations() {
  std::vector<Config> all;
  for (const RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    for (const bool bias : {false, true}) {
      for (const int kv_heads : {1, 2, 4}) {
        Config config;
        config.pairing = pairing;
        config.bias = bias;
        config.kv_heads = kv_heads;
        config.layer_without_rope = bias ? 2 : -1;
        all.push_back(config);
      }
    }
  }
  return all;
}

}  // namespace

TEST_CASE_TEMPLATE("ratio 1 equals full prefill, whatever the selector", Backend, PortableBackend, EigenBackend<>) {
  for (const Config& config : configurations()) {
    Scene scene(config);
    CAPTURE(config.kv_heads);
    CAPTURE(config.bias);
    const Prefill oracle = full_prefill(scene.model, scene.tokens, scene.positions);
    const auto check = [&](auto selector) {
      FloatHost host = make_host(scene.model, scene.prompt.rows());
      REQUIRE(run(scene, host, selector, Backend{}).ok());
      CHECK(host.committed == scene.prompt.rows());
      REQUIRE(host.outputs() == 1);
      CHECK(largest_difference(host.logits(0), oracle.logits.back()) <= 1e-4);
      CHECK(cache_error(scene, host, oracle) <= 1e-5);
    };
    check(at_ratio<FirstK>(1));
    check(at_ratio<RandomScore>(1));
    check(at_ratio<KeyDeviation>(1));
    check(at_ratio<ValueDeviation>(1));
    check(at_ratio<KeyValueDeviation>(1));
    check(at_ratio<AttentionMass>(1));
  }
}

TEST_CASE_TEMPLATE("ratio 0 is full reuse plus the fresh rows", Backend, PortableBackend, EigenBackend<>) {
  Scene scene;
  const Prefill oracle = reference(scene.model, scene.tokens, scene.positions, &scene.reused,
                                   [&](int, int row) { return !scene.cached[static_cast<std::size_t>(row)]; });
  const auto check = [&](auto selector) {
    FloatHost host = make_host(scene.model, scene.prompt.rows());
    BlendReport report;
    REQUIRE(run(scene, host, selector, Backend{}, &report).ok());
    CHECK(report.fusor.rows_selected == 0);
    CHECK(report.fusor.rows_computed == 9 * scene.model.config.layers);  // five of instructions, four of the question
    CHECK(largest_difference(host.logits(0), oracle.logits.back()) <= 1e-4);
    CHECK(cache_error(scene, host, oracle) <= 1e-5);
  };
  check(at_ratio<FirstK>(0));
  check(at_ratio<KeyValueDeviation>(0));
  check(at_ratio<AttentionMass>(0));
}

TEST_CASE_TEMPLATE("a chosen set gives what the oracle gives for that set", Backend, PortableBackend, EigenBackend<>) {
  for (const int gap : {0, 13}) {
    Scene scene({}, 11, gap);
    const std::vector<int> rows = {5, 6, 10, 16, 20, 24};
    const Prefill oracle = reference(scene.model, scene.tokens, scene.positions, &scene.reused, [&](int, int row) {
      return !scene.cached[static_cast<std::size_t>(row)] || std::find(rows.begin(), rows.end(), row) != rows.end();
    });
    FloatHost host = make_host(scene.model, scene.prompt.rows());
    scene.outputs = {Row(10), Row(24), Row(scene.prompt.rows() - 1)};
    BlendReport report;
    REQUIRE(run(scene, host, given({5, 6, 16, 20}), Backend{}, &report).ok());  // 10 and 24 run since they are outputs
    CHECK(report.fusor.rows_selected == 4);
    REQUIRE(host.outputs() == 3);
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(largest_difference(host.logits(i), oracle.logits[static_cast<std::size_t>(scene.outputs[i].value)]) <=
            1e-4);
    }
    CHECK(cache_error(scene, host, oracle) <= 1e-5);
  }
}

TEST_CASE_TEMPLATE("deviation chooses at layer 1 as the oracle's own arithmetic does", Backend, PortableBackend,
                   EigenBackend<>) {
  Scene scene({}, 23);
  const Prefill full = full_prefill(scene.model, scene.tokens, scene.positions);
  const auto distance = [](const std::vector<double>& x, const std::vector<double>& y) {
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
    return std::sqrt(sum);
  };
  // Rotation keeps distances, so keys before rope serve.
  std::vector<std::pair<double, int>> ranked;
  double key_sum = 0;
  double value_sum = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int row = 0; row < scene.prompt.rows(); ++row) {
      const auto at = static_cast<std::size_t>(row);
      if (!scene.cached[at]) continue;
      const double key = distance(full.keys[1][at], scene.reused.keys[1][at]);
      const double value = distance(full.values[1][at], scene.reused.values[1][at]);
      if (pass == 0) {
        key_sum += key;
        value_sum += value;
      } else {
        ranked.emplace_back(-(key / key_sum + value / value_sum), row);
      }
    }
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<bool> kept(scene.cached.size(), false);
  for (int i = 0; i < 6; ++i) kept[static_cast<std::size_t>(ranked[static_cast<std::size_t>(i)].second)] = true;
  const Prefill oracle = reference(scene.model, scene.tokens, scene.positions, &scene.reused, [&](int layer, int row) {
    return layer <= 1 || !scene.cached[static_cast<std::size_t>(row)] || kept[static_cast<std::size_t>(row)];
  });

  FloatHost host = make_host(scene.model, scene.prompt.rows());
  BlendReport report;
  REQUIRE(run(scene, host, at_ratio<KeyValueDeviation>(0.3), Backend{}, &report).ok());  // 0.3 · 20 = 6
  CHECK(report.fusor.rows_selected == 6);
  CHECK(largest_difference(host.logits(0), oracle.logits.back()) <= 1e-4);
  CHECK(cache_error(scene, host, oracle) <= 1e-5);
}

TEST_CASE("attention mass chooses the rows the question looks at under full reuse") {
  Scene scene({}, 5);
  // The oracle's attention of the question's rows, over full reuse.
  const Prefill reuse = reference(scene.model, scene.tokens, scene.positions, &scene.reused,
                                  [&](int, int row) { return !scene.cached[static_cast<std::size_t>(row)]; });
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  using Selector = DeviationSelector<AttentionMass, CountBudget>;
  LayerwiseFusor<Selector> fusor(Selector(AttentionMass{}, CountBudget{5}));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim));
  Source source = scene.source();
  REQUIRE(blend(host, source, fusor, scene.prompt, scene.outputs, memory).ok());
  CHECK(source.waits == scene.model.config.layers);  // loaded once, though there are two passes
  const std::vector<float> blended(fusor.attention_mass().begin(), fusor.attention_mass().end());

  // The same mass from a host that stops after the probe, step by step.
  FloatHost probe = make_host(scene.model, scene.prompt.rows());
  LayerwiseFusor<Selector> steps(Selector(AttentionMass{}, CountBudget{5}));
  REQUIRE(
      steps.begin(scene.prompt, {scene.model.config.layers, scene.model.config.head_dim}, scene.outputs, memory).ok());
  REQUIRE(steps.probing());
  CHECK(steps.first_probe_row() == 5);
  REQUIRE(probe.begin(scene.prompt).ok());
  REQUIRE(probe.embed(steps.active()).ok());
  for (std::int32_t l = 0; l < probe.layers(); ++l) {
    REQUIRE(probe.project(l, steps.active()).ok());
    REQUIRE(steps.place(l, probe.rope(l), source, probe.keys(l), probe.values(l)).ok());
    REQUIRE(steps.fuse(l, probe.fresh_keys(), probe.fresh_values(), probe.keys(l), probe.values(l)).ok());
    REQUIRE(
        probe.attend_and_report(l, steps.active(), steps.kept(), steps.first_probe_row(), steps.attention_mass()).ok());
    steps.narrow();
  }
  CHECK(cache_error(scene, probe, reuse) <= 1e-5);
  CHECK(std::equal(steps.attention_mass().begin(), steps.attention_mass().end(), blended.begin(), blended.end()));
  double total = 0;
  std::vector<std::pair<float, int>> ranked;
  for (int row = 0; row < scene.prompt.rows(); ++row) {
    const float mass = steps.attention_mass()[static_cast<std::size_t>(row)];
    total += mass;
    if (scene.cached[static_cast<std::size_t>(row)]) ranked.emplace_back(-mass, row);
  }
  // Every head of every question row pays a total of 1.
  CHECK(total == doctest::Approx(4.0 * scene.model.config.heads * scene.model.config.layers).epsilon(1e-5));
  std::sort(ranked.begin(), ranked.end());
  REQUIRE(steps.choose_after_probe().ok());
  CHECK_FALSE(steps.probing());
  std::vector<int> expected = {0, 1, 2, 3, 4};
  for (int i = 0; i < 5; ++i) expected.push_back(ranked[static_cast<std::size_t>(i)].second);
  for (int row = 25; row < 29; ++row) expected.push_back(row);
  std::sort(expected.begin(), expected.end());
  std::vector<int> chosen;
  for (const Row row : steps.active()) chosen.push_back(row.value);
  CHECK(chosen == expected);
}

TEST_CASE("attention weighed by values is each layer's attention times the norms of the reused values") {
  Scene scene({}, 5);
  const auto rows = static_cast<std::size_t>(scene.prompt.rows());
  // Plain mass, layer by layer, times norms of what the chunks hold.
  FloatHost probe = make_host(scene.model, scene.prompt.rows());
  using Plain = DeviationSelector<AttentionMass, CountBudget>;
  LayerwiseFusor<Plain> steps(Plain(AttentionMass{}, CountBudget{5}));
  std::vector<std::byte> memory(steps.workspace_bytes(scene.prompt, scene.model.config.head_dim));
  Source source = scene.source();
  REQUIRE(
      steps.begin(scene.prompt, {scene.model.config.layers, scene.model.config.head_dim}, scene.outputs, memory).ok());
  CHECK(std::string(steps.report().selector) == "attention_mass");
  REQUIRE(probe.begin(scene.prompt).ok());
  REQUIRE(probe.embed(steps.active()).ok());
  std::vector<double> before(rows, 0.0);
  std::vector<double> weighed(rows, 0.0);
  for (std::int32_t l = 0; l < probe.layers(); ++l) {
    REQUIRE(probe.project(l, steps.active()).ok());
    REQUIRE(steps.place(l, probe.rope(l), source, probe.keys(l), probe.values(l)).ok());
    REQUIRE(steps.fuse(l, probe.fresh_keys(), probe.fresh_values(), probe.keys(l), probe.values(l)).ok());
    REQUIRE(
        probe.attend_and_report(l, steps.active(), steps.kept(), steps.first_probe_row(), steps.attention_mass()).ok());
    steps.narrow();
    for (std::size_t r = 0; r < rows; ++r) {
      const double mass = static_cast<double>(steps.attention_mass()[r]);
      double squares = 0.0;
      for (const double x : scene.reused.values[static_cast<std::size_t>(l)][r]) squares += x * x;
      weighed[r] += (mass - before[r]) * std::sqrt(squares);
      before[r] = mass;
    }
  }

  FloatHost host = make_host(scene.model, scene.prompt.rows());
  using Selector = DeviationSelector<AttentionValueMass, CountBudget>;
  LayerwiseFusor<Selector> fusor(Selector(AttentionValueMass{}, CountBudget{5}));
  BlendReport report;
  Source again = scene.source();
  REQUIRE(blend(host, again, fusor, scene.prompt, scene.outputs, memory, &report).ok());
  CHECK(report.fusor.rows_selected == 5);
  CHECK(std::string(report.fusor.selector) == "attention_value_mass");
  for (std::size_t r = 0; r < rows; ++r) {
    CAPTURE(r);
    const double expected = scene.cached[r] ? weighed[r] : 0.0;
    CHECK(static_cast<double>(fusor.attention_mass()[r]) == doctest::Approx(expected).epsilon(1e-4));
  }
}

TEST_CASE("mean KV error falls as the ratio rises") {
  for (const unsigned seed : {1u, 2u, 3u, 4u}) {
    CAPTURE(seed);
    Scene scene({}, seed);
    const Prefill oracle = full_prefill(scene.model, scene.tokens, scene.positions);
    double before = 1e30;
    for (const double ratio : {0.0, 0.1, 0.25, 0.5, 0.75, 1.0}) {
      FloatHost host = make_host(scene.model, scene.prompt.rows());
      REQUIRE(run(scene, host, at_ratio<KeyValueDeviation>(ratio)).ok());
      const double error = cache_error(scene, host, oracle);
      CAPTURE(ratio);
      CHECK(error < before);
      before = error;
    }
    CHECK(before <= 1e-5);
  }
}

TEST_CASE("a gradual budget narrows layer by layer and keeps its mean") {
  Config config;
  config.layers = 8;
  Scene scene(config, 3);
  using Selector = DeviationSelector<KeyDeviation, GradualBudget>;
  GradualBudget budget;
  budget.ratio = 0.4;
  budget.span = 4;
  LayerwiseFusor<Selector> fusor(Selector(KeyDeviation{}, budget));
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, config.head_dim));
  Source source = scene.source();
  REQUIRE(fusor.begin(scene.prompt, {config.layers, config.head_dim}, scene.outputs, memory).ok());
  REQUIRE(host.begin(scene.prompt).ok());
  REQUIRE(host.embed(fusor.active()).ok());
  double kept_rows = 0;
  std::vector<Row> before(fusor.active().begin(), fusor.active().end());
  for (std::int32_t l = 0; l < config.layers; ++l) {
    REQUIRE(host.project(l, fusor.active()).ok());
    REQUIRE(fusor.place(l, host.rope(l), source, host.keys(l), host.values(l)).ok());
    REQUIRE(fusor.fuse(l, host.fresh_keys(), host.fresh_values(), host.keys(l), host.values(l)).ok());
    if (l < config.layers - 1) {
      std::vector<Row> kept;
      for (const ActiveIndex i : fusor.kept()) kept.push_back(fusor.active()[static_cast<std::size_t>(i.value)]);
      CHECK(std::is_sorted(kept.begin(), kept.end()));
      CHECK(std::includes(before.begin(), before.end(), kept.begin(), kept.end()));
      if (l >= 1) kept_rows += static_cast<double>(kept.size()) - 9;
      before = kept;
    }
    REQUIRE(host.attend(l, fusor.active(), fusor.kept()).ok());
    fusor.narrow();
  }
  kept_rows += fusor.report().rows_selected;
  CHECK(kept_rows / (config.layers - 1) == doctest::Approx(0.4 * 20).epsilon(0.05));
  CHECK(fusor.report().rows_selected < 8);
}

TEST_CASE("later tokens and later unselected rows change no earlier bit") {
  Scene scene;
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  REQUIRE(run(scene, host, given({7, 12})).ok());
  const auto same_up_to = [&](const FloatHost& other, int rows) {
    const auto bytes = static_cast<std::size_t>(rows * scene.model.config.kv_heads * scene.model.config.head_dim * 4);
    for (std::size_t i = 0; i < host.memory().size(); ++i) {
      if (std::memcmp(host.memory()[i].data(), other.memory()[i].data(), bytes) != 0) return false;
    }
    return true;
  };
  SUBCASE("a later fresh token") {
    scene.question[1] = (scene.question[1] + 1) % scene.model.config.vocab;
    FloatHost other = make_host(scene.model, scene.prompt.rows());
    REQUIRE(run(scene, other, given({7, 12})).ok());
    CHECK(same_up_to(other, 26));
    CHECK_FALSE(same_up_to(other, 27));
  }
  SUBCASE("an unselected row of a later chunk") {
    for (auto& keys : scene.b->keys) keys[static_cast<std::size_t>(3 * 16)] += 1;  // row 19 of the prompt
    for (auto& values : scene.b->values) values[static_cast<std::size_t>(3 * 16)] += 1;
    FloatHost other = make_host(scene.model, scene.prompt.rows());
    REQUIRE(run(scene, other, given({7, 12})).ok());
    CHECK(same_up_to(other, 19));
    CHECK_FALSE(same_up_to(other, 20));
  }
}

// CacheBlend #21, LMCache #1152: a mask aligned to the bottom right lets scattered rows see the future or miss the past.
TEST_CASE("a selected row reaches every earlier position and none behind it") {
  Config config;
  Model model(config, 9);
  std::mt19937 random(9);
  Chunk chunk;
  chunk.tokens = random_tokens(random, 7, config.vocab);
  encode_chunk(model, chunk, 3);
  std::vector<Segment> segments = {cached_segment(chunk.info, Position(0))};
  const Prompt prompt = Prompt::make(segments, Position(100)).value;
  const std::vector<Row> outputs = {Row(2), Row(5)};
  const auto logits = [&](int changed) {
    Chunk copy = chunk;
    copy.info.tokens = copy.tokens;
    if (changed >= 0) {
      for (auto& values : copy.values) {
        for (int d = 0; d < 16; ++d) values[static_cast<std::size_t>(changed * 16 + d)] += 1;
      }
    }
    std::vector<Segment> own = {cached_segment(copy.info, Position(0))};
    const Prompt p = Prompt::make(own, Position(100)).value;
    FloatHost host = make_host(model, 7);
    Source source(model, {&copy});
    LayerwiseFusor fusor(at_ratio<FirstK>(0));
    std::vector<std::byte> memory(fusor.workspace_bytes(p, config.head_dim));
    REQUIRE(blend(host, source, fusor, p, outputs, memory).ok());
    REQUIRE(host.outputs() == 2);
    return std::make_pair(host.logits(0), host.logits(1));
  };
  CHECK_FALSE(prompt.segments()[0].exact);
  const auto [row2, row5] = logits(-1);
  for (int changed = 0; changed < 7; ++changed) {
    CAPTURE(changed);
    const auto [other2, other5] = logits(changed);
    CHECK((other2 != row2) == (changed < 2));  // rows 2 and 5 are recomputed: their own stored values do not matter
    const bool reaches_row5 = changed < 5 && changed != 2;
    CHECK((other5 != row5) == reaches_row5);
  }
}
