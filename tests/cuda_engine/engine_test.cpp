// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The GPU engine's logic on the CPU, against the reference engine with the same weights: prefill, blends, decoding,
// over caches whose blocks lie in any order, with attention in one step and in many.
#include <kvblend/kvblend.hpp>

#include <doctest/doctest.h>
#include <cuda_engine/blender.hpp>
#include <cuda_engine/cpu_device.hpp>
#include <cuda_engine/engine.hpp>
#include <cuda_engine/passages.hpp>

#include <thrust/system/omp/execution_policy.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "engine/engine_fixture.hpp"

using namespace engine_fixture;
using namespace kvblend;
using cuda_engine::CpuDevice;
using cuda_engine::Passages;
using eigen_engine::Model;
using eigen_engine::ThreadPool;

namespace {

// Its threads do many rows at the same time, as a GPU does.
using Cpu = CpuDevice<float, thrust::system::omp::detail::par_t>;
using GpuEngine = cuda_engine::Engine<Cpu>;
using Weights = cuda_engine::Weights<Cpu>;

static_assert(AttentionReportingHost<GpuEngine>);
static_assert(KvSource<Passages<Cpu>>);

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(difference <= largest)) largest = difference;  // a NaN too
  }
  return largest;
}

std::vector<float> logits_of(GpuEngine& engine) {
  std::vector<float> out(static_cast<std::size_t>(engine.active_rows()) *
                         static_cast<std::size_t>(engine.config().vocabulary));
  require_ok(engine.logits(out));
  return out;
}

// Both engines over the same weights.
struct Pair {
  Model model;
  ThreadPool pool{1};
  eigen_engine::Engine reference;
  Cpu device;
  Weights weights;
  GpuEngine engine;

  // `shuffled`: blocks of 8 rows in no order, some of the pool unused; else one piece. `bytes` of scratch for
  // attention.
  Pair(Model from, std::int32_t rows, bool shuffled, std::int64_t bytes)
      : model(std::move(from)), reference(model, rows, pool), engine(device, weights) {
    require_ok(weights.load(device, model));
    std::vector<std::int32_t> table(static_cast<std::size_t>((rows + 7) / 8 + 5));
    std::iota(table.begin(), table.end(), 0);
    if (shuffled) std::shuffle(table.begin(), table.end(), std::mt19937(7));
    cuda_engine::EngineOptions options;
    options.max_rows = rows;
    options.block_size = 8;
    options.block_table = table;
    options.attention_bytes = bytes;
    require_ok(engine.open(options));
  }
};

constexpr std::int64_t kOneStep = 1 << 24;
constexpr std::int64_t kManySteps = 20000;

// A prompt of passages and a question behind them, and the passages' KV from the GPU engine.
struct Request {
  Pair& pair;
  Passages<Cpu> passages;
  std::vector<TokenId> question, all;
  std::vector<ChunkInfo> chunks;
  std::vector<Segment> segments;
  Prompt prompt;

  // The question begins `gap` positions behind the passages.
  Request(Pair& engines, const std::vector<int>& sizes, int question_size, int gap = 0)
      : pair(engines), passages(engines.device, engines.engine) {
    std::uint32_t seed = 100;
    for (const int size : sizes) {
      const auto tokens = random_tokens(size, pair.model.config().vocabulary, seed++);
      require_ok(passages.add(tokens));
      all.insert(all.end(), tokens.begin(), tokens.end());
    }
    const Position behind(static_cast<int>(all.size()) + gap);
    question = random_tokens(question_size, pair.model.config().vocabulary, seed);
    all.insert(all.end(), question.begin(), question.end());
    for (std::int32_t i = 0; i < passages.size(); ++i) chunks.push_back({passages.tokens(i), Position(0), {}, {}});
    for (const ChunkInfo& chunk : chunks) segments.push_back(cached_segment(chunk));
    segments.push_back(fresh_segment(question, behind));
    auto made = Prompt::make(segments, Position(pair.model.config().context - 1));
    require_ok(made.status);
    prompt = made.value;
  }

  template <class Engine, class Selector>
  void blend_on(Engine& engine, const Selector& selector) {
    engine.clear();
    LayerwiseFusor<Selector> fusor(selector);
    std::vector<std::byte> memory(fusor.workspace_bytes(prompt, pair.model.config().head_dim));
    const std::array<Row, 2> outputs = {Row(prompt.rows() - 3), Row(prompt.rows() - 1)};
    require_ok(blend(engine, passages, fusor, prompt, outputs, memory));
    CHECK(engine.rows() == prompt.rows());
  }

  // By the fusor whose steps a GPU takes without waiting.
  template <class Selector>
  void blend_as_gpu(const Selector& selector) {
    pair.engine.clear();
    cuda_engine::Blender<Cpu, Selector> blender(pair.device, selector);
    require_ok(blender.open(pair.engine, prompt));
    const std::array<Row, 2> outputs = {Row(prompt.rows() - 3), Row(prompt.rows() - 1)};
    require_ok(blender.run(pair.engine, passages, prompt, outputs));
    CHECK(pair.engine.rows() == prompt.rows());
  }

