// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A blend over a PassHost: against the oracle of tiny_model.hpp, and against the same blend over a LayerwiseHost.
#include <kvblend/eigen/backend.hpp>

#include "scene.hpp"
#include "tiny_pass_host.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

using namespace kvblend;
using namespace tiny;

namespace {

// Notes the rows that run at the last layer.
struct NotingHost : FloatHost {
  using FloatHost::FloatHost;
  std::vector<int> last_rows;

  Status project(std::int32_t layer, std::span<const Row> rows) {
    last_rows.clear();
    for (const Row row : rows) last_rows.push_back(row.value);
    return FloatHost::project(layer, rows);
  }
};

NotingHost make_noting_host(const Model& model, int rows) {
  const Config& c = model.config;
  const std::int64_t head = 4 * c.head_dim;
  const ContiguousLayout layout(rows, c.kv_heads, c.head_dim, c.kv_heads * head, head);
  return NotingHost(model, layout, static_cast<std::size_t>(rows * c.kv_heads * head));
}

// Gives both hosts the KV of the prompt's resident rows.
void make_resident(const Scene& scene, FloatHost& layerwise, TinyPassHost& host) {
  const Config& c = scene.model.config;
  const Prefill full = full_prefill(scene.model, scene.tokens, scene.positions);
  for (std::int32_t l = 0; l < c.layers; ++l) {
    const auto at = static_cast<std::size_t>(l);
    const auto fill = [&](const std::vector<std::vector<double>>& from, bool keys, auto plane, std::vector<float>& to) {
      to.clear();
      for (std::size_t row = 0; row < static_cast<std::size_t>(scene.prompt.resident_rows()); ++row) {
        auto values = from[row];
        if (keys) rotate(scene.model.ropes[at], values, scene.positions[row]);
        const std::vector<float> rounded(values.begin(), values.end());
        to.insert(to.end(), rounded.begin(), rounded.end());
        for (int head = 0; head < c.kv_heads; ++head) {
          encode_head(plane, static_cast<std::int64_t>(row), head, rounded.data() + head * c.head_dim);
        }
      }
    };
    fill(full.keys[at], true, layerwise.keys(l), host.committed_keys[at]);
    fill(full.values[at], false, layerwise.values(l), host.committed_values[at]);
  }
}

bool holds_poison(const TinyPassHost& host) {
  for (const TinyPassHost::Planes* planes : {&host.committed_keys, &host.committed_values}) {
    for (const auto& plane : *planes) {
      for (const float value : plane) {
        if (!(std::abs(value) < 1000)) return true;
      }
    }
  }
  return false;
}

// What a blend must give that ran the rows the host has noted: at scored layers all rows that are not exact, in every
// pass those it was told. The others hold reused KV.
Prefill oracle_of(const Scene& scene, const TinyPassHost& host, int scored) {
  return reference(scene.model, scene.tokens, scene.positions, &scene.reused, [&](int layer, int row) {
    if (row < scene.prompt.resident_rows()) return true;
    const auto among = [row](const std::vector<int>& rows) {
      return std::find(rows.begin(), rows.end(), row) != rows.end();
    };
    if (host.scores > 0 && layer <= scored && among(host.scored_rows)) return true;
    return std::any_of(host.passes.begin(), host.passes.end(), [&](const TinyPassHost::Pass& pass) {
      return pass.range.first <= layer && layer < pass.range.end && (among(pass.rows) || host.extra.count(row) > 0);
    });
  });
}

void check_against(Scene& scene, TinyPassHost& host, const Prefill& oracle) {
  CHECK(host.commits == 1);
  CHECK(host.aborts == 0);
  CHECK_FALSE(holds_poison(host));
  TinyPassHost::Cache cache = host.cache();
  CHECK(cache_error(scene, cache, oracle) <= 1e-5);
  REQUIRE(host.logits.size() == scene.outputs.size());
  for (std::size_t i = 0; i < host.logits.size(); ++i) {
    CHECK(largest_difference(host.logits[i], oracle.logits[static_cast<std::size_t>(scene.outputs[i].value)]) <= 1e-4);
  }
}

// One prompt on both kinds of host. Bits are equal where both compute on the same ones: a PassHost that scores runs
// exact cached rows itself.
template <class Backend, class Selector>
void compare_hosts(Scene& scene, const Selector& selector, bool same_arithmetic) {
  NotingHost layerwise = make_noting_host(scene.model, scene.prompt.rows());
  BlendReport expected;
  {
    TinyPassHost unused(scene.model, true);
    make_resident(scene, layerwise, unused);
  }
  REQUIRE(run(scene, layerwise, selector, Backend{}, &expected).ok());
  for (const bool ranges : {true, false}) {
    CAPTURE(ranges);
    TinyPassHost host(scene.model, ranges);
    {
      NotingHost unused = make_noting_host(scene.model, scene.prompt.rows());
      make_resident(scene, unused, host);
    }
    PassReport report;
    REQUIRE(run_passes(scene, host, selector, Backend{}, &report).ok());
    check_against(scene, host, oracle_of(scene, host, selector.first_layer()));
    CHECK(report.fusor.rows_selected == expected.fusor.rows_selected);
    CHECK(report.passes == static_cast<std::int32_t>(host.passes.size()));
    CHECK(host.loads == 1);
    if (!layerwise.last_rows.empty()) {
      REQUIRE(host.passes.size() == 1);
      CHECK(host.passes[0].rows == layerwise.last_rows);
      CHECK(host.passes[0].outputs.size() == scene.outputs.size());
    } else {
      CHECK(host.passes.empty());
    }
    for (std::size_t l = 0; l < host.committed_keys.size(); ++l) {
      CAPTURE(l);
      if (same_arithmetic) {
        CHECK(same_bits(layerwise.memory()[2 * l], host.committed_keys[l]));
        CHECK(same_bits(layerwise.memory()[2 * l + 1], host.committed_values[l]));
        continue;
      }
      std::vector<float> keys(host.committed_keys[l].size()), values(keys.size());
      std::memcpy(keys.data(), layerwise.memory()[2 * l].data(), keys.size() * sizeof(float));
      std::memcpy(values.data(), layerwise.memory()[2 * l + 1].data(), keys.size() * sizeof(float));
      CHECK(largest_difference_of(keys, host.committed_keys[l]) <= 2e-5);
      CHECK(largest_difference_of(values, host.committed_values[l]) <= 2e-5);
    }
    for (std::size_t i = 0; i < scene.outputs.size(); ++i) {
      if (same_arithmetic) {
        CHECK(host.logits[i] == layerwise.logits(i));
      } else {
        CHECK(largest_difference_of(host.logits[i], layerwise.logits(i)) <= 1e-4);
      }
    }
  }
}

template <class Backend>
void compare_hosts(Scene& scene) {
  const bool cached_exact = scene.prompt.exact_end().value > scene.prompt.resident_rows();
  for (const double ratio : {0.0, 0.05, 0.15, 0.5, 1.0}) {
    CAPTURE(ratio);
    compare_hosts<Backend>(scene, at_ratio<FirstK>(ratio), true);
    compare_hosts<Backend>(scene, at_ratio<RandomScore>(ratio), true);
    compare_hosts<Backend>(scene, at_ratio<KeyDeviation>(ratio), !cached_exact);
    compare_hosts<Backend>(scene, at_ratio<ValueDeviation>(ratio), !cached_exact);
    compare_hosts<Backend>(scene, at_ratio<KeyValueDeviation>(ratio), !cached_exact);
    compare_hosts<Backend>(scene, at_ratio<AttentionMass>(ratio), true);
    compare_hosts<Backend>(scene, at_ratio<AttentionValueMass>(ratio), true);
  }
}

Config eight_layers() {
  Config config;
  config.layers = 8;
  return config;
}

template <class Score>
DeviationSelector<Score, GradualBudget> gradual(double ratio, int span, Score score = {}) {
  return DeviationSelector<Score, GradualBudget>(score, GradualBudget(ratio, 1.6, span));
}

// Rows that a gradual budget with wide = 1.6 keeps of 20, written out from its definition: a line from 1.6 r to f over
// `span` steps, f from then on, such that the mean over all steps is r.
int gradual_rows(double ratio, int span, int step, int steps) {
  const double first = std::min(1.0, 1.6 * ratio);
  double line = 0;  // sum over the steps of how far each has come from first to f
  for (int i = 0; i < steps; ++i) line += std::min(1.0, static_cast<double>(i) / span);
  const double last = first - (first - ratio) * steps / line;
  const double share = first + (last - first) * std::min(1.0, static_cast<double>(step) / span);
  return static_cast<int>(std::floor(share * 20 + 0.5));
}

// The best `count` cached rows by score, and all others of the prompt.
std::vector<int> best(const Scene& scene, const std::vector<double>& scores, int count) {
  std::vector<std::pair<double, int>> ranked;
  std::vector<int> rows;
  for (int row = 0; row < scene.prompt.rows(); ++row) {
    if (scene.cached[static_cast<std::size_t>(row)]) {
      ranked.emplace_back(-scores[static_cast<std::size_t>(row)], row);
    } else {
      rows.push_back(row);
    }
  }
  std::sort(ranked.begin(), ranked.end());
  for (int i = 0; i < count; ++i) rows.push_back(ranked[static_cast<std::size_t>(i)].second);
  std::sort(rows.begin(), rows.end());
  return rows;
}

// The scores of the oracle at layer 1, rows of no cached segment 0. Each kind in units of its mean, if both are wanted.
std::vector<double> deviations(const Scene& scene, bool keys, bool values) {
  const Prefill full = full_prefill(scene.model, scene.tokens, scene.positions);
  std::vector<double> sum(scene.tokens.size(), 0.0);
  const auto add = [&](const std::vector<std::vector<double>>& fresh, const std::vector<std::vector<double>>& reused) {
    std::vector<double> each(sum.size(), 0.0);
    double total = 0;
    for (std::size_t row = 0; row < sum.size(); ++row) {
      if (!scene.cached[row]) continue;
      for (std::size_t i = 0; i < fresh[row].size(); ++i) {
        each[row] += (fresh[row][i] - reused[row][i]) * (fresh[row][i] - reused[row][i]);
      }
      each[row] = std::sqrt(each[row]);
      total += each[row];
    }
    for (std::size_t row = 0; row < sum.size(); ++row) sum[row] += each[row] / total;
  };
  if (keys) add(full.keys[1], scene.reused.keys[1]);
  if (values) add(full.values[1], scene.reused.values[1]);
  return sum;
}

// What a blend over a LayerwiseHost chose by, which is held against the oracle in blend_test.cpp.
template <class Score>
std::vector<double> attention_scores(Scene& scene) {
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  LayerwiseFusor fusor(at_ratio<Score>(0.5));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim));
  Source source = scene.source();
  REQUIRE(blend(host, source, fusor, scene.prompt, scene.outputs, memory).ok());
  return {fusor.attention_mass().begin(), fusor.attention_mass().end()};
}

}  // namespace

