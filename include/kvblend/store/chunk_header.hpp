// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a chunk file's safetensors header says: the identity as metadata, and where the tensors lie. Between
// store/identity.hpp and store/chunk_file.hpp.
//
// Metadata (all strings): format "kvblend-chunk", version "1", model, fingerprint, tenant, recipe, dtype (to_string of
// one of kAllDTypes), layers, kv_heads, head_dim, first_position (decimal), ropes (JSON, a list of objects), layer_rope
// (JSON, a list of indices into ropes), digest (32 hexadecimal digits over the whole identity), and "xxh3.NAME" for
// each tensor NAME: XXH3-64 of its bytes, 16 hexadecimal digits.
// Tensors: layers.N.key, layers.N.value [tokens, kv_heads, head_dim], of ggml's blocks U8 [tokens, kv_heads, bytes of a
// head]; tokens, context I32; scores F32, if there are any.
#pragma once

#include <kvblend/store/chunk.hpp>
#include <kvblend/store/digest.hpp>
#include <kvblend/store/safetensors.hpp>

#include <charconv>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

inline constexpr std::string_view kChunkFileFormat = "kvblend-chunk";
inline constexpr std::string_view kChunkFileVersion = "1";

// Header of a valid identity, without checksums, in the order tensors are written: layer by layer, keys before values,
// so that a layer is one contiguous read. Error: a text that is not UTF-8.
Result<SafetensorsHeader> make_chunk_header(const ChunkIdentity& identity);

// The identity a header states, but for tokens and context, which lie in tensors. Errors name the metadata key.
Result<ChunkIdentity> parse_chunk_identity(const SafetensorsHeader& header);

// Checks that the header has the tensors of this identity, of the right dtype and shape, each with a checksum, and no
// others. Tokens and context are taken as long as their tensors are.
Status check_chunk_tensors(const SafetensorsHeader& header, const ChunkIdentity& identity);

// The checksum the header states for a tensor.
Result<std::uint64_t> stated_checksum(const SafetensorsHeader& header, const std::string& tensor);

[[nodiscard]] inline std::string key_tensor(std::int32_t layer) { return "layers." + std::to_string(layer) + ".key"; }
[[nodiscard]] inline std::string value_tensor(std::int32_t layer) {
  return "layers." + std::to_string(layer) + ".value";
}

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

[[nodiscard]] inline const char* safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32: return "F32";
    case DType::f16: return "F16";
    case DType::bf16: return "BF16";
    case DType::f8_e4m3: return "F8_E4M3";
    case DType::f8_e5m2: return "F8_E5M2";
    case DType::q8_0: return "U8";  // safetensors has no name for blocks: their bytes
    case DType::q4_0: return "U8";
  }
  return "";
}

// Shape of a layer's keys, or values, in the elements of safetensors_dtype.
[[nodiscard]] inline std::vector<std::int64_t> plane_shape(const ModelIdentity& model, std::int64_t tokens) {
  return {tokens, model.kv_heads, block_values(model.dtype) == 1 ? model.head_dim : head_bytes(model)};
}

inline Status bad_metadata(const char* key, const char* what, StatusCode code = StatusCode::corrupt) {
  return Status::error(code, "%s", what).at("metadata %s", key);
}

inline std::string ropes_to_json(const std::vector<RopeSpec>& ropes) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const RopeSpec& spec : ropes) {
    nlohmann::ordered_json entry = nlohmann::ordered_json::object();
    entry["head_dim"] = spec.head_dim;
    entry["rotary_dim"] = spec.rotary_dim;
    entry["rotary_offset"] = spec.rotary_offset;
    entry["pairing"] = spec.pairing == RopePairing::neox ? "neox" : "interleaved";
    entry["attention_factor"] = spec.attention_factor;
    entry["inv_freq"] = std::vector<double>(spec.frequencies().begin(), spec.frequencies().end());
    entry["axis_of_pair"] = std::vector<int>(spec.axes().begin(), spec.axes().end());
    list.push_back(std::move(entry));
  }
  return list.dump();
}

