// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A prompt file: instructions, and items of a question and the passages that go before it, as JSON.
#pragma once

#include <kvblend/core/status.hpp>

#include <optional>
#include <string>
#include <vector>

namespace rag {

struct Item {
  std::string question;
  std::vector<std::string> passages;
  std::vector<std::string> answers;  // may be empty
  std::string group;                 // what it is one of, for means by group; may be empty
};

// Passages to encode others behind, after the instructions; but a prompt's first passage, which is encoded behind these
// alone. None: all are encoded alone.
using Context = std::optional<std::vector<std::string>>;

struct PromptFile {
  std::string instructions;
  std::vector<Item> items;
  Context context;
};

// {"instructions": text, "items": [{"question": text, "passages": [text, …], "answers": [text, …], "group": text}, …]};
// "answers" and "group" may be missing. Errors name the file, and the key that is missing or of another type.
kvblend::Result<PromptFile> read_prompt_file(const std::string& path);

// As a command line says it: "alone", "instructions" for these without passages, or a file, {"passages": [text, …]}, of
// passages like those that will be stored.
kvblend::Result<Context> read_context(const std::string& how);
// "alone", "instructions", or "instructions; behind the first 4 passages 1a2b3c4d", a hash of these.
std::string describe(const Context& context);
inline constexpr const char* kContextHelp =
    "what passages are encoded behind: 'alone': nothing; 'instructions': these; a JSON file: these and its passages";
inline constexpr const char* kUsualContext = KVBLEND_USUAL_CONTEXT;  // neutral passages that serve any prompt

}  // namespace rag
