// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Blends through cuda::Fusor against LayerwiseFusor on the same scene: the same rows at every layer, the same bits of
// KV, whatever the selector, the prompt and the memory; and the same when all work is written down first and done later.
#include <kvblend/kvblend.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>
#include "deferred.hpp"
#include "executions.hpp"
#include "fuse/scene.hpp"

using namespace kvblend;
using namespace tiny;

namespace {

namespace device = kvblend::cuda;

bool contains(const Status& status, const char* part) {
  return (std::string(status.where()) + ": " + status.message()).find(part) != std::string::npos;
}

// Writes down which rows ran and which went on.
struct Recorded : FloatHost {
  using FloatHost::FloatHost;
  std::vector<std::vector<int>> log;

  explicit Recorded(const FloatHost& host) : FloatHost(host) {}
  Status project(std::int32_t layer, std::span<const Row> rows) {
    note(rows);
    return FloatHost::project(layer, rows);
  }
  Status attend(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept) {
    note(kept);
    return FloatHost::attend(layer, rows, kept);
  }
  Status attend_and_report(std::int32_t layer, std::span<const Row> rows, std::span<const ActiveIndex> kept,
                           std::int32_t first, std::span<float> mass) {
    note(kept);
    log.push_back({first, static_cast<int>(mass.size())});
    return FloatHost::attend_and_report(layer, rows, kept, first, mass);
  }

 private:
  template <class T>
  void note(std::span<const T> list) {
    std::vector<int>& values = log.emplace_back();
    for (const T entry : list) values.push_back(entry.value);
  }
};

template <class Fusor>
struct Memory {
  std::vector<std::byte> host, device;

  Memory(const Fusor& fusor, const Scene& scene) {
    const Config& c = scene.model.config;
    const device::WorkspaceBytes bytes = fusor.workspace_bytes(scene.prompt, {c.layers, c.head_dim}, c.kv_heads);
    host.assign(bytes.host, std::byte{0x41});  // what lies in it decides nothing
    device.assign(bytes.device, std::byte{0x41});
  }
  device::Workspace spans() { return {host, device}; }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <class Execution, class Angles = ExactAngles, class Selector>
void check_same(Scene& scene, const Selector& selector) {
  Recorded expected(make_host(scene.model, scene.prompt.rows()));
  BlendReport expected_report;
  LayerwiseFusor<Selector, PortableBackend, Angles> host_fusor(selector);
  std::vector<std::byte> memory(host_fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim));
  Source source = scene.source();
  REQUIRE(blend(expected, source, host_fusor, scene.prompt, scene.outputs, memory, &expected_report).ok());

  Recorded host(make_host(scene.model, scene.prompt.rows()));
  BlendReport report;
  device::Fusor<Selector, Execution, Angles> fusor(selector);
  Memory workspace(fusor, scene);
  const Status status = blend(host, source, fusor, scene.prompt, scene.outputs, workspace.spans(), &report);
  REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());
  CHECK(host.log == expected.log);
  CHECK(host.memory() == expected.memory());
  REQUIRE(host.outputs() == scene.outputs.size());
  for (std::size_t i = 0; i < host.outputs(); ++i) CHECK(same_bits(host.logits(i), expected.logits(i)));
  CHECK(report.fusor.rows_selected == expected_report.fusor.rows_selected);
  CHECK(report.fusor.rows_computed == expected_report.fusor.rows_computed);
  CHECK(report.fusor.selector == expected_report.fusor.selector);
}

template <class Score>
DeviationSelector<Score, GradualBudget> gradual(double ratio) {
  return DeviationSelector<Score, GradualBudget>(Score{}, GradualBudget(ratio, 1.6, 2));
}

