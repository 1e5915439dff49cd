// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ChunkIdentity: everything a stored chunk's keys and values depend on. A look-up in any tier of store/ compares all of
// it, field by field; no hash alone ever decides that two chunks are the same.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/rope/spec.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

inline constexpr std::int32_t kMaxStoredLayers = 4096;
inline constexpr std::int32_t kMaxStoredKvHeads = 65536;

// The model that computed a chunk, and the shape of its cache. A host fills in one of these and stamps every chunk and
// every loader with it.
struct ModelIdentity {
  std::string name;         // what people call it
  std::string fingerprint;  // what tells its weights from others of that name, such as a hash of the model file; and
                            // whatever else its cache's bytes depend on: scales of fp8, Hadamard turns
  DType dtype = DType::f32;
  std::int32_t layers = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
};

// Bytes of one head's keys, or values, of one token.
[[nodiscard]] inline std::int64_t head_bytes(const ModelIdentity& model) {
  return std::int64_t{model.head_dim / block_values(model.dtype)} * block_bytes(model.dtype);
}

struct ChunkIdentity {
  ModelIdentity model;
  std::string tenant;                    // whose chunk it is; chunks of one tenant are not found by another
  std::string recipe;                    // how the chunk's scores were computed; empty: it has none
  std::vector<RopeSpec> ropes;           // the distinct ones
  std::vector<std::int32_t> layer_rope;  // [layers], index into ropes
  std::vector<TokenId> tokens;
  std::vector<TokenId> context;  // what stood before the tokens when they were encoded; empty: they were encoded alone
  Position first_position{};     // where tokens[0] stood then

  // Appends the rope of the next layer; a host calls it once a layer.
  void add_layer_rope(const RopeSpec& spec);
  // `layer` in [0, layers) of a valid identity.
  [[nodiscard]] const RopeSpec& rope(std::int32_t layer) const {
    return ropes[static_cast<std::size_t>(layer_rope[static_cast<std::size_t>(layer)])];
  }
};

// Bytes of one layer's keys (as many again for its values), of a whole layer, and of all layers.
[[nodiscard]] inline std::int64_t plane_bytes(const ChunkIdentity& identity) {
  return static_cast<std::int64_t>(identity.tokens.size()) * identity.model.kv_heads * head_bytes(identity.model);
}
[[nodiscard]] inline std::int64_t layer_bytes(const ChunkIdentity& identity) { return 2 * plane_bytes(identity); }
[[nodiscard]] inline std::int64_t total_bytes(const ChunkIdentity& identity) {
  return layer_bytes(identity) * identity.model.layers;
}

// Whether a chunk could have this identity at all; errors name the field. No tokens at all are fine.
Status validate(const ModelIdentity& model);
Status validate(const ChunkIdentity& identity);

// StatusCode::mismatch naming the first field that differs, with both values where they are short; ok if none does.
// Two ropes are the same if their used frequencies, their pairing and so on are, bit by bit.
Status check_same(const ModelIdentity& wanted, const ModelIdentity& found);
Status check_same(const ChunkIdentity& wanted, const ChunkIdentity& found);

[[nodiscard]] inline bool operator==(const ModelIdentity& a, const ModelIdentity& b) { return check_same(a, b).ok(); }
[[nodiscard]] inline bool operator==(const ChunkIdentity& a, const ChunkIdentity& b) { return check_same(a, b).ok(); }

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

// Specs are compared on their bits and on used entries only, so that equality and digest agree.
inline bool same_rope(const RopeSpec& a, const RopeSpec& b) {
  const auto same = [](double x, double y) {
    return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y);
  };
  if (a.head_dim != b.head_dim || a.rotary_dim != b.rotary_dim || a.rotary_offset != b.rotary_offset ||
      a.pairing != b.pairing || !same(a.attention_factor, b.attention_factor)) {
    return false;
  }
  return std::equal(a.frequencies().begin(), a.frequencies().end(), b.frequencies().begin(), same) &&
         std::equal(a.axes().begin(), a.axes().end(), b.axes().begin());
}

