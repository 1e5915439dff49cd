// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Tokenizer: text to tokens and back, by the vocabulary of a GGUF file through llama.cpp.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

struct llama_model;

namespace eigen_engine {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

class Tokenizer {
 public:
  Tokenizer() = default;

  // Reads the vocabulary only. Errors: the file is missing or holds no vocabulary that llama.cpp knows.
  static kvblend::Result<Tokenizer> load(const char* path);

  [[nodiscard]] std::int32_t size() const;

  // `add_special`: with the tokens the model wants at the start of a text, such as BOS. `parse_special`: text such as
  // <|im_start|> becomes the token of that name, which only text of one's own should do.
  kvblend::Result<std::vector<kvblend::TokenId>> tokenize(std::string_view text, bool add_special,
                                                          bool parse_special) const;
  // `show_special`: control tokens appear as their names, otherwise not at all.
  kvblend::Result<std::string> detokenize(std::span<const kvblend::TokenId> tokens, bool show_special = false) const;

  // Whether generation ends with this token.
  [[nodiscard]] bool is_end(kvblend::TokenId token) const;

  // The messages as the model's own chat template writes them, to be tokenised with parse_special; `open_answer` adds
  // what comes before the assistant's answer. Errors: no template, or one llama.cpp does not know.
  kvblend::Result<std::string> chat(std::span<const ChatMessage> messages, bool open_answer) const;

 private:
  struct Free {
    void operator()(llama_model* model) const;
  };
  std::unique_ptr<llama_model, Free> model_;
};

}  // namespace eigen_engine
