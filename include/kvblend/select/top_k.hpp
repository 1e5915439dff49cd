// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The k best of many scores, by one written rule, so that every back end and every run picks the same rows.
#pragma once

#include <kvblend/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// The order of scores: 0 is the best.
//   NaN first (a score that cannot be computed is no reason to trust the row), then +inf, finite scores falling, -inf;
//   -0 and +0 are equal, and all NaNs are. Equal scores rank by index, lowest first.
// On the bits, so that it holds under -ffast-math.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr std::uint32_t score_rank(float score) {
  const auto bits = __builtin_bit_cast(std::uint32_t, score);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0;
  const bool negative = (bits >> 31) != 0 && magnitude != 0;
  return negative ? 0x80000000u + magnitude : 0x80000000u - magnitude;
}

// Writes the indices of the best clamp(k, 0, scores.size()) scores to `out`, ascending, each once, and returns how
// many. `scratch` has at least scores.size() entries, `out` at least as many as are returned. O(n + k log k).
inline std::int32_t select_top_k(std::span<const float> scores, std::int32_t k, std::span<std::uint64_t> scratch,
                                 std::span<ActiveIndex> out) {
  const std::size_t count = scores.size();
  const std::size_t picks = k > 0 ? (std::min)(static_cast<std::size_t>(k), count) : 0;
  if (picks == 0) return 0;
  // Rank above index: all keys differ, so that which are the smallest does not depend on the algorithm.
  const std::span<std::uint64_t> keys = scratch.first(count);
  for (std::size_t i = 0; i < count; ++i) keys[i] = std::uint64_t{score_rank(scores[i])} << 32 | i;
  if (picks < count) {
    std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(picks), keys.end());
  }
  for (std::size_t i = 0; i < picks; ++i) out[i] = ActiveIndex(static_cast<std::int32_t>(keys[i] & 0xffffffffu));
  std::sort(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(picks));
  return static_cast<std::int32_t>(picks);
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
