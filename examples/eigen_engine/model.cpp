// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Checks tensors against the config and fuses them into the engine's layout.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <eigen_engine/model.hpp>
#include <kvblend/core/bits.hpp>
#include <kvblend/rope/builders.hpp>
#include <random>
#include <utility>

namespace eigen_engine {

using kvblend::Result;
using kvblend::RopePairing;
using kvblend::RopeSpec;
using kvblend::Status;
using kvblend::StatusCode;

namespace {

Status check_field(std::int64_t value, const char* name) {
  if (value >= 1 && value <= (1 << 24)) return {};
  return Status::error(StatusCode::invalid_argument, "is %lld", static_cast<long long>(value)).at("%s", name);
}

Status check_config(const ModelConfig& config) {
  KVBLEND_RETURN_IF_ERROR(check_field(config.vocabulary, "vocabulary"));
  KVBLEND_RETURN_IF_ERROR(check_field(config.hidden, "hidden"));
  KVBLEND_RETURN_IF_ERROR(check_field(config.layers, "layers"));
  KVBLEND_RETURN_IF_ERROR(check_field(config.heads, "heads"));
  KVBLEND_RETURN_IF_ERROR(check_field(config.kv_heads, "kv_heads"));
  KVBLEND_RETURN_IF_ERROR(check_field(config.head_dim, "head_dim"));
  KVBLEND_RETURN_IF_ERROR(check_field(config.feed_forward, "feed_forward"));
  KVBLEND_RETURN_IF_ERROR(check_field(config.context, "context"));
  if (config.heads % config.kv_heads != 0) {
    return Status::error(StatusCode::invalid_argument, "%d does not divide %d heads", config.kv_heads, config.heads)
        .at("kv_heads");
  }
  if (config.head_dim > kvblend::kMaxHeadDim || std::int64_t{config.heads} * config.head_dim > (1 << 24)) {
    return Status::error(StatusCode::invalid_argument, "is %d", config.head_dim).at("head_dim");
  }
  if (!kvblend::is_finite(config.norm_epsilon) || config.norm_epsilon < 0) {
    return Status::error(StatusCode::invalid_argument, "is not a small positive number").at("norm_epsilon");
  }
  return {};
}

Status check_rope(const ModelConfig& config, const RopeSpec& rope) {
  if (rope.head_dim == config.head_dim && rope.rotary_dim >= 0 && rope.rotary_dim % 2 == 0 && rope.rotary_offset >= 0 &&
      rope.rotary_offset + rope.rotary_dim <= rope.head_dim) {
    return {};
  }
  return Status::error(StatusCode::invalid_argument, "rotates %d of %d values from %d, in heads of %d", rope.rotary_dim,
                       rope.head_dim, rope.rotary_offset, config.head_dim)
      .at("rope");
}

Status check_size(const std::vector<float>& tensor, std::int64_t rows, std::int64_t columns, const char* name) {
  if (static_cast<std::int64_t>(tensor.size()) == rows * columns) return {};
  return Status::error(StatusCode::mismatch, "has %zu values, must have %lld x %lld", tensor.size(),
                       static_cast<long long>(rows), static_cast<long long>(columns))
      .at("%s", name);
}

void append(Buffer& out, std::int64_t& at, const float* values, std::int64_t count) {
  std::copy_n(values, count, out.data() + at);
  at += count;
}

// One after the other, and frees them.
Buffer joined(std::initializer_list<std::vector<float>*> parts) {
  std::int64_t size = 0;
  for (const auto* part : parts) size += static_cast<std::int64_t>(part->size());
  Buffer out(size);
  std::int64_t at = 0;
  for (auto* part : parts) {
    append(out, at, part->data(), static_cast<std::int64_t>(part->size()));
    std::vector<float>().swap(*part);
  }
  return out;
}

Buffer interleaved(std::vector<float>& gate, std::vector<float>& up, std::int64_t rows, std::int64_t columns) {
  Buffer out(2 * rows * columns);
  std::int64_t at = 0;
  for (std::int64_t row = 0; row < rows; row += kGateBlock) {
    const std::int64_t count = (std::min)(kGateBlock, rows - row) * columns;
    append(out, at, gate.data() + row * columns, count);
    append(out, at, up.data() + row * columns, count);
  }
  std::vector<float>().swap(gate);
  std::vector<float>().swap(up);
  return out;
}

}  // namespace

Result<Model> Model::start(const ModelConfig& config) {
  KVBLEND_RETURN_IF_ERROR(check_config(config));
  Model model;
  model.config_ = config;
  model.layers_.reserve(static_cast<std::size_t>(config.layers));
  model.ropes_.reserve(static_cast<std::size_t>(config.layers));
  return model;
}

Status Model::add_layer(LayerTensors&& layer) {
  const ModelConfig& c = config_;
  const auto at = static_cast<int>(layers_.size());
  const std::int64_t bias = c.qkv_bias ? 1 : 0;
  const struct {
    const std::vector<float>& tensor;
    std::int64_t rows, columns;
    const char* name;
  } expected[] = {{layer.attention_norm, 1, c.hidden, "attention_norm"},
                  {layer.query, c.query_values(), c.hidden, "query"},
                  {layer.key, c.key_values(), c.hidden, "key"},
                  {layer.value, c.key_values(), c.hidden, "value"},
                  {layer.query_bias, bias, c.query_values(), "query_bias"},
                  {layer.key_bias, bias, c.key_values(), "key_bias"},
                  {layer.value_bias, bias, c.key_values(), "value_bias"},
                  {layer.attention_output, c.hidden, c.query_values(), "attention_output"},
                  {layer.feed_forward_norm, 1, c.hidden, "feed_forward_norm"},
                  {layer.gate, c.feed_forward, c.hidden, "gate"},
                  {layer.up, c.feed_forward, c.hidden, "up"},
                  {layer.down, c.hidden, c.feed_forward, "down"}};
  for (const auto& e : expected) {
    char name[64];
    std::snprintf(name, sizeof name, "layer %d %s", at, e.name);
    KVBLEND_RETURN_IF_ERROR(check_size(e.tensor, e.rows, e.columns, name));
  }
  KVBLEND_RETURN_IF_ERROR(check_rope(c, layer.rope));

  LayerWeights weights;
  weights.attention_norm = joined({&layer.attention_norm});
  weights.qkv = joined({&layer.query, &layer.key, &layer.value});
  weights.qkv_bias = joined({&layer.query_bias, &layer.key_bias, &layer.value_bias});
  weights.attention_output = joined({&layer.attention_output});
  weights.feed_forward_norm = joined({&layer.feed_forward_norm});
  weights.gate_up = interleaved(layer.gate, layer.up, c.feed_forward, c.hidden);
  weights.down = joined({&layer.down});
  layers_.push_back(std::move(weights));
  ropes_.push_back(layer.rope);
  return {};
}

Status Model::finish(std::vector<float>&& embedding, std::vector<float>&& output_norm, std::vector<float>&& output) {
  const ModelConfig& c = config_;
  if (static_cast<std::int32_t>(layers_.size()) != c.layers) {
    return Status::error(StatusCode::mismatch, "%zu layers came, %d were announced", layers_.size(), c.layers)
        .at("layers");
  }
  KVBLEND_RETURN_IF_ERROR(check_size(embedding, c.vocabulary, c.hidden, "embedding"));
  KVBLEND_RETURN_IF_ERROR(check_size(output_norm, 1, c.hidden, "output_norm"));
  KVBLEND_RETURN_IF_ERROR(check_size(output, c.tied_output ? 0 : c.vocabulary, c.hidden, "output"));
  embedding_ = joined({&embedding});
  output_norm_ = joined({&output_norm});
  output_ = joined({&output});
  return {};
}

Result<Model> Model::make(const ModelConfig& config, ModelTensors&& tensors) {
  Result<Model> model = start(config);
  if (!model.ok()) return model;
  for (LayerTensors& layer : tensors.layers) KVBLEND_RETURN_IF_ERROR(model.value.add_layer(std::move(layer)));
  KVBLEND_RETURN_IF_ERROR(
      model.value.finish(std::move(tensors.embedding), std::move(tensors.output_norm), std::move(tensors.output)));
  return model;
}

ModelTensors random_tensors(const ModelConfig& config, RopePairing pairing, std::uint32_t seed) {
  std::mt19937 generator(seed);
  const auto filled = [&generator](std::int64_t rows, std::int64_t columns, float mean, float deviation) {
    // A sum of uniforms rather than std::normal_distribution, whose values differ between standard libraries.
    std::vector<float> values(static_cast<std::size_t>(rows * columns));
    for (float& value : values) {
      double sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<double>(generator()) / 4294967296.0 - 0.5;
      value = mean + deviation * static_cast<float>(sum * 1.7320508);
    }
    return values;
  };
  const auto matrix = [&filled](std::int64_t rows, std::int64_t columns) {
    return filled(rows, columns, 0.0f, 1.0f / std::sqrt(static_cast<float>(columns)));
  };
  const ModelConfig& c = config;
  ModelTensors tensors;
  tensors.embedding = filled(c.vocabulary, c.hidden, 0.0f, 1.0f);
  for (std::int32_t i = 0; i < c.layers; ++i) {
    LayerTensors layer;
    layer.attention_norm = filled(1, c.hidden, 1.0f, 0.1f);
    layer.query = filled(c.query_values(), c.hidden, 0.0f, 2.0f / std::sqrt(static_cast<float>(c.hidden)));
    layer.key = matrix(c.key_values(), c.hidden);
    layer.value = matrix(c.key_values(), c.hidden);
    if (c.qkv_bias) {
      layer.query_bias = filled(1, c.query_values(), 0.0f, 0.5f);
      layer.key_bias = filled(1, c.key_values(), 0.0f, 0.5f);
      layer.value_bias = filled(1, c.key_values(), 0.0f, 0.5f);
    }
    layer.attention_output = matrix(c.hidden, c.query_values());
    layer.feed_forward_norm = filled(1, c.hidden, 1.0f, 0.1f);
    layer.gate = matrix(c.feed_forward, c.hidden);
    layer.up = matrix(c.feed_forward, c.hidden);
    layer.down = matrix(c.hidden, c.feed_forward);
    layer.rope = kvblend::plain_rope(c.head_dim, 10000.0, pairing).value;  // add_layer checks it
    tensors.layers.push_back(std::move(layer));
  }
  tensors.output_norm = filled(1, c.hidden, 1.0f, 0.1f);
  if (!c.tied_output) tensors.output = matrix(c.vocabulary, c.hidden);
  return tensors;
}

Result<Model> random_model(const ModelConfig& config, RopePairing pairing, std::uint32_t seed) {
  KVBLEND_RETURN_IF_ERROR(check_config(config));
  return Model::make(config, random_tensors(config, pairing, seed));
}

}  // namespace eigen_engine