// Each kind of score, on the host and on the device, with a budget of each kind.
template <class Execution>
void check_selectors(Scene& scene) {
  check_same<Execution>(scene, at_ratio<FirstK>(0.3));
  check_same<Execution>(scene, gradual<RandomScore>(0.4));
  check_same<Execution>(scene, at_ratio<ValueDeviation>(0.3));
  check_same<Execution>(scene, DeviationSelector<KeyDeviation, CountBudget>(KeyDeviation{}, CountBudget(3), 2));
  check_same<Execution>(scene, gradual<KeyValueDeviation>(0.4));
  check_same<Execution>(scene, DeviationSelector<AttentionMass, CountBudget>(AttentionMass{}, CountBudget(3)));
  check_same<Execution>(scene, gradual<AttentionValueMass>(0.4));
}

}  // namespace

TEST_CASE_TEMPLATE("a blend on the device runs the same rows and leaves the same bits", Execution,
                   KVBLEND_TEST_EXECUTIONS) {
  Scene scene;
  scene.a->info.scores = scene.a->scores = {3, 1, 2, 9, 0, 4, 4, 8, 1, 1, 2};
  scene.b->info.scores = scene.b->scores = {3, 1, 2, 9, 0, 4, 4, 8, 1};
  check_selectors<Execution>(scene);
  check_same<Execution>(scene, at_ratio<StoredScore<>>(0.3));
  check_same<Execution>(scene, at_ratio<ProductScore<AttentionValueMass, StoredScore<>>>(0.3));
  check_same<Execution>(scene, gradual<SumScore<KeyValueDeviation, StoredScore<>>>(0.4));
  for (const double ratio : {0.0, 0.02, 0.5, 1.0}) {
    CAPTURE(ratio);
    check_same<Execution>(scene, at_ratio<RandomScore>(ratio));
    check_same<Execution>(scene, at_ratio<KeyValueDeviation>(ratio));
    check_same<Execution>(scene, gradual<AttentionValueMass>(ratio));
  }
  for (const std::int32_t check_layer : {0, 3}) {
    CAPTURE(check_layer);
    check_same<Execution>(
        scene, DeviationSelector<KeyValueDeviation, RatioBudget>(KeyValueDeviation{}, RatioBudget(0.4), check_layer));
  }
}

TEST_CASE_TEMPLATE("budgets that read scores serve where the host has them", Execution, KVBLEND_TEST_EXECUTIONS) {
  Scene scene;
  check_same<Execution>(scene, DeviationSelector<RandomScore, ThresholdBudget>(RandomScore{}, ThresholdBudget{0.6f}));
}

TEST_CASE_TEMPLATE("prompts of all kinds are blended alike", Execution, KVBLEND_TEST_EXECUTIONS) {
  Scene scene;
  SUBCASE("outputs in the middle, also among reused rows") { scene.outputs = {Row(3), Row(7), Row(16), Row(28)}; }
  SUBCASE("no outputs") { scene.outputs = {}; }
  SUBCASE("nothing cached") {
    scene.segments = {fresh_segment(scene.instructions), fresh_segment(scene.question)};
    scene.lay_out();
  }
  SUBCASE("all of it cached") {
    scene.segments = {cached_segment(scene.b->info, Position(3)), cached_segment(scene.a->info, Position(20))};
    scene.lay_out();
    scene.outputs = {};
  }
  SUBCASE("an exact prefix") {
    scene.segments = {cached_segment(scene.a->info, Position(0)), cached_segment(scene.b->info),
                      fresh_segment(scene.question)};
    scene.lay_out();
    REQUIRE(scene.prompt.exact_end() == Row(11));
    scene.outputs = {Row(4), Row(23)};
  }
  SUBCASE("resident rows") {
    scene.segments = {resident_segment(scene.instructions), cached_segment(scene.a->info),
                      fresh_segment(scene.question)};
    scene.lay_out();
  }
  SUBCASE("a part of a chunk, and no rows of another") {
    scene.segments = {fresh_segment(scene.question), cached_segment(scene.a->info, 6, 4),
                      cached_segment(scene.b->info, 3, 0), cached_segment(scene.b->info, 3, 5)};
    scene.lay_out();
  }
  SUBCASE("NaN and infinity in the stored KV") {
    for (std::size_t layer = 0; layer < 4; ++layer) {
      scene.a->keys[layer][37] = std::numeric_limits<float>::quiet_NaN();
      scene.b->values[layer][50] = std::numeric_limits<float>::infinity();
      scene.b->keys[layer][51] = 3e38f;
    }
  }
  check_selectors<Execution>(scene);
}

