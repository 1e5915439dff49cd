// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Weights: a llama-family model in a device's memory, from an eigen_engine::Model or made up there.
#pragma once

#include <cuda_engine/device.hpp>
#include <cuda_engine/functors.hpp>
#include <eigen_engine/model.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/rope/builders.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace cuda_engine {

using eigen_engine::ModelConfig;
using kvblend::Result;
using kvblend::RopeSpec;
using kvblend::Status;
using kvblend::StatusCode;

template <class D>
struct LayerWeights {
  using T = typename D::Scalar;
  Array<D, float> attention_norm;     // [hidden]
  Array<D, T> qkv;                    // [qkv_values, hidden]: queries, keys, values
  Array<D, float> qkv_bias;           // [qkv_values], or empty
  Array<D, T> attention_output;       // [hidden, heads · head_dim]
  Array<D, float> feed_forward_norm;  // [hidden]
  Array<D, T> gate_up;                // [2 · feed_forward, hidden]: gate, then up
  Array<D, T> down;                   // [hidden, feed_forward]
  RopeSpec rope;
};

template <Device D>
class Weights {
 public:
  using T = typename D::Scalar;

  // Memory for all of it.
  Status allocate(const ModelConfig& config) {
    const ModelConfig& c = config;
    config_ = config;
    const struct {
      std::int32_t value;
      const char* name;
    } widths[] = {{c.hidden, "hidden"}, {c.head_dim, "head_dim"}, {c.feed_forward, "feed_forward"}};
    for (const auto& width : widths) {
      if (width.value > 0 && width.value % 4 == 0) continue;
      return Status::error(StatusCode::unsupported, "is %d, must be a multiple of four", width.value)
          .at("%s", width.name);
    }
    layers_.clear();
    layers_.resize(static_cast<std::size_t>(c.layers));
    KVBLEND_RETURN_IF_ERROR(embedding_.allocate(std::int64_t{c.vocabulary} * c.hidden, "embedding"));
    for (LayerWeights<D>& layer : layers_) {
      KVBLEND_RETURN_IF_ERROR(layer.attention_norm.allocate(c.hidden, "attention_norm"));
      KVBLEND_RETURN_IF_ERROR(layer.qkv.allocate(std::int64_t{c.qkv_values()} * c.hidden, "qkv"));
      KVBLEND_RETURN_IF_ERROR(layer.qkv_bias.allocate(c.qkv_bias ? c.qkv_values() : 0, "qkv_bias"));
      KVBLEND_RETURN_IF_ERROR(
          layer.attention_output.allocate(std::int64_t{c.hidden} * c.query_values(), "attention_output"));
      KVBLEND_RETURN_IF_ERROR(layer.feed_forward_norm.allocate(c.hidden, "feed_forward_norm"));
      KVBLEND_RETURN_IF_ERROR(layer.gate_up.allocate(std::int64_t{2} * c.feed_forward * c.hidden, "gate_up"));
      KVBLEND_RETURN_IF_ERROR(layer.down.allocate(std::int64_t{c.hidden} * c.feed_forward, "down"));
    }
    KVBLEND_RETURN_IF_ERROR(output_norm_.allocate(c.hidden, "output_norm"));
    return output_.allocate(c.tied_output ? 0 : std::int64_t{c.vocabulary} * c.hidden, "output");
  }

  // Copies the model's, as the device's Scalar.
  Status load(D& device, const eigen_engine::Model& model) {
    KVBLEND_RETURN_IF_ERROR(allocate(model.config()));
    const ModelConfig& c = config_;
    KVBLEND_RETURN_IF_ERROR(copy(device, model.embedding(), embedding_));
    for (std::int32_t i = 0; i < c.layers; ++i) {
      LayerWeights<D>& layer = layers_[static_cast<std::size_t>(i)];
      const eigen_engine::LayerWeights& from = model.layer(i);
      layer.rope = model.rope(i);
      KVBLEND_RETURN_IF_ERROR(copy(device, from.attention_norm.data(), layer.attention_norm));
      KVBLEND_RETURN_IF_ERROR(copy(device, from.qkv.data(), layer.qkv));
      KVBLEND_RETURN_IF_ERROR(copy(device, from.qkv_bias.data(), layer.qkv_bias));
      KVBLEND_RETURN_IF_ERROR(copy(device, from.attention_output.data(), layer.attention_output));
      KVBLEND_RETURN_IF_ERROR(copy(device, from.feed_forward_norm.data(), layer.feed_forward_norm));
      const std::vector<float> gate_up = gate_then_up(from.gate_up.data(), c.feed_forward, c.hidden);
      KVBLEND_RETURN_IF_ERROR(copy(device, gate_up.data(), layer.gate_up));
      KVBLEND_RETURN_IF_ERROR(copy(device, from.down.data(), layer.down));
    }
    KVBLEND_RETURN_IF_ERROR(copy(device, model.output_norm(), output_norm_));
    return copy(device, model.output(), output_);
  }