inline bool get_int32(const nlohmann::json& object, const char* key, std::int32_t& out) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_integer()) return false;
  if (found->is_number_unsigned() && found->get<std::uint64_t>() > std::uint64_t{0x7fffffff}) return false;
  const auto value = found->get<std::int64_t>();
  if (value < (std::numeric_limits<std::int32_t>::min)()) return false;
  out = static_cast<std::int32_t>(value);
  return true;
}

inline bool parse_rope(const nlohmann::json& entry, RopeSpec& spec) {
  if (!entry.is_object() || !get_int32(entry, "head_dim", spec.head_dim) ||
      !get_int32(entry, "rotary_dim", spec.rotary_dim) || !get_int32(entry, "rotary_offset", spec.rotary_offset)) {
    return false;
  }
  const auto pairing = entry.find("pairing");
  const auto factor = entry.find("attention_factor");
  const auto frequencies = entry.find("inv_freq");
  const auto axes = entry.find("axis_of_pair");
  if (pairing == entry.end() || factor == entry.end() || frequencies == entry.end() || axes == entry.end()) {
    return false;
  }
  if (*pairing == "neox") {
    spec.pairing = RopePairing::neox;
  } else if (*pairing == "interleaved") {
    spec.pairing = RopePairing::interleaved;
  } else {
    return false;
  }
  if (!factor->is_number()) return false;
  spec.attention_factor = factor->get<double>();
  if (spec.rotary_dim < 0 || spec.pairs() > kMaxRopePairs || !frequencies->is_array() ||
      frequencies->size() != static_cast<std::size_t>(spec.pairs()) || !axes->is_array() ||
      axes->size() != frequencies->size()) {
    return false;
  }
  for (std::size_t i = 0; i < frequencies->size(); ++i) {
    const nlohmann::json& axis = (*axes)[i];
    if (!(*frequencies)[i].is_number() || !axis.is_number_unsigned() || axis.get<std::uint64_t>() >= kRopeAxes) {
      return false;
    }
    spec.inv_freq[i] = (*frequencies)[i].get<double>();
    spec.axis_of_pair[i] = axis.get<std::uint8_t>();
  }
  return true;
}

inline Status parse_ropes(const std::string& text, std::vector<RopeSpec>& ropes) {
  const StrictJson json = parse_strict_json(text);
  if (json.error != nullptr) return bad_metadata("ropes", json.error);
  if (!json.value.is_array() || json.value.size() > static_cast<std::size_t>(kMaxStoredLayers)) {
    return bad_metadata("ropes", "is not a list of ropes");
  }
  for (const nlohmann::json& entry : json.value) {
    RopeSpec spec;
    if (!parse_rope(entry, spec)) return bad_metadata("ropes", "an entry is not a rope");
    ropes.push_back(spec);
  }
  return {};
}

inline Status parse_layer_rope(const std::string& text, std::vector<std::int32_t>& layer_rope) {
  const StrictJson json = parse_strict_json(text);
  if (json.error != nullptr) return bad_metadata("layer_rope", json.error);
  if (!json.value.is_array()) return bad_metadata("layer_rope", "is not a list of indices");
  for (const nlohmann::json& entry : json.value) {
    std::int64_t index = 0;
    if (!get_offset(entry, index) || index >= kMaxStoredLayers) {
      return bad_metadata("layer_rope", "is not a list of indices");
    }
    layer_rope.push_back(static_cast<std::int32_t>(index));
  }
  return {};
}

inline Status get_text(const SafetensorsHeader& header, const char* key, std::string& out) {
  const std::string* text = header.text(key);
  if (text == nullptr) return bad_metadata(key, "is missing: not a chunk file, or not a whole one");
  out = *text;
  return {};
}