TEST_CASE_TEMPLATE("an empty prompt is blended to nothing", Execution, KVBLEND_TEST_EXECUTIONS) {
  Scene scene;
  scene.segments = {};
  scene.prompt = Prompt::make(scene.segments, Position(9)).value;
  scene.outputs = {};
  check_same<Execution>(scene, at_ratio<KeyDeviation>(0.3));
}

TEST_CASE_TEMPLATE("layers may have ropes of their own, and tables a row each", Execution, KVBLEND_TEST_EXECUTIONS) {
  Config config;
  config.odd_layers_theta = 100;
  config.layer_without_rope = 2;
  Scene scene(config, 13, 40);
  check_same<Execution>(scene, at_ratio<KeyValueDeviation>(0.3));
  check_same<Execution>(scene, gradual<FirstK>(0.3));
  Scene plain({}, 13, 40);
  check_same<Execution, EngineAngles>(plain, at_ratio<KeyValueDeviation>(0.3));
}

TEST_CASE("one fusor and one workspace serve prompt after prompt, also after a failure") {
  Scene first({}, 7);
  Scene second({}, 7, 13);  // the same chunks elsewhere
  const auto check = [&](auto selector) {
    FloatHost expected = make_host(second.model, second.prompt.rows());
    REQUIRE(run(second, expected, selector).ok());
    device::Fusor<decltype(selector), kvblend_test::AnyExecution> fusor(selector);
    Memory memory(fusor, first);
    for (const int fail_at_layer : {-1, 2}) {
      FloatHost other = make_host(first.model, first.prompt.rows());
      Source source = first.source();
      source.fail_at_layer = fail_at_layer;
      CHECK(blend(other, source, fusor, first.prompt, first.outputs, memory.spans()).ok() == (fail_at_layer < 0));
    }
    FloatHost host = make_host(second.model, second.prompt.rows());
    Source source = second.source();
    REQUIRE(blend(host, source, fusor, second.prompt, second.outputs, memory.spans()).ok());
    CHECK(host.memory() == expected.memory());
  };
  check(gradual<FirstK>(0.4));
  check(gradual<KeyValueDeviation>(0.4));
  check(gradual<AttentionValueMass>(0.4));
}

// What a CUDA Graph needs of a blend, and a stream that runs far behind the host.
TEST_CASE("a blend that is written down first and done twice leaves the same bits each time") {
  Config config;
  config.odd_layers_theta = 100;  // tables are uploaded at each layer
  Scene scene(config, 13, 40);
  scene.outputs = {Row(7), Row(28)};
  const auto check = [&](auto selector) {
    FloatHost expected = make_host(scene.model, scene.prompt.rows());
    REQUIRE(run(scene, expected, selector).ok());

    kvblend_test::Queue queue;
    FloatHost engine = make_host(scene.model, scene.prompt.rows());
    kvblend_test::DeferredHost host(engine, queue, scene.prompt.rows(), config);
    device::Fusor<decltype(selector), kvblend_test::DeferredExecution> fusor(selector,
                                                                             kvblend_test::DeferredExecution(&queue));
    Memory memory(fusor, scene);
    Source source = scene.source();
    const Status status = blend(host, source, fusor, scene.prompt, scene.outputs, memory.spans());
    REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());
    const std::vector<std::vector<std::byte>> untouched = engine.memory();
    CHECK(untouched == make_host(scene.model, scene.prompt.rows()).memory());
    for (int replay = 0; replay < 2; ++replay) {
      CAPTURE(replay);
      kvblend_test::run_queue(queue);
      CHECK(engine.memory() == expected.memory());
      REQUIRE(engine.outputs() == 2);
      for (std::size_t i = 0; i < 2; ++i) CHECK(engine.logits(i) == expected.logits(i));
      for (std::int32_t layer = 0; layer < 4; ++layer) {
        std::fill_n(engine.keys(layer).base, engine.memory()[0].size(), std::byte{0x3c});
        std::fill_n(engine.values(layer).base, engine.memory()[0].size(), std::byte{0x3c});
      }
      std::fill(memory.device.begin(), memory.device.end(), std::byte{0x41});
    }
  };
  check(at_ratio<KeyValueDeviation>(0.3));
  check(gradual<KeyValueDeviation>(0.4));
  check(gradual<RandomScore>(0.4));
  check(gradual<AttentionValueMass>(0.4));
  check(at_ratio<FirstK>(0));
}

