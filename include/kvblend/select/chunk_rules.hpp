// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rules about chunks around any score: a floor for each, the false sinks at their heads first, and another score where
// a chunk stores none.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/select/combine.hpp>
#include <kvblend/select/score.hpp>
#include <kvblend/select/scores.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

// What a rule around a score passes on.
template <class S>
struct RuleAround {
  static constexpr ScoreTiming timing = S::timing;
  static constexpr bool uses_keys = S::uses_keys;
  static constexpr bool uses_values = S::uses_values;

  S score{};

  RuleAround() = default;
  explicit RuleAround(const S& s) : score(s) {}
  [[nodiscard]] bool covers(const Prompt& prompt) const { return score_covers(score, prompt); }
};

// Calls body(segment, first, count) for the rows of each segment: `count` of inputs.rows from index `first` on.
template <class Body>
Status for_each_segment(const ScoreInputs& inputs, Body body) {
  SegmentCursor cursor(inputs.prompt);
  for (std::size_t first = 0; first < inputs.rows.size();) {
    const std::size_t s = cursor.find(inputs.rows[first]);
    if (s == inputs.prompt.segments().size()) return not_reused(inputs.rows[first]);
    const Segment& segment = inputs.prompt.segments()[s];
    std::size_t end = first + 1;
    while (end < inputs.rows.size() && inputs.rows[end] < segment.end_row()) ++end;
    body(segment, first, end - first);
    first = end;
  }
  return {};
}

}  // namespace detail

// No segment goes without: of k rows chosen among N, a segment of n candidates gets at least floor(share·k·n/N) of its
// own best; share 0 is the score alone, 1 an even split by length. A score that fades with distance would otherwise
// starve early passages. The rest goes to the best rows wherever they are. It writes minus a place, the smaller of a
// row's place among all and of (t + 1)·N/(g·n) for the t-th best of its segment, with g = share/(1 - share): at most
// (1 + g)·p rows stand up to place p, so the rows up to k/(1 + g) are kept whatever k is.
template <Score S>
struct ChunkFloor : detail::RuleAround<S> {
  static constexpr const char* name = detail::JoinedName<"floor", S>::joined.data();
  static constexpr std::int32_t held = kAllScratch;
  static constexpr bool writes_places = true;

  double share = 0.25;  // in [0, 1]

  ChunkFloor() = default;
  explicit ChunkFloor(const S& s, double least = 0.25) : detail::RuleAround<S>(s), share(least) {}

  [[nodiscard]] Status validate() const {
    if (is_nan(share) || !(share >= 0.0 && share <= 1.0)) {
      return Status::error(StatusCode::invalid_argument, "%.9g is not in [0, 1]", share).at("share");
    }
    return detail::validate_score(this->score);
  }

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    KVBLEND_RETURN_IF_ERROR(detail::check_scratch(inputs));
    KVBLEND_RETURN_IF_ERROR(detail::run_score(this->score, inputs, out));
    const std::span<std::uint64_t> keys = inputs.scratch.keys.first(out.size());
    const std::span<ActiveIndex> places = inputs.scratch.places;
    KVBLEND_RETURN_IF_ERROR(detail::for_each_segment(inputs, [&](const Segment&, std::size_t first, std::size_t count) {
      const std::span<std::uint64_t> own = keys.subspan(first, count);
      detail::sort_by_score(out.subspan(first, count), first, own);
      for (std::size_t t = 0; t < count; ++t) {
        places[detail::index_of_key(own[t])] = ActiveIndex(static_cast<std::int32_t>(t));
      }
    }));
    detail::sort_by_score(out, 0, keys);
    for (std::size_t place = 0; place < keys.size(); ++place) {
      out[detail::index_of_key(keys[place])] = static_cast<float>(place + 1);
    }
    return detail::for_each_segment(inputs, [&](const Segment&, std::size_t first, std::size_t count) {
      const double step = static_cast<double>(out.size()) / static_cast<double>(count);
      for (std::size_t i = first; i < first + count; ++i) {
        const double even = (places[i].value + 1) * step;  // the row's place in an even split
        float place = out[i];
        if (share == 1.0) place = static_cast<float>(even);
        if (share > 0.0 && share < 1.0) place = (std::min)(place, static_cast<float>(even * (1.0 - share) / share));
        out[i] = -place;
      }
    });
  }
};

