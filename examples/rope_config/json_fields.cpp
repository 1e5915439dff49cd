// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rope_config/json_fields.hpp>

#include <kvblend/core/bits.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstddef>
#include <limits>

namespace rope_config {

using kvblend::Result;
using kvblend::Status;
using kvblend::StatusCode;
using nlohmann::json;

namespace {

constexpr int kMaxDepth = 64;
constexpr std::size_t kMaxPath = 60;  // what a Status holds

Status invalid(const char* what) { return Status::error(StatusCode::invalid_argument, "%s", what); }

// Levels of nesting, counted before any parser recurses into them. Brackets within strings do not count.
int depth_of(std::string_view text) {
  int depth = 0;
  int deepest = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      deepest = ++depth > deepest ? depth : deepest;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

// One value of a list or a field. Each returns what is wrong, or null.
const char* take(const json& value, double& out) {
  if (!value.is_number()) return "is not a number";
  out = value.get<double>();
  return kvblend::is_finite(out) ? nullptr : "is not finite";
}
const char* take(const json& value, std::int32_t& out) {
  double number = 0;
  if (const char* fault = take(value, number); fault != nullptr) return fault;
  if (number != std::floor(number)) return "is not a whole number";
  constexpr double kLimit = (std::numeric_limits<std::int32_t>::max)();
  if (number > kLimit || number < -kLimit) return "is not a sensible number";
  out = static_cast<std::int32_t>(number);
  return nullptr;
}
const char* take(const json& value, bool& out) {
  if (!value.is_boolean()) return "is not true or false";
  out = value.get<bool>();
  return nullptr;
}
const char* take(const json& value, std::string& out) {
  if (!value.is_string()) return "is not a text";
  out = value.get_ref<const std::string&>();
  return nullptr;
}

template <class T>
Status read_one(const Fields& fields, const char* name, std::optional<T>& out) {
  const json* value = fields.find(name);
  if (value == nullptr) return {};
  T taken{};
  if (const char* fault = take(*value, taken); fault != nullptr) return fields.wrong(name, fault);
  out = std::move(taken);
  return {};
}

template <class T>
Status read_list(const Fields& fields, const char* name, std::optional<std::vector<T>>& out) {
  const json* list = fields.find(name);
  if (list == nullptr) return {};
  if (!list->is_array()) return fields.wrong(name, "is not a list");
  std::vector<T> taken(list->size());
  for (std::size_t i = 0; i < list->size(); ++i) {
    T value{};
    if (const char* fault = take((*list)[i], value); fault != nullptr) {
      return at_path(invalid(fault), fields.path(name) + "[" + std::to_string(i) + "]");
    }
    taken[i] = std::move(value);
  }
  out = std::move(taken);
  return {};
}

}  // namespace

Status at_path(const Status& status, const std::string& path) {
  const bool fits = path.size() <= kMaxPath;
  const char* shown = fits ? path.c_str() : path.c_str() + (path.size() - kMaxPath + 3);
  return Status::error(status.code(), "%s", status.message()).at("%s%s", fits ? "" : "...", shown);
}

Status in_file(const Status& status, const std::string& path) {
  return at_path(Status::error(status.code(), "%s: %s", status.where(), status.message()), path);
}

Result<json> parse_object(std::string_view text) {
  if (text.size() > kMaxConfigBytes) return invalid("is larger than 16 MiB").at("configuration");
  if (depth_of(text) > kMaxDepth) return invalid("is nested more than 64 levels deep").at("configuration");
  json parsed = json::parse(text.begin(), text.end(), nullptr, false);
  if (parsed.is_discarded()) return invalid("is not JSON").at("configuration");
  if (!parsed.is_object()) return invalid("is not a JSON object").at("configuration");
  return parsed;
}

bool Fields::holds(const char* name) const { return object_->contains(name); }

const json* Fields::find(const char* name) const {
  const auto found = object_->find(name);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

Status Fields::read(const char* name, std::optional<double>& out) const { return read_one(*this, name, out); }
Status Fields::read(const char* name, std::optional<std::int32_t>& out) const { return read_one(*this, name, out); }
Status Fields::read(const char* name, std::optional<bool>& out) const { return read_one(*this, name, out); }
Status Fields::read(const char* name, std::optional<std::string>& out) const { return read_one(*this, name, out); }
Status Fields::read(const char* name, std::optional<std::vector<double>>& out) const {
  return read_list(*this, name, out);
}
Status Fields::read(const char* name, std::optional<std::vector<std::int32_t>>& out) const {
  return read_list(*this, name, out);
}
Status Fields::read(const char* name, std::optional<std::vector<std::string>>& out) const {
  return read_list(*this, name, out);
}

Status Fields::missing(const char* name) const {
  return at_path(Status::error(StatusCode::not_found, "is missing"), path(name));
}
Status Fields::wrong(const char* name, const char* what) const { return at_path(invalid(what), path(name)); }

Status Fields::check_positive(const char* name, double value) const {
  if (value > 0) return {};
  return at_path(Status::error(StatusCode::invalid_argument, "is %g, must be positive", value), path(name));
}

}  // namespace rope_config
