// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// GGUF through rope_config's file and rope readers.
#include <eigen_engine/gguf_loader.hpp>
#include <rope_config/gguf_file.hpp>
#include <rope_config/gguf_rope.hpp>

#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>

#include "ggml.h"
#include "gguf.h"
#include "llama.h"

namespace eigen_engine {

using kvblend::Result;
using kvblend::Status;
using kvblend::StatusCode;

namespace {

class Reader {
 public:
  Status open(const char* path) { return file_.open(path); }
  Result<Model> read();

 private:
  [[nodiscard]] std::string key(const char* suffix) const { return file_.key(suffix); }
  Status read_config(ModelConfig& config) const;
  Status read_ropes(rope_config::ModelRope& ropes);
  Status read_tensor(const std::string& tensor, std::int64_t rows, std::int64_t columns, std::vector<float>& out) {
    return file_.read_tensor(tensor, rows, columns, out);
  }
  Status read_layer(const ModelConfig& config, std::int32_t index, LayerTensors& layer);

  rope_config::GgufFile file_;
};

Status Reader::read_config(ModelConfig& config) const {
  KVBLEND_RETURN_IF_ERROR(file_.read("block_count", config.layers, true));
  KVBLEND_RETURN_IF_ERROR(file_.read("embedding_length", config.hidden, true));
  KVBLEND_RETURN_IF_ERROR(file_.read("feed_forward_length", config.feed_forward, true));
  KVBLEND_RETURN_IF_ERROR(file_.read("attention.head_count", config.heads, true));
  KVBLEND_RETURN_IF_ERROR(file_.read("context_length", config.context, true));
  config.kv_heads = config.heads;
  KVBLEND_RETURN_IF_ERROR(file_.read("attention.head_count_kv", config.kv_heads));
  if (config.heads < 1 || config.kv_heads < 1) {
    return Status::error(StatusCode::corrupt, "must be at least 1").at("%s", key("attention.head_count").c_str());
  }
  config.head_dim = config.hidden / config.heads;
  KVBLEND_RETURN_IF_ERROR(file_.read("attention.key_length", config.head_dim));
  std::int32_t value_dim = config.head_dim;
  KVBLEND_RETURN_IF_ERROR(file_.read("attention.value_length", value_dim));
  if (value_dim != config.head_dim) {
    return Status::error(StatusCode::unsupported, "is %d where keys have %d", value_dim, config.head_dim)
        .at("%s", key("attention.value_length").c_str());
  }
  std::int32_t experts = 0;
  KVBLEND_RETURN_IF_ERROR(file_.read("expert_count", experts));
  if (experts > 0) {
    return Status::error(StatusCode::unsupported, "models of experts are not supported")
        .at("%s", key("expert_count").c_str());
  }
  double epsilon = 1e-5;
  KVBLEND_RETURN_IF_ERROR(file_.read("attention.layer_norm_rms_epsilon", epsilon));
  config.norm_epsilon = static_cast<float>(epsilon);

  const std::int64_t embedding = gguf_find_tensor(file_.header(), "token_embd.weight");
  if (embedding < 0) {
    return Status::error(StatusCode::not_found, "the file has no such tensor").at("token_embd.weight");
  }
  const std::int64_t vocabulary = gguf_get_tensor_ne(file_.header(), embedding)[1];
  if (vocabulary < 1 || vocabulary > (1 << 24)) {
    return Status::error(StatusCode::corrupt, "has %lld rows", static_cast<long long>(vocabulary))
        .at("token_embd.weight");
  }
  config.vocabulary = static_cast<std::int32_t>(vocabulary);
  config.qkv_bias = file_.has_tensor("blk.0.attn_q.bias");
  config.tied_output = !file_.has_tensor("output.weight");
  return {};
}

// One a layer. The engine was tried with plain, linear and llama 3's only.
Status Reader::read_ropes(rope_config::ModelRope& ropes) {
  Result<rope_config::ModelRope> read = rope_config::read_gguf_rope(file_);
  if (!read.ok()) return read.status;
  for (const rope_config::LayerRope& layer : read.value.layers) {
    bool known = false;
    for (const char* family : {"plain", "linear", "llama3"}) known = known || std::strcmp(layer.family, family) == 0;
    if (!known) {
      return Status::error(StatusCode::unsupported, "\"%s\" is not supported", layer.family)
          .at("%s", key("rope.scaling.type").c_str());
    }
  }
  ropes = std::move(read.value);
  return {};
}

Status Reader::read_layer(const ModelConfig& c, std::int32_t index, LayerTensors& layer) {
  const std::string prefix = "blk." + std::to_string(index) + ".";
  const std::int64_t q = c.query_values();
  const std::int64_t kv = c.key_values();
  for (const char* unknown : {"attn_q_norm.weight", "attn_k_norm.weight", "attn_sinks.weight", "attn_output.bias"}) {
    if (file_.has_tensor(prefix + unknown)) {
      return Status::error(StatusCode::unsupported, "is nothing the engine knows").at("%s%s", prefix.c_str(), unknown);
    }
  }
  KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "attn_norm.weight", 1, c.hidden, layer.attention_norm));
  KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "attn_q.weight", q, c.hidden, layer.query));
  KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "attn_k.weight", kv, c.hidden, layer.key));
  KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "attn_v.weight", kv, c.hidden, layer.value));
  if (c.qkv_bias) {
    KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "attn_q.bias", 1, q, layer.query_bias));
    KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "attn_k.bias", 1, kv, layer.key_bias));
    KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "attn_v.bias", 1, kv, layer.value_bias));
  }
  KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "attn_output.weight", c.hidden, q, layer.attention_output));
  KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "ffn_norm.weight", 1, c.hidden, layer.feed_forward_norm));
  KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "ffn_gate.weight", c.feed_forward, c.hidden, layer.gate));
  KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "ffn_up.weight", c.feed_forward, c.hidden, layer.up));
  KVBLEND_RETURN_IF_ERROR(read_tensor(prefix + "ffn_down.weight", c.hidden, c.feed_forward, layer.down));
  return {};
}