TEST_CASE_TEMPLATE("passes at ratio 1 equal full prefill whatever the selector", Backend, PortableBackend,
                   EigenBackend<>) {
  for (const RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    for (const int kv_heads : {1, 2, 4}) {
      Config config;
      config.pairing = pairing;
      config.kv_heads = kv_heads;
      config.bias = kv_heads == 2;
      config.layer_without_rope = kv_heads == 4 ? 2 : -1;
      Scene scene(config);
      scene.outputs = {Row(2), Row(9), Row(24), Row(28)};
      const Prefill oracle = full_prefill(scene.model, scene.tokens, scene.positions);
      const auto check = [&](auto selector) {
        for (const bool ranges : {true, false}) {
          TinyPassHost host(scene.model, ranges);
          REQUIRE(run_passes(scene, host, selector, Backend{}).ok());
          check_against(scene, host, oracle);
        }
      };
      check(at_ratio<FirstK>(1));
      check(at_ratio<RandomScore>(1));
      check(at_ratio<KeyDeviation>(1));
      check(at_ratio<ValueDeviation>(1));
      check(at_ratio<KeyValueDeviation>(1));
      check(at_ratio<AttentionValueMass>(1));
    }
  }
}

TEST_CASE_TEMPLATE("passes at ratio 0 are full reuse plus the fresh rows", Backend, PortableBackend, EigenBackend<>) {
  Scene scene;
  const Prefill oracle = reference(scene.model, scene.tokens, scene.positions, &scene.reused,
                                   [&](int, int row) { return !scene.cached[static_cast<std::size_t>(row)]; });
  const auto check = [&](auto selector) {
    for (const bool ranges : {true, false}) {
      TinyPassHost host(scene.model, ranges);
      PassReport report;
      REQUIRE(run_passes(scene, host, selector, Backend{}, &report).ok());
      check_against(scene, host, oracle);
      CHECK(host.scores == 0);  // with nothing to choose nothing is scored
      CHECK(host.probes == 0);
      CHECK(report.passes == 1);
      CHECK(report.fusor.rows_selected == 0);
      CHECK(report.fusor.rows_computed == 9 * scene.model.config.layers);
    }
  };
  check(at_ratio<FirstK>(0));
  check(at_ratio<KeyDeviation>(0));
  check(at_ratio<KeyValueDeviation>(0));
  check(at_ratio<AttentionMass>(0));
  check(gradual<KeyDeviation>(0, 2));  // never narrows, as it keeps nothing: any host will do
}