template <class Plane>
void check_norms(const Plane& plane, std::int32_t rows) {
  std::vector<Row> every_third;
  for (Row row(2); row.value < rows; row = row + 3) every_third.push_back(row);
  std::vector<float> out(every_third.size() + 1, -1.0f);
  std::vector<std::byte> scratch(8 * out.size() * static_cast<std::size_t>(plane.layout.heads()));
  using device::Operations;
  const Operations<kvblend_test::AnyExecution> operations(kvblend_test::AnyExecution{}, scratch);
  REQUIRE(operations.norms(plane, every_third, std::span(out).first(every_third.size())).ok());
  for (std::size_t i = 0; i < every_third.size(); ++i) {
    CAPTURE(i);
    const float expected = row_norm(plane, every_third[i].value);
    CHECK(std::memcmp(&out[i], &expected, sizeof expected) == 0);
  }
  CHECK(out.back() == -1.0f);
}

TEST_CASE("norms of rows have the bits of the host's in every kind of memory") {
  std::vector<std::byte> memory(16 * 1024);
  std::mt19937 random(3);
  // Neither NaN nor the same in any two rows, whatever the format.
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random() % 0x38);
  check_norms(dense_plane<F32Codec>(memory.data(), 20, 3, 36), 20);
  check_norms(dense_plane<F16Codec>(memory.data(), 20, 3, 36), 20);
  check_norms(dense_plane<Q8_0Codec>(memory.data(), 20, 3, 64), 20);
  std::vector<std::int32_t> table{5, 2, 0, 7, 1};
  const PagedLayout layout(table.data(), 5, 4, 3, 36, 4 * 3 * 72, 3 * 72, 72);
  check_norms(PagedPlane<Bf16Codec>(memory.data(), layout), 20);

  table[1] = -1;  // which a device cannot report
  const std::vector<Row> rows{Row(3), Row(5), Row(8)};
  std::vector<float> out(3);
  std::vector<std::byte> scratch(8 * 10);
  const device::Operations<kvblend_test::AnyExecution> operations(kvblend_test::AnyExecution{}, scratch);
  const PagedPlane<Bf16Codec> plane(memory.data(), layout);
  REQUIRE(operations.norms(plane, rows, out).ok());
  CHECK(out[0] > 0);
  CHECK(out[1] == 0);
  CHECK(out[2] > 0);
}

