// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes. Nothing in it is believed before
// it was checked against the real file. The format: huggingface/safetensors, README.md, "Format".
#pragma once

#include <kvblend/core/status.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;  // "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8", "I32"
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;  // bytes from the start of the file
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t size() const { return end - begin; }
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // by `begin`, ascending
  std::vector<std::pair<std::string, std::string>> metadata;

  [[nodiscard]] const SafetensorsTensor* tensor(std::string_view name) const {
    const auto found = std::find_if(tensors.begin(), tensors.end(), [name](const auto& t) { return t.name == name; });
    return found == tensors.end() ? nullptr : &*found;
  }
  [[nodiscard]] const std::string* text(std::string_view key) const {
    const auto found = std::find_if(metadata.begin(), metadata.end(), [key](const auto& m) { return m.first == key; });
    return found == metadata.end() ? nullptr : &found->second;
  }
};

inline constexpr std::int64_t kSafetensorsPrefix = 8;                          // bytes of the length
inline constexpr std::int64_t kMaxSafetensorsHeader = std::int64_t{16} << 20;  // bytes; a chunk's has a few thousand

// Checks the length that a file of `file_size` bytes states for its header.
Status check_safetensors_length(std::uint64_t header_size, std::int64_t file_size);

// Reads the JSON that follows it. The tensors must lie in the file one directly behind the other, up to its end, and
// each must be as long as its shape and dtype say. Errors (StatusCode::corrupt) name the tensor or the key.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view json, std::int64_t file_size);

// The two parts before the tensors' bytes: length and JSON, padded with spaces to a multiple of 8. `begin` and `end` of
// the tensors count from the end of the header here.
[[nodiscard]] std::string make_safetensors_header(const SafetensorsHeader& header);

// Whether JSON can hold it, as it holds UTF-8 only.
[[nodiscard]] bool is_utf8(const std::string& text);

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

// 0 for types that no chunk has.
[[nodiscard]] inline std::int64_t safetensors_value_bytes(std::string_view dtype) {
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F16" || dtype == "BF16") return 2;
  if (dtype == "F8_E4M3" || dtype == "F8_E5M2" || dtype == "U8") return 1;
  return 0;
}

// Notes whether an object has a key twice: JSON parsers take one of the two, each its own.
class DuplicateKeys {
 public:
  bool operator()(int, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) open_.emplace_back();
    if (event == Event::object_end) open_.pop_back();
    if (event == Event::key && !open_.back().insert(value.get_ref<const std::string&>()).second) found_ = true;
    return true;
  }
  [[nodiscard]] bool found() const { return found_; }

 private:
  std::vector<std::set<std::string>> open_;
  bool found_ = false;
};

struct StrictJson {
  nlohmann::json value;
  const char* error = nullptr;
};

inline StrictJson parse_strict_json(std::string_view text) {
  StrictJson result;
  DuplicateKeys keys;
  result.value = nlohmann::json::parse(
      text.begin(), text.end(),
      [&keys](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
        return keys(depth, event, value);
      },
      false);
  if (result.value.is_discarded()) {
    result.error = "is not JSON";
  } else if (keys.found()) {
    result.error = "has a key twice";
  }
  return result;
}

inline bool get_offset(const nlohmann::json& value, std::int64_t& out) {
  if (!value.is_number_unsigned()) return false;
  const auto number = value.get<std::uint64_t>();
  if (number > static_cast<std::uint64_t>((std::numeric_limits<std::int64_t>::max)())) return false;
  out = static_cast<std::int64_t>(number);
  return true;
}

inline Status bad_tensor(const std::string& name, const char* what) {
  return Status::error(StatusCode::corrupt, "%s", what).at("%.60s", name.c_str());
}