TEST_CASE_TEMPLATE("both kinds of host select the same rows and end with the same cache", Backend, PortableBackend,
                   EigenBackend<>) {
  SUBCASE("plain") {
    Scene scene;
    scene.outputs = {Row(0), Row(7), Row(28)};
    compare_hosts<Backend>(scene);
  }
  SUBCASE("a gap of positions") {
    Scene scene({}, 11, 13);
    compare_hosts<Backend>(scene);
  }
  SUBCASE("an exact cached prefix with an output in it") {
    Scene scene({}, 3);
    scene.segments = {cached_segment(scene.a->info), fresh_segment(scene.instructions), cached_segment(scene.b->info),
                      fresh_segment(scene.question)};
    scene.lay_out();
    REQUIRE(scene.prompt.exact_end() == Row(11));
    compare_hosts<Backend>(scene);
    scene.outputs = {Row(4), Row(10), Row(18), Row(28)};
    compare_hosts<Backend>(scene);
  }
  SUBCASE("a resident prefix") {
    Scene scene({}, 4);
    scene.segments = {resident_segment(scene.instructions), cached_segment(scene.a->info),
                      cached_segment(scene.b->info), fresh_segment(scene.question)};
    scene.lay_out();
    REQUIRE(scene.prompt.resident_rows() == 5);
    compare_hosts<Backend>(scene);
  }
  SUBCASE("a resident prefix and an exact chunk behind it") {
    Scene scene({}, 5);
    scene.a->context = scene.instructions;
    encode_chunk(scene.model, *scene.a, 5);
    for (auto& layer : scene.a->prefill.keys) layer.erase(layer.begin(), layer.begin() + 5);
    for (auto& layer : scene.a->prefill.values) layer.erase(layer.begin(), layer.begin() + 5);
    scene.segments = {resident_segment(scene.instructions), cached_segment(scene.a->info),
                      cached_segment(scene.b->info), fresh_segment(scene.question)};
    scene.lay_out();
    REQUIRE(scene.prompt.exact_end() == Row(16));
    scene.outputs = {Row(6), Row(15), Row(28)};
    compare_hosts<Backend>(scene);
  }
  SUBCASE("only fresh rows") {
    Scene scene;
    scene.segments = {fresh_segment(scene.instructions), fresh_segment(scene.question)};
    scene.lay_out();
    compare_hosts<Backend>(scene);
  }
  SUBCASE("only cached rows") {
    Scene scene({}, 6);
    scene.segments = {cached_segment(scene.b->info), cached_segment(scene.a->info), cached_segment(scene.b->info)};
    scene.lay_out();
    compare_hosts<Backend>(scene);
    scene.outputs.clear();  // at ratio 0 nothing is left to run
    compare_hosts<Backend>(scene);
  }
  SUBCASE("segments without rows") {
    Scene scene;
    scene.segments = {cached_segment(scene.b->info, 0, 0),
                      fresh_segment(scene.instructions),
                      fresh_segment({}),
                      cached_segment(scene.a->info),
                      cached_segment(scene.b->info, 9, 0),
                      fresh_segment(scene.question),
                      cached_segment(scene.a->info, 3, 4),
                      fresh_segment({})};
    scene.lay_out();
    compare_hosts<Backend>(scene);
  }
}

