// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Models of a few layers with random weights, written as GGUF files for llama.cpp to load: those that can be blended,
// and one of each kind that cannot.
#pragma once

#include <doctest/doctest.h>

#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "ggml.h"
#include "gguf.h"

namespace tiny_gguf {

// A file in the temporary folder that goes away with the object. Tests run side by side, each in its own process.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& name)
      : path_((std::filesystem::temp_directory_path() / ("kvblend_" + std::to_string(::getpid()) + "_" + name))
                  .string()) {}
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

constexpr std::int32_t kHidden = 128;
constexpr std::int32_t kFeedForward = 128;
constexpr std::int32_t kVocabulary = 320;
constexpr std::int32_t kHeadDim = 64;  // so that llama.cpp turns q8_0 rows by Hadamard's matrix
constexpr std::int32_t kWindow = 64;   // of gemma3, longer than the self-test

class Writer {
 public:
  Writer(const std::string& architecture, std::int32_t layers, unsigned seed)
      : file_(gguf_init_empty()),
        tensors_(ggml_init({std::size_t{64} << 20, nullptr, false})),
        architecture_(architecture),
        random_(seed) {
    text("general.architecture", architecture);
    text("tokenizer.ggml.model", "no_vocab");
    number("vocab_size", kVocabulary);
    number("block_count", layers);
    number("context_length", 4096);
    number("embedding_length", kHidden);
    number("feed_forward_length", kFeedForward);
    number("attention.head_count", kHidden / kHeadDim);
    number("attention.head_count_kv", kHidden / kHeadDim);
    number("attention.key_length", kHeadDim);
    number("attention.value_length", kHeadDim);
    real("attention.layer_norm_rms_epsilon", 1e-5f);
    matrix("token_embd.weight", kHidden, kVocabulary);
  }

  void text(const char* key, const std::string& value) { gguf_set_val_str(file_.get(), key, value.c_str()); }
  void number(const char* key, std::int32_t value) {
    gguf_set_val_u32(file_.get(), of_model(key).c_str(), static_cast<std::uint32_t>(value));
  }
  void real(const char* key, float value) { gguf_set_val_f32(file_.get(), of_model(key).c_str(), value); }
  void numbers(const char* key, const std::vector<std::int32_t>& values) {
    gguf_set_arr_data(file_.get(), of_model(key).c_str(), GGUF_TYPE_INT32, values.data(), values.size());
  }

  // Products keep the size of what they multiply; norms are about 1, biases small.
  void matrix(const std::string& name, std::int64_t columns, std::int64_t rows) {
    fill(ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_F32, columns, rows), name, 0,
         1 / std::sqrt(static_cast<float>(columns)));
  }
  void norm(const std::string& name, std::int64_t size) {
    fill(ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_F32, size), name, 1, 0.1f);
  }
  void bias(const std::string& name, std::int64_t size) {
    fill(ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_F32, size), name, 0, 0.3f);
  }
  void attention(const std::string& block, const char* output) {
    norm(block + "attn_norm.weight", kHidden);
    for (const char* part : {"attn_q.weight", "attn_k.weight", "attn_v.weight"}) matrix(block + part, kHidden, kHidden);
    matrix(block + output, kHidden, kHidden);
  }
  void feed_forward(const std::string& block) {
    norm(block + "ffn_norm.weight", kHidden);
    matrix(block + "ffn_gate.weight", kHidden, kFeedForward);
    matrix(block + "ffn_up.weight", kHidden, kFeedForward);
    matrix(block + "ffn_down.weight", kFeedForward, kHidden);
  }

  void write(const std::string& path) { REQUIRE(gguf_write_to_file(file_.get(), path.c_str(), false)); }

 private:
  struct Free {
    void operator()(gguf_context* file) const { gguf_free(file); }
    void operator()(ggml_context* tensors) const { ggml_free(tensors); }
  };

  [[nodiscard]] std::string of_model(const char* key) const { return architecture_ + "." + key; }
  void fill(ggml_tensor* tensor, const std::string& name, float mean, float spread) {
    std::normal_distribution<float> draw(mean, spread);
    auto* const values = static_cast<float*>(tensor->data);
    for (std::int64_t i = 0; i < ggml_nelements(tensor); ++i) values[i] = draw(random_);
    ggml_set_name(tensor, name.c_str());
    gguf_add_tensor(file_.get(), tensor);
  }

  std::unique_ptr<gguf_context, Free> file_;
  std::unique_ptr<ggml_context, Free> tensors_;
  std::string architecture_;
  std::mt19937 random_;
};