  // What the question pays to each row under full reuse, layer after layer.
  template <class Engine>
  std::vector<float> mass_on(Engine& engine) {
    engine.clear();
    using Selector = DeviationSelector<AttentionValueMass, RatioBudget>;
    LayerwiseFusor<Selector> fusor(Selector(AttentionValueMass{}, RatioBudget{0.15}));
    std::vector<std::byte> memory(fusor.workspace_bytes(prompt, pair.model.config().head_dim));
    const std::array<Row, 1> outputs = {Row(prompt.rows() - 1)};
    require_ok(fusor.begin(prompt, {engine.layers(), pair.model.config().head_dim}, outputs, memory));
    require_ok(engine.begin(prompt));
    require_ok(engine.embed(fusor.active()));
    std::vector<float> out;
    for (std::int32_t layer = 0; layer < engine.layers(); ++layer) {
      require_ok(engine.project(layer, fusor.active()));
      require_ok(fusor.place(layer, engine.rope(layer), passages, engine.keys(layer), engine.values(layer)));
      require_ok(
          fusor.fuse(layer, engine.fresh_keys(), engine.fresh_values(), engine.keys(layer), engine.values(layer)));
      const std::span<float> mass = fusor.attention_mass();
      require_ok(engine.attend_and_report(layer, fusor.active(), fusor.kept(), fusor.first_probe_row(), mass));
      out.insert(out.end(), mass.begin(), mass.end());
      fusor.narrow();  // counts the next layer's from 0
    }
    engine.abort();
    return out;
  }

  // Logits of a blend on either engine, and of two tokens after it; on the GPU engine with either fusor.
  template <class Selector>
  void compare(const Selector& selector) {
    blend_on(pair.engine, selector);
    const std::vector<float> logits = logits_of(pair.engine);
    blend_as_gpu(selector);
    CHECK(logits_of(pair.engine) == logits);
    blend_on(pair.reference, selector);
    CHECK(pair.engine.active_rows() == 2);
    CHECK(largest_difference(logits_of(pair.engine), logits_of(pair.reference)) <= 1e-4);
    for (const TokenId token : {3, 44}) {
      require_ok(pair.engine.decode(token));
      require_ok(pair.reference.decode(token));
      CHECK(largest_difference(logits_of(pair.engine), logits_of(pair.reference)) <= 1e-4);
    }
  }

 private:
  static std::vector<float> logits_of(GpuEngine& engine) { return ::logits_of(engine); }
  static std::vector<float> logits_of(eigen_engine::Engine& engine) { return engine_fixture::logits_of(engine); }
};

template <class Score>
DeviationSelector<Score, RatioBudget> at_ratio(double ratio) {
  return DeviationSelector<Score, RatioBudget>(Score{}, RatioBudget{ratio});
}

}  // namespace

TEST_CASE("prefill on the GPU engine gives the reference's logits") {
  for (const RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    for (const bool bias : {false, true}) {
      Pair pair(small_model(pairing, bias, !bias), 150, bias, bias ? kManySteps : kOneStep);
      const auto tokens = random_tokens(120, pair.model.config().vocabulary, 5);
      const std::span<const TokenId> all(tokens);
      // In two passes, with a gap of positions between them.
      for (const auto& [first, count, position] : {std::array{0, 90, 0}, std::array{90, 30, 200}}) {
        const auto part = all.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
        require_ok(pair.engine.prefill(part, cuda_engine::Wanted::all, Position(position)));
        require_ok(pair.reference.prefill(part, eigen_engine::Wanted::all, Position(position)));
        const auto expected = logits_of(pair.reference);
        CHECK(largest_difference(logits_of(pair.engine), expected) <= 1e-4);
      }
    }
  }
}

TEST_CASE("a blend on the GPU engine gives the reference's logits and decoding goes on alike") {
  for (const bool bias : {false, true}) {
    Pair pair(small_model(bias ? RopePairing::interleaved : RopePairing::neox, bias), 140, true,
              bias ? kOneStep : kManySteps);
    Request request(pair, {23, 30, 41}, 9, bias ? 0 : 50);
    request.compare(at_ratio<FirstK>(0.15));
    request.compare(at_ratio<KeyValueDeviation>(0.15));
    request.compare(at_ratio<AttentionValueMass>(0.15));
    request.compare(DeviationSelector<KeyDeviation, GradualBudget>(KeyDeviation{}, GradualBudget{0.15}));
    request.compare(at_ratio<KeyValueDeviation>(1));
    request.compare(at_ratio<FirstK>(0));
  }
}