TEST_CASE("a paged half-precision cache takes the same bits, and rows without a block are passed over") {
  Scene scene;
  const Config& c = scene.model.config;
  const std::vector<std::int32_t> table{5, 2, 0, 7, 1, 3, 4, 6};
  const std::int64_t head = 2 * c.head_dim;
  const PagedLayout layout(table.data(), 8, 4, c.kv_heads, c.head_dim, 4 * 2 * head, c.kv_heads * head, head);
  using PagedHost = Host<F16Codec, PagedLayout>;
  const auto selector = at_ratio<KeyValueDeviation>(0.3);
  PagedHost expected(scene.model, layout, static_cast<std::size_t>(8 * 4 * 2 * head));
  REQUIRE(run(scene, expected, selector).ok());
  PagedHost host(scene.model, layout, static_cast<std::size_t>(8 * 4 * 2 * head));
  device::Fusor<decltype(selector), kvblend_test::AnyExecution> fusor(selector);
  Memory memory(fusor, scene);
  Source source = scene.source();
  REQUIRE(blend(host, source, fusor, scene.prompt, scene.outputs, memory.spans()).ok());
  CHECK(host.memory() == expected.memory());

  const std::vector<std::int32_t> holes{-1, -1, -1, -1, -1, -1, -1, -1};  // which a device cannot report
  PagedHost without(scene.model, layout, static_cast<std::size_t>(8 * 4 * 2 * head));
  const auto before = without.memory();
  REQUIRE(fusor.begin(scene.prompt, {c.layers, c.head_dim}, scene.outputs, memory.spans()).ok());
  auto keys = without.keys(0);
  keys.layout.block_table = holes.data();
  keys.base += 4 * 2 * head;                                          // "block -1" is the first of the memory
  REQUIRE(fusor.place(1, without.rope(1), source, keys, keys).ok());  // where deviations want all rows placed
  CHECK(without.memory() == before);
}

TEST_CASE("what does not fit is refused by name and nothing is written") {
  Scene scene;
  const Config& c = scene.model.config;
  const BlendShape shape{c.layers, c.head_dim};
  const auto selector = at_ratio<KeyDeviation>(0.3);
  device::Fusor<DeviationSelector<KeyDeviation, RatioBudget>, kvblend_test::AnyExecution> fusor(selector);
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  Source source = scene.source();
  CHECK(contains(fusor.place(0, host.rope(0), source, host.keys(0), host.values(0)), "begin: was not called"));
  CHECK(contains(fusor.fuse(0, host.fresh_keys(), host.fresh_keys(), host.keys(0), host.values(0)), "begin: was not"));

  Memory memory(fusor, scene);
  const device::Workspace all = memory.spans();
  CHECK(contains(fusor.begin(scene.prompt, shape, scene.outputs, {all.host.first(100), all.device}),
                 "workspace.host: needs"));
  CHECK(contains(fusor.begin(scene.prompt, shape, scene.outputs, {all.host, all.device.first(100)}),
                 "workspace.device: needs"));
  CHECK(contains(fusor.begin(scene.prompt, {0, 8}, scene.outputs, all), "layers"));
  CHECK(contains(fusor.begin(scene.prompt, {4, 2000}, scene.outputs, all), "head_dim"));
  const std::vector<Row> outside{Row(29)};
  CHECK(contains(fusor.begin(scene.prompt, shape, outside, all), "outputs[0]"));
  device::Fusor<DeviationSelector<KeyDeviation, RatioBudget>, kvblend_test::AnyExecution> late(
      DeviationSelector<KeyDeviation, RatioBudget>(KeyDeviation{}, RatioBudget(0.3), 4));
  CHECK(contains(late.begin(scene.prompt, shape, scene.outputs, all), "check_layer"));

  REQUIRE(fusor.begin(scene.prompt, shape, scene.outputs, all).ok());
  REQUIRE(host.begin(scene.prompt).ok());
  REQUIRE(host.embed(fusor.active()).ok());
  REQUIRE(host.project(0, fusor.active()).ok());
  const auto before = host.memory();
  const auto keys = host.keys(0);
  const auto values = host.values(0);
  const auto shaped = [&](std::int64_t rows, std::int32_t heads, std::int32_t head_dim) {
    return FloatHost::Plane(keys.base, ContiguousLayout(rows, heads, head_dim, 64, 32));
  };
  CHECK(contains(fusor.place(0, host.rope(0), source, keys, shaped(28, 2, 8)), "cache values: not all of 29 rows"));
  CHECK(contains(fusor.place(0, host.rope(0), source, shaped(29, 1, 8), values), "stored keys: 2 heads of 8"));
  CHECK(contains(fusor.place(0, host.rope(0), source, keys, shaped(29, 2, 4)), "stored values: 2 heads of 8"));
  CHECK(contains(fusor.place(0, host.rope(0), source, keys, FloatHost::Plane(nullptr, keys.layout)), "no memory"));
  const auto fresh = host.fresh_keys();
  auto short_one = fresh;
  short_one.layout.row_count -= 1;
  CHECK(contains(fusor.fuse(0, short_one, fresh, keys, values), "fresh keys: not all of"));
  auto other = fresh;
  other.layout.head_count = 1;
  CHECK(contains(fusor.fuse(0, fresh, other, keys, values), "fresh values: 1 heads of 8"));
  CHECK(host.memory() == before);

  // Without room for the sums of deviations, only the layer that scores fails.
  const std::size_t scratch = device::Operations<kvblend_test::AnyExecution>().scratch_bytes(20, c.kv_heads);
  REQUIRE(
      fusor.begin(scene.prompt, shape, scene.outputs, {all.host, all.device.first(all.device.size() - scratch)}).ok());
  CHECK(fusor.fuse(0, fresh, fresh, keys, values).ok());
  CHECK(contains(fusor.fuse(1, fresh, fresh, keys, values), "scratch: deviations need"));

  const auto by_attention = gradual<AttentionValueMass>(0.4);
  device::Fusor<std::remove_const_t<decltype(by_attention)>, kvblend_test::AnyExecution> probing(by_attention);
  CHECK(contains(probing.choose_after_probe(), "probe: no probe pass is under way"));
  Memory more(probing, scene);
  const std::span<std::byte> less = std::span(more.device).first(more.device.size() - scratch);
  REQUIRE(probing.begin(scene.prompt, shape, scene.outputs, {more.host, less}).ok());
  REQUIRE(probing.probing());
  CHECK(contains(probing.fuse(0, fresh, fresh, keys, values), "scratch: norms need"));
}

