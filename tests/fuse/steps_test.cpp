// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The step API beyond whole blends: what a source is asked for and when, what survives from one blend to the next, which
// rows a probe reports from, and what place() and fuse() refuse.
#include "scene.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

using namespace kvblend;
using namespace tiny;

namespace {

bool contains(const Status& status, const char* part) {
  return (std::string(status.where()) + ": " + status.message()).find(part) != std::string::npos;
}

// A source whose layers can only be read between wait and release, and that writes down both.
struct StrictSource : Source {
  using Source::Source;
  std::string log;
  std::int32_t held = -1;

  Status wait(std::int32_t layer) {
    log += "w" + std::to_string(layer);
    held = layer;
    return Source::wait(layer);
  }
  auto keys(std::int32_t segment, std::int32_t layer) {
    CHECK(layer == held);
    return Source::keys(segment, layer);
  }
  auto values(std::int32_t segment, std::int32_t layer) {
    CHECK(layer == held);
    return Source::values(segment, layer);
  }
  void release(std::int32_t layer) {
    log += "r" + std::to_string(layer);
    held = -1;
  }
};

template <class Fusor>
Status blend_with(Fusor& fusor, Scene& scene, FloatHost& host, std::span<std::byte> memory, int fail_at_layer = -1,
                  BlendReport* report = nullptr) {
  Source source = scene.source();
  source.fail_at_layer = fail_at_layer;
  return blend(host, source, fusor, scene.prompt, scene.outputs, memory, report);
}

// The value the fusor's steps give, layer by layer, up to and with `last`.
template <class Fusor>
void run_steps(Fusor& fusor, Scene& scene, FloatHost& host, bool place, std::int32_t last) {
  Source source = scene.source();
  REQUIRE(host.begin(scene.prompt).ok());
  REQUIRE(host.embed(fusor.active()).ok());
  for (std::int32_t l = 0; l <= last; ++l) {
    REQUIRE(host.project(l, fusor.active()).ok());
    if (place) REQUIRE(fusor.place(l, host.rope(l), source, host.keys(l), host.values(l)).ok());
    REQUIRE(fusor.fuse(l, host.fresh_keys(), host.fresh_values(), host.keys(l), host.values(l)).ok());
    if (l == last) break;
    REQUIRE(host.attend(l, fusor.active(), fusor.kept()).ok());
    fusor.narrow();
  }
}

}  // namespace

TEST_CASE("each layer is waited for, read and released once, in order") {
  Scene scene;
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  const auto check = [&](auto selector) {
    StrictSource source(scene.model, {nullptr, scene.a.get(), scene.b.get(), nullptr});
    LayerwiseFusor fusor(selector);
    std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, 8));
    REQUIRE(blend(host, source, fusor, scene.prompt, scene.outputs, memory).ok());
    CHECK(source.log == "w0r0w1r1w2r2w3r3");
  };
  check(at_ratio<FirstK>(0.3));
  check(at_ratio<KeyValueDeviation>(0.3));
  check(at_ratio<AttentionMass>(0.3));
}

TEST_CASE_TEMPLATE("layers may have ropes of their own", Angles, ExactAngles, EngineAngles) {
  Config config;
  config.odd_layers_theta = 100;
  config.layer_without_rope = 2;
  Scene scene(config, 13, 40);
  const Prefill oracle = reference(scene.model, scene.tokens, scene.positions, &scene.reused,
                                   [&](int, int row) { return !scene.cached[static_cast<std::size_t>(row)]; });
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  using Selector = DeviationSelector<FirstK, RatioBudget>;
  LayerwiseFusor<Selector, PortableBackend, Angles> fusor(at_ratio<FirstK>(0));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, config.head_dim));
  REQUIRE(blend_with(fusor, scene, host, memory).ok());
  CHECK(cache_error(scene, host, oracle) <= 1e-5);
  CHECK(largest_difference(host.logits(0), oracle.logits.back()) <= 1e-4);
}

TEST_CASE("one fusor and one workspace serve prompt after prompt, also after a failure") {
  Scene first({}, 7);
  Scene second({}, 7, 13);  // the same chunks elsewhere
  const auto check = [&](auto selector) {
    FloatHost expected = make_host(second.model, second.prompt.rows());
    BlendReport expected_report;
    REQUIRE(run(second, expected, selector, PortableBackend{}, &expected_report).ok());

    LayerwiseFusor fusor(selector);
    std::vector<std::byte> memory(fusor.workspace_bytes(first.prompt, 8) + fusor.workspace_bytes(second.prompt, 8),
                                  std::byte{0x41});  // what lies in it decides nothing
    FloatHost other = make_host(first.model, first.prompt.rows());
    REQUIRE(blend_with(fusor, first, other, memory).ok());
    CHECK_FALSE(blend_with(fusor, first, other, memory, 2).ok());
    FloatHost host = make_host(second.model, second.prompt.rows());
    BlendReport report;
    REQUIRE(blend_with(fusor, second, host, memory, -1, &report).ok());
    CHECK(host.memory() == expected.memory());
    CHECK(host.logits(0) == expected.logits(0));
    CHECK(report.fusor.rows_computed == expected_report.fusor.rows_computed);
    CHECK(report.fusor.rows_selected == expected_report.fusor.rows_selected);
  };
  check(at_ratio<FirstK>(0.3));
  check(at_ratio<KeyValueDeviation>(0.3));
  check(at_ratio<AttentionMass>(0.3));
}

