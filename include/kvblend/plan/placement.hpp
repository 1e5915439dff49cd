// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Placement: which tier each cached segment of a prompt is loaded from, and what loading a layer of them takes. A detail
// of RecomputePlanner.
#pragma once

#include <kvblend/plan/plan.hpp>
#include <kvblend/plan/tier.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/select/score.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

// Index of a cached segment that lies in no tier whose KV can be read in place, or -1.
inline std::int32_t segment_out_of_memory(const Prompt& prompt, std::span<const Tier> tiers,
                                          std::span<const TierMask> held_in) {
  for (std::size_t s = 0; s < held_in.size(); ++s) {
    if (prompt.segments()[s].kind != SegmentKind::cached || prompt.segments()[s].size() == 0) continue;
    bool found = false;
    for (std::size_t t = 0; t < tiers.size(); ++t) {
      found = found || (((held_in[s] >> t) & 1u) != 0 && tiers[t].in_memory && tiers[t].delivers());
    }
    if (!found) return static_cast<std::int32_t>(s);
  }
  return -1;
}

inline void clear_placement(std::span<SegmentPlan> segments, std::span<LayerPlan> layers) {
  for (SegmentPlan& segment : segments) {
    segment.tier = -1;
    segment.load_s = 0.0;
  }
  for (LayerPlan& layer : layers) layer = LayerPlan{};
}

struct Placement {
  bool exact_only = false;          // load only the exact prefix
  bool overlaps = true;             // compute hides loading: otherwise the fastest tier, in memory first
  double bytes_per_token = 0.0;     // at the layer that has most
  double budget_s_per_token = 0.0;  // what may pass per token loaded, a layer

  // Index of the tier to load `tokens` from, or -1 if none they lie in delivers.
  [[nodiscard]] std::int32_t choose_tier(std::span<const Tier> tiers, TierMask held_in, std::int32_t tokens) const {
    const double bytes = tokens * bytes_per_token;
    std::int32_t fastest = -1;
    for (std::size_t t = 0; t < tiers.size(); ++t) {
      const Tier& tier = tiers[t];
      if (((held_in >> t) & 1u) == 0 || !tier.delivers()) continue;
      if (overlaps && tier.load_seconds(bytes) <= tokens * budget_s_per_token) return static_cast<std::int32_t>(t);
      if (fastest < 0 || beats(tier, tiers[static_cast<std::size_t>(fastest)], bytes)) {
        fastest = static_cast<std::int32_t>(t);
      }
    }
    return fastest;
  }

  // Sets the tier of every segment that is loaded. Returns -1, or the first segment that cannot be had.
  [[nodiscard]] std::int32_t choose_tiers(std::span<const Tier> tiers, std::span<const TierMask> held_in,
                                          std::span<SegmentPlan> segments) const {
    for (std::size_t s = 0; s < segments.size(); ++s) {
      SegmentPlan& segment = segments[s];
      if (segment.kind != SegmentKind::cached || segment.tokens == 0 || (exact_only && !segment.exact)) continue;
      segment.tier = choose_tier(tiers, held_in[s], segment.tokens);
      if (segment.tier < 0) return static_cast<std::int32_t>(s);
    }
    return -1;
  }

 private:
  [[nodiscard]] bool beats(const Tier& tier, const Tier& best, double bytes) const {
    if (!overlaps && tier.in_memory != best.in_memory) return tier.in_memory;
    return tier.load_seconds(bytes) < best.load_seconds(bytes);
  }
};

// Seconds that a layer's reads take, which are also added to their segments.
inline double load_layer(std::span<const Tier> tiers, double bytes_per_token, bool tiers_in_parallel,
                         std::span<SegmentPlan> segments) {
  std::array<double, static_cast<std::size_t>(kMaxTiers)> of_tier{};
  double sum = 0.0;
  double longest = 0.0;
  for (SegmentPlan& segment : segments) {
    if (segment.tier < 0) continue;
    const auto t = static_cast<std::size_t>(segment.tier);
    const double load_s = tiers[t].load_seconds(segment.tokens * bytes_per_token);
    segment.load_s += load_s;
    sum += load_s;
    of_tier[t] += load_s;
    longest = (std::max)(longest, of_tier[t]);
  }
  return tiers_in_parallel ? longest : sum;
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
