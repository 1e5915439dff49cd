// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Reads typed fields of a JSON object, with errors that name the field by its whole path.
#pragma once

#include <kvblend/core/status.hpp>

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace rope_config {

// A Status at a path of any length: what does not fit loses its beginning, so that the field's own name stays.
kvblend::Status at_path(const kvblend::Status& status, const std::string& path);
// The same fault, of a builder that knows no file: its own field goes into the message.
kvblend::Status in_file(const kvblend::Status& status, const std::string& path);

inline constexpr std::size_t kMaxConfigBytes = std::size_t{16} << 20;

// Parses `text`. Errors: more than kMaxConfigBytes, more than 64 levels, no JSON, no object.
kvblend::Result<nlohmann::json> parse_object(std::string_view text);

// An object and the path to it: empty, or ending in a dot. A field that is null counts as absent.
class Fields {
 public:
  Fields(const nlohmann::json& object, std::string path) : object_(&object), path_(static_cast<std::string&&>(path)) {}

  [[nodiscard]] std::string path(std::string_view name) const { return path_ + std::string(name); }
  [[nodiscard]] const std::string& prefix() const { return path_; }
  [[nodiscard]] const nlohmann::json& object() const { return *object_; }
  [[nodiscard]] bool holds(const char* name) const;  // also if it is null
  [[nodiscard]] const nlohmann::json* find(const char* name) const;

  // Leave `out` alone if the field is absent. Errors: another type; numbers are finite, integers fit 32 bits.
  kvblend::Status read(const char* name, std::optional<double>& out) const;
  kvblend::Status read(const char* name, std::optional<std::int32_t>& out) const;
  kvblend::Status read(const char* name, std::optional<bool>& out) const;
  kvblend::Status read(const char* name, std::optional<std::string>& out) const;
  kvblend::Status read(const char* name, std::optional<std::vector<double>>& out) const;
  kvblend::Status read(const char* name, std::optional<std::vector<std::int32_t>>& out) const;
  kvblend::Status read(const char* name, std::optional<std::vector<std::string>>& out) const;
  // The first of several names that is there.
  template <class T>
  kvblend::Status read_first(std::initializer_list<const char*> names, std::optional<T>& out,
                             std::string* found = nullptr) const {
    for (const char* name : names) {
      if (find(name) == nullptr) continue;
      if (found != nullptr) *found = path(name);
      return read(name, out);
    }
    return {};
  }

  [[nodiscard]] kvblend::Status missing(const char* name) const;
  [[nodiscard]] kvblend::Status wrong(const char* name, const char* what) const;
  // A number that must be above zero.
  [[nodiscard]] kvblend::Status check_positive(const char* name, double value) const;

 private:
  const nlohmann::json* object_;
  std::string path_;
};

}  // namespace rope_config