inline Status parse_tensor(const nlohmann::json& value, SafetensorsTensor& tensor) {
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets")) {
    return bad_tensor(tensor.name, "must have dtype, shape and data_offsets");
  }
  const nlohmann::json& dtype = *value.find("dtype");
  const nlohmann::json& shape = *value.find("shape");
  const nlohmann::json& offsets = *value.find("data_offsets");
  if (!dtype.is_string()) return bad_tensor(tensor.name, "dtype is not a string");
  tensor.dtype = dtype.get_ref<const std::string&>();
  std::int64_t bytes = safetensors_value_bytes(tensor.dtype);
  if (bytes == 0) return bad_tensor(tensor.name, "dtype is none that a chunk has");
  if (!shape.is_array() || shape.size() > 8) return bad_tensor(tensor.name, "shape is not a list of sizes");
  for (const nlohmann::json& entry : shape) {
    std::int64_t size = 0;
    if (!get_offset(entry, size)) return bad_tensor(tensor.name, "shape is not a list of sizes");
    if (size != 0 && bytes > (std::numeric_limits<std::int64_t>::max)() / size) {
      return bad_tensor(tensor.name, "shape passes 2^63 - 1 bytes");
    }
    bytes *= size;
    tensor.shape.push_back(size);
  }
  if (!offsets.is_array() || offsets.size() != 2 || !get_offset(offsets[0], tensor.begin) ||
      !get_offset(offsets[1], tensor.end) || tensor.begin > tensor.end) {
    return bad_tensor(tensor.name, "data_offsets are not [begin, end]");
  }
  if (tensor.size() != bytes) return bad_tensor(tensor.name, "data_offsets do not agree with shape and dtype");
  return {};
}

}  // namespace detail

inline Status check_safetensors_length(std::uint64_t header_size, std::int64_t file_size) {
  if (file_size < kSafetensorsPrefix || header_size > static_cast<std::uint64_t>(file_size - kSafetensorsPrefix)) {
    return Status::error(StatusCode::corrupt, "header of %llu bytes does not fit the file of %lld",
                         static_cast<unsigned long long>(header_size), static_cast<long long>(file_size))
        .at("header");
  }
  if (header_size > static_cast<std::uint64_t>(kMaxSafetensorsHeader)) {
    return Status::error(StatusCode::corrupt, "%llu bytes are more than any chunk file's",
                         static_cast<unsigned long long>(header_size))
        .at("header");
  }
  return {};
}

inline Result<SafetensorsHeader> parse_safetensors_header(std::string_view json, std::int64_t file_size) {
  const detail::StrictJson parsed = detail::parse_strict_json(json);
  if (parsed.error != nullptr) return Status::error(StatusCode::corrupt, "%s", parsed.error).at("header");
  if (!parsed.value.is_object()) return Status::error(StatusCode::corrupt, "is not a JSON object").at("header");
  const std::int64_t data_start = kSafetensorsPrefix + static_cast<std::int64_t>(json.size());
  const std::int64_t data_size = file_size - data_start;

  SafetensorsHeader header;
  for (const auto& [name, value] : parsed.value.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return detail::bad_tensor(name, "is not an object");
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) return detail::bad_tensor(key, "metadata is not a string");
        header.metadata.emplace_back(key, text.get_ref<const std::string&>());
      }
      continue;
    }
    SafetensorsTensor tensor;
    tensor.name = name;
    KVBLEND_RETURN_IF_ERROR(detail::parse_tensor(value, tensor));
    if (tensor.end > data_size) return detail::bad_tensor(name, "lies outside the file");
    header.tensors.push_back(std::move(tensor));
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t end = 0;
  for (SafetensorsTensor& tensor : header.tensors) {
    if (tensor.begin < end) return detail::bad_tensor(tensor.name, "overlaps another tensor");
    if (tensor.begin > end) return detail::bad_tensor(tensor.name, "leaves a gap before it");
    end = tensor.end;
    tensor.begin += data_start;
    tensor.end += data_start;
  }
  if (end != data_size) {
    return Status::error(StatusCode::corrupt, "%lld bytes follow the last tensor",
                         static_cast<long long>(data_size - end))
        .at("file");
  }
  return header;
}

inline std::string make_safetensors_header(const SafetensorsHeader& header) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  nlohmann::ordered_json metadata = nlohmann::ordered_json::object();
  for (const auto& [key, text] : header.metadata) metadata[key] = text;
  json["__metadata__"] = std::move(metadata);
  for (const SafetensorsTensor& tensor : header.tensors) {
    nlohmann::ordered_json entry = nlohmann::ordered_json::object();
    entry["dtype"] = tensor.dtype;
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {tensor.begin, tensor.end};
    json[tensor.name] = std::move(entry);
  }
  std::string text = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::ignore);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string result;
  for (int byte = 0; byte < 8; ++byte) result.push_back(static_cast<char>((text.size() >> (8 * byte)) & 0xff));
  return result + text;
}

inline bool is_utf8(const std::string& text) {
  const std::string kept = nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::ignore);
  const nlohmann::json back = nlohmann::json::parse(kept, nullptr, false);
  return back.is_string() && back.get_ref<const std::string&>() == text;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
