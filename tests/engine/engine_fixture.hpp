// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Small models and shorthand for the engine's tests.
#pragma once

#include <doctest/doctest.h>
#include <eigen_engine/engine.hpp>

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace engine_fixture {

// Rows of differing sizes that fit neither tiles nor vector registers: 4 layers, 4 heads over 2, feed-forward 100.
inline eigen_engine::ModelConfig small_config(bool bias = false, bool tied = true) {
  eigen_engine::ModelConfig config;
  config.architecture = "llama";
  config.vocabulary = 101;
  config.hidden = 64;
  config.layers = 4;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 16;
  config.feed_forward = 100;
  config.context = 512;
  config.qkv_bias = bias;
  config.tied_output = tied;
  return config;
}

inline eigen_engine::Model small_model(kvblend::RopePairing pairing = kvblend::RopePairing::neox, bool bias = false,
                                       bool tied = true, std::uint32_t seed = 1) {
  auto model = eigen_engine::random_model(small_config(bias, tied), pairing, seed);
  REQUIRE(model.ok());
  return std::move(model.value);
}

inline std::vector<int> random_tokens(int count, int vocabulary, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int> tokens;
  for (int i = 0; i < count; ++i) {
    tokens.push_back(static_cast<int>(generator() % static_cast<std::uint32_t>(vocabulary)));
  }
  return tokens;
}

// Fails the test with the Status's own words.
inline void require_ok(const kvblend::Status& status) {
  INFO(status.where() << ": " << status.message());
  REQUIRE(status.ok());
}

// [active rows][vocabulary], one after the other.
inline std::vector<float> logits_of(eigen_engine::Engine& engine) {
  std::vector<float> out(static_cast<std::size_t>(engine.active_rows()) *
                         static_cast<std::size_t>(engine.config().vocabulary));
  require_ok(engine.logits(out));
  return out;
}

inline std::vector<float> prefill_logits(eigen_engine::Engine& engine, const std::vector<int>& tokens) {
  require_ok(engine.prefill(tokens, eigen_engine::Wanted::all));
  return logits_of(engine);
}

// Keys, then values, of all cached rows of a layer.
inline std::vector<float> cached(eigen_engine::Engine& engine, std::int32_t layer) {
  std::vector<float> out;
  for (const auto& plane : {engine.keys(layer), engine.values(layer)}) {
    for (std::int64_t row = 0; row < plane.layout.row_count; ++row) {
      for (std::int32_t head = 0; head < plane.layout.heads(); ++head) {
        const auto* values = reinterpret_cast<const float*>(plane.at(row, head));
        out.insert(out.end(), values, values + plane.layout.head_dim());
      }
    }
  }
  return out;
}

inline std::vector<kvblend::Row> rows_of(const std::vector<int>& values) {
  std::vector<kvblend::Row> rows;
  for (const int value : values) rows.emplace_back(value);
  return rows;
}

inline std::vector<kvblend::ActiveIndex> first_indices(std::size_t count) {
  std::vector<kvblend::ActiveIndex> indices;
  for (std::size_t i = 0; i < count; ++i) indices.emplace_back(static_cast<std::int32_t>(i));
  return indices;
}

}  // namespace engine_fixture