inline Status get_number(const SafetensorsHeader& header, const char* key, std::int32_t& out) {
  std::string text;
  KVBLEND_RETURN_IF_ERROR(get_text(header, key, text));
  const std::from_chars_result result = std::from_chars(text.data(), text.data() + text.size(), out);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) {
    return bad_metadata(key, "is not a 32-bit number");
  }
  return {};
}

inline Status check_tensor(const SafetensorsHeader& header, const std::string& name, const char* dtype,
                           const std::vector<std::int64_t>& shape) {
  const SafetensorsTensor* tensor = header.tensor(name);
  if (tensor == nullptr) return bad_tensor(name, "is missing");
  if (tensor->dtype != dtype) {
    return Status::error(StatusCode::corrupt, "is %s, should be %s", tensor->dtype.c_str(), dtype)
        .at("%s", name.c_str());
  }
  if (tensor->shape != shape) return bad_tensor(name, "has another shape than the metadata says");
  return stated_checksum(header, name).status;
}

inline Result<std::int64_t> token_count(const SafetensorsHeader& header, const char* name) {
  const SafetensorsTensor* tensor = header.tensor(name);
  if (tensor == nullptr) return bad_tensor(name, "is missing");
  if (tensor->shape.size() != 1 || tensor->shape[0] > (std::numeric_limits<std::int32_t>::max)()) {
    return bad_tensor(name, "is not a list of tokens");
  }
  return tensor->shape[0];
}

}  // namespace detail

inline Result<SafetensorsHeader> make_chunk_header(const ChunkIdentity& identity) {
  const ModelIdentity& model = identity.model;
  SafetensorsHeader header;
  header.metadata = {{"format", std::string(kChunkFileFormat)},
                     {"version", std::string(kChunkFileVersion)},
                     {"model", model.name},
                     {"fingerprint", model.fingerprint},
                     {"tenant", identity.tenant},
                     {"recipe", identity.recipe},
                     {"dtype", to_string(model.dtype)},
                     {"layers", std::to_string(model.layers)},
                     {"kv_heads", std::to_string(model.kv_heads)},
                     {"head_dim", std::to_string(model.head_dim)},
                     {"first_position", std::to_string(identity.first_position.value)},
                     {"ropes", detail::ropes_to_json(identity.ropes)},
                     {"layer_rope", nlohmann::json(identity.layer_rope).dump()},
                     {"digest", to_hex(digest_of(identity))}};
  for (const auto& [key, text] : header.metadata) {
    if (!is_utf8(text)) return Status::error(StatusCode::invalid_argument, "is not UTF-8").at("%s", key.c_str());
  }
  std::int64_t end = 0;
  const auto add = [&header, &end](std::string name, const char* dtype, std::vector<std::int64_t> shape,
                                   std::int64_t bytes) {
    header.tensors.push_back({std::move(name), dtype, std::move(shape), end, end + bytes});
    end += bytes;
  };
  const auto tokens = static_cast<std::int64_t>(identity.tokens.size());
  const auto context = static_cast<std::int64_t>(identity.context.size());
  for (std::int32_t layer = 0; layer < model.layers; ++layer) {
    const std::vector<std::int64_t> shape = detail::plane_shape(model, tokens);
    add(key_tensor(layer), detail::safetensors_dtype(model.dtype), shape, plane_bytes(identity));
    add(value_tensor(layer), detail::safetensors_dtype(model.dtype), shape, plane_bytes(identity));
  }
  add("tokens", "I32", {tokens}, 4 * tokens);
  add("context", "I32", {context}, 4 * context);
  if (!identity.recipe.empty()) add("scores", "F32", {tokens}, 4 * tokens);
  return header;
}

