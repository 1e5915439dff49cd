// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The library's own blend on the engine, through the store and the loader: ratio 1 against full prefill, ratio 0 against
// full reuse, and the same bits at any number of threads.
#include <kvblend/eigen.hpp>
#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>

#include <doctest/doctest.h>
#include <eigen_engine/gguf_loader.hpp>

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "engine/engine_fixture.hpp"

using namespace engine_fixture;
using namespace kvblend;
using eigen_engine::Engine;
using eigen_engine::Model;
using eigen_engine::PoolExecutor;
using eigen_engine::ThreadPool;
using eigen_engine::Wanted;

namespace {

// [instructions][three passages][question], whose first four parts were prefilled alone and stored.
struct Stored {
  std::vector<ChunkHandle> chunks;
  std::vector<ChunkInfo> infos;
  std::vector<TokenId> question, all;
  std::vector<Segment> segments;
  std::vector<ChunkSource> sources;
  Prompt prompt;
  ModelIdentity identity;

  Stored(const Model& model, const std::array<int, 5>& sizes) {
    const eigen_engine::ModelConfig& config = model.config();
    identity.name = "test";
    identity.layers = config.layers;
    identity.kv_heads = config.kv_heads;
    identity.head_dim = config.head_dim;
    ThreadPool pool(1);
    for (std::size_t part = 0; part < sizes.size(); ++part) {
      const auto tokens = random_tokens(sizes[part], config.vocabulary, 100 + static_cast<std::uint32_t>(part));
      all.insert(all.end(), tokens.begin(), tokens.end());
      if (part + 1 == sizes.size()) {
        question = tokens;
        break;
      }
      Engine engine(model, sizes[part], pool);
      require_ok(engine.prefill(tokens, Wanted::none));
      ChunkIdentity chunk_identity;
      chunk_identity.model = identity;
      for (std::int32_t layer = 0; layer < config.layers; ++layer) chunk_identity.add_layer_rope(model.rope(layer));
      chunk_identity.tokens = tokens;
      auto chunk = Chunk::allocate(chunk_identity);
      require_ok(chunk.status);
      for (std::int32_t layer = 0; layer < config.layers; ++layer) {
        require_ok(
            import_rows<F32Codec>(chunk.value, layer, engine.keys(layer), engine.values(layer), 0, 0, engine.rows()));
      }
      chunks.push_back(share(std::move(chunk.value)));
    }
    for (const ChunkHandle& chunk : chunks) infos.push_back(chunk->info());
    for (const ChunkInfo& info : infos) segments.push_back(cached_segment(info));
    for (const ChunkHandle& chunk : chunks) sources.emplace_back(chunk);
    segments.push_back(fresh_segment(question));
    sources.emplace_back();
    auto made = Prompt::make(segments, Position(config.context - 1));
    require_ok(made.status);
    prompt = made.value;
  }

  template <class Selector>
  std::vector<float> blend_logits(Engine& engine, ThreadPool& pool, const Selector& selector) {
    using Backend = EigenBackend<PoolExecutor>;
    engine.clear();
    LayerwiseLoader<F32Codec> loader;
    require_ok(loader.open(identity, prompt, sources, 2, {}));
    require_ok(loader.start());
    LayerwiseFusor<Selector, Backend> fusor(selector, Backend(PoolExecutor(pool)));
    std::vector<std::byte> memory(fusor.workspace_bytes(prompt, identity.head_dim));
    const std::array<Row, 1> outputs = {Row(prompt.rows() - 1)};
    require_ok(blend(engine, loader, fusor, prompt, outputs, memory));
    CHECK(engine.rows() == prompt.rows());
    return logits_of(engine);
  }
};

template <class Score>
DeviationSelector<Score, RatioBudget> at_ratio(double ratio) {
  return DeviationSelector<Score, RatioBudget>(Score{}, RatioBudget{ratio});
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::fabs(static_cast<double>(a[i]) - b[i]));
  return largest;
}

// Of the last row, in an emptied cache.
std::vector<float> full_prefill_logits(Engine& engine, const std::vector<TokenId>& tokens) {
  engine.clear();
  require_ok(engine.prefill(tokens));
  return logits_of(engine);
}

}  // namespace

TEST_CASE("a blend at ratio 1 gives full prefill's logits, and decoding goes on alike") {
  ThreadPool pool(2);
  for (const RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    for (const bool bias : {false, true}) {
      for (const bool tied : {false, true}) {
        const Model model = small_model(pairing, bias, tied);
        Stored stored(model, {7, 30, 41, 25, 9});
        Engine engine(model, stored.prompt.rows() + 4, pool);
        const std::vector<float> full = full_prefill_logits(engine, stored.all);
        require_ok(engine.decode(3));
        const std::vector<float> next = logits_of(engine);
        const auto check = [&](auto selector) {
          CHECK(largest_difference(stored.blend_logits(engine, pool, selector), full) <= 1e-4);
          require_ok(engine.decode(3));
          CHECK(largest_difference(logits_of(engine), next) <= 1e-4);
        };
        check(at_ratio<FirstK>(1));
        check(at_ratio<KeyValueDeviation>(1));
        check(at_ratio<AttentionMass>(1));
      }
    }
  }
}

TEST_CASE("a blend has the same bits at one and two threads") {
  const Model model = small_model(RopePairing::interleaved, true);
  Stored stored(model, {7, 130, 141, 55, 9});
  ThreadPool one(1), two(2);
  Engine first(model, stored.prompt.rows(), one), second(model, stored.prompt.rows(), two);
  const auto check = [&](auto selector) {
    CHECK(stored.blend_logits(first, one, selector) == stored.blend_logits(second, two, selector));
    for (std::int32_t layer = 0; layer < first.layers(); ++layer) {
      const auto bytes =
          static_cast<std::size_t>(first.rows() * stored.identity.kv_heads * stored.identity.head_dim) * sizeof(float);
      CHECK(std::memcmp(first.keys(layer).base, second.keys(layer).base, bytes) == 0);
      CHECK(std::memcmp(first.values(layer).base, second.values(layer).base, bytes) == 0);
    }
  };
  check(at_ratio<FirstK>(0.15));
  check(at_ratio<KeyValueDeviation>(0.15));
  check(at_ratio<AttentionMass>(0.15));
  check(DeviationSelector<KeyDeviation, GradualBudget>(KeyDeviation{}, GradualBudget{0.15}));
}

TEST_CASE("real model: a blend at ratio 1 gives full prefill's logits") {
  if (!std::filesystem::exists(KVBLEND_TEST_MODEL)) {
    MESSAGE("skipped: no model at " << KVBLEND_TEST_MODEL);
    return;
  }
  const auto model = eigen_engine::load_gguf(KVBLEND_TEST_MODEL);
  require_ok(model.status);
  Stored stored(model.value, {26, 90, 101, 77, 23});
  ThreadPool pool(2);
  Engine engine(model.value, stored.prompt.rows(), pool);
  const std::vector<float> full = full_prefill_logits(engine, stored.all);
  CHECK(largest_difference(stored.blend_logits(engine, pool, at_ratio<FirstK>(1)), full) <= 1e-4);
  CHECK(largest_difference(stored.blend_logits(engine, pool, at_ratio<KeyValueDeviation>(1)), full) <= 1e-4);
  // Full reuse is something else, or the test would show nothing.
  CHECK(largest_difference(stored.blend_logits(engine, pool, at_ratio<FirstK>(0)), full) > 0.1);
}
