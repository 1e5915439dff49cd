// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A prompt file: instructions, and items of a question and the passages that go before it, as JSON.
#pragma once

#include <kvblend/core/status.hpp>

#include <string>
#include <vector>

namespace rag {

struct Item {
  std::string question;
  std::vector<std::string> passages;
  std::vector<std::string> answers;  // may be empty
  std::string group;                 // what it is one of, for means by group; may be empty
};

struct PromptFile {
  std::string instructions;
  std::vector<Item> items;
};

// {"instructions": text, "items": [{"question": text, "passages": [text, …], "answers": [text, …], "group": text}, …]};
// "answers" and "group" may be missing. Errors name the file, and the key that is missing or of another type.
kvblend::Result<PromptFile> read_prompt_file(const std::string& path);

}  // namespace rag
