// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// GGUF through ggml's reader for the header, and bounded reads of our own for the tensors.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <eigen_engine/gguf_loader.hpp>
#include <exception>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "ggml.h"
#include "gguf.h"
#include "llama.h"

namespace eigen_engine {

using kvblend::Result;
using kvblend::RopePairing;
using kvblend::Status;
using kvblend::StatusCode;

namespace {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
struct FreeGguf {
  void operator()(gguf_context* context) const { gguf_free(context); }
};

class Reader {
 public:
  Status open(const char* path);
  Result<Model> read();

 private:
  Status corrupt(const char* what) const {
    return Status::error(StatusCode::corrupt, "%s", what).at("%s", name_.c_str());
  }
  [[nodiscard]] std::string key(const char* suffix) const { return architecture_ + "." + suffix; }
  [[nodiscard]] std::int64_t find(const std::string& key) const { return gguf_find_key(header_.get(), key.c_str()); }

  Status read_integer(const char* suffix, std::int32_t& out, bool required) const;
  Status read_number(const char* suffix, double& out) const;
  Status read_text(const std::string& key, std::string& out) const;
  Status read_config(ModelConfig& config, std::int32_t& rotary_dim) const;
  Status read_rope_scaling(double& linear_factor) const;
  [[nodiscard]] bool has(const std::string& tensor) const {
    return gguf_find_tensor(header_.get(), tensor.c_str()) >= 0;
  }
  // [rows, columns], or [columns] with rows 1.
  Status read_tensor(const std::string& tensor, std::int64_t rows, std::int64_t columns, std::vector<float>& out);
  Status read_layer(const ModelConfig& config, std::int32_t index, LayerTensors& layer);

