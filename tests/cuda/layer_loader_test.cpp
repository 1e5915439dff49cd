// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LayerLoader's order of work, on two queues that are written down and then gone through in any order that the marks
// allow: a layer is never read before its copy, and its memory never overwritten before it was read.
#include <kvblend/cuda/layer_loader.hpp>
#include <kvblend/kvblend.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>
#include "executions.hpp"
#include "fuse/scene.hpp"

using namespace kvblend;
using namespace tiny;

namespace {

namespace device = kvblend::cuda;

bool contains(const Status& status, const char* part) {
  return (std::string(status.where()) + ": " + status.message()).find(part) != std::string::npos;
}

// Two queues. An event is recorded by a piece of work, and waited for as it was last recorded when the wait was queued.
struct Queues {
  struct Work {
    std::function<void()> run;
    const int* awaits = nullptr;  // runs once this counts `awaited` records
    int awaited = 0;
  };
  std::array<std::vector<Work>, 2> queue;  // 0 the blend's, 1 that of copies
  std::array<std::size_t, 2> done{};
  std::array<std::array<int, 16>, 2> queued{}, recorded{};  // by kind of mark and slot

  void mark(std::size_t on, std::size_t kind, std::int32_t slot) {
    const auto s = static_cast<std::size_t>(slot);
    ++queued[kind][s];
    queue[on].push_back({[this, kind, s] { ++recorded[kind][s]; }});
  }
  void await(std::size_t on, std::size_t kind, std::int32_t slot) {
    const auto s = static_cast<std::size_t>(slot);
    queue[on].push_back({[] {}, &recorded[kind][s], queued[kind][s]});
  }
  [[nodiscard]] bool can_run(std::size_t on) const {
    if (done[on] == queue[on].size()) return false;
    const Work& work = queue[on][done[on]];
    return work.awaits == nullptr || *work.awaits >= work.awaited;
  }
  // Until nothing can run: false if something is left, that is, the queues wait for each other.
  bool run(const std::function<std::size_t()>& prefer) {
    while (can_run(0) || can_run(1)) {
      std::size_t on = prefer();
      if (!can_run(on)) on = 1 - on;
      queue[on][done[on]++].run();
    }
    return done[0] == queue[0].size() && done[1] == queue[1].size();
  }
};

struct QueuedStreams {
  Queues* queues;

  Status copy(void* to, const void* from, std::size_t bytes) const {
    queues->queue[1].push_back({[to, from, bytes] { std::memcpy(to, from, bytes); }});
    return {};
  }
  Status mark_copied(std::int32_t slot) const { return queues->mark(1, 0, slot), Status(); }
  Status await_copied(std::int32_t slot) const { return queues->await(0, 0, slot), Status(); }
  Status mark_read(std::int32_t slot) const { return queues->mark(0, 1, slot), Status(); }
  Status await_read(std::int32_t slot) const { return queues->await(1, 1, slot), Status(); }
};

using Loader = device::LayerLoader<Source, QueuedStreams>;

std::vector<float> floats_of(const Loader::Plane& plane, const Segment& segment) {
  std::vector<float> values(static_cast<std::size_t>(segment.size() * 16));
  for (std::int32_t row = 0; row < segment.size(); ++row) {
    for (std::int32_t head = 0; head < 2; ++head) {
      decode_head(plane, segment.chunk_offset + row, head, values.data() + row * 16 + head * 8);
    }
  }
  return values;
}

}  // namespace

