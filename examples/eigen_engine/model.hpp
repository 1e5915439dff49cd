// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Model: the weights of a llama-family transformer in float32, laid out for the engine's products.
#pragma once

#include <eigen_engine/buffer.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace eigen_engine {

struct ModelConfig {
  std::string architecture;  // as GGUF names it: "llama", "qwen2"
  std::int32_t vocabulary = 0;
  std::int32_t hidden = 0;  // values of a hidden state
  std::int32_t layers = 0;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;  // divides heads
  std::int32_t head_dim = 0;
  std::int32_t feed_forward = 0;
  std::int32_t context = 0;  // positions [0, context) are the model's range
  float norm_epsilon = 1e-5f;
  bool qkv_bias = false;
  bool tied_output = true;  // the output head is the embedding

  [[nodiscard]] std::int32_t query_values() const { return heads * head_dim; }
  [[nodiscard]] std::int32_t key_values() const { return kv_heads * head_dim; }
  [[nodiscard]] std::int32_t qkv_values() const { return query_values() + 2 * key_values(); }
};

// One layer as files have it. Matrices are row-major [outputs, inputs].
struct LayerTensors {
  std::vector<float> attention_norm;                    // [hidden]
  std::vector<float> query, key, value;                 // [heads·head_dim or kv_heads·head_dim, hidden]
  std::vector<float> query_bias, key_bias, value_bias;  // empty without bias
  std::vector<float> attention_output;                  // [hidden, heads·head_dim]
  std::vector<float> feed_forward_norm;                 // [hidden]
  std::vector<float> gate, up;                          // [feed_forward, hidden]
  std::vector<float> down;                              // [hidden, feed_forward]
  kvblend::RopeSpec rope;
};

struct ModelTensors {
  std::vector<float> embedding;  // [vocabulary, hidden]
  std::vector<LayerTensors> layers;
  std::vector<float> output_norm;  // [hidden]
  std::vector<float> output;       // [vocabulary, hidden]; empty if tied
};

// The same, fused. Queries, keys and values come from one product, gate and up from another.
struct LayerWeights {
  Buffer attention_norm;
  Buffer qkv;       // [qkv_values, hidden]: queries, keys, values
  Buffer qkv_bias;  // [qkv_values] or empty
  Buffer attention_output;
  Buffer feed_forward_norm;
  Buffer gate_up;  // [2·feed_forward, hidden]: blocks of kGateBlock gate rows, each followed by its up rows
  Buffer down;
};

// Gate rows that stand together in gate_up; the last block may be shorter.
inline constexpr std::int64_t kGateBlock = 48;

class Model {
 public:
  // Checks sizes and fuses; takes the tensors apart layer by layer, so that memory holds about one copy.
  // Errors name the tensor or field: a size that does not fit the config, a config that is no model, a bad rope.
  static kvblend::Result<Model> make(const ModelConfig& config, ModelTensors&& tensors);

  // Adds one layer after the other, for files that are read in that order; finish() checks that all came.
  static kvblend::Result<Model> start(const ModelConfig& config);
  kvblend::Status add_layer(LayerTensors&& layer);
  kvblend::Status finish(std::vector<float>&& embedding, std::vector<float>&& output_norm, std::vector<float>&& output);

  [[nodiscard]] const ModelConfig& config() const { return config_; }
  [[nodiscard]] const LayerWeights& layer(std::int32_t i) const { return layers_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t i) const { return ropes_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] const float* embedding() const { return embedding_.data(); }
  [[nodiscard]] const float* output_norm() const { return output_norm_.data(); }
  [[nodiscard]] const float* output() const { return config_.tied_output ? embedding_.data() : output_.data(); }

 private:
  ModelConfig config_;
  Buffer embedding_;
  std::vector<LayerWeights> layers_;
  std::vector<kvblend::RopeSpec> ropes_;
  Buffer output_norm_;
  Buffer output_;
};

// Weights from a seeded generator, scaled so that hidden states neither vanish nor grow: for tests. Every layer gets
// the plain rope of base 10 000.
ModelTensors random_tensors(const ModelConfig& config, kvblend::RopePairing pairing, std::uint32_t seed);
kvblend::Result<Model> random_model(const ModelConfig& config, kvblend::RopePairing pairing, std::uint32_t seed);

}  // namespace eigen_engine