TEST_CASE("an empty prompt commits nothing and runs nothing") {
  Scene scene;
  scene.segments.clear();
  scene.lay_out();
  scene.outputs.clear();
  for (const bool ranges : {true, false}) {
    TinyPassHost host(scene.model, ranges);
    PassReport report;
    REQUIRE(run_passes(scene, host, at_ratio<KeyDeviation>(0.5), PortableBackend{}, &report).ok());
    CHECK(host.commits == 1);
    CHECK(host.calls == 2);  // begin and commit
    CHECK(report.passes == 0);
  }
}

TEST_CASE("scores may come from any layer") {
  for (const int check_layer : {0, 1, 2, 3}) {
    CAPTURE(check_layer);
    Scene scene({}, 8);
    const DeviationSelector<ValueDeviation, RatioBudget> selector(ValueDeviation{}, RatioBudget(0.3), check_layer);
    for (const bool ranges : {true, false}) {
      CAPTURE(ranges);
      FloatHost layerwise = make_host(scene.model, scene.prompt.rows());
      BlendReport expected;
      REQUIRE(run(scene, layerwise, selector, PortableBackend{}, &expected).ok());
      TinyPassHost host(scene.model, ranges);
      PassReport report;
      REQUIRE(run_passes(scene, host, selector, PortableBackend{}, &report).ok());
      check_against(scene, host, oracle_of(scene, host, check_layer));
      CHECK(host.scores == 1);
      CHECK(host.logits[0] == layerwise.logits(0));
      CHECK(report.fusor.rows_selected == 6);
      CHECK(expected.fusor.rows_selected == 6);
      for (std::size_t l = 0; l < host.committed_keys.size(); ++l) {
        CHECK(same_bits(layerwise.memory()[2 * l], host.committed_keys[l]));
        CHECK(same_bits(layerwise.memory()[2 * l + 1], host.committed_values[l]));
      }
    }
  }
  Config config;
  config.layers = 1;
  Scene one(config);
  TinyPassHost host(one.model, false);
  const DeviationSelector<ValueDeviation, RatioBudget> selector(ValueDeviation{}, RatioBudget(0.3), 0);
  REQUIRE(run_passes(one, host, selector).ok());
  check_against(one, host, oracle_of(one, host, 0));
}