  std::string name_;  // the file's, without its folder, for messages
  std::uint64_t size_ = 0;
  std::unique_ptr<std::FILE, CloseFile> file_;
  std::unique_ptr<gguf_context, FreeGguf> header_;
  std::string architecture_;
  std::vector<char> raw_;
};

Status Reader::open(const char* path) {
  const std::filesystem::path file(path);
  name_ = file.filename().string();
  std::error_code error;
  const auto kind = std::filesystem::status(file, error).type();
  if (kind == std::filesystem::file_type::not_found) {
    return Status::error(StatusCode::not_found, "no such file").at("%s", path);
  }
  if (kind == std::filesystem::file_type::directory) {
    return Status::error(StatusCode::invalid_argument, "is a directory, not a GGUF file").at("%s", path);
  }
  file_.reset(std::fopen(path, "rb"));
  if (file_ == nullptr) {
    return Status::error(StatusCode::io_error, "cannot be opened: %s", std::strerror(errno)).at("%s", path);
  }
  size_ = std::filesystem::file_size(file, error);
  if (error) return Status::error(StatusCode::io_error, "%s", error.message().c_str()).at("%s", path);
  char magic[4] = {};
  if (std::fread(magic, 1, sizeof magic, file_.get()) != sizeof magic || std::memcmp(magic, GGUF_MAGIC, 4) != 0) {
    return corrupt(size_ == 0 ? "is empty" : "is not a GGUF file");
  }
  silence_llama();
  try {
    header_.reset(gguf_init_from_file(path, {/*no_alloc=*/true, /*ctx=*/nullptr}));
  } catch (const std::exception&) {
    header_.reset();
  }
  return header_ != nullptr ? Status{} : corrupt("has a GGUF header that is cut or damaged");
}

Status Reader::read_integer(const char* suffix, std::int32_t& out, bool required) const {
  const std::string name = key(suffix);
  const std::int64_t id = find(name);
  if (id < 0) {
    return required ? Status::error(StatusCode::not_found, "the file has no such key").at("%s", name.c_str())
                    : Status{};
  }
  std::int64_t value = -1;
  switch (gguf_get_kv_type(header_.get(), id)) {
    case GGUF_TYPE_UINT32: value = gguf_get_val_u32(header_.get(), id); break;
    case GGUF_TYPE_INT32: value = gguf_get_val_i32(header_.get(), id); break;
    case GGUF_TYPE_UINT64: value = static_cast<std::int64_t>(gguf_get_val_u64(header_.get(), id)); break;
    case GGUF_TYPE_ARRAY:
      return Status::error(StatusCode::unsupported, "differs from layer to layer").at("%s", name.c_str());
    default: break;
  }
  if (value < 0 || value > (1 << 30)) {
    return Status::error(StatusCode::corrupt, "is not a sensible integer").at("%s", name.c_str());
  }
  out = static_cast<std::int32_t>(value);
  return {};
}

Status Reader::read_number(const char* suffix, double& out) const {
  const std::string name = key(suffix);
  const std::int64_t id = find(name);
  if (id < 0) return {};
  if (gguf_get_kv_type(header_.get(), id) != GGUF_TYPE_FLOAT32) {
    return Status::error(StatusCode::corrupt, "is not a float").at("%s", name.c_str());
  }
  out = static_cast<double>(gguf_get_val_f32(header_.get(), id));
  return {};
}

Status Reader::read_text(const std::string& name, std::string& out) const {
  const std::int64_t id = find(name);
  if (id < 0) return {};
  if (gguf_get_kv_type(header_.get(), id) != GGUF_TYPE_STRING) {
    return Status::error(StatusCode::corrupt, "is not text").at("%s", name.c_str());
  }
  out = gguf_get_val_str(header_.get(), id);
  return {};
}

Status Reader::read_config(ModelConfig& config, std::int32_t& rotary_dim) const {
  KVBLEND_RETURN_IF_ERROR(read_integer("block_count", config.layers, true));
  KVBLEND_RETURN_IF_ERROR(read_integer("embedding_length", config.hidden, true));
  KVBLEND_RETURN_IF_ERROR(read_integer("feed_forward_length", config.feed_forward, true));
  KVBLEND_RETURN_IF_ERROR(read_integer("attention.head_count", config.heads, true));
  KVBLEND_RETURN_IF_ERROR(read_integer("context_length", config.context, true));
  config.kv_heads = config.heads;
  KVBLEND_RETURN_IF_ERROR(read_integer("attention.head_count_kv", config.kv_heads, false));
  if (config.heads < 1 || config.kv_heads < 1) {
    return Status::error(StatusCode::corrupt, "must be at least 1").at("%s", key("attention.head_count").c_str());
  }
  config.head_dim = config.hidden / config.heads;
  KVBLEND_RETURN_IF_ERROR(read_integer("attention.key_length", config.head_dim, false));
  std::int32_t value_dim = config.head_dim;
  KVBLEND_RETURN_IF_ERROR(read_integer("attention.value_length", value_dim, false));
  if (value_dim != config.head_dim) {
    return Status::error(StatusCode::unsupported, "is %d where keys have %d", value_dim, config.head_dim)
        .at("%s", key("attention.value_length").c_str());
  }
  std::int32_t experts = 0;
  KVBLEND_RETURN_IF_ERROR(read_integer("expert_count", experts, false));
  if (experts > 0) {
    return Status::error(StatusCode::unsupported, "models of experts are not supported")
        .at("%s", key("expert_count").c_str());
  }
  rotary_dim = config.head_dim;
  KVBLEND_RETURN_IF_ERROR(read_integer("rope.dimension_count", rotary_dim, false));
  if (rotary_dim % 2 != 0 || rotary_dim > config.head_dim) {
    return Status::error(StatusCode::corrupt, "is %d, heads have %d", rotary_dim, config.head_dim)
        .at("%s", key("rope.dimension_count").c_str());
  }
  double epsilon = 1e-5;
  KVBLEND_RETURN_IF_ERROR(read_number("attention.layer_norm_rms_epsilon", epsilon));
  config.norm_epsilon = static_cast<float>(epsilon);

  const std::int64_t embedding = gguf_find_tensor(header_.get(), "token_embd.weight");
  if (embedding < 0) {
    return Status::error(StatusCode::not_found, "the file has no such tensor").at("token_embd.weight");
  }
  const std::int64_t vocabulary = gguf_get_tensor_ne(header_.get(), embedding)[1];
  if (vocabulary < 1 || vocabulary > (1 << 24)) {
    return Status::error(StatusCode::corrupt, "has %lld rows", static_cast<long long>(vocabulary))
        .at("token_embd.weight");
  }
  config.vocabulary = static_cast<std::int32_t>(vocabulary);
  config.qkv_bias = has("blk.0.attn_q.bias");
  config.tied_output = !has("output.weight");
  return {};
}

Status Reader::read_rope_scaling(double& linear_factor) const {
  std::string kind = "none";
  KVBLEND_RETURN_IF_ERROR(read_text(key("rope.scaling.type"), kind));
  linear_factor = 1.0;
  if (kind == "linear") {
    KVBLEND_RETURN_IF_ERROR(read_number("rope.scaling.factor", linear_factor));
  } else if (kind == "none") {
    KVBLEND_RETURN_IF_ERROR(read_number("rope.scale_linear", linear_factor));
  } else {
    return Status::error(StatusCode::unsupported, "\"%s\" is not supported", kind.c_str())
        .at("%s", key("rope.scaling.type").c_str());
  }
  if (linear_factor == 0.0) linear_factor = 1.0;  // how converters write "no scaling"
  if (!(linear_factor > 0.0) || !std::isfinite(linear_factor)) {
    return Status::error(StatusCode::corrupt, "is %g", linear_factor).at("%s", key("rope.scaling.factor").c_str());
  }
  return {};
}

Status Reader::read_tensor(const std::string& tensor, std::int64_t rows, std::int64_t columns,
                           std::vector<float>& out) {
  const std::int64_t id = gguf_find_tensor(header_.get(), tensor.c_str());
  if (id < 0) return Status::error(StatusCode::not_found, "the file has no such tensor").at("%s", tensor.c_str());
  const std::int64_t* shape = gguf_get_tensor_ne(header_.get(), id);
  if (shape[0] != columns || shape[1] != rows || shape[2] != 1 || shape[3] != 1) {
    return Status::error(StatusCode::mismatch, "has shape [%lld, %lld], must have [%lld, %lld]",
                         static_cast<long long>(shape[1]), static_cast<long long>(shape[0]),
                         static_cast<long long>(rows), static_cast<long long>(columns))
        .at("%s", tensor.c_str());
  }
  const ggml_type type = gguf_get_tensor_type(header_.get(), id);
  const ggml_type_traits* traits = ggml_get_type_traits(type);
  if (type != GGML_TYPE_F32 && traits->to_float == nullptr) {
    return Status::error(StatusCode::unsupported, "has type %s, which ggml cannot turn into floats", traits->type_name)
        .at("%s", tensor.c_str());
  }
  const std::uint64_t first = gguf_get_data_offset(header_.get()) + gguf_get_tensor_offset(header_.get(), id);
  const std::uint64_t bytes = gguf_get_tensor_size(header_.get(), id);
  if (first > size_ || bytes > size_ - first) {
    return Status::error(StatusCode::corrupt, "ends at byte %llu of a file of %llu: it was cut",
                         static_cast<unsigned long long>(first + bytes), static_cast<unsigned long long>(size_))
        .at("%s", tensor.c_str());
  }
  out.resize(static_cast<std::size_t>(rows * columns));
  void* target = out.data();
  if (type != GGML_TYPE_F32) {
    raw_.resize(bytes);
    target = raw_.data();
  }
  if (std::fseek(file_.get(), static_cast<long>(first), SEEK_SET) != 0 ||
      std::fread(target, 1, bytes, file_.get()) != bytes) {
    return Status::error(StatusCode::io_error, "cannot be read from %s", name_.c_str()).at("%s", tensor.c_str());
  }
  if (type != GGML_TYPE_F32) traits->to_float(raw_.data(), out.data(), rows * columns);
  return {};
}

Status Reader::read_layer(const ModelConfig& c, std::int32_t index, LayerTensors& layer) {
  const std::string prefix = "blk." + std::to_string(index) + ".";
  const std::int64_t q = c.query_values();
  const std::int64_t kv = c.key_values();
  for (const char* unknown : {"attn_q_norm.weight", "attn_k_norm.weight", "attn_sinks.weight", "attn_output.bias"}) {
    if (has(prefix + unknown)) {
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
  KVBLEND_RETURN_IF_ERROR(read_text("general.architecture", config.architecture));
  architecture_ = config.architecture;
  // Converters permute llama's query and key rows for interleaved pairs; qwen2 keeps its halves.
  RopePairing pairing = RopePairing::interleaved;
  if (architecture_ == "qwen2") {
    pairing = RopePairing::neox;
  } else if (architecture_ != "llama") {
    return Status::error(StatusCode::unsupported, "\"%s\" is not supported: llama and qwen2 are", architecture_.c_str())
        .at("general.architecture");
  }
  std::int32_t rotary_dim = 0;
  KVBLEND_RETURN_IF_ERROR(read_config(config, rotary_dim));
  double base = 10000.0;
  double linear_factor = 1.0;
  KVBLEND_RETURN_IF_ERROR(read_number("rope.freq_base", base));
  KVBLEND_RETURN_IF_ERROR(read_rope_scaling(linear_factor));
  std::vector<float> divisors;  // llama3's scaling is stored as a divisor a pair
  if (has("rope_freqs.weight")) {
    KVBLEND_RETURN_IF_ERROR(read_tensor("rope_freqs.weight", 1, rotary_dim / 2, divisors));
  }

  Result<Model> model = Model::start(config);
  if (!model.ok()) return model;
  for (std::int32_t i = 0; i < config.layers; ++i) {
    LayerTensors layer;
    KVBLEND_RETURN_IF_ERROR(read_layer(config, i, layer));
    layer.rope = plain_rope(config.head_dim, rotary_dim, base, pairing, divisors, linear_factor);
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
  Reader reader;
  KVBLEND_RETURN_IF_ERROR(reader.open(path));
  return reader.read();
}

}  // namespace eigen_engine
