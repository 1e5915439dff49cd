// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/tokenized.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace rag {

using namespace kvblend;

namespace {

// Whether the passage has one of the answers, in the case that the file writes it in or in small letters.
bool answers(const Item& item, const std::string& passage) {
  return std::any_of(item.answers.begin(), item.answers.end(), [&](const std::string& answer) {
    std::string small = answer;
    for (char& c : small) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    return !answer.empty() && (passage.find(answer) != std::string::npos || passage.find(small) != std::string::npos);
  });
}

void leave_out(const Item& item, std::size_t most_tokens, TokenizedItem& out) {
  std::vector<bool> holds(1, true);  // the instructions stay
  for (const std::string& passage : item.passages) holds.push_back(answers(item, passage));
  std::size_t total = out.question.size();
  for (const auto& part : out.reusable) total += part.size();
  for (const bool also_answers : {false, true}) {
    for (std::size_t i = out.reusable.size() - 1; i > 0 && total > most_tokens; --i) {
      if (holds[i] && !also_answers) continue;
      total -= out.reusable[i].size();
      out.reusable.erase(out.reusable.begin() + static_cast<std::ptrdiff_t>(i));
      holds.erase(holds.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

}  // namespace

std::int32_t TokenizedItem::rows_to_encode() const {
  std::size_t most = 0;
  for (std::size_t part = 0; part < reusable.size(); ++part) {
    most = std::max(most, context_of(part).size() + reusable[part].size());
  }
  return static_cast<std::int32_t>(most);
}

Status check_context(const TokenizedItem& item, std::int32_t positions) {
  const std::int32_t needed = item.rows_to_encode();
  if (needed <= positions) return {};
  return Status::error(StatusCode::out_of_range,
                       "has %zu tokens, %d with the longest passage; the model has %d positions", item.context.size(),
                       needed, positions)
      .at("context");
}

Result<TokenizedItem> tokenize(const eigen_engine::Tokenizer& tokenizer, const PromptFile& prompts, const Item& item,
                               std::size_t most_tokens) {
  // The chat template around the parts, cut at markers that no template touches.
  const std::string marker = "\x1fpassages\x1f";
  std::string before = prompts.instructions + "\n\n";
  std::string behind = "\nAnswer:";
  const std::array<eigen_engine::ChatMessage, 2> messages = {{{"system", prompts.instructions}, {"user", marker}}};
  if (const auto text = tokenizer.chat(messages, true); text.ok()) {
    const std::size_t at = text.value.rfind(marker);
    if (at != std::string::npos) {
      before = text.value.substr(0, at);
      behind = text.value.substr(at + marker.size());
    }
  }
  TokenizedItem out;
  auto tokens = tokenizer.tokenize(before, true, true);
  KVBLEND_RETURN_IF_ERROR(tokens.status);
  out.reusable.push_back(std::move(tokens.value));
  const auto add = [&](const std::vector<std::string>& passages, auto&& take) -> Status {
    for (const std::string& passage : passages) {
      auto own = tokenizer.tokenize(passage + "\n\n", false, false);
      KVBLEND_RETURN_IF_ERROR(own.status);
      take(own.value);
    }
    return {};
  };
  if (prompts.context) {
    out.context = out.reusable.front();
    KVBLEND_RETURN_IF_ERROR(add(*prompts.context, [&](const std::vector<TokenId>& passage) {
      out.context.insert(out.context.end(), passage.begin(), passage.end());
    }));
  }
  KVBLEND_RETURN_IF_ERROR(
      add(item.passages, [&](std::vector<TokenId>& passage) { out.reusable.push_back(std::move(passage)); }));
  tokens = tokenizer.tokenize("Question: " + item.question, false, false);
  KVBLEND_RETURN_IF_ERROR(tokens.status);
  out.question = std::move(tokens.value);
  tokens = tokenizer.tokenize(behind, false, true);
  KVBLEND_RETURN_IF_ERROR(tokens.status);
  out.question.insert(out.question.end(), tokens.value.begin(), tokens.value.end());
  if (most_tokens > 0) leave_out(item, most_tokens, out);
  for (const auto& part : out.reusable) out.all.insert(out.all.end(), part.begin(), part.end());
  out.all.insert(out.all.end(), out.question.begin(), out.question.end());
  if (most_tokens > 0 && out.all.size() > most_tokens) {
    return Status::error(StatusCode::out_of_range, "%zu without passages, at most %zu", out.all.size(), most_tokens)
        .at("tokens");
  }
  return out;
}

}  // namespace rag