  // Random ones, scaled so that hidden states neither vanish nor grow; the same for a seed, but for rounding to Scalar.
  Status make_up(D& device, const ModelConfig& config, const RopeSpec& rope, std::uint64_t seed) {
    KVBLEND_RETURN_IF_ERROR(allocate(config));
    Maker make{device, seed};
    make(embedding_, 0, 0.3f);
    const float hidden = deviation(config.hidden);
    for (LayerWeights<D>& layer : layers_) {
      layer.rope = rope;
      make(layer.attention_norm, 1, 0.1f);
      make(layer.qkv, 0, hidden);
      make.part(layer.qkv, std::int64_t{config.query_values()} * config.hidden,
                2 * hidden);  // so that rows differ in weight
      make(layer.qkv_bias, 0, 0.5f);
      make(layer.attention_output, 0, deviation(config.query_values()));
      make(layer.feed_forward_norm, 1, 0.1f);
      make(layer.gate_up, 0, hidden);
      make(layer.down, 0, deviation(config.feed_forward));
    }
    make(output_norm_, 1, 0.1f);
    make(output_, 0, hidden);
    return make.status;
  }

  [[nodiscard]] const ModelConfig& config() const { return config_; }
  [[nodiscard]] const LayerWeights<D>& layer(std::int32_t i) const { return layers_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] const T* embedding() const { return embedding_.data(); }
  [[nodiscard]] const float* output_norm() const { return output_norm_.data(); }
  [[nodiscard]] const T* output() const { return config_.tied_output ? embedding_.data() : output_.data(); }

 private:
  struct Maker {
    D& device;
    std::uint64_t seed;
    Status status{};

    template <class V>
    void operator()(Array<D, V>& to, float mean, float deviation) {
      fill(to.data(), to.size(), mean, deviation);
    }
    // The first `count` values.
    template <class V>
    void part(Array<D, V>& to, std::int64_t count, float deviation) {
      fill(to.data(), count, 0, deviation);
    }

   private:
    template <class V>
    void fill(V* to, std::int64_t count, float mean, float deviation) {
      seed += 0x632be59bd9b4e019ULL;
      if (!status.ok()) return;
      status = device.execution().for_each(count, RandomValue<V>{to, seed, mean, deviation});
    }
  };
  static float deviation(std::int32_t inputs) { return 1.0f / std::sqrt(static_cast<float>(inputs)); }

  template <class V>
  static Status copy(D& device, const float* from, Array<D, V>& to) {
    std::vector<V> converted(static_cast<std::size_t>(to.size()));
    for (std::size_t i = 0; i < converted.size(); ++i) store(converted[i], from[i]);
    KVBLEND_RETURN_IF_ERROR(device.execution().upload(to.data(), converted.data(), converted.size() * sizeof(V)));
    return device.finish();  // before `converted` goes
  }

  // From the Model's blocks of rows to two matrices.
  static std::vector<float> gate_then_up(const float* blocks, std::int64_t rows, std::int64_t columns) {
    std::vector<float> out(static_cast<std::size_t>(2 * rows * columns));
    for (std::int64_t row = 0; row < rows; row += eigen_engine::kGateBlock) {
      const std::int64_t count = (std::min)(eigen_engine::kGateBlock, rows - row) * columns;
      std::copy_n(blocks + 2 * row * columns, count, out.data() + row * columns);
      std::copy_n(blocks + 2 * row * columns + count, count, out.data() + (rows + row) * columns);
    }
    return out;
  }

  ModelConfig config_;
  std::vector<LayerWeights<D>> layers_;
  Array<D, T> embedding_;
  Array<D, float> output_norm_;
  Array<D, T> output_;
};

// Shapes of models people run; `context` positions are what an engine makes a table for.
[[nodiscard]] inline ModelConfig llama3_8b(std::int32_t context) {
  ModelConfig c;
  c.architecture = "llama";
  c.vocabulary = 128256;
  c.hidden = 4096;
  c.layers = 32;
  c.heads = 32;
  c.kv_heads = 8;
  c.head_dim = 128;
  c.feed_forward = 14336;
  c.context = context;
  c.tied_output = false;
  return c;
}
[[nodiscard]] inline ModelConfig qwen25_7b(std::int32_t context) {
  ModelConfig c;
  c.architecture = "qwen2";
  c.vocabulary = 152064;
  c.hidden = 3584;
  c.layers = 28;
  c.heads = 28;
  c.kv_heads = 4;
  c.head_dim = 128;
  c.feed_forward = 18944;
  c.context = context;
  c.norm_epsilon = 1e-6f;
  c.qkv_bias = true;
  c.tied_output = false;
  return c;
}

}  // namespace cuda_engine