// The first tokens of a chunk that was encoded alone before all else: attention takes them for the start of the text,
// and they draw far more of it than they would (a false sink). At ratios so small that a score may pass them over,
// fresh keys there repair most. Chunks encoded behind a context have no such tokens, nor has a part that starts further
// on.
template <Score S>
struct SinksFirst : detail::RuleAround<S> {
  static constexpr const char* name = detail::JoinedName<"sinks_first", S>::joined.data();
  static constexpr std::int32_t held = detail::held_by<S>();
  static constexpr bool writes_places = detail::writes_places<S>();

  std::int32_t tokens = 1;  // of each chunk, >= 0

  SinksFirst() = default;
  explicit SinksFirst(const S& s, std::int32_t first_tokens = 1) : detail::RuleAround<S>(s), tokens(first_tokens) {}

  [[nodiscard]] Status validate() const {
    if (tokens < 0) return Status::error(StatusCode::invalid_argument, "%d is negative", tokens).at("tokens");
    return detail::validate_score(this->score);
  }

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    KVBLEND_RETURN_IF_ERROR(detail::run_score(this->score, inputs, out));
    return detail::for_each_segment(inputs, [&](const Segment& segment, std::size_t first, std::size_t count) {
      if (segment.chunk == nullptr || !segment.chunk->context.empty()) return;
      for (std::size_t i = first; i < first + count; ++i) {
        const std::int32_t token = segment.chunk_offset + (inputs.rows[i] - segment.first_row);
        if (token < tokens) out[i] = std::numeric_limits<float>::infinity();
      }
    });
  }
};

// `preferred` for prompts that it covers, else `other`, for all rows: scores of two kinds do not compare. Both are
// known at one time, as a blend's way depends on it; where that is to change too, the plan's situation decides
// (plan/situation.hpp). The selector's name_for(prompt) and the blend's report say which of the two it was, unless
// another score is put around the fallback.
template <CoveringScore Preferred, Score Other>
struct Fallback {
  static_assert(Preferred::timing == Other::timing, "kvblend: a fallback must be known when the preferred score is");
  static_assert(Preferred::timing != ScoreTiming::after_probe || Preferred::uses_values == Other::uses_values,
                "kvblend: one probe pass reports attention either plain or weighed by values");
  static constexpr ScoreTiming timing = Preferred::timing;
  static constexpr bool uses_keys = Preferred::uses_keys || Other::uses_keys;
  static constexpr bool uses_values = Preferred::uses_values || Other::uses_values;
  static constexpr const char* name = detail::JoinedName<"fallback", Preferred, Other>::joined.data();
  static constexpr std::int32_t held = (std::max)(detail::held_by<Preferred>(), detail::held_by<Other>());
  static constexpr bool writes_places = detail::writes_places<Preferred>() || detail::writes_places<Other>();

  Preferred preferred{};
  Other other{};

  Fallback() = default;
  explicit Fallback(const Preferred& p, const Other& o = {}) : preferred(p), other(o) {}

  [[nodiscard]] const char* name_for(const Prompt& prompt) const {
    return preferred.covers(prompt) ? detail::score_name(preferred, prompt) : detail::score_name(other, prompt);
  }
  [[nodiscard]] bool covers(const Prompt& prompt) const {
    return preferred.covers(prompt) || detail::score_covers(other, prompt);
  }
  [[nodiscard]] Status validate() const {
    KVBLEND_RETURN_IF_ERROR(detail::validate_score(preferred));
    return detail::validate_score(other);
  }

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    if (preferred.covers(inputs.prompt)) return detail::run_score(preferred, inputs, out);
    return detail::run_score(other, inputs, out);
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
