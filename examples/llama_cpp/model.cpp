// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <llama_cpp/model.hpp>

#include <rope_config/gguf_rope.hpp>

#include <algorithm>
#include <utility>

#include "llama.h"

namespace llama_cpp {

using namespace kvblend;

namespace {

Status refused(const char* why) { return Status::error(StatusCode::unsupported, "%s", why).at("model"); }

}  // namespace

void Model::Free::operator()(llama_model* model) const { llama_model_free(model); }

bool Model::is_end(std::int32_t token) const { return llama_vocab_is_eog(llama_model_get_vocab(model_.get()), token); }

Result<Model> Model::open(const std::string& path) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  Model model;
  model.path_ = path;
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  ggml_backend_dev_t no_devices[] = {nullptr};  // all on the CPU, so that a graph runs in one piece
  params.devices = no_devices;
  model.model_.reset(llama_model_load_from_file(path.c_str(), params));
  if (model.model_ == nullptr) {
    return Status::error(StatusCode::corrupt, "llama.cpp cannot load this file").at("%s", path.c_str());
  }
  KVBLEND_RETURN_IF_ERROR(model.describe());
  return model;
}

Status Model::describe() {
  const llama_model* model = model_.get();
  rope_config::GgufFile file;
  KVBLEND_RETURN_IF_ERROR(file.open(path_.c_str()));
  architecture_ = file.architecture();

  const llama_rope_type rope = llama_model_rope_type(model);
  if (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE || rope == LLAMA_ROPE_TYPE_VISION) {
    return refused("has M-RoPE: a token has several positions there, of which llama.cpp's batches know one");
  }
  if (llama_model_is_recurrent(model)) return refused("keeps a recurrent state in place of keys");
  if (llama_model_is_hybrid(model)) return refused("keeps a recurrent state beside its keys");
  if (llama_model_has_encoder(model)) return refused("has an encoder");
  if (file.has("attention.temperature_scale")) {
    return refused("scales attention by position, in an input that is not rewritten");
  }
  if (file.has("attention.kv_lora_rank")) return refused("has multi-head latent attention, whose cache is another");

  Result<rope_config::ModelRope> ropes = rope_config::read_gguf_rope(file);
  KVBLEND_RETURN_IF_ERROR(ropes.status);
  for (const rope_config::LayerRope& layer : ropes.value.layers) ropes_.push_back(layer.spec);
  const std::int32_t layers = llama_model_n_layer(model);
  if (layers != this->layers()) {
    return Status::error(StatusCode::mismatch, "llama.cpp has %d layers, the file's ropes %d", layers, this->layers())
        .at("model");
  }

  // A list of heads is fine if they are all the same.
  std::vector<std::int32_t> heads;
  if (file.is_list("attention.head_count_kv")) {
    KVBLEND_RETURN_IF_ERROR(file.read("attention.head_count_kv", heads));
    if (std::adjacent_find(heads.begin(), heads.end(), std::not_equal_to<>()) != heads.end()) {
      return refused("has layers with different numbers of KV heads");
    }
  }
  kv_heads_ = llama_model_n_head_kv(model);
  head_dim_ = ropes_.empty() ? 0 : ropes_.front().head_dim;
  for (const RopeSpec& spec : ropes_) {
    if (spec.head_dim != head_dim_) return refused("has layers with different head_dim");
  }
  vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
  context_ = llama_model_n_ctx_train(model);
  window_ = llama_model_n_swa(model);
  return {};
}

}  // namespace llama_cpp
