// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A prompt file's item in a model's tokens: parts that can be stored, and the question behind them.
#pragma once

#include <rag/prompt_file.hpp>

#include <eigen_engine/tokenizer.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <string>
#include <vector>

namespace rag {

struct TokenizedItem {
  std::vector<std::vector<kvblend::TokenId>> reusable;  // instructions, then the passages
  std::vector<kvblend::TokenId> question;
  std::vector<kvblend::TokenId> all;
};

// By the model's chat template, where it has one. `most_tokens` > 0: passages are left out until the prompt fits, from
// the last on, those with an answer in them after all others. Errors: the tokenizer's; a prompt that does not fit
// without passages.
kvblend::Result<TokenizedItem> tokenize(const eigen_engine::Tokenizer& tokenizer, const std::string& instructions,
                                        const Item& item, std::size_t most_tokens = 0);

}  // namespace rag