TEST_CASE("rows that a host computes besides those it was told are only better") {
  Scene scene;
  for (const bool ranges : {true, false}) {
    TinyPassHost host(scene.model, ranges);
    host.extra = {5, 13, 22};
    REQUIRE(run_passes(scene, host, given({7, 12, 16})).ok());
    CHECK(host.passes[0].rows == std::vector<int>{0, 1, 2, 3, 4, 7, 12, 16, 25, 26, 27, 28});
    check_against(scene, host, oracle_of(scene, host, 0));
    TinyPassHost scoring(scene.model, ranges);
    scoring.extra = {5, 13, 22};
    REQUIRE(run_passes(scene, scoring, at_ratio<KeyDeviation>(0.2)).ok());
    check_against(scene, scoring, oracle_of(scene, scoring, 1));
  }
}

TEST_CASE_TEMPLATE("a gradual budget runs groups of layers with the rows of each group's middle", Backend,
                   PortableBackend, EigenBackend<>) {
  using Ranges = std::vector<std::pair<int, int>>;
  Scene scene(eight_layers(), 3);
  // Reused KV at its place, and the fresh rows' behind it.
  TinyPassHost placed(scene.model, true);
  REQUIRE(run_passes(scene, placed, at_ratio<FirstK>(0)).ok());

  const auto check = [&](auto selector, const std::vector<double>& scores, const Ranges& ranges, int groups) {
    CAPTURE(groups);
    const int first = selector.first_layer();
    TinyPassHost host(scene.model, true);
    PassReport report;
    PassOptions options;
    options.groups = groups;
    REQUIRE(run_passes(scene, host, selector, Backend{}, &report, options).ok());
    REQUIRE(host.passes.size() == ranges.size());
    CHECK(report.passes == static_cast<std::int32_t>(ranges.size()));
    check_against(scene, host, oracle_of(scene, host, first));
    std::int64_t computed = host.scores > 0 ? scene.prompt.rows() * (first + 1) : 0;
    if (host.probes > 0) computed += scene.prompt.fresh_rows() * 8;
    int reused_rows = 0;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      CAPTURE(i);
      const TinyPassHost::Pass& pass = host.passes[i];
      CHECK(pass.range.first == ranges[i].first);
      CHECK(pass.range.end == ranges[i].second);
      CHECK(pass.outputs.size() == (i + 1 == ranges.size() ? 1 : 0));
      const int middle = (pass.range.first + pass.range.end - 1) / 2;
      const int count = gradual_rows(0.4, 4, middle - first, 8 - first);
      CHECK(pass.rows == best(scene, scores, count));
      computed += pass.range.size() * static_cast<int>(pass.rows.size());
      reused_rows += pass.range.size() * count;
      if (i + 1 == ranges.size()) CHECK(report.fusor.rows_selected == count);
      // Rows that do not run hold what was placed.
      for (std::int32_t l = std::max(pass.range.first, host.scores > 0 ? first + 1 : 0); l < pass.range.end; ++l) {
        for (int row = 0; row < scene.prompt.rows(); ++row) {
          if (std::find(pass.rows.begin(), pass.rows.end(), row) != pass.rows.end()) continue;
          const std::ptrdiff_t at = row * 16;
          const auto same = [&](const TinyPassHost::Planes& x, const TinyPassHost::Planes& y) {
            const auto layer = static_cast<std::size_t>(l);
            return std::equal(x[layer].begin() + at, x[layer].begin() + at + 16, y[layer].begin() + at);
          };
          CHECK(same(host.committed_keys, placed.committed_keys));
          CHECK(same(host.committed_values, placed.committed_values));
        }
      }
    }
    CHECK(report.fusor.rows_computed == computed);
    // One group has the rows of one layer, be what it may; from two on the last is where the budget falls no more.
    if (groups >= 2) CHECK(std::abs(reused_rows / (8.0 - first) - 0.4 * 20) <= 0.8);
  };
  const Ranges from_1[] = {{{1, 8}},
                           {{1, 5}, {5, 8}},
                           {{1, 3}, {3, 5}, {5, 8}},
                           {{1, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 8}},
                           {{1, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 8}},
                           {{1, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 8}}};
  const Ranges from_0[] = {{{0, 8}},
                           {{0, 4}, {4, 8}},
                           {{0, 2}, {2, 4}, {4, 8}},
                           {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 8}},
                           {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 8}},
                           {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 8}}};
  // First-k: by place in the segment.
  std::vector<double> places(29, 0.0);
  for (int row = 5; row < 16; ++row) places[static_cast<std::size_t>(row)] = 5 - row;
  for (int row = 16; row < 25; ++row) places[static_cast<std::size_t>(row)] = 16 - row;
  std::size_t i = 0;
  for (const int groups : {1, 2, 3, 9, 100, std::numeric_limits<int>::max()}) {
    check(gradual<KeyDeviation>(0.4, 4), deviations(scene, true, false), from_1[i], groups);
    check(gradual<ValueDeviation>(0.4, 4), deviations(scene, false, true), from_1[i], groups);
    check(gradual<KeyValueDeviation>(0.4, 4), deviations(scene, true, true), from_1[i], groups);
    check(gradual<FirstK>(0.4, 4), places, from_0[i], groups);
    check(gradual<AttentionMass>(0.4, 4), attention_scores<AttentionMass>(scene), from_0[i], groups);
    check(gradual<AttentionValueMass>(0.4, 4), attention_scores<AttentionValueMass>(scene), from_0[i], groups);
    ++i;
  }
}