inline std::string block(std::int32_t layer) { return "blk." + std::to_string(layer) + "."; }

// "llama" (pairs side by side), "qwen2" (halves, biases), "qwen2vl" (the same with M-RoPE) or "gemma3" (a window in all
// layers but each sixth). `latent`: states a rank of multi-head latent attention, which the llama architecture ignores.
inline void write_decoder(const std::string& path, const std::string& architecture, bool latent = false) {
  const std::int32_t layers = architecture == "gemma3" ? 7 : 4;
  Writer writer(architecture, layers, 5);
  writer.real("rope.freq_base", 10000);
  writer.norm("output_norm.weight", kHidden);
  if (architecture == "qwen2vl") writer.numbers("rope.dimension_sections", {8, 12, 12, 0});
  if (architecture == "gemma3") writer.number("attention.sliding_window", kWindow);
  if (latent) writer.number("attention.kv_lora_rank", 16);
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    const std::string name = block(layer);
    writer.attention(name, "attn_output.weight");
    writer.feed_forward(name);
    if (architecture.starts_with("qwen2")) {
      for (const char* part : {"attn_q.bias", "attn_k.bias", "attn_v.bias"}) writer.bias(name + part, kHidden);
    }
    if (architecture != "gemma3") continue;
    for (const char* part : {"attn_q_norm.weight", "attn_k_norm.weight"}) writer.norm(name + part, kHeadDim);
    for (const char* part : {"post_attention_norm.weight", "post_ffw_norm.weight"}) writer.norm(name + part, kHidden);
  }
  writer.write(path);
}

// State-space layers, which keep no keys.
inline void write_mamba(const std::string& path) {
  constexpr std::int32_t kInner = 2 * kHidden;
  constexpr std::int32_t kState = 16;
  constexpr std::int32_t kRank = 8;
  Writer writer("mamba", 2, 5);
  writer.number("ssm.conv_kernel", 4);
  writer.number("ssm.inner_size", kInner);
  writer.number("ssm.state_size", kState);
  writer.number("ssm.time_step_rank", kRank);
  writer.norm("output_norm.weight", kHidden);
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    const std::string name = block(layer);
    writer.norm(name + "attn_norm.weight", kHidden);
    writer.matrix(name + "ssm_in.weight", kHidden, 2 * kInner);
    writer.matrix(name + "ssm_conv1d.weight", 4, kInner);
    writer.bias(name + "ssm_conv1d.bias", kInner);
    writer.matrix(name + "ssm_x.weight", kInner, kRank + 2 * kState);
    writer.matrix(name + "ssm_dt.weight", kRank, kInner);
    writer.bias(name + "ssm_dt.bias", kInner);
    writer.matrix(name + "ssm_a", kState, kInner);
    writer.bias(name + "ssm_d", kInner);
    writer.matrix(name + "ssm_out.weight", kInner, kHidden);
  }
  writer.write(path);
}

inline void write_encoder(const std::string& path) {
  Writer writer("t5encoder", 2, 5);
  writer.number("attention.relative_buckets_count", 32);
  writer.norm("enc.output_norm.weight", kHidden);
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    const std::string name = "enc." + block(layer);
    writer.attention(name, "attn_o.weight");
    writer.feed_forward(name);
  }
  writer.write(path);
}

}  // namespace tiny_gguf
