// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// can_shift: whether keys rotated by one RopeSpec can be moved to where another holds, asked before any is touched.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Ok if `stored`, by which the keys were rotated, and `wanted`, by which the cache is, are valid and the same rotation.
// Else an error that names the field: one spec's own fault, or what they differ in. Frequencies that depend on the
// prompt's length (dynamic NTK) differ between two lengths, and so are refused.
inline Status can_shift(const RopeSpec& stored, const RopeSpec& wanted) {
  KVBLEND_RETURN_IF_ERROR(validate(stored));
  KVBLEND_RETURN_IF_ERROR(validate(wanted));
  const auto differs = [](const char* field, std::int32_t was, std::int32_t is) {
    return Status::error(StatusCode::mismatch, "keys were stored with %d, the cache has %d", was, is)
        .at("rope %s", field);
  };
  if (stored.head_dim != wanted.head_dim) return differs("head_dim", stored.head_dim, wanted.head_dim);
  if (stored.rotary_dim != wanted.rotary_dim) return differs("rotary_dim", stored.rotary_dim, wanted.rotary_dim);
  if (stored.rotary_dim == 0) return {};  // no rope on either side: the other fields mean nothing
  if (stored.rotary_offset != wanted.rotary_offset) {
    return differs("rotary_offset", stored.rotary_offset, wanted.rotary_offset);
  }
  if (stored.pairing != wanted.pairing) {
    return Status::error(StatusCode::mismatch, "keys were stored %s, the cache is %s", to_string(stored.pairing),
                         to_string(wanted.pairing))
        .at("rope pairing");
  }
  if (stored.attention_factor != wanted.attention_factor) {
    return Status::error(StatusCode::mismatch, "keys were stored with %.9g, the cache has %.9g",
                         stored.attention_factor, wanted.attention_factor)
        .at("rope attention_factor");
  }
  for (std::int32_t pair = 0; pair < stored.pairs(); ++pair) {
    const auto i = static_cast<std::size_t>(pair);
    if (stored.inv_freq[i] != wanted.inv_freq[i]) {
      return Status::error(StatusCode::mismatch, "keys were stored with %.17g, the cache has %.17g", stored.inv_freq[i],
                           wanted.inv_freq[i])
          .at("rope inv_freq[%d]", pair);
    }
  }
  return {};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
