// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// can_shift: whether keys rotated by one RopeSpec can be moved to where another holds, and what that takes, asked
// before any is touched.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

enum class ShiftKind : std::uint8_t {
  rotate,  // pairs turn
  copy,    // keys stay what they are
};

// What it takes to move keys that `stored` rotated into a cache that `wanted` rotates: copy if there is no rope, else
// rotate. An error names the field: a fault of one spec, or the first field in which the two differ and may not.
//
// Frequencies may differ: those of dynamic NTK and longrope depend on the prompt's length, and keys from a prompt of
// another length move from the old frequencies at their old positions to the new at the new. For that the two specs
// must each be the one that held; one spec for both lengths moves such keys to a wrong place. The two are taken at
// their word: specs of two models with heads alike give a move between them.
// An attention factor that differs is refused: the amplitude is in the stored keys, and a shift only turns them.
inline Result<ShiftKind> can_shift(const RopeSpec& stored, const RopeSpec& wanted) {
  KVBLEND_RETURN_IF_ERROR(validate(stored));
  KVBLEND_RETURN_IF_ERROR(validate(wanted));
  const auto differs = [](const char* field, std::int32_t was, std::int32_t is) {
    return Status::error(StatusCode::mismatch, "keys were stored with %d, the cache has %d", was, is)
        .at("rope %s", field);
  };
  if (stored.head_dim != wanted.head_dim) return differs("head_dim", stored.head_dim, wanted.head_dim);
  if (stored.rotary_dim != wanted.rotary_dim) return differs("rotary_dim", stored.rotary_dim, wanted.rotary_dim);
  if (stored.rotary_dim == 0) return ShiftKind::copy;  // no rope on either side: the other fields mean nothing
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
    if (stored.axis_of_pair[i] != wanted.axis_of_pair[i]) {
      return Status::error(StatusCode::mismatch, "keys were stored with %d, the cache has %d", stored.axis_of_pair[i],
                           wanted.axis_of_pair[i])
          .at("rope axis_of_pair[%d]", pair);
    }
  }
  return ShiftKind::rotate;
}

// The same for one run: copy also if its frequencies and its positions stay.
inline Result<ShiftKind> can_shift(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run) {
  Result<ShiftKind> kind = can_shift(stored, wanted);
  if (kind.ok() && run.old_first == run.new_first && same_frequencies(stored, wanted)) kind.value = ShiftKind::copy;
  return kind;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
