// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Model: a GGUF file loaded by llama.cpp, with what a blend has to know of it.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct llama_model;

namespace llama_cpp {

class Model {
 public:
  // llama.cpp's log is silenced, as it is the process's. Errors: a file that is missing or no model; one that cannot be
  // blended, with the reason: M-RoPE, ALiBi and whatever else read_gguf_rope refuses, recurrent and hybrid memory, MLA,
  // encoders, layers without KV of their own or with different heads.
  static kvblend::Result<Model> open(const std::string& path);

  [[nodiscard]] llama_model* get() const { return model_.get(); }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const std::string& architecture() const { return architecture_; }
  [[nodiscard]] std::int32_t layers() const { return static_cast<std::int32_t>(ropes_.size()); }
  [[nodiscard]] std::int32_t kv_heads() const { return kv_heads_; }
  [[nodiscard]] std::int32_t head_dim() const { return head_dim_; }
  [[nodiscard]] std::int32_t vocabulary() const { return vocabulary_; }
  [[nodiscard]] std::int32_t context() const { return context_; }  // positions it was trained for
  [[nodiscard]] std::int32_t window() const { return window_; }    // of its sliding-window layers; 0: it has none
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t layer) const {
    return ropes_[static_cast<std::size_t>(layer)];
  }
  [[nodiscard]] bool is_end(std::int32_t token) const;

 private:
  struct Free {
    void operator()(llama_model* model) const;
  };
  kvblend::Status describe();

  std::string path_;
  std::unique_ptr<llama_model, Free> model_;
  std::string architecture_;
  std::vector<kvblend::RopeSpec> ropes_;
  std::int32_t kv_heads_ = 0;
  std::int32_t head_dim_ = 0;
  std::int32_t vocabulary_ = 0;
  std::int32_t context_ = 0;
  std::int32_t window_ = 0;
};

}  // namespace llama_cpp
