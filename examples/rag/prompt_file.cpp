// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rag/prompt_file.hpp>

#include <kvblend/store/digest.hpp>

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <span>
#include <utility>

namespace rag {

using kvblend::Result;
using kvblend::Status;
using kvblend::StatusCode;

namespace {

Status wrong(const std::string& key, const char* what) {
  return Status::error(StatusCode::invalid_argument, "%s", what).at("%.60s", key.c_str());
}

Status read_texts(const nlohmann::json& object, const std::string& key, const std::string& where,
                  std::vector<std::string>& out) {
  const auto found = object.find(key);
  if (found == object.end()) return wrong(where + key, "is missing");
  if (!found->is_array()) return wrong(where + key, "is not a list");
  for (std::size_t i = 0; i < found->size(); ++i) {
    if (!(*found)[i].is_string()) return wrong(where + key + "[" + std::to_string(i) + "]", "is not a text");
    out.push_back((*found)[i].get<std::string>());
  }
  return {};
}

Status read_text(const nlohmann::json& object, const std::string& key, const std::string& where, std::string& out) {
  const auto found = object.find(key);
  if (found == object.end()) return wrong(where + key, "is missing");
  if (!found->is_string()) return wrong(where + key, "is not a text");
  out = found->get<std::string>();
  return {};
}

Status read_item(const nlohmann::json& json, const std::string& where, Item& item) {
  if (!json.is_object()) return wrong(where, "is not an object");
  KVBLEND_RETURN_IF_ERROR(read_text(json, "question", where + ".", item.question));
  KVBLEND_RETURN_IF_ERROR(read_texts(json, "passages", where + ".", item.passages));
  if (json.contains("answers")) KVBLEND_RETURN_IF_ERROR(read_texts(json, "answers", where + ".", item.answers));
  if (json.contains("group")) KVBLEND_RETURN_IF_ERROR(read_text(json, "group", where + ".", item.group));
  if (item.passages.empty()) return wrong(where + ".passages", "is empty");
  return {};
}

Status read(const nlohmann::json& json, PromptFile& file) {
  if (json.is_discarded()) return wrong("prompt file", "is not JSON");
  if (!json.is_object()) return wrong("prompt file", "is not an object");
  KVBLEND_RETURN_IF_ERROR(read_text(json, "instructions", "", file.instructions));
  const auto items = json.find("items");
  if (items == json.end() || !items->is_array()) return wrong("items", "is missing or not a list");
  if (items->empty()) return wrong("items", "is empty");
  for (std::size_t i = 0; i < items->size(); ++i) {
    KVBLEND_RETURN_IF_ERROR(read_item((*items)[i], "items[" + std::to_string(i) + "]", file.items.emplace_back()));
  }
  return {};
}

// `name` of the file in errors.
template <class Read>
Status read_json(const std::string& path, const char* name, const Read& read_in) {
  std::ifstream stream(path, std::ios::binary);
  stream.peek();  // a directory opens, but cannot be read
  if (!stream) {
    return Status::error(StatusCode::io_error, "cannot read the %s file %.150s", name, path.c_str()).at("%s", name);
  }
  const Status status = read_in(nlohmann::json::parse(stream, nullptr, false));
  if (status.ok()) return {};
  return Status::error(status.code(), "%s: %s, in %.100s", status.where(), status.message(), path.c_str())
      .at("%s", name);
}

}  // namespace

Result<PromptFile> read_prompt_file(const std::string& path) {
  PromptFile file;
  KVBLEND_RETURN_IF_ERROR(read_json(path, "prompt", [&](const nlohmann::json& json) { return read(json, file); }));
  return file;
}

Result<Context> read_context(const std::string& how) {
  if (how == "alone") return Context();
  std::vector<std::string> passages;
  if (how != "instructions") {
    KVBLEND_RETURN_IF_ERROR(read_json(how, "context", [&](const nlohmann::json& json) {
      if (!json.is_object()) return wrong("context file", "is not a JSON object");
      return read_texts(json, "passages", "", passages);
    }));
  }
  return Context(std::move(passages));
}

std::string describe(const Context& context) {
  if (!context) return "alone";
  if (context->empty()) return "instructions";
  kvblend::Xxh3Hash hash;
  for (const std::string& passage : *context)
    hash.update(std::as_bytes(std::span(passage.c_str(), passage.size() + 1)));
  return "instructions; behind the first " + std::to_string(context->size()) + " passages " +
         to_hex(hash.finish()).substr(0, 8);
}

}  // namespace rag
