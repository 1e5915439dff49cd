// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Layers with a sliding window: which they are, what a pass without the window would give, and chunks that outgrow it.
// Prompts longer than the window are blended in exact_test.cpp.
#include "llama_fixture.hpp"
#include "plain_context.hpp"

using namespace llama_fixture;
using llama_cpp::Engine;
using llama_cpp::GraphHook;

namespace {

// Gemma 3: each sixth layer sees all; those are in the first body of a blob, the others in the second.
void check_layers(const Engine& engine) {
  REQUIRE(engine.blob_format().bodies.size() == 2);
  std::int32_t next[2] = {0, 0};
  for (std::int32_t layer = 0; layer < engine.model().layers(); ++layer) {
    CAPTURE(layer);
    const std::int32_t body = (layer + 1) % 6 == 0 ? 0 : 1;
    CHECK(engine.place_of(layer).body == body);
    CHECK(engine.place_of(layer).layer == next[body]++);
  }
}

// Recomputes the last `count` rows of a prefilled prompt with given windows; their last logits.
std::vector<float> rewritten(const Engine& engine, const Tokens& tokens, std::int32_t count,
                             const std::vector<std::uint8_t>& windowed) {
  GraphHook hook;
  PlainContext plain(engine, true, &hook);
  plain.decode(0, 0, tokens);
  const auto cells = static_cast<std::int32_t>(tokens.size());
  std::vector<std::int32_t> rows;
  for (std::int32_t row = cells - count; row < cells; ++row) rows.push_back(row);
  GraphHook::Rewrite what;
  what.range = {0, engine.model().layers()};
  what.layers = engine.model().layers();
  what.cells = cells;
  what.rows = rows;
  what.windowed = windowed;
  what.window = engine.model().window();
  hook.rewrite(what);
  const std::vector<float> logits = plain.decode(1, 0, Tokens(tokens.end() - count, tokens.end()));
  require_ok(hook.finish());
  return logits;
}

void check_window_matters(const Engine& engine, std::int32_t count) {
  const Tokens tokens = random_tokens(engine.model().window() + 60, engine.model(), 1);
  PlainContext plain(engine);
  const std::vector<float> expected = plain.decode(0, 0, tokens);
  std::vector<std::uint8_t> windowed;
  for (std::int32_t layer = 0; layer < engine.model().layers(); ++layer) windowed.push_back((layer + 1) % 6 != 0);
  CHECK(same_bits(rewritten(engine, tokens, count, windowed), expected));
  const std::vector<float> without = rewritten(engine, tokens, count, std::vector<std::uint8_t>(windowed.size(), 0));
  CHECK_FALSE(same_bits(without, expected));
  MESSAGE("relative L2 of logits without the window: " << relative_error(without, expected));
  CHECK(relative_error(without, expected) > 1e-2);
}

void check_long_chunk(Engine& engine) {
  llama_cpp::BlobWriter staging;
  const std::int32_t window = engine.model().window();
  require_ok(llama_cpp::with_host(engine, staging, [&](auto host) -> Status {
    require_ok(make_chunk(host, engine, random_tokens(window, engine.model(), 1)).status);
    const Status status = make_chunk(host, engine, random_tokens(window + 1, engine.model(), 1)).status;
    CHECK(status.code() == StatusCode::unsupported);
    CHECK(std::string(status.where()) == "layer 0");
    INFO(text_of(status));
    CHECK(std::string(status.message()).find("window of " + std::to_string(window)) != std::string::npos);
    return {};
  }));
}

}  // namespace

TEST_CASE("a sliding window: a small model") {
  const llama_cpp::Model model = tiny_model("gemma3");
  REQUIRE(model.window() == tiny_gguf::kWindow);
  const auto engine = open_engine(model, options_for(300));
  check_layers(*engine);
  check_window_matters(*engine, 50);
  check_long_chunk(*engine);
}

TEST_CASE("a sliding window: Gemma 3") {
  const std::string path = model_path(kGemma);
  if (path.empty()) return;
  const llama_cpp::Model model = open_model(path);
  REQUIRE(model.window() == 512);
  llama_cpp::EngineOptions options = options_for(600);
  options.batch = 600;
  const auto engine = open_engine(model, options);
  check_layers(*engine);
  check_window_matters(*engine, 50);
  check_long_chunk(*engine);
}
