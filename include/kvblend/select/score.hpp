// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Score: what makes a reused row worth recomputing. The concept a new selector satisfies with one small struct; the
// policies we ship are in scores.hpp.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/prompt/prompt.hpp>

#include <concepts>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// When a score can be known decides what loading can hide behind.
enum class ScoreTiming : std::uint8_t {
  before_load,  // from the prompt and the arrays stored with its chunks: only the chosen rows run, from layer 0 on
  during_pass,  // from the fresh keys and values of a layer: every row runs up to that check layer
  after_probe,  // from a pass of the question's rows over all reused KV: all of it must be in memory first
};

// Memory that scores made of others keep their parts in: one entry per row each. A selector lends what its own choice
// needs only afterwards. Empty for scores without `held`.
struct ScoreScratch {
  std::span<std::uint64_t> keys;
  std::span<ActiveIndex> places;
};

// What a score may look at. All spans but `prompt` run over `rows`; those that the timing or the `uses_` flags do not
// ask for are empty.
struct ScoreInputs {
  const Prompt& prompt;
  std::span<const Row> rows;               // candidates: reused rows, ascending
  std::span<const float> key_deviation;    // ‖fresh key − reused key‖₂ over all heads, at `layer`
  std::span<const float> value_deviation;  // the same of values
  std::span<const float> attention_mass;   // attention the probe rows pay to each row: sum over layers and heads; with
      // uses_values each layer's times ‖the row's reused value‖₂ over all heads
  std::int32_t layer = 0;
  ScoreScratch scratch = {};
};

// A score writes one float per row; higher is recomputed first. A policy is a copyable struct with
//   static constexpr ScoreTiming timing
//   static constexpr bool uses_keys, uses_values      during_pass: which deviations it reads; after_probe: whether
//                                                     attention is weighed by the values it fetches
//   static constexpr const char* name                 for plans and reports
//   Status operator()(const ScoreInputs&, std::span<float> out) const
//   Status validate() const                           (only if it has fields that can be wrong)
//   bool covers(const Prompt&) const                  (only if it can lack what it needs) whether it can score the rows
//   const char* name_for(const Prompt&) const         (only if it depends on the prompt) what it is there
//   static constexpr bool writes_places               (only if true) what it writes orders the rows and has no unit: no
//                                                     threshold can be set against it
//   static constexpr std::int32_t held                (only if it uses ScoreInputs::scratch) kAllScratch: it does as
//                                                     it likes. 1 or 2: it keeps so many words of 32 bits in each of
//                                                     `keys`, at the low end; what was there it shifts up and back
template <class S>
concept Score = requires(const S score, const ScoreInputs& inputs, std::span<float> out) {
  { S::timing } -> std::convertible_to<ScoreTiming>;
  { S::uses_keys } -> std::convertible_to<bool>;
  { S::uses_values } -> std::convertible_to<bool>;
  { S::name } -> std::convertible_to<const char*>;
  { score(inputs, out) } -> std::same_as<Status>;
};

template <class S>
concept ValidatedScore = Score<S> && requires(const S score) {
  { score.validate() } -> std::same_as<Status>;
};

template <class S>
concept CoveringScore = Score<S> && requires(const S score, const Prompt& prompt) {
  { score.covers(prompt) } -> std::same_as<bool>;
};

template <class S>
concept PromptNamedScore = Score<S> && requires(const S score, const Prompt& prompt) {
  { score.name_for(prompt) } -> std::same_as<const char*>;
};

// ScoreScratch is wanted whole; no other score may keep anything there meanwhile.
inline constexpr std::int32_t kAllScratch = 3;

namespace detail {

template <class S>
constexpr std::int32_t held_by() {
  if constexpr (requires {
                  { S::held } -> std::convertible_to<std::int32_t>;
                }) {
    return S::held;
  } else {
    return 0;
  }
}

template <class S>
constexpr bool writes_places() {
  if constexpr (requires {
                  { S::writes_places } -> std::convertible_to<bool>;
                }) {
    return S::writes_places;
  } else {
    return false;
  }
}

// Asks a score, which gets no scratch that it does not say it uses: a score around it may hold something there.
template <Score S>
Status run_score(const S& score, const ScoreInputs& inputs, std::span<float> out) {
  if constexpr (held_by<S>() > 0) {
    return score(inputs, out);
  } else {
    ScoreInputs without = inputs;
    without.scratch = {};
    return score(without, out);
  }
}

template <Score S>
Status validate_score(const S& score) {
  if constexpr (ValidatedScore<S>) return score.validate();
  return {};
}

template <Score S>
bool score_covers(const S& score, const Prompt& prompt) {
  if constexpr (CoveringScore<S>) return score.covers(prompt);
  return true;
}

template <Score S>
const char* score_name(const S& score, const Prompt& prompt) {
  if constexpr (PromptNamedScore<S>) return score.name_for(prompt);
  return S::name;
}

// Whether all reused rows of the prompt lie in chunks with scores.
inline bool has_stored_scores(const Prompt& prompt) {
  for (const Segment& segment : prompt.segments()) {
    const bool reused = segment.kind == SegmentKind::cached && !segment.exact && segment.size() > 0;
    if (reused && segment.chunk->scores.empty()) return false;
  }
  return prompt.reused_rows() > 0;
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