TEST_CASE("a budget that narrows to nothing leaves the later layers to reuse") {
  Scene scene(eight_layers(), 5);
  scene.segments = {cached_segment(scene.b->info), cached_segment(scene.a->info)};
  scene.lay_out();
  scene.outputs.clear();  // no row has to run
  TinyPassHost host(scene.model, true);
  PassReport report;
  // wide = 2 over 7 of 8 layers: the share falls to 0.
  const DeviationSelector<FirstK, GradualBudget> selector(FirstK{}, GradualBudget(0.2, 2.0, 7));
  REQUIRE(run_passes(scene, host, selector, PortableBackend{}, &report, {100}).ok());
  CHECK(host.passes.size() == 7);
  CHECK(report.passes == 7);
  CHECK(host.passes.back().range.end == 7);
  CHECK(report.fusor.rows_selected == 0);
  check_against(scene, host, oracle_of(scene, host, 0));
}

TEST_CASE("a budget that narrows is refused by a host of whole passes before anything is loaded") {
  Scene scene(eight_layers());
  const auto check = [&](auto selector) {
    TinyPassHost host(scene.model, false);
    LayerwiseFusor fusor(selector);
    std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, 8));
    Source source = scene.source();
    const Status status = blend(host, source, fusor, scene.prompt, scene.outputs, memory);
    CHECK(status.code() == StatusCode::unsupported);
    CHECK(std::string(status.where()) == "budget");
    CHECK(source.waits == 0);
    CHECK(host.scores == 0);
    CHECK(host.loads == 0);
    CHECK(host.commits == 0);
    CHECK(host.aborts == 1);
    CHECK(host.misuses == 0);
  };
  check(gradual<KeyDeviation>(0.4, 4));
  check(gradual<FirstK>(0.4, 4));

  TinyPassHost host(scene.model, true);
  for (const int groups : {0, -1}) {
    const Status status = run_passes(scene, host, gradual<FirstK>(0.4, 4), PortableBackend{}, nullptr, {groups});
    CHECK(status.code() == StatusCode::invalid_argument);
    CHECK(std::string(status.where()) == "groups");
  }
  CHECK(host.calls == 0);
}

namespace {

// A score and a budget of no use: other rows at every layer, and more of them later. Rows that were dropped cannot come
// back, as nobody knows what they were.
struct Fickle {
  static constexpr ScoreTiming timing = ScoreTiming::before_load;
  static constexpr bool uses_keys = false;
  static constexpr bool uses_values = false;
  static constexpr const char* name = "fickle";

  Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<float>((inputs.rows[i].value * 7 + inputs.layer * 5) % 20);
    }
    return {};
  }
};

struct Widening {
  Status validate() const { return {}; }
  std::int32_t rows(const BudgetInputs& inputs) const { return 6 + inputs.layer; }
  std::int32_t most_rows(std::int32_t reused) const { return reused; }
  bool narrows_at(std::int32_t, std::int32_t) const { return true; }
};

}  // namespace

TEST_CASE("rows that were dropped stay dropped whatever the selector says") {
  Scene scene(eight_layers());
  TinyPassHost host(scene.model, true);
  REQUIRE(run_passes(scene, host, DeviationSelector<Fickle, Widening>(Fickle{}), PortableBackend{}, nullptr, {8}).ok());
  CHECK(host.passes.size() == 8);  // the host counts rows that come back as misuse
  check_against(scene, host, oracle_of(scene, host, 0));
}

