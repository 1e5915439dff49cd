// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Plan: what a planner decided for one prompt, with the predicted times it decided by, and its text.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/plan/tier.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/select/score.hpp>

#include <array>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// What the engine is to do. For full_recompute and prefix it makes its prompt anew, with fresh segments in the place of
// the cached ones that are not loaded; reuse and blend take the prompt as planned and a RatioBudget of Plan::ratio.
enum class PlanMode : std::uint8_t {
  nothing,         // the prompt is empty
  full_recompute,  // load nothing, run every row that is not resident
  prefix,          // load the cached segments of the exact prefix, run every row behind it
  reuse,           // load all cached segments, run only the rows that were never cached
  blend,           // load all cached segments, run those rows and `rows_kept` of the reused ones
};

[[nodiscard]] constexpr const char* to_string(PlanMode mode) {
  switch (mode) {
    case PlanMode::nothing: return "nothing to do";
    case PlanMode::full_recompute: return "full recompute";
    case PlanMode::prefix: return "prefix";
    case PlanMode::reuse: return "reuse";
    case PlanMode::blend: return "blend";
  }
  return "unknown";
}

[[nodiscard]] constexpr const char* to_string(ScoreTiming timing) {
  switch (timing) {
    case ScoreTiming::before_load: return "before load";
    case ScoreTiming::during_pass: return "during the pass";
    case ScoreTiming::after_probe: return "after a probe";
  }
  return "unknown";
}
inline constexpr std::size_t kScoreTimings = 3;

// What the plan says of a segment of the prompt, in the prompt's order.
struct SegmentPlan {
  SegmentKind kind = SegmentKind::fresh;
  bool exact = false;
  std::int32_t tokens = 0;
  std::int32_t tier = -1;  // index of the tier to load it from; -1: it is not loaded
  double load_s = 0.0;     // over all layers
};

// What the plan expects of a layer. Times ready_s and done_s count from the start of the pass.
struct LayerPlan {
  double load_s = 0.0;       // reading the layer of all segments that are loaded
  double recompute_s = 0.0;  // running its rows, the choice's extra rows included
  double ready_s = 0.0;      // its KV is in memory
  double done_s = 0.0;       // its rows ran
  double ratio = 0.0;        // max(r_min, what hides this layer's own load), never above the layer before
};

// The spans are the caller's memory, as given to the planner.
struct Plan {
  PlanMode mode = PlanMode::nothing;
  double ratio = 0.0;            // share of the reused rows to recompute; 1 when they all are
  std::int32_t reused_rows = 0;  // rows a selector chooses from
  std::int32_t rows_kept = 0;    // of them to recompute: ratio·reused_rows, rounded as RatioBudget does
  std::int32_t active_rows = 0;  // rows a layer runs once the choice is made
  double ttft_s = 0.0;           // of this plan: all layers, without what precedes and follows them in the engine
  double full_ttft_s = 0.0;      // of running every row that is not resident
  ScoreTiming timing = ScoreTiming::before_load;  // of the selector the plan was made for
  bool stored_scores = false;                     // every reused segment's chunk has scores

  // By ScoreTiming: whether a blend with such a selector is possible from where the KV lies and faster than without, and
  // its predicted TTFT (0 where the KV cannot be had).
  std::array<bool, kScoreTimings> allowed{};
  std::array<double, kScoreTimings> blend_ttft_s{};

  std::span<const Tier> tiers;
  std::span<const SegmentPlan> segments;
  std::span<const LayerPlan> layers;
  char reason[192] = "";  // why this mode and ratio

  [[nodiscard]] bool allows(ScoreTiming t) const { return allowed[static_cast<std::size_t>(t)]; }
};

// Writes the plan as text, a few lines and one per segment and per run of equal layers. As snprintf: writes at most
// out.size() characters with the closing 0, cut where they do not suffice, and returns the length of the whole text.
inline std::size_t print(const Plan& plan, std::span<char> out);

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

// Appends to a span of characters and counts what would have been written.
class TextWriter {
 public:
  explicit TextWriter(std::span<char> out) : out_(out) {
    if (!out_.empty()) out_[0] = '\0';
  }

#if defined(__GNUC__)
  __attribute__((format(printf, 2, 3)))
#endif
  void
  append(const char* format, ...) {
    const std::size_t room = length_ < out_.size() ? out_.size() - length_ : 0;
    std::va_list arguments;
    va_start(arguments, format);
    const int count = std::vsnprintf(room > 0 ? out_.data() + length_ : nullptr, room, format, arguments);
    va_end(arguments);
    if (count > 0) length_ += static_cast<std::size_t>(count);
  }