TEST_CASE("the GPU engine reports the attention that the reference reports") {
  for (const bool bias : {false, true}) {
    Pair pair(small_model(bias ? RopePairing::interleaved : RopePairing::neox, bias), 140, true,
              bias ? kOneStep : kManySteps);
    Request request(pair, {23, 30, 41}, 9, 50);
    const std::vector<float> mass = request.mass_on(pair.engine);
    CHECK(largest_difference(mass, request.mass_on(pair.reference)) <= 1e-4);
    CHECK(request.mass_on(pair.engine) == mass);
    const auto& config = pair.model.config();
    REQUIRE(mass.size() == static_cast<std::size_t>(config.layers * request.prompt.rows()));
    for (std::int32_t layer = 0; layer < config.layers; ++layer) {
      const auto first = mass.begin() + layer * request.prompt.rows();
      const double sum = std::accumulate(first, first + request.prompt.rows(), 0.0);
      CHECK(sum == doctest::Approx(9 * config.heads).epsilon(1e-5));  // each question row's weights add up to 1 a head
    }
  }
}

TEST_CASE("a blend on the GPU engine at ratio 1 gives its full prefill's logits") {
  Pair pair(small_model(RopePairing::neox, true), 120, true, kManySteps);
  Request request(pair, {23, 30, 41}, 9);
  const auto last = [](std::vector<float> logits) { return std::vector<float>(logits.end() - 101, logits.end()); };
  require_ok(pair.engine.prefill(request.all));
  const std::vector<float> full = logits_of(pair.engine);
  request.blend_on(pair.engine, at_ratio<KeyValueDeviation>(1));
  CHECK(largest_difference(last(logits_of(pair.engine)), full) <= 1e-4);
  // Reuse is something else, or the test would show nothing.
  request.blend_on(pair.engine, at_ratio<KeyValueDeviation>(0));
  CHECK(largest_difference(last(logits_of(pair.engine)), full) > 0.1);
}

TEST_CASE("resident rows stay where a blend on the GPU engine begins behind them") {
  Pair pair(small_model(), 140, true, kOneStep);
  Passages<Cpu> passages(pair.device, pair.engine);
  const auto system = random_tokens(19, 101, 1), text = random_tokens(40, 101, 2), question = random_tokens(8, 101, 3);
  require_ok(passages.add(random_tokens(1, 101, 4)));  // stands for the resident segment, which is not asked for
  require_ok(passages.add(text));
  const ChunkInfo chunk{text, Position(0), {}, {}};
  std::vector<Segment> segments = {resident_segment(system), cached_segment(chunk), fresh_segment(question)};
  const auto prompt = Prompt::make(segments, Position(511));
  require_ok(prompt.status);
  const auto run = [&](auto& engine) {
    engine.clear();
    require_ok(engine.prefill(system));
    const auto selector = at_ratio<FirstK>(0.3);
    LayerwiseFusor<std::remove_const_t<decltype(selector)>> fusor(selector);
    std::vector<std::byte> memory(fusor.workspace_bytes(prompt.value, 16));
    const std::array<Row, 1> outputs = {Row(prompt.value.rows() - 1)};
    require_ok(blend(engine, passages, fusor, prompt.value, outputs, memory));
  };
  run(pair.engine);
  run(pair.reference);
  CHECK(largest_difference(logits_of(pair.engine), engine_fixture::logits_of(pair.reference)) <= 1e-4);
  // The cache is not what a prompt says that was resident.
  pair.engine.clear();
  CHECK(pair.engine.begin(prompt.value).code() == StatusCode::mismatch);
  require_ok(pair.engine.prefill(random_tokens(19, 101, 5)));
  CHECK(pair.engine.begin(prompt.value).code() == StatusCode::mismatch);
}

TEST_CASE("the GPU engine refuses what it cannot hold") {
  Pair pair(small_model(), 20, false, kOneStep);
  const auto tokens = random_tokens(21, 101, 1);
  CHECK(pair.engine.prefill(tokens).code() == StatusCode::out_of_range);
  CHECK(pair.engine.decode(101).code() == StatusCode::out_of_range);
  require_ok(pair.engine.prefill(std::span(tokens).first(5)));
  CHECK(pair.engine.prefill(std::span(tokens).first(1), cuda_engine::Wanted::last, Position(4)).code() ==
        StatusCode::out_of_range);
  CHECK(pair.engine.prefill(std::span(tokens).first(1), cuda_engine::Wanted::last, Position(512)).code() ==
        StatusCode::out_of_range);
  CHECK(pair.engine.rows() == 5);
  cuda_engine::EngineOptions options;
  options.max_rows = 20;
  const std::array<std::int32_t, 2> twice = {1, 1};
  options.block_table = twice;
  GpuEngine other(pair.device, pair.weights);
  CHECK(other.open(options).code() == StatusCode::invalid_argument);
  auto config = small_config();
  config.head_dim = 18;
  CHECK(Weights().allocate(config).code() == StatusCode::unsupported);
}