TEST_CASE("later tokens and their KV change no earlier bit of a blend by passes") {
  Scene scene(eight_layers());
  scene.outputs = {Row(3), Row(12), Row(28)};
  std::mt19937 random(99);
  std::normal_distribution<float> normal(0, 30);
  Scene noise(eight_layers());
  noise.outputs = scene.outputs;
  // From row 16 on everything differs: tokens, stored KV and question.
  noise.b->tokens = random_tokens(random, 9, 50);
  noise.b->info.tokens = noise.b->tokens;
  for (auto* planes : {&noise.b->keys, &noise.b->values}) {
    for (auto& plane : *planes) {
      for (float& value : plane) value = normal(random);
    }
  }
  noise.question = random_tokens(random, 4, 50);
  noise.segments = {fresh_segment(noise.instructions), cached_segment(noise.a->info), cached_segment(noise.b->info),
                    fresh_segment(noise.question)};
  noise.prompt = Prompt::make(noise.segments, Position(1000)).value;

  const auto check = [&](auto selector, bool ranges) {
    TinyPassHost host(scene.model, ranges), other(noise.model, ranges);
    REQUIRE(run_passes(scene, host, selector).ok());
    REQUIRE(run_passes(noise, other, selector).ok());
    const auto same_rows = [&](const TinyPassHost::Planes& x, const TinyPassHost::Planes& y, int rows) {
      for (std::size_t l = 0; l < x.size(); ++l) {
        if (std::memcmp(x[l].data(), y[l].data(), static_cast<std::size_t>(rows) * 16 * sizeof(float)) != 0) {
          return false;
        }
      }
      return true;
    };
    CHECK(same_rows(host.committed_keys, other.committed_keys, 16));
    CHECK(same_rows(host.committed_values, other.committed_values, 16));
    CHECK_FALSE(same_rows(host.committed_keys, other.committed_keys, 17));
    CHECK(host.logits[0] == other.logits[0]);
    CHECK(host.logits[1] == other.logits[1]);
    CHECK(host.logits[2] != other.logits[2]);
  };
  for (const bool ranges : {true, false}) {
    check(given({6, 7, 10, 18}), ranges);
    check(at_ratio<FirstK>(0.5), ranges);
    check(at_ratio<KeyValueDeviation>(1), ranges);
  }
  // Place in the segment alone decides, so that both blends run the same rows.
  check(gradual<FirstK>(0.4, 4), true);
}

namespace {

std::string text(const Status& status) { return std::string(status.where()) + ": " + status.message(); }

// Two resident rows, so that there is something to lose.
Scene with_resident_rows() {
  Scene scene(eight_layers());
  const std::span<const TokenId> all(scene.instructions);
  scene.segments = {resident_segment(all.first(2)), fresh_segment(all.subspan(2)), cached_segment(scene.a->info),
                    cached_segment(scene.b->info), fresh_segment(scene.question)};
  scene.lay_out();
  return scene;
}

template <class Selector>
void fail_everywhere(Selector selector, bool ranges, int calls) {
  Scene scene = with_resident_rows();
  TinyPassHost good(scene.model, ranges);
  FloatHost unused = make_host(scene.model, scene.prompt.rows());
  make_resident(scene, unused, good);
  const TinyPassHost start = good;
  REQUIRE(run_passes(scene, good, selector).ok());
  CHECK(good.calls == calls);

  LayerwiseFusor fusor(selector);
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim));
  const auto fail = [&](int call, int layer, StatusCode code, const char* message) {
    CAPTURE(call);
    CAPTURE(layer);
    TinyPassHost host = start;
    Source source = scene.source();
    host.fail_after = call;
    source.fail_at_layer = layer;
    const Status status = blend(host, source, fusor, scene.prompt, scene.outputs, memory);
    CHECK(status.code() == code);
    CHECK(text(status).find(message) != std::string::npos);
    CHECK(host.aborts == (call == 0 ? 0 : 1));  // a begin that failed has nothing to abort
    CHECK(host.commits == 0);
    CHECK(host.committed_keys == start.committed_keys);
    CHECK(host.committed_values == start.committed_values);
    if (layer >= 0) CHECK(host.loads == 0);

    host.fail_after = -1;
    Source again = scene.source();
    REQUIRE(blend(host, again, fusor, scene.prompt, scene.outputs, memory).ok());
    CHECK(host.committed_keys == good.committed_keys);
    CHECK(host.committed_values == good.committed_values);
    CHECK(host.logits == good.logits);
    CHECK(host.misuses == 0);
  };
  for (int call = 0; call < calls; ++call) fail(call, -1, StatusCode::host_error, "engine failed");
  for (int layer = 0; layer < 8; ++layer) fail(-1, layer, StatusCode::corrupt, "checksum differs");
}

}  // namespace

TEST_CASE("a pass host or a source that fails in any call aborts once and can be used again") {
  fail_everywhere(at_ratio<FirstK>(0.3), false, 4);  // begin, load, compute, commit
  fail_everywhere(at_ratio<KeyValueDeviation>(0.3), false, 5);
  fail_everywhere(at_ratio<KeyValueDeviation>(0.3), true, 5);
  fail_everywhere(gradual<KeyDeviation>(0.4, 4), true, 7);  // three groups
  fail_everywhere(gradual<FirstK>(0.4, 4), true, 6);
  fail_everywhere(at_ratio<AttentionMass>(0.3), false, 5);  // begin, load, probe, compute, commit
  fail_everywhere(at_ratio<AttentionValueMass>(0.3), true, 5);
}

