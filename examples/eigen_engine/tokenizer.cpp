// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// llama.cpp's tokenizer behind kvblend's Status.
#include <algorithm>
#include <eigen_engine/gguf_loader.hpp>
#include <eigen_engine/tokenizer.hpp>
#include <limits>

#include "llama.h"

namespace eigen_engine {

using kvblend::Result;
using kvblend::Status;
using kvblend::StatusCode;
using kvblend::TokenId;

void Tokenizer::Free::operator()(llama_model* model) const { llama_model_free(model); }

Result<Tokenizer> Tokenizer::load(const char* path) {
  silence_llama();
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  Tokenizer tokenizer;
  tokenizer.model_.reset(llama_model_load_from_file(path, params));
  if (tokenizer.model_ == nullptr) {
    return Status::error(StatusCode::corrupt, "no vocabulary can be read from this file").at("%s", path);
  }
  return tokenizer;
}

std::int32_t Tokenizer::size() const { return llama_vocab_n_tokens(llama_model_get_vocab(model_.get())); }

bool Tokenizer::is_end(TokenId token) const { return llama_vocab_is_eog(llama_model_get_vocab(model_.get()), token); }

Result<std::vector<TokenId>> Tokenizer::tokenize(std::string_view text, bool add_special, bool parse_special) const {
  if (text.size() > static_cast<std::size_t>((std::numeric_limits<std::int32_t>::max)() / 2)) {
    return Status::error(StatusCode::out_of_range, "has %zu bytes", text.size()).at("text");
  }
  const llama_vocab* vocab = llama_model_get_vocab(model_.get());
  const auto bytes = static_cast<std::int32_t>(text.size());
  std::vector<TokenId> tokens(text.size() + 8);  // a token has at least one byte; BOS and the like have none
  const std::int32_t count = llama_tokenize(vocab, text.data(), bytes, tokens.data(),
                                            static_cast<std::int32_t>(tokens.size()), add_special, parse_special);
  if (count < 0) return Status::error(StatusCode::host_error, "llama.cpp could not tokenise it").at("text");
  tokens.resize(static_cast<std::size_t>(count));
  return tokens;
}

Result<std::string> Tokenizer::detokenize(std::span<const TokenId> tokens, bool show_special) const {
  const llama_vocab* vocab = llama_model_get_vocab(model_.get());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= size()) {
      return Status::error(StatusCode::out_of_range, "is %d, the vocabulary has %d", tokens[i], size())
          .at("token %zu", i);
    }
  }
  std::string text(tokens.size() * 8 + 16, '\0');
  for (int attempt = 0; attempt < 2; ++attempt) {
    const std::int32_t length =
        llama_detokenize(vocab, tokens.data(), static_cast<std::int32_t>(tokens.size()), text.data(),
                         static_cast<std::int32_t>(text.size()), /*remove_special=*/false, show_special);
    if (length >= 0) {
      text.resize(static_cast<std::size_t>(length));
      return text;
    }
    text.resize(static_cast<std::size_t>(-length));  // what it needs
  }
  return Status::error(StatusCode::host_error, "llama.cpp could not write them as text").at("tokens");
}

Result<std::string> Tokenizer::chat(std::span<const ChatMessage> messages, bool open_answer) const {
  const char* chat_template = llama_model_chat_template(model_.get(), nullptr);
  if (chat_template == nullptr) {
    return Status::error(StatusCode::not_found, "the model file has none").at("chat template");
  }
  std::vector<llama_chat_message> list;
  std::size_t bytes = 256;
  for (const ChatMessage& message : messages) {
    list.push_back({message.role.c_str(), message.content.c_str()});
    bytes += message.role.size() + message.content.size() + 64;
  }
  std::string text(bytes, '\0');
  for (int attempt = 0; attempt < 2; ++attempt) {
    const std::int32_t length = llama_chat_apply_template(chat_template, list.data(), list.size(), open_answer,
                                                          text.data(), static_cast<std::int32_t>(text.size()));
    if (length < 0) break;
    const bool fits = static_cast<std::size_t>(length) <= text.size();
    text.resize(static_cast<std::size_t>(length));
    if (fits) return text;
  }
  return Status::error(StatusCode::unsupported, "llama.cpp does not know it").at("chat template");
}

}  // namespace eigen_engine