inline Status check_rope(const RopeSpec& spec, std::int32_t head_dim, std::size_t index) {
  if (const Status status = validate(spec); !status.ok()) {
    return Status::error(status.code(), "%s: %s", status.where(), status.message()).at("ropes[%zu]", index);
  }
  if (spec.head_dim == head_dim) return {};
  return Status::error(StatusCode::invalid_argument, "head_dim is %d, the model's %d", spec.head_dim, head_dim)
      .at("ropes[%zu]", index);
}

inline Status text_mismatch(const char* field, const std::string& wanted, const std::string& found) {
  return Status::error(StatusCode::mismatch, "wanted '%.60s', is '%.60s'", wanted.c_str(), found.c_str())
      .at("%s", field);
}

inline Status number_mismatch(const char* field, std::int64_t wanted, std::int64_t found) {
  return Status::error(StatusCode::mismatch, "wanted %lld, is %lld", static_cast<long long>(wanted),
                       static_cast<long long>(found))
      .at("%s", field);
}

inline Status check_same_tokens(const char* field, std::span<const TokenId> wanted, std::span<const TokenId> found) {
  if (wanted.size() != found.size()) {
    return Status::error(StatusCode::mismatch, "wanted %zu tokens, has %zu", wanted.size(), found.size())
        .at("%s", field);
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] != found[i]) {
      return Status::error(StatusCode::mismatch, "wanted token %d, is %d", wanted[i], found[i]).at("%s[%zu]", field, i);
    }
  }
  return {};
}

}  // namespace detail

inline void ChunkIdentity::add_layer_rope(const RopeSpec& spec) {
  std::size_t index = 0;
  while (index < ropes.size() && !detail::same_rope(ropes[index], spec)) ++index;
  if (index == ropes.size()) ropes.push_back(spec);
  layer_rope.push_back(static_cast<std::int32_t>(index));
}

inline Status validate(const ModelIdentity& model) {
  const auto out_of_range = [](const char* field, std::int32_t value, std::int32_t limit) {
    return Status::error(StatusCode::invalid_argument, "%d is not in [1, %d]", value, limit).at("%s", field);
  };
  if (model.name.empty()) return Status::error(StatusCode::invalid_argument, "is empty").at("model.name");
  if (model.layers < 1 || model.layers > kMaxStoredLayers) {
    return out_of_range("model.layers", model.layers, kMaxStoredLayers);
  }
  if (model.kv_heads < 1 || model.kv_heads > kMaxStoredKvHeads) {
    return out_of_range("model.kv_heads", model.kv_heads, kMaxStoredKvHeads);
  }
  if (model.head_dim < 1 || model.head_dim > kMaxHeadDim) {
    return out_of_range("model.head_dim", model.head_dim, kMaxHeadDim);
  }
  if (block_bytes(model.dtype) == 0) {
    return Status::error(StatusCode::invalid_argument, "%d is none", static_cast<int>(model.dtype)).at("model.dtype");
  }
  if (model.head_dim % block_values(model.dtype) != 0) {
    return Status::error(StatusCode::invalid_argument, "%d is not whole %s blocks of %d", model.head_dim,
                         to_string(model.dtype), block_values(model.dtype))
        .at("model.head_dim");
  }
  return {};
}

