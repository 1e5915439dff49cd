// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Digests: the key under which a tier of store/ looks for a chunk, and the checksums of chunk files. A digest narrows
// the search; check_same (store/identity.hpp) then decides.
#pragma once

// xxHash is compiled into the including file, under names of its own: nothing to link, and no clash with a copy that
// the host links.
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#define KVBLEND_UNDEF_XXH_INLINE_ALL
#endif
#include <xxhash.h>
#ifdef KVBLEND_UNDEF_XXH_INLINE_ALL
#undef XXH_INLINE_ALL
#undef KVBLEND_UNDEF_XXH_INLINE_ALL
#endif

#include <kvblend/store/identity.hpp>

#include <array>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

struct ChunkDigest {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  friend constexpr auto operator<=>(const ChunkDigest&, const ChunkDigest&) = default;
};

// A hash over a stream of bytes. Tiers take it as a policy: whatever it returns, even one value for everything, no
// chunk is ever mistaken for another; a poor one is only slower.
template <class H>
concept IdentityHash = std::default_initializable<H> && requires(H& hash, std::span<const std::byte> bytes) {
  { hash.update(bytes) } -> std::same_as<void>;
  { hash.finish() } -> std::same_as<ChunkDigest>;
};

// XXH3, 128 bits.
class Xxh3Hash {
 public:
  Xxh3Hash() { XXH3_128bits_reset(&state_); }
  void update(std::span<const std::byte> bytes) { XXH3_128bits_update(&state_, bytes.data(), bytes.size()); }
  [[nodiscard]] ChunkDigest finish() {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return {hash.high64, hash.low64};
  }

 private:
  XXH3_state_t state_;
};

// Of all fields of a valid identity.
template <IdentityHash Hash = Xxh3Hash>
[[nodiscard]] ChunkDigest digest_of(const ChunkIdentity& identity);

// XXH3, 64 bits, over bytes that arrive in pieces.
class Checksum {
 public:
  Checksum() { XXH3_64bits_reset(&state_); }
  void update(std::span<const std::byte> bytes) { XXH3_64bits_update(&state_, bytes.data(), bytes.size()); }
  [[nodiscard]] std::uint64_t value() const { return XXH3_64bits_digest(&state_); }

 private:
  XXH3_state_t state_;
};

[[nodiscard]] inline std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

// 16 lower-case digits, the highest first.
[[nodiscard]] inline std::string to_hex(std::uint64_t value) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t i = 0; i < 16; ++i) text[i] = kDigits[(value >> (60 - 4 * i)) & 15u];
  return text;
}
[[nodiscard]] inline std::string to_hex(const ChunkDigest& digest) { return to_hex(digest.high) + to_hex(digest.low); }

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

// Feeds fields to a hash, each of a fixed size or behind its length, so that no two identities give the same stream.
template <class Hash>
class IdentityFeed {
 public:
  explicit IdentityFeed(Hash& hash) : hash_(hash) {}

  template <class T>
  void number(T value) {
    hash_.update(std::as_bytes(std::span<const T, 1>(&value, 1)));
  }
  void text(const std::string& value) {
    number(static_cast<std::uint64_t>(value.size()));
    hash_.update(std::as_bytes(std::span<const char>(value.data(), value.size())));
  }
  void tokens(std::span<const TokenId> value) {
    number(static_cast<std::uint64_t>(value.size()));
    hash_.update(std::as_bytes(value));
  }
  void rope(const RopeSpec& spec) {
    number(spec.head_dim);
    number(spec.rotary_dim);
    number(spec.rotary_offset);
    number(static_cast<std::int32_t>(spec.pairing));
    number(spec.attention_factor);
    hash_.update(std::as_bytes(spec.frequencies()));
    hash_.update(std::as_bytes(spec.axes()));
  }

 private:
  Hash& hash_;
};

}  // namespace detail

template <IdentityHash Hash>
ChunkDigest digest_of(const ChunkIdentity& identity) {
  Hash hash;
  detail::IdentityFeed<Hash> feed(hash);
  feed.text(identity.model.name);
  feed.text(identity.model.fingerprint);
  feed.number(static_cast<std::int32_t>(identity.model.dtype));
  feed.number(identity.model.layers);
  feed.number(identity.model.kv_heads);
  feed.number(identity.model.head_dim);
  feed.text(identity.tenant);
  feed.text(identity.recipe);
  feed.number(static_cast<std::uint64_t>(identity.layer_rope.size()));
  for (std::size_t layer = 0; layer < identity.layer_rope.size(); ++layer) {
    feed.rope(identity.rope(static_cast<std::int32_t>(layer)));
  }
  feed.tokens(identity.tokens);
  feed.tokens(identity.context);
  feed.number(identity.first_position.value);
  return hash.finish();
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
