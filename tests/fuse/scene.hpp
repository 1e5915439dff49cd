// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scene: a prompt of instructions, two chunks and a question on the tiny model, with all the oracle needs to know of it.
#pragma once

#include <kvblend/fuse/blend.hpp>
#include <kvblend/select/budgets.hpp>
#include <kvblend/select/scores.hpp>

#include "tiny_model.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace tiny {

using namespace kvblend;

using FloatHost = Host<F32Codec, ContiguousLayout>;

inline FloatHost make_host(const Model& model, int rows) {
  const Config& c = model.config;
  const std::int64_t head = 4 * c.head_dim;
  const ContiguousLayout layout(rows, c.kv_heads, c.head_dim, c.kv_heads * head, head);
  return FloatHost(model, layout, static_cast<std::size_t>(rows * c.kv_heads * head));
}

inline std::vector<TokenId> random_tokens(std::mt19937& random, int count, int vocab) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % static_cast<unsigned>(vocab));
  return tokens;
}

// [instructions][chunk a][chunk b][question], chunks computed alone at odd places, and everything the oracle needs.
struct Scene {
  Model model;
  std::vector<TokenId> instructions, question;
  std::unique_ptr<Chunk> a = std::make_unique<Chunk>(), b = std::make_unique<Chunk>();
  std::vector<Segment> segments;
  Prompt prompt;
  std::vector<TokenId> tokens;
  std::vector<int> positions;
  std::vector<bool> cached;
  Prefill reused;  // by row of the prompt
  std::vector<Row> outputs;

  explicit Scene(Config config = {}, unsigned seed = 7, int gap = 0) : model(config, seed) {
    std::mt19937 random(seed);
    instructions = random_tokens(random, 5, config.vocab);
    question = random_tokens(random, 4, config.vocab);
    a->tokens = random_tokens(random, 11, config.vocab);
    b->tokens = random_tokens(random, 9, config.vocab);
    encode_chunk(model, *a, 0);
    encode_chunk(model, *b, 37);  // not every engine encodes chunks at position 0
    segments = {fresh_segment(instructions), cached_segment(a->info), cached_segment(b->info, Position(16 + gap)),
                fresh_segment(question)};
    lay_out();
  }

  void lay_out() {
    Result<Prompt> made = Prompt::make(segments, Position(1000));
    REQUIRE(made.ok());
    prompt = made.value;
    tokens.clear();
    positions.clear();
    cached.clear();
    reused.keys.assign(model.layers.size(), {});
    reused.values.assign(model.layers.size(), {});
    for (const Segment& segment : segments) {
      const Chunk* chunk = segment.chunk == &a->info ? a.get() : b.get();
      for (Row row = segment.first_row; row < segment.end_row(); ++row) {
        tokens.push_back(prompt.token(row));
        positions.push_back(prompt.position(row).value);
        cached.push_back(segment.kind == SegmentKind::cached);
        for (std::size_t l = 0; l < model.layers.size(); ++l) {
          const auto at = static_cast<std::size_t>(row - segment.first_row + segment.chunk_offset);
          reused.keys[l].push_back(cached.back() ? chunk->prefill.keys[l][at] : std::vector<double>());
          reused.values[l].push_back(cached.back() ? chunk->prefill.values[l][at] : std::vector<double>());
        }
      }
    }
    outputs = {Row(prompt.rows() - 1)};
  }

  Source source() {
    std::vector<Chunk*> by_segment;
    for (const Segment& segment : segments) {
      by_segment.push_back(segment.chunk == &a->info ? a.get() : segment.chunk == &b->info ? b.get() : nullptr);
    }
    return Source(model, by_segment);
  }
};

template <class Host, class Selector, class Backend = PortableBackend>
Status run(Scene& scene, Host& host, Selector selector, Backend backend = {}, BlendReport* report = nullptr) {
  LayerwiseFusor<Selector, Backend> fusor(selector, backend);
  std::vector<std::byte> memory(fusor.workspace_bytes(scene.prompt, scene.model.config.head_dim));
  Source source = scene.source();
  return blend(host, source, fusor, scene.prompt, scene.outputs, memory, report);
}

inline double largest_difference(const std::vector<float>& got, const std::vector<double>& expected) {
  REQUIRE(got.size() == expected.size());
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) largest = std::max(largest, std::abs(got[i] - expected[i]));
  return largest;
}

// Mean absolute difference of the host's cache to the oracle's keys (rotated) and values.
template <class Host>
double cache_error(Scene& scene, Host& host, const Prefill& oracle) {
  const Config& c = scene.model.config;
  double sum = 0;
  int count = 0;
  for (std::int32_t l = 0; l < c.layers; ++l) {
    for (std::size_t row = 0; row < scene.tokens.size(); ++row) {
      auto key = oracle.keys[static_cast<std::size_t>(l)][row];
      rotate(scene.model.ropes[static_cast<std::size_t>(l)], key, scene.positions[row]);
      const auto& value = oracle.values[static_cast<std::size_t>(l)][row];
      for (int head = 0; head < c.kv_heads; ++head) {
        std::vector<float> k(static_cast<std::size_t>(c.head_dim)), v(k.size());
        decode_head(host.keys(l), static_cast<std::int64_t>(row), head, k.data());
        decode_head(host.values(l), static_cast<std::int64_t>(row), head, v.data());
        for (int d = 0; d < c.head_dim; ++d) {
          const auto at = static_cast<std::size_t>(head * c.head_dim + d);
          sum +=
              std::abs(k[static_cast<std::size_t>(d)] - key[at]) + std::abs(v[static_cast<std::size_t>(d)] - value[at]);
          count += 2;
        }
      }
    }
  }
  return sum / count;
}

// A selector in one small struct: rows told beforehand.
struct GivenRows {
  static constexpr ScoreTiming timing = ScoreTiming::before_load;
  static constexpr bool uses_keys = false;
  static constexpr bool uses_values = false;
  static constexpr const char* name = "given rows";
  std::vector<int> wanted;

  Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = std::find(wanted.begin(), wanted.end(), inputs.rows[i].value) != wanted.end() ? 1.0f : 0.0f;
    }
    return {};
  }
};

inline DeviationSelector<GivenRows, CountBudget> given(std::vector<int> rows) {
  const auto count = static_cast<std::int32_t>(rows.size());
  return DeviationSelector<GivenRows, CountBudget>(GivenRows{std::move(rows)}, CountBudget{count});
}

template <class Score>
DeviationSelector<Score, RatioBudget> at_ratio(double ratio, Score score = {}) {
  return DeviationSelector<Score, RatioBudget>(score, RatioBudget{ratio});
}

}  // namespace tiny
