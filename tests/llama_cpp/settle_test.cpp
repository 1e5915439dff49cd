// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A pass that settles its layers: rows attend to what the cache was made while they ran, and nothing else is written.
#include "llama_fixture.hpp"

#include <cstring>

using namespace llama_fixture;
using llama_cpp::BlobReader;
using llama_cpp::Engine;

namespace {

constexpr std::int32_t kResident = 20;

// A sequence's KV, and another's of as many tokens; each with the first rows of the other one.
struct Scene {
  explicit Scene(Engine& e, std::int32_t count = 60) : engine(e), tokens(random_tokens(count, e.model(), 1)) {
    expected_blob = prefill(engine, {tokens}).blob;
    wrong = prefill(engine, {random_tokens(count, engine.model(), 2)}).blob;
    settled = expected_blob;
    for (std::int32_t layer = 0; layer < engine.model().layers(); ++layer) {
      for (std::int32_t cell = 0; cell < kResident; ++cell) {
        visit_cell(engine, expected_blob, layer, cell, [&](std::ptrdiff_t at, std::int64_t bytes) {
          std::memcpy(settled.data() + at, wrong.data() + at, static_cast<std::size_t>(bytes));
          std::memcpy(wrong.data() + at, expected_blob.data() + at, static_cast<std::size_t>(bytes));
        });
      }
    }
    for (const std::int32_t row : {25, 26, 33, 40, 52, 53, 54, count - 1}) rows.push_back(Row(row));
  }

  // Over `blob`, with layers that become those of `settled` if `settles`; fails at layer `fails_at`.
  Status compute(const Bytes& blob, bool settles, std::int32_t fails_at = -1) {
    const auto reader = BlobReader::open(engine.blob_format(), settled);
    require_ok(reader.status);
    require_ok(engine.load(blob, static_cast<std::int32_t>(tokens.size())));
    layers.clear();
    Engine::Settle settle;
    if (settles) {
      settle = [&](std::int32_t layer, std::int32_t first, std::int32_t end, std::span<const std::int32_t> cells,
                   std::span<const float> keys, std::span<const float> values) -> Result<BlobReader::Rows> {
        layers.push_back(layer);
        CHECK(first == 0);
        CHECK(end == static_cast<std::int32_t>(tokens.size()));
        const std::int32_t width = engine.model().kv_heads() * engine.model().head_dim();
        CHECK(keys.size() == cells.size() * static_cast<std::size_t>(width));
        CHECK(values.size() == keys.size());
        CHECK(cells.front() >= kResident);
        for (const Row row : rows) CHECK(std::find(cells.begin(), cells.end(), row.value) != cells.end());
        ran = cells.size();
        if (layer == fails_at) return Status::error(StatusCode::insufficient_space, "on purpose").at("test");
        const Engine::Place place = engine.place_of(layer);
        return reader.value.rows(place.body, place.layer);
      };
    }
    return engine.compute({0, engine.model().layers()}, rows, tokens, std::span<const Row>(rows).last(1), kResident,
                          settle);
  }

  Engine& engine;
  Tokens tokens;
  Bytes expected_blob, wrong, settled;
  std::vector<Row> rows;
  std::vector<std::int32_t> layers;  // that settled
  std::size_t ran = 0;
};

}  // namespace

TEST_CASE("rows attend to what a layer settled to and resident rows stay") {
  for (const char* architecture : {"llama", "qwen2", "gemma3"}) {
    CAPTURE(architecture);
    const llama_cpp::Model model = tiny_model(architecture);
    const auto check = [&](DType type, bool flash_attention) {
      CAPTURE(std::string(to_string(type)));
      CAPTURE(flash_attention);
      const auto engine = open_engine(model, options_for(192, type, flash_attention));
      // As long as the window allows, which is too short for that kernel of flash attention that takes no fewer than 64
      // rows: they are filled up to so many, of those that are not resident.
      const bool windowed = model.window() > 0;
      const bool fills_up = flash_attention && type != DType::q8_0;
      if (windowed && fills_up) return;
      Scene scene(*engine, windowed ? 60 : 120);
      require_ok(scene.compute(scene.expected_blob, false));
      const Outcome expected = outcome_of(*engine);
      require_ok(scene.compute(scene.wrong, false));
      CHECK(relative_error(outcome_of(*engine).logits, expected.logits) > 0.1);

      require_ok(scene.compute(scene.wrong, true));
      std::vector<std::int32_t> all;
      for (std::int32_t layer = 0; layer < model.layers(); ++layer) all.push_back(layer);
      CHECK(scene.layers == all);
      CHECK(scene.ran == (fills_up ? std::size_t{64} : scene.rows.size()));
      const Outcome outcome = outcome_of(*engine);
      CHECK(outcome.blob == scene.expected_blob);
      if (flash_attention) {
        CHECK(relative_error(outcome.logits, expected.logits) < 1e-2);
      } else {
        CHECK(same_bits(outcome.logits, expected.logits));
      }
    };
    check(DType::f32, false);
    check(DType::f16, false);
    check(DType::f32, true);
    check(DType::f16, true);
    check(DType::q8_0, true);
  }
}

TEST_CASE("a layer that cannot settle ends the pass and nothing of it is left in the next") {
  const llama_cpp::Model model = tiny_model("gemma3");
  const auto engine = open_engine(model, options_for(128));
  Scene scene(*engine);
  require_ok(scene.compute(scene.wrong, true));
  const Outcome expected = outcome_of(*engine);
  const Outcome plain = prefill(*engine, {scene.tokens});

  const Status status = scene.compute(scene.wrong, true, 2);
  CHECK(status.code() == StatusCode::insufficient_space);
  CHECK(std::string(status.where()) == "test");
  CHECK(scene.layers == std::vector<std::int32_t>{0, 1, 2});
  CHECK(engine->can_settle().ok());
  CHECK(engine->route() == llama_cpp::Route::in_place);
  check_same(prefill(*engine, {scene.tokens}), plain);
  require_ok(scene.compute(scene.wrong, true));
  check_same(outcome_of(*engine), expected);
}

TEST_CASE("rows that are computed by runs cannot settle") {
  llama_cpp::EngineOptions options = options_for(128);
  options.route = llama_cpp::Route::runs;
  const llama_cpp::Model model = tiny_model("llama");
  const auto engine = open_engine(model, options);
  Scene scene(*engine);
  const Status status = scene.compute(scene.wrong, true);
  CHECK(status.code() == StatusCode::unsupported);
  CHECK(std::string(status.where()) == "settle");
  CHECK(scene.layers.empty());
  CHECK(outcome_of(*engine).blob == scene.wrong);
}