TEST_CASE("bad arguments are named before a pass host is asked for anything") {
  Scene scene;
  TinyPassHost host(scene.model, true);
  CHECK(text(run_passes(scene, host, at_ratio<KeyDeviation>(1.5))).find("ratio") != std::string::npos);
  const DeviationSelector<KeyDeviation, RatioBudget> outside(KeyDeviation{}, RatioBudget(0.1), 4);
  CHECK(text(run_passes(scene, host, outside)).find("check_layer") != std::string::npos);
  scene.outputs = {Row(29)};
  CHECK(text(run_passes(scene, host, at_ratio<FirstK>(0.1))).find("outputs[0]") != std::string::npos);
  scene.outputs = {Row(28)};
  LayerwiseFusor fusor(at_ratio<FirstK>(0.1));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, 8) - 1);
  Source source = scene.source();
  PassReport report;
  CHECK(blend(host, source, fusor, scene.prompt, scene.outputs, memory, &report).code() ==
        StatusCode::insufficient_space);
  CHECK(host.calls == 0);
  CHECK(host.aborts == 0);
}

TEST_CASE("a blend by passes allocates nothing") {
  Scene scene(eight_layers());
  const auto check = [&](auto selector) {
    TinyPassHost host(scene.model, true);
    LayerwiseFusor fusor(selector);
    std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, 8));
    Source source = scene.source();
    PassReport report;
    const long before = allocations_so_far();
    const Status status = blend(host, source, fusor, scene.prompt, scene.outputs, memory, &report);
    const long all = allocations_so_far() - before;
    REQUIRE(status.ok());
    CHECK(host.own_allocations > 0);  // or nothing counts
    CHECK(all == host.own_allocations);
  };
  check(at_ratio<FirstK>(0.3));
  check(at_ratio<KeyValueDeviation>(0.3));
  check(gradual<KeyValueDeviation>(0.4, 4));
  check(at_ratio<AttentionValueMass>(0.3));
}

TEST_CASE("without a row that runs anyway a pass host is asked for no probe") {
  Scene scene({}, 5);
  scene.segments = {cached_segment(scene.b->info), cached_segment(scene.a->info)};
  scene.lay_out();
  scene.outputs.clear();
  TinyPassHost host(scene.model, false);
  REQUIRE(run_passes(scene, host, at_ratio<AttentionMass>(0.5)).ok());
  CHECK(host.probes == 0);
  CHECK(host.passes.size() == 1);
}

TEST_CASE("a probe that reports too few rows ends a blend by passes") {
  struct Short : TinyPassHost {
    using TinyPassHost::TinyPassHost;
    [[nodiscard]] std::span<const float> attention_mass(std::int32_t layer) {
      const auto all = TinyPassHost::attention_mass(layer);
      return layer == 2 ? all.first(all.size() - 1) : all;
    }
  };
  Scene scene;
  Short host(scene.model, false);
  LayerwiseFusor fusor(at_ratio<AttentionMass>(0.3));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim));
  Source source = scene.source();
  const Status status = blend(host, source, fusor, scene.prompt, scene.outputs, memory);
  CHECK(status.code() == StatusCode::mismatch);
  CHECK(text(status) == "attention_mass(2): has 28 floats, the prompt has 29 rows");
  CHECK(host.passes.empty());
  CHECK(host.aborts == 1);
}

TEST_CASE("the report says what a blend by passes did") {
  Scene scene;
  const auto check = [&](auto selector, bool ranges, int selected, int computed) {
    CAPTURE(ranges);
    TinyPassHost host(scene.model, ranges);
    PassReport report;
    report.passes = 77;  // of an earlier blend
    REQUIRE(run_passes(scene, host, selector, PortableBackend{}, &report).ok());
    CHECK(report.passes == 1);
    CHECK(report.fusor.rows_selected == selected);
    CHECK(report.fusor.rows_computed == computed);
  };
  // 20 reused rows and 9 that must run, in four layers.
  check(at_ratio<FirstK>(0.3), true, 6, 15 * 4);
  check(at_ratio<FirstK>(0.3), false, 6, 15 * 4);
  check(at_ratio<KeyDeviation>(0.3), true, 6, 29 * 2 + 15 * 3);   // goes on at layer 1, whose projections were run
  check(at_ratio<KeyDeviation>(0.3), false, 6, 29 * 2 + 15 * 4);  // starts anew
  check(at_ratio<AttentionMass>(0.3), true, 6, 9 * 4 + 15 * 4);   // the probe runs what must run
  check(given({5, 6}), true, 2, 11 * 4);
  scene.outputs = {Row(5), Row(28)};  // what must run anyway is not selected
  check(given({5, 6}), true, 2, 12 * 4);
}