  void append_time(double seconds) {
    if (seconds >= 1.0) {
      append("%.3g s", seconds);
    } else if (seconds >= 1e-3) {
      append("%.3g ms", seconds * 1e3);
    } else {
      append("%.3g us", seconds * 1e6);
    }
  }

  void append_tier(const Tier& tier) {
    const double b = tier.bandwidth_bytes_per_s;
    if (!is_finite(b)) {
      append("%s (unlimited", tier.name);
    } else if (b >= 1e9) {
      append("%s (%.3g GB/s", tier.name, b * 1e-9);
    } else {
      append("%s (%.3g MB/s", tier.name, b * 1e-6);
    }
    if (tier.latency_s > 0.0) {
      append(", ");
      append_time(tier.latency_s);
      append(" a read");
    }
    append(")");
  }

  [[nodiscard]] std::size_t length() const { return length_; }

 private:
  std::span<char> out_;
  std::size_t length_ = 0;
};

inline void print_segment(TextWriter& text, const Plan& plan, std::size_t index) {
  const SegmentPlan& segment = plan.segments[index];
  text.append("segment %zu: %d tokens ", index, segment.tokens);
  if (segment.kind == SegmentKind::fresh) {
    text.append("fresh\n");
  } else if (segment.kind == SegmentKind::resident) {
    text.append("resident\n");
  } else if (segment.tier < 0) {
    text.append("cached, not loaded\n");
  } else {
    text.append("from ");
    text.append_tier(plan.tiers[static_cast<std::size_t>(segment.tier)]);
    text.append(segment.exact ? ", exact, " : ", ");
    text.append_time(segment.load_s);
    text.append(" in all\n");
  }
}

inline void print_layers(TextWriter& text, std::span<const LayerPlan> layers) {
  for (std::size_t first = 0; first < layers.size();) {
    const LayerPlan& layer = layers[first];
    std::size_t end = first + 1;
    while (end < layers.size() && layers[end].load_s == layer.load_s && layers[end].recompute_s == layer.recompute_s &&
           layers[end].ratio == layer.ratio) {
      ++end;
    }
    if (end == first + 1) {
      text.append("layer %zu: ", first);
    } else {
      text.append("layers %zu-%zu, each: ", first, end - 1);
    }
    text.append("load ");
    text.append_time(layer.load_s);
    text.append(", recompute ");
    text.append_time(layer.recompute_s);
    text.append(", ratio %.4g\n", layer.ratio);
    first = end;
  }
}

}  // namespace detail

inline std::size_t print(const Plan& plan, std::span<char> out) {
  detail::TextWriter text(out);
  text.append("plan: %s", to_string(plan.mode));
  if (plan.mode == PlanMode::blend || plan.mode == PlanMode::reuse) {
    text.append(", ratio %.4g: %d of %d reused rows, %d active rows a layer, chosen %s", plan.ratio, plan.rows_kept,
                plan.reused_rows, plan.active_rows, to_string(plan.timing));
  } else if (plan.mode != PlanMode::nothing) {
    text.append(", %d active rows a layer", plan.active_rows);
  }
  text.append("\nwhy: %s\n", plan.reason);
  if (plan.mode != PlanMode::nothing) {
    text.append("time to first token: ");
    text.append_time(plan.ttft_s);
    text.append(", full recompute ");
    text.append_time(plan.full_ttft_s);
    text.append("\nselectors that pay off:");
    bool any = false;
    for (std::size_t t = 0; t < kScoreTimings; ++t) {
      if (!plan.allowed[t]) continue;
      text.append("%s %s (", any ? "," : "", to_string(static_cast<ScoreTiming>(t)));
      text.append_time(plan.blend_ttft_s[t]);
      text.append(")");
      any = true;
    }
    text.append(any ? "\n" : " none\n");
    if (plan.reused_rows > 0) text.append("stored scores: %s\n", plan.stored_scores ? "yes" : "not with every chunk");
  }
  for (std::size_t s = 0; s < plan.segments.size(); ++s) detail::print_segment(text, plan, s);
  if (plan.mode != PlanMode::nothing) detail::print_layers(text, plan.layers);
  return text.length();
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
