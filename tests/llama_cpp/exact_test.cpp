// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// At ratio 1 a blend is what llama.cpp itself computes, bit for bit: logits, KV and the tokens that follow.
#include "llama_fixture.hpp"

using namespace llama_fixture;

namespace {

constexpr std::int32_t kGreedy = 32;

// Instructions, chunks and a question of odd sizes.
std::vector<Part> prompt_parts(const llama_cpp::Model& model, SegmentKind first,
                               const std::vector<std::int32_t>& sizes) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const bool last = i + 1 == sizes.size();
    parts.push_back({i == 0 ? first
                     : last ? SegmentKind::fresh
                            : SegmentKind::cached,
                     random_tokens(sizes[i], model, static_cast<unsigned>(10 + i))});
  }
  return parts;
}

struct Scene {
  llama_cpp::Engine& engine;
  llama_cpp::BlobWriter staging{};
  std::vector<Part> parts{};
  std::vector<ChunkHandle> chunks{};
  Outcome expected{};
  Tokens answer{};

  template <class Selector>
  void check(const std::string& name, const Selector& selector, std::int32_t passes) {
    CAPTURE(name);
    engine.clear();
    const Outcome blended = blend_parts(engine, staging, parts, chunks, selector);
    require_ok(blended.status);
    CHECK(blended.report.passes == passes);
    check_same(blended, expected);
    CHECK(greedy(engine, kGreedy) == answer);
  }

  void check_all() {
    check("first_k gradual", gradual_first_rows(1), 3);  // before any scores: nothing of those serves it
    check("first_k", first_rows(1), 1);
    check("key_value_deviation", deviating(1), 1);
    check("key_value_deviation gradual", gradual_deviating(1), 3);
    // Nothing of all that came from the other route.
    CHECK(engine.route() == llama_cpp::Route::in_place);
    CHECK(engine.route_reason().empty());
  }
};

// Fresh instructions: all is a plain prefill. Instructions from their own chunk, which is exact: all behind them is
// what llama.cpp computes behind a prefix that it holds.
void check_model(const llama_cpp::Model& model, const llama_cpp::EngineOptions& options,
                 const std::vector<std::int32_t>& sizes, bool prefix_too = true) {
  CAPTURE(model.architecture());
  CAPTURE(std::string(to_string(options.cache_type)));
  const auto engine = open_engine(model, options);
  for (const SegmentKind first : {SegmentKind::fresh, SegmentKind::cached}) {
    const bool prefix = first == SegmentKind::cached;
    if (prefix && !prefix_too) continue;
    CAPTURE(prefix);
    Scene scene{*engine};
    scene.parts = prompt_parts(model, first, sizes);
    scene.chunks = make_chunks(*engine, scene.parts);
    const Tokens all = tokens_of(scene.parts);
    const Tokens& instructions = scene.parts.front().tokens;
    const Tokens rest(all.begin() + static_cast<std::ptrdiff_t>(instructions.size()), all.end());
    scene.expected = prefix ? prefill(*engine, {instructions, rest}) : prefill(*engine, {all});
    scene.answer = greedy(*engine, kGreedy);
    scene.check_all();
  }
}

const std::vector<std::int32_t> kSizes = {21, 47, 33, 19};

}  // namespace

TEST_CASE("ratio 1 equals the engine's own prefill: small models of each kind") {
  for (const std::string architecture : {"llama", "qwen2", "gemma3"}) {
    const llama_cpp::Model model = tiny_model(architecture);
    // gemma3 refuses chunks longer than its window, so the prompt is what passes it.
    const std::vector<std::int32_t> sizes = model.window() > 0 ? std::vector<std::int32_t>{21, 37, 33, 40, 29} : kSizes;
    for (const DType type : {DType::f16, DType::f32, DType::bf16}) check_model(model, options_for(256, type), sizes);
    // Batches that cut the prompt; none of a single token, for which llama.cpp has kernels of its own.
    llama_cpp::EngineOptions small = options_for(256);
    small.batch = 64;
    check_model(model, small, sizes);
  }
}

TEST_CASE("ratio 1 equals the engine's own prefill: SmolLM2") {
  const std::string path = model_path(kSmolLm2);
  if (path.empty()) return;
  check_model(open_model(path), options_for(256), {21, 57, 43, 29});
}

TEST_CASE("ratio 1 equals the engine's own prefill: SmolLM2 with f32 and bf16 caches") {
  const std::string path = model_path(kSmolLm2);
  if (path.empty()) return;
  const llama_cpp::Model model = open_model(path);
  for (const DType type : {DType::f32, DType::bf16}) check_model(model, options_for(160, type), {17, 31, 18}, false);
}

TEST_CASE("ratio 1 equals the engine's own prefill: Qwen 2.5") {
  const std::string path = model_path(kQwen);
  if (path.empty()) return;
  check_model(open_model(path), options_for(256), {21, 57, 43, 29});
}

TEST_CASE("ratio 1 equals the engine's own prefill: Gemma 3 past its window") {
  const std::string path = model_path(kGemma);
  if (path.empty()) return;
  const llama_cpp::Model model = open_model(path);
  REQUIRE(model.window() == 512);
  check_model(model, options_for(800), {38, 200, 220, 190, 45}, false);
}

TEST_CASE("ratio 1 equals the engine's own prefill: behind a conversation that is in the cache") {
  for (const std::string architecture : {"llama", "qwen2", "gemma3"}) {
    CAPTURE(architecture);
    const llama_cpp::Model model = tiny_model(architecture);
    const auto engine = open_engine(model, options_for(256));
    // The first turn may not be longer than a window: what it has passed cannot be kept.
    std::vector<Part> parts = prompt_parts(model, SegmentKind::resident, {31, 29, 33, 19});
    parts.insert(parts.begin() + 1, Part{SegmentKind::fresh, random_tokens(5, model, 40)});
    const std::vector<ChunkHandle> chunks = make_chunks(*engine, parts);
    const Tokens all = tokens_of(parts);
    const Tokens& turn = parts.front().tokens;
    const Tokens rest(all.begin() + static_cast<std::ptrdiff_t>(turn.size()), all.end());
    const Outcome expected = prefill(*engine, {turn, rest});
    const Tokens answer = greedy(*engine, kGreedy);
    llama_cpp::BlobWriter staging;
    const auto check = [&](const auto& selector) {
      engine->clear();
      require_ok(engine->prefill(turn));
      // What was generated behind the turn goes.
      require_ok(engine->prefill(std::span(rest).first(3)));
      const Outcome blended = blend_parts(*engine, staging, parts, chunks, selector);
      require_ok(blended.status);
      check_same(blended, expected);
      CHECK(greedy(*engine, kGreedy) == answer);
    };
    check(gradual_first_rows(1));
    check(first_rows(1));
    check(deviating(1));
    check(gradual_deviating(1));
  }
}
