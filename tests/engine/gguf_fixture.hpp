// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Writes small models as GGUF files, and asks llama.cpp what it makes of one.
#pragma once

#include <doctest/doctest.h>
#include <eigen_engine/gguf_loader.hpp>
#include <eigen_engine/model.hpp>

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "ggml.h"
#include "gguf.h"
#include "llama.h"

namespace gguf_fixture {

// A file in the temporary folder that goes away with the object. Tests run side by side, each in its own process.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& name) {
    const std::string mine = "kvblend_" + std::to_string(::getpid()) + "_" + name;
    path_ = (std::filesystem::temp_directory_path() / mine).string();
  }
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const char* path() const { return path_.c_str(); }

 private:
  std::string path_;
};

// Keys and tensors of a model file; `change` may add, overwrite or remove keys before it is written.
inline void write_gguf(const char* path, const eigen_engine::ModelConfig& c, const eigen_engine::ModelTensors& w,
                       ggml_type type = GGML_TYPE_F32, const std::vector<float>& rope_divisors = {},
                       const std::function<void(gguf_context*)>& change = {}, const std::string& left_out = {}) {
  std::size_t bytes = 1 << 20;
  bytes += 8 * (w.embedding.size() + w.output.size());
  for (const auto& layer : w.layers) bytes += 8 * (3 * layer.gate.size() + 4 * layer.query.size());
  ggml_context* tensors = ggml_init({bytes, nullptr, false});
  gguf_context* file = gguf_init_empty();
  const std::string arch = c.architecture;
  gguf_set_val_str(file, "general.architecture", arch.c_str());
  const auto integer = [&](const char* key, std::int32_t value) {
    gguf_set_val_u32(file, (arch + "." + key).c_str(), static_cast<std::uint32_t>(value));
  };
  integer("block_count", c.layers);
  integer("embedding_length", c.hidden);
  integer("feed_forward_length", c.feed_forward);
  integer("attention.head_count", c.heads);
  integer("attention.head_count_kv", c.kv_heads);
  integer("attention.key_length", c.head_dim);
  integer("attention.value_length", c.head_dim);
  integer("rope.dimension_count", c.head_dim);
  integer("context_length", c.context);
  integer("vocab_size", c.vocabulary);
  gguf_set_val_f32(file, (arch + ".attention.layer_norm_rms_epsilon").c_str(), c.norm_epsilon);
  gguf_set_val_f32(file, (arch + ".rope.freq_base").c_str(), 10000.0f);
  gguf_set_val_str(file, "tokenizer.ggml.model", "no_vocab");
  if (change) change(file);

  const auto add = [&](const std::string& name, const std::vector<float>& values, std::int64_t columns) {
    if (values.empty() || name == left_out) return;
    const auto rows = static_cast<std::int64_t>(values.size()) / columns;
    const bool matrix = rows > 1;
    ggml_tensor* tensor =
        matrix ? ggml_new_tensor_2d(tensors, type, columns, rows) : ggml_new_tensor_1d(tensors, GGML_TYPE_F32, columns);
    ggml_set_name(tensor, name.c_str());
    ggml_quantize_chunk(tensor->type, values.data(), tensor->data, 0, rows, columns, nullptr);
    gguf_add_tensor(file, tensor);
  };
  add("token_embd.weight", w.embedding, c.hidden);
  add("output_norm.weight", w.output_norm, c.hidden);
  add("output.weight", w.output, c.hidden);
  add("rope_freqs.weight", rope_divisors, c.head_dim / 2);
  for (std::size_t i = 0; i < w.layers.size(); ++i) {
    const auto& layer = w.layers[i];
    const std::string prefix = "blk." + std::to_string(i) + ".";
    add(prefix + "attn_norm.weight", layer.attention_norm, c.hidden);
    add(prefix + "attn_q.weight", layer.query, c.hidden);
    add(prefix + "attn_k.weight", layer.key, c.hidden);
    add(prefix + "attn_v.weight", layer.value, c.hidden);
    add(prefix + "attn_q.bias", layer.query_bias, c.query_values());
    add(prefix + "attn_k.bias", layer.key_bias, c.key_values());
    add(prefix + "attn_v.bias", layer.value_bias, c.key_values());
    add(prefix + "attn_output.weight", layer.attention_output, c.query_values());
    add(prefix + "ffn_norm.weight", layer.feed_forward_norm, c.hidden);
    add(prefix + "ffn_gate.weight", layer.gate, c.hidden);
    add(prefix + "ffn_up.weight", layer.up, c.hidden);
    add(prefix + "ffn_down.weight", layer.down, c.feed_forward);
  }
  REQUIRE(gguf_write_to_file(file, path, false));
  gguf_free(file);
  ggml_free(tensors);
}

// Logits of every token by llama.cpp itself, [tokens, vocabulary]; empty if it refuses the file.
inline std::vector<float> llama_logits(const char* path, const std::vector<int>& tokens, int vocabulary) {
  eigen_engine::silence_llama();
  llama_model_params model_params = llama_model_default_params();
  model_params.use_extra_bufts = false;  // plain products: those repacked for AMX want larger matrices
  const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(llama_model_load_from_file(path, model_params),
                                                                        llama_model_free);
  if (model == nullptr) return {};
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 512;
  params.n_batch = params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = 2;
  params.type_k = params.type_v = GGML_TYPE_F32;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(model.get(), params),
                                                                      llama_free);
  if (context == nullptr) return {};
  llama_batch batch = llama_batch_init(static_cast<std::int32_t>(tokens.size()), 0, 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    batch.token[i] = tokens[i];
    batch.pos[i] = static_cast<llama_pos>(i);
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  batch.n_tokens = static_cast<std::int32_t>(tokens.size());
  std::vector<float> out;
  if (llama_decode(context.get(), batch) == 0) {
    for (std::int32_t i = 0; i < batch.n_tokens; ++i) {
      const float* row = llama_get_logits_ith(context.get(), i);
      out.insert(out.end(), row, row + vocabulary);
    }
  }
  llama_batch_free(batch);
  return out;
}

}  // namespace gguf_fixture