Result<Model> Reader::read() {
  ModelConfig config;
  config.architecture = file_.architecture();
  if (config.architecture != "llama" && config.architecture != "qwen2") {
    return Status::error(StatusCode::unsupported, "\"%s\" is not supported: llama and qwen2 are",
                         config.architecture.c_str())
        .at("general.architecture");
  }
  KVBLEND_RETURN_IF_ERROR(read_config(config));
  rope_config::ModelRope ropes;
  KVBLEND_RETURN_IF_ERROR(read_ropes(ropes));
  if (ropes.layers.size() != static_cast<std::size_t>(config.layers)) {
    return Status::error(StatusCode::unsupported, "layers that predict further tokens are not supported")
        .at("%s", key("nextn_predict_layers").c_str());
  }

  Result<Model> model = Model::start(config);
  if (!model.ok()) return model;
  for (std::int32_t i = 0; i < config.layers; ++i) {
    LayerTensors layer;
    KVBLEND_RETURN_IF_ERROR(read_layer(config, i, layer));
    layer.rope = ropes.layers[static_cast<std::size_t>(i)].spec;
    KVBLEND_RETURN_IF_ERROR(model.value.add_layer(std::move(layer)));
  }
  std::vector<float> embedding, norm, output;
  KVBLEND_RETURN_IF_ERROR(read_tensor("token_embd.weight", config.vocabulary, config.hidden, embedding));
  KVBLEND_RETURN_IF_ERROR(read_tensor("output_norm.weight", 1, config.hidden, norm));
  if (!config.tied_output) {
    KVBLEND_RETURN_IF_ERROR(read_tensor("output.weight", config.vocabulary, config.hidden, output));
  }
  KVBLEND_RETURN_IF_ERROR(model.value.finish(std::move(embedding), std::move(norm), std::move(output)));
  return model;
}

}  // namespace

void silence_llama() {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
}

Result<Model> load_gguf(const char* path) {
  silence_llama();
  Reader reader;
  KVBLEND_RETURN_IF_ERROR(reader.open(path));
  return reader.read();
}

}  // namespace eigen_engine
