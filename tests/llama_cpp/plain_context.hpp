// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A context of llama.cpp used by its own calls alone, to compare the engine with.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "llama.h"
#include "llama_fixture.hpp"

namespace llama_fixture {

// With the settings of an engine's. `hook`: looks at its graphs.
class PlainContext {
 public:
  explicit PlainContext(const llama_cpp::Engine& engine, bool unified = true, llama_cpp::GraphHook* hook = nullptr) {
    const llama_cpp::EngineOptions& options = engine.options();
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<std::uint32_t>(options.context + options.batch);
    params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(options.batch);
    params.n_seq_max = 2;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    const std::map<DType, ggml_type> types = {{DType::f16, GGML_TYPE_F16},
                                              {DType::bf16, GGML_TYPE_BF16},
                                              {DType::f32, GGML_TYPE_F32},
                                              {DType::q8_0, GGML_TYPE_Q8_0}};
    params.type_k = params.type_v = types.at(options.cache_type);
    params.swa_full = true;
    params.kv_unified = unified;
    if (hook != nullptr) {
      params.cb_eval = llama_cpp::GraphHook::callback;
      params.cb_eval_user_data = hook;
    }
    context_.reset(llama_init_from_model(engine.model().get(), params));
    REQUIRE(context_ != nullptr);
    vocabulary_ = static_cast<std::size_t>(engine.model().vocabulary());
  }

  std::vector<float> decode(std::int32_t sequence, std::int32_t first, const Tokens& tokens) {
    llama_batch batch = llama_batch_init(static_cast<std::int32_t>(tokens.size()), 0, 1);
    batch.n_tokens = static_cast<std::int32_t>(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      batch.token[i] = tokens[i];
      batch.pos[i] = first + static_cast<std::int32_t>(i);
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = sequence;
      batch.logits[i] = i + 1 == tokens.size() ? 1 : 0;
    }
    const std::int32_t result = llama_decode(context_.get(), batch);
    llama_batch_free(batch);
    REQUIRE(result == 0);
    const float* logits = llama_get_logits_ith(context_.get(), -1);
    return {logits, logits + vocabulary_};
  }
  void remove(std::int32_t sequence) { llama_memory_seq_rm(llama_get_memory(context_.get()), sequence, -1, -1); }
  void shift(std::int32_t by) { llama_memory_seq_add(llama_get_memory(context_.get()), 0, -1, -1, by); }
  void set(std::span<const std::byte> blob) {
    REQUIRE(llama_state_seq_set_data(context_.get(), reinterpret_cast<const std::uint8_t*>(blob.data()), blob.size(),
                                     0) == blob.size());
  }
  Bytes get() {
    Bytes blob(llama_state_seq_get_size(context_.get(), 0));
    REQUIRE(llama_state_seq_get_data(context_.get(), reinterpret_cast<std::uint8_t*>(blob.data()), blob.size(), 0) ==
            blob.size());
    return blob;
  }

 private:
  struct Free {
    void operator()(llama_context* context) const { llama_free(context); }
  };
  std::unique_ptr<llama_context, Free> context_;
  std::size_t vocabulary_ = 0;
};

}  // namespace llama_fixture