TEST_CASE_TEMPLATE("the shifter leaves the bits of RopeShifter and refuses what that does", Execution,
                   KVBLEND_TEST_EXECUTIONS) {
  Scene scene;
  const RopeSpec& spec = scene.model.ropes[0];
  Source source = scene.source();
  const auto stored = source.keys(1, 0);
  std::vector<float> expected(20 * 16), moved(20 * 16), host(16), on_device(16);
  const auto plane = [](std::vector<float>& values) {
    return dense_plane<F32Codec>(reinterpret_cast<std::byte*>(values.data()), 20, 2, 8);
  };
  const device::Shifter<Execution> shifter;
  for (const int new_first : {3, 90}) {  // stays, and turns
    const ShiftRun run{Row(4), 1, 9, Position(3), Position(new_first)};
    REQUIRE(RopeShifter<>().shift(spec, spec, run, stored, plane(expected), host).ok());
    REQUIRE(shifter.shift(spec, spec, run, stored, plane(moved), host, on_device).ok());
    CHECK(same_bits(moved, expected));
  }
  const auto refuses = [&](const ShiftRun& run, const RopeSpec& wanted, std::size_t floats, const char* part) {
    const Status status =
        shifter.shift(spec, wanted, run, stored, plane(moved), host, std::span(on_device).first(floats));
    return contains(status, part);
  };
  const ShiftRun run{Row(4), 1, 9, Position(3), Position(90)};
  CHECK(refuses(run, spec, 7, "rotation table: needs 8 floats"));
  CHECK(refuses({Row(4), 3, 9, Position(3), Position(90)}, spec, 16, "source: not all of 9 rows"));
  CHECK(refuses({Row(12), 1, 9, Position(3), Position(90)}, spec, 16, "destination: not all of 9 rows"));
  CHECK(refuses({Row(4), 1, -1, Position(3), Position(90)}, spec, 16, "run count"));
  RopeSpec other = spec;
  other.pairing = RopePairing::interleaved;
  CHECK(refuses(run, other, 16, "rope pairing"));
}