inline Result<ChunkIdentity> parse_chunk_identity(const SafetensorsHeader& header) {
  std::string text;
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "format", text));
  if (text != kChunkFileFormat) return detail::bad_metadata("format", "is not kvblend-chunk");
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "version", text));
  if (text != kChunkFileVersion) {
    return detail::bad_metadata("version", "is not one this program reads", StatusCode::unsupported);
  }
  ChunkIdentity identity;
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "model", identity.model.name));
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "fingerprint", identity.model.fingerprint));
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "tenant", identity.tenant));
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "recipe", identity.recipe));
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "dtype", text));
  bool known = false;
  for (const DType dtype : kAllDTypes) {
    if (text == to_string(dtype)) {
      identity.model.dtype = dtype;
      known = true;
    }
  }
  if (!known) return detail::bad_metadata("dtype", "is none that this program knows");
  KVBLEND_RETURN_IF_ERROR(detail::get_number(header, "layers", identity.model.layers));
  KVBLEND_RETURN_IF_ERROR(detail::get_number(header, "kv_heads", identity.model.kv_heads));
  KVBLEND_RETURN_IF_ERROR(detail::get_number(header, "head_dim", identity.model.head_dim));
  KVBLEND_RETURN_IF_ERROR(detail::get_number(header, "first_position", identity.first_position.value));
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "ropes", text));
  KVBLEND_RETURN_IF_ERROR(detail::parse_ropes(text, identity.ropes));
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "layer_rope", text));
  KVBLEND_RETURN_IF_ERROR(detail::parse_layer_rope(text, identity.layer_rope));
  KVBLEND_RETURN_IF_ERROR(detail::get_text(header, "digest", text));
  if (const Status status = validate(identity); !status.ok()) {
    return Status::error(StatusCode::corrupt, "%s", status.message()).at("%s", status.where());
  }
  return identity;
}

inline Status check_chunk_tensors(const SafetensorsHeader& header, const ChunkIdentity& identity) {
  const ModelIdentity& model = identity.model;
  const Result<std::int64_t> tokens = detail::token_count(header, "tokens");
  if (!tokens.ok()) return tokens.status;
  const Result<std::int64_t> context = detail::token_count(header, "context");
  if (!context.ok()) return context.status;
  const std::size_t expected = 2 * static_cast<std::size_t>(model.layers) + (identity.recipe.empty() ? 2 : 3);
  const char* dtype = detail::safetensors_dtype(model.dtype);
  const std::vector<std::int64_t> shape = detail::plane_shape(model, tokens.value);
  KVBLEND_RETURN_IF_ERROR(detail::check_tensor(header, "tokens", "I32", {tokens.value}));
  KVBLEND_RETURN_IF_ERROR(detail::check_tensor(header, "context", "I32", {context.value}));
  if (!identity.recipe.empty()) {
    KVBLEND_RETURN_IF_ERROR(detail::check_tensor(header, "scores", "F32", {tokens.value}));
  }
  for (std::int32_t layer = 0; layer < model.layers; ++layer) {
    KVBLEND_RETURN_IF_ERROR(detail::check_tensor(header, key_tensor(layer), dtype, shape));
    KVBLEND_RETURN_IF_ERROR(detail::check_tensor(header, value_tensor(layer), dtype, shape));
  }
  if (header.tensors.size() != expected) {
    return Status::error(StatusCode::corrupt, "has %zu tensors, the metadata say %zu", header.tensors.size(), expected)
        .at("header");
  }
  return {};
}

inline Result<std::uint64_t> stated_checksum(const SafetensorsHeader& header, const std::string& tensor) {
  const std::string* text = header.text("xxh3." + tensor);
  if (text == nullptr) return detail::bad_tensor(tensor, "metadata have no checksum of it");
  std::uint64_t value = 0;
  const std::from_chars_result result = std::from_chars(text->data(), text->data() + text->size(), value, 16);
  if (text->size() != 16 || result.ec != std::errc() || result.ptr != text->data() + text->size()) {
    return detail::bad_tensor(tensor, "checksum is not 16 hexadecimal digits");
  }
  return value;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