TEST_CASE("a probe reports from the rows behind all reused ones, or from the last that runs") {
  Scene scene;  // rows 0-4 fresh, 5-15 and 16-24 reused, 25-28 fresh
  LayerwiseFusor fusor(at_ratio<AttentionMass>(0.3));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, 8));
  const auto first_row = [&](std::vector<Row> outputs) {
    REQUIRE(fusor.begin(scene.prompt, {4, 8}, outputs, memory).ok());
    REQUIRE(fusor.probing());
    return fusor.active()[static_cast<std::size_t>(fusor.first_probe_row())].value;
  };
  CHECK(first_row({}) == 25);
  CHECK(first_row({Row(7), Row(28)}) == 25);
  CHECK(first_row({Row(24), Row(28)}) == 25);  // a reused row is no question, though it runs
  scene.segments = {fresh_segment(scene.question, Position(0)), cached_segment(scene.a->info, Position(10)),
                    cached_segment(scene.b->info, Position(30))};
  scene.lay_out();
  CHECK(first_row({}) == 3);  // the question stands before the passages
  CHECK(first_row({Row(23)}) == 23);
}

TEST_CASE("a probe pass keeps all its rows, and a gradual budget narrows only behind it") {
  Scene scene;
  using Selector = DeviationSelector<AttentionMass, GradualBudget>;
  LayerwiseFusor<Selector> fusor(Selector(AttentionMass{}, GradualBudget(0.4, 1.6, 2)));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, 8));
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  REQUIRE(fusor.begin(scene.prompt, {4, 8}, scene.outputs, memory).ok());
  run_steps(fusor, scene, host, true, 3);
  CHECK(fusor.active().size() == 9);
  CHECK(fusor.kept().size() == 9);
  REQUIRE(fusor.choose_after_probe().ok());
  CHECK(fusor.active().size() == 9 + 13);  // 0.64 of 20 reused rows
  run_steps(fusor, scene, host, false, 2);
  // Shares 0.64, f + (0.64 - f)/2, f, f with a mean of 0.4: f = 0.256.
  CHECK(fusor.kept().size() == 9 + 5);
  CHECK_FALSE(fusor.choose_after_probe().ok());
}

TEST_CASE("rows of the exact prefix are never chosen") {
  Scene scene;
  scene.segments = {cached_segment(scene.a->info, Position(0)), cached_segment(scene.b->info)};
  scene.lay_out();
  REQUIRE(scene.prompt.exact_end() == Row(11));
  LayerwiseFusor fusor(DeviationSelector<FirstK, CountBudget>(FirstK{}, CountBudget(2)));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, 8));
  REQUIRE(fusor.begin(scene.prompt, {4, 8}, scene.outputs, memory).ok());
  const std::vector<Row> active(fusor.active().begin(), fusor.active().end());
  CHECK(active == std::vector<Row>{Row(11), Row(12), Row(19)});
}

TEST_CASE("planes of another shape are refused by name and nothing is written") {
  Scene scene;
  LayerwiseFusor fusor(at_ratio<FirstK>(0.3));
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, 8));
  REQUIRE(fusor.begin(scene.prompt, {4, 8}, scene.outputs, memory).ok());
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  REQUIRE(host.begin(scene.prompt).ok());
  REQUIRE(host.embed(fusor.active()).ok());
  REQUIRE(host.project(0, fusor.active()).ok());
  const auto before = host.memory();
  Source source = scene.source();
  const auto keys = host.keys(0);
  const auto values = host.values(0);
  const auto shaped = [&](std::int64_t rows, std::int32_t heads, std::int32_t head_dim) {
    return FloatHost::Plane(keys.base, ContiguousLayout(rows, heads, head_dim, 64, 32));
  };
  CHECK(contains(fusor.place(0, host.rope(0), source, keys, shaped(28, 2, 8)), "cache values: row 28 has no memory"));
  CHECK(contains(fusor.place(0, host.rope(0), source, shaped(29, 1, 8), values), "stored keys: 2 heads of 8"));
  CHECK(contains(fusor.place(0, host.rope(0), source, keys, shaped(29, 2, 4)), "stored values: 2 heads of 8"));
  CHECK(contains(fusor.place(0, host.rope(0), source, keys, shaped(29, 2, 2000)), "cache values"));
  CHECK(contains(fusor.place(0, host.rope(0), source, shaped(29, 2, 2000), values), "cache keys"));
  RopeSpec wide = host.rope(0);  // both sides agree on a rotation wider than the heads that lie there
  wide.head_dim = wide.rotary_dim = 16;
  for (RopeSpec& spec : scene.model.ropes) spec = wide;
  CHECK(contains(fusor.place(0, wide, source, keys, values), "rope head_dim"));

  const auto fresh = host.fresh_keys();
  auto short_one = fresh;
  short_one.layout.row_count -= 1;
  auto other = fresh;
  other.layout.head_count = 1;
  CHECK(contains(fusor.fuse(0, short_one, fresh, keys, values), "fresh keys: row 14 has no memory"));
  CHECK(contains(fusor.fuse(0, fresh, other, keys, values), "fresh values: 1 heads of 8"));
  CHECK(host.memory() == before);
}

TEST_CASE("a part of a chunk needs the rows up to its own end") {
  Scene scene;
  scene.segments = {fresh_segment(scene.question), cached_segment(scene.a->info, 6, 5)};
  scene.lay_out();
  for (auto& keys : scene.a->keys) keys.resize(10 * 16);  // the last of eleven is lost
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  CHECK(contains(run(scene, host, at_ratio<FirstK>(0.3)), "stored keys: row 10 has no memory"));
}