inline Status validate(const ChunkIdentity& identity) {
  constexpr std::int64_t kMaxInt32 = (std::numeric_limits<std::int32_t>::max)();
  KVBLEND_RETURN_IF_ERROR(validate(identity.model));
  if (identity.layer_rope.size() != static_cast<std::size_t>(identity.model.layers)) {
    return Status::error(StatusCode::invalid_argument, "has %zu entries for %d layers", identity.layer_rope.size(),
                         identity.model.layers)
        .at("layer_rope");
  }
  for (std::size_t layer = 0; layer < identity.layer_rope.size(); ++layer) {
    const std::int32_t index = identity.layer_rope[layer];
    if (index < 0 || static_cast<std::size_t>(index) >= identity.ropes.size()) {
      return Status::error(StatusCode::invalid_argument, "no rope %d", index).at("layer_rope[%zu]", layer);
    }
  }
  for (std::size_t i = 0; i < identity.ropes.size(); ++i) {
    KVBLEND_RETURN_IF_ERROR(detail::check_rope(identity.ropes[i], identity.model.head_dim, i));
  }
  if (identity.first_position.value < 0) {
    return Status::error(StatusCode::invalid_argument, "%d is negative", identity.first_position.value)
        .at("first_position");
  }
  if (identity.tokens.size() > static_cast<std::size_t>(kMaxInt32) ||
      identity.first_position.value + static_cast<std::int64_t>(identity.tokens.size()) > kMaxInt32) {
    return Status::error(StatusCode::invalid_argument, "positions pass 2^31 - 1").at("tokens");
  }
  if (identity.context.size() > static_cast<std::size_t>(kMaxInt32)) {
    return Status::error(StatusCode::invalid_argument, "more than 2^31 - 1 tokens").at("context");
  }
  // One layer fits 60 bits by the bounds above; all of them together must fit as well.
  if (layer_bytes(identity) > (std::numeric_limits<std::int64_t>::max)() / identity.model.layers) {
    return Status::error(StatusCode::invalid_argument, "size passes 2^63 - 1 bytes").at("tokens");
  }
  return {};
}

inline Status check_same(const ModelIdentity& wanted, const ModelIdentity& found) {
  if (wanted.name != found.name) return detail::text_mismatch("model.name", wanted.name, found.name);
  if (wanted.fingerprint != found.fingerprint) {
    return detail::text_mismatch("model.fingerprint", wanted.fingerprint, found.fingerprint);
  }
  if (wanted.dtype != found.dtype) {
    return Status::error(StatusCode::mismatch, "wanted %s, is %s", to_string(wanted.dtype), to_string(found.dtype))
        .at("model.dtype");
  }
  if (wanted.layers != found.layers) return detail::number_mismatch("model.layers", wanted.layers, found.layers);
  if (wanted.kv_heads != found.kv_heads) {
    return detail::number_mismatch("model.kv_heads", wanted.kv_heads, found.kv_heads);
  }
  if (wanted.head_dim != found.head_dim) {
    return detail::number_mismatch("model.head_dim", wanted.head_dim, found.head_dim);
  }
  return {};
}

inline Status check_same(const ChunkIdentity& wanted, const ChunkIdentity& found) {
  KVBLEND_RETURN_IF_ERROR(check_same(wanted.model, found.model));
  if (wanted.tenant != found.tenant) {
    // Not printed: another tenant's name is not this caller's to know.
    return Status::error(StatusCode::mismatch, "belongs to another tenant").at("tenant");
  }
  if (wanted.recipe != found.recipe) return detail::text_mismatch("recipe", wanted.recipe, found.recipe);
  if (wanted.layer_rope.size() != found.layer_rope.size()) {
    return detail::number_mismatch("layer_rope", static_cast<std::int64_t>(wanted.layer_rope.size()),
                                   static_cast<std::int64_t>(found.layer_rope.size()));
  }
  for (std::size_t i = 0; i < wanted.layer_rope.size(); ++i) {
    const auto layer = static_cast<std::int32_t>(i);
    if (!detail::same_rope(wanted.rope(layer), found.rope(layer))) {
      return Status::error(StatusCode::mismatch, "keys were rotated by another rope").at("rope of layer %d", layer);
    }
  }
  KVBLEND_RETURN_IF_ERROR(detail::check_same_tokens("tokens", wanted.tokens, found.tokens));
  KVBLEND_RETURN_IF_ERROR(detail::check_same_tokens("context", wanted.context, found.context));
  if (wanted.first_position != found.first_position) {
    return detail::number_mismatch("first_position", wanted.first_position.value, found.first_position.value);
  }
  return {};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