TEST_CASE("each layer is read after its copy and before its memory is used again") {
  Scene scene;
  scene.segments = {fresh_segment(scene.question), cached_segment(scene.a->info, 6, 4),
                    cached_segment(scene.b->info, 3, 0), cached_segment(scene.b->info)};
  scene.lay_out();
  std::mt19937 random(5);
  const std::function<std::size_t()> orders[] = {[] { return std::size_t{0}; }, [] { return std::size_t{1}; },
                                                 [&random] { return std::size_t{random() % 2}; }};
  for (const std::int32_t depth : {1, 2, 3, 4, 9}) {
    for (const auto& order : orders) {
      CAPTURE(depth);
      Queues queues;
      Source source = scene.source();
      Loader loader(QueuedStreams{&queues});
      const Loader::Shape shape{4, 2, 8};
      std::vector<std::byte> staging(Loader::staging_bytes(scene.prompt, shape, depth));
      int reads = 0;
      for (int blend = 0; blend < 2; ++blend) {  // the second takes the memory that the first may still read
        REQUIRE(loader.open(source, scene.prompt, shape, depth, staging).ok());
        for (std::int32_t layer = 0; layer < 4; ++layer) {
          REQUIRE(loader.wait(layer).ok());
          for (const std::int32_t index : {1, 2, 3}) {
            const Segment& segment = scene.segments[static_cast<std::size_t>(index)];
            const Chunk& chunk = index == 1 ? *scene.a : *scene.b;
            const auto check = [&](const Loader::Plane& plane, const std::vector<float>& stored) {
              const auto first = stored.begin() + segment.chunk_offset * 16;
              const std::vector<float> expected(first, first + segment.size() * 16);
              queues.queue[0].push_back({[plane, segment, expected, &reads] {
                CHECK(floats_of(plane, segment) == expected);
                ++reads;
              }});
            };
            check(loader.keys(index, layer), chunk.keys[static_cast<std::size_t>(layer)]);
            check(loader.values(index, layer), chunk.values[static_cast<std::size_t>(layer)]);
          }
          loader.release(layer);
        }
      }
      CHECK(reads == 0);  // nothing was done yet
      CHECK(queues.run(order));
      CHECK(reads == 2 * 4 * 3 * 2);
    }
  }
}

TEST_CASE_TEMPLATE("a blend through the loader leaves the bits of one without", Execution, KVBLEND_TEST_EXECUTIONS) {
  struct Direct {  // all work is done at once
    Execution execution;
    Status copy(void* to, const void* from, std::size_t bytes) const { return execution.upload(to, from, bytes); }
    Status mark_copied(std::int32_t) const { return {}; }
    Status await_copied(std::int32_t) const { return {}; }
    Status mark_read(std::int32_t) const { return {}; }
    Status await_read(std::int32_t) const { return {}; }
  };
  Scene scene;
  const auto selector = at_ratio<KeyValueDeviation>(0.3);
  FloatHost expected = make_host(scene.model, scene.prompt.rows());
  REQUIRE(run(scene, expected, selector).ok());
  Source source = scene.source();
  using DirectLoader = device::LayerLoader<Source, Direct>;
  DirectLoader loader{Direct{}};
  std::vector<std::byte> staging(DirectLoader::staging_bytes(scene.prompt, {4, 2, 8}, 2));
  REQUIRE(loader.open(source, scene.prompt, {4, 2, 8}, 2, staging).ok());
  device::Fusor<DeviationSelector<KeyValueDeviation, RatioBudget>, Execution> fusor(selector);
  const device::WorkspaceBytes bytes = fusor.workspace_bytes(scene.prompt, {4, 8}, 2);
  std::vector<std::byte> pinned(bytes.host), memory(bytes.device);
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  REQUIRE(blend(host, loader, fusor, scene.prompt, scene.outputs, {pinned, memory}).ok());
  CHECK(host.memory() == expected.memory());
}

TEST_CASE("the loader refuses by name what it cannot do") {
  Scene scene;
  Queues queues;
  Source source = scene.source();
  Loader loader(QueuedStreams{&queues});
  const Loader::Shape shape{4, 2, 8};
  std::vector<std::byte> staging(Loader::staging_bytes(scene.prompt, shape, 2));
  CHECK(contains(loader.wait(0), "loader: was not opened"));
  CHECK(contains(loader.open(source, scene.prompt, {0, 2, 8}, 2, staging), "layers"));
  CHECK(contains(loader.open(source, scene.prompt, {4, 0, 8}, 2, staging), "heads"));
  CHECK(contains(loader.open(source, scene.prompt, {4, 2, 0}, 2, staging), "head_dim"));
  CHECK(contains(loader.open(source, scene.prompt, shape, 0, staging), "depth"));
  CHECK(contains(loader.open(source, scene.prompt, shape, 3, staging), "staging: needs"));
  CHECK(contains(loader.open(source, scene.prompt, {4, 1, 8}, 2, staging), "segment 1, layer 0, stored keys: are not"));
  REQUIRE(loader.open(source, scene.prompt, shape, 2, staging).ok());
  CHECK(contains(loader.wait(2), "layer 2: layers 0 to 1 are there"));
  source.fail_at_layer = 3;
  REQUIRE(loader.wait(0).ok());
  loader.release(0);
  REQUIRE(loader.wait(1).ok());
  CHECK(contains(loader.wait(0), "layer 0"));
  loader.release(1);  // now layer 3 fails
  CHECK(contains(loader.wait(2), "layer 3: checksum differs"));
}
