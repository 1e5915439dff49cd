// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Frequencies that depend on the prompt's length (dynamic NTK): chunks that were cached in passes of other lengths are
// placed from their own frequencies to the prompt's.
#include <kvblend/rope/scaling.hpp>

#include "scene.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace kvblend;
using namespace tiny;

namespace {

// The same weights under the frequencies of another length.
Model at_length(const Model& model, std::int64_t length) {
  Model out = model;
  for (std::size_t l = 0; l < out.ropes.size(); ++l) {
    if (out.ropes[l].rotary_dim == 0) continue;
    const double theta = l % 2 == 0 ? model.config.theta : model.config.odd_layers_theta;
    const auto spec = dynamic_ntk_rope(model.config.head_dim, theta, {4, 8}, length, out.ropes[l].pairing);
    REQUIRE(spec.ok());
    out.ropes[l] = spec.value;
  }
  return out;
}

// Chunks under the ropes of the models they were computed with.
struct LengthSource : Source {
  std::vector<const Model*> by_segment;

  LengthSource(const Source& source, std::vector<const Model*> models)
      : Source(source), by_segment(std::move(models)) {}
  [[nodiscard]] const RopeSpec& rope(std::int32_t segment, std::int32_t layer) {
    return by_segment[static_cast<std::size_t>(segment)]->ropes[static_cast<std::size_t>(layer)];
  }
};

// Chunk a from a prompt of 11 tokens, b from the middle of one of 46, both now in one of 29.
struct LengthScene : Scene {
  Model at_a, at_b;

  explicit LengthScene(const Config& config, bool b_alike = false)
      : Scene(config), at_a(at_length(model, 11)), at_b(at_length(model, b_alike ? 29 : 46)) {
    model.ropes = at_length(model, prompt.rows()).ropes;
    encode_chunk(at_a, *a, 0);
    encode_chunk(at_b, *b, 37);
    lay_out();
    REQUIRE(prompt.rows() == 29);
    REQUIRE_FALSE(model.ropes[0] == at_a.ropes[0]);
  }
  LengthSource length_source() { return {source(), {nullptr, &at_a, &at_b, nullptr}}; }
};

Config two_bases() {
  Config config;
  config.odd_layers_theta = 100;
  config.layer_without_rope = 2;
  return config;
}

}  // namespace

TEST_CASE_TEMPLATE("chunks of other lengths are placed from their frequencies to the prompt's", Angles, ExactAngles,
                   EngineAngles) {
  for (const bool b_alike : {false, true}) {
    CAPTURE(b_alike);
    LengthScene scene(two_bases(), b_alike);
    const Prefill oracle = reference(scene.model, scene.tokens, scene.positions, &scene.reused,
                                     [&](int, int row) { return !scene.cached[static_cast<std::size_t>(row)]; });
    FloatHost host = make_host(scene.model, scene.prompt.rows());
    using Selector = DeviationSelector<FirstK, RatioBudget>;
    LayerwiseFusor<Selector, PortableBackend, Angles> fusor(at_ratio<FirstK>(0));
    std::vector<std::byte> memory(
        fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim, RopeTables::per_row));
    LengthSource source = scene.length_source();
    const Status status = blend(host, source, fusor, scene.prompt, scene.outputs, memory);
    REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());
    CHECK(cache_error(scene, host, oracle) <= 1e-6);
    CHECK(largest_difference(host.logits(0), oracle.logits.back()) <= 1e-4);

    // By the prompt's frequencies alone it would be another cache.
    FloatHost wrong = make_host(scene.model, scene.prompt.rows());
    Source careless = scene.source();
    REQUIRE(blend(wrong, careless, fusor, scene.prompt, scene.outputs, memory).ok());
    CHECK(cache_error(scene, wrong, oracle) > 1e-3);
  }
}

TEST_CASE("a workspace with tables a run says what other frequencies take, and writes nothing") {
  LengthScene scene(two_bases());
  using Selector = DeviationSelector<FirstK, RatioBudget>;
  LayerwiseFusor<Selector, PortableBackend, ExactAngles> fusor(at_ratio<FirstK>(0));
  const auto per_run = fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim);
  CHECK(per_run < fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim, RopeTables::per_row));
  FloatHost host = make_host(scene.model, scene.prompt.rows());
  std::vector<std::byte> memory(per_run);
  LengthSource source = scene.length_source();
  const Config& config = scene.model.config;
  REQUIRE(fusor.begin(scene.prompt, {config.layers, config.head_dim}, scene.outputs, memory).ok());
  const auto before = host.memory();
  const Status status = fusor.place(0, host.rope(0), source, host.keys(0), host.values(0));
  CHECK(status.code() == StatusCode::insufficient_space);
  CHECK(std::string(status.where()) == "workspace");
  CHECK(std::string(status.message()).find("RopeTables::per_row") != std::string::npos);
  CHECK(host.memory() == before);
}
