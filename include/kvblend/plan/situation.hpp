// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Situation: which kinds of selectors a prompt leaves open, from where its chunks lie and what is stored with them. A
// calibration names a default selector for each (quality.hpp); the planner then plans for that one's timing.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/plan/placement.hpp>
#include <kvblend/plan/tier.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/select/score.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

enum class Situation : std::uint8_t {
  kv_in_memory,      // a probe pass can start at once; chunks may lack stored scores
  hide_loading,      // loading is to hide behind recompute: the choice is made before it, or as layers come
  no_stored_scores,  // the same, and a chunk has no scores stored
};
inline constexpr std::size_t kSituations = 3;

[[nodiscard]] constexpr const char* to_string(Situation situation) {
  switch (situation) {
    case Situation::kv_in_memory: return "KV in memory";
    case Situation::hide_loading: return "loading to be hidden";
    case Situation::no_stored_scores: return "loading to be hidden, no stored scores";
  }
  return "unknown";
}

// `tiers` and `held_in` as the planner takes them. Of a prompt that reuses nothing any answer is right.
// Errors: more than kMaxTiers; held_in of another length than the prompt's segments.
[[nodiscard]] inline Result<Situation> situation_of(const Prompt& prompt, std::span<const Tier> tiers,
                                                    std::span<const TierMask> held_in) {
  if (tiers.size() > static_cast<std::size_t>(kMaxTiers)) {
    return Status::error(StatusCode::out_of_range, "%zu, at most %d", tiers.size(), kMaxTiers).at("tiers");
  }
  if (held_in.size() != prompt.segments().size()) {
    return Status::error(StatusCode::mismatch, "%zu entries for %zu segments", held_in.size(), prompt.segments().size())
        .at("held_in");
  }
  if (detail::segment_out_of_memory(prompt, tiers, held_in) < 0) return Situation::kv_in_memory;
  return detail::has_stored_scores(prompt) ? Situation::hide_loading : Situation::no_stored_scores;
}

// Whether a selector can be used there. `needs_stored_scores`: it reads them and has no fallback of its own
// (chunk_rules.hpp's Fallback), so that all chunks must be known to have them.
[[nodiscard]] constexpr bool suits(Situation situation, ScoreTiming timing, bool needs_stored_scores) {
  if (timing == ScoreTiming::after_probe && situation != Situation::kv_in_memory) return false;
  return situation == Situation::hide_loading || !needs_stored_scores;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
