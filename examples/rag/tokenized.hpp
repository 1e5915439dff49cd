// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A prompt file's item in a model's tokens: parts that can be stored, and the question behind them.
#pragma once

#include <rag/prompt_file.hpp>

#include <eigen_engine/tokenizer.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace rag {

struct TokenizedItem {
  std::vector<std::vector<kvblend::TokenId>> reusable;  // instructions, then the passages
  std::vector<kvblend::TokenId> question;
  std::vector<kvblend::TokenId> all;
  std::vector<kvblend::TokenId> context;  // what passages are encoded behind

  // Of a part. The instructions begin the prompt, and behind them stands the first passage: these are encoded as they
  // stand there, and exact.
  [[nodiscard]] std::span<const kvblend::TokenId> context_of(std::size_t part) const {
    if (part == 0) return {};
    if (part == 1 && !context.empty()) return reusable.front();
    return context;
  }
  // That an engine must have to encode all parts.
  [[nodiscard]] std::int32_t rows_to_encode() const;
};

// Errors: a part and its context need more positions than the model has.
kvblend::Status check_context(const TokenizedItem& item, std::int32_t positions);

// By the model's chat template, where it has one. `most_tokens` > 0: passages are left out until the prompt fits, from
// the last on, those with an answer in them after all others. Errors: the tokenizer's; a prompt that does not fit
// without passages.
kvblend::Result<TokenizedItem> tokenize(const eigen_engine::Tokenizer& tokenizer, const PromptFile& prompts,
                                        const Item& item, std::size_t most_tokens = 0);

}  // namespace rag
