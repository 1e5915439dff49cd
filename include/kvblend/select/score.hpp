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

// What a score may look at. All spans but `prompt` run over `rows`; those that the timing or the `uses_` flags do not
// ask for are empty.
struct ScoreInputs {
  const Prompt& prompt;
  std::span<const Row> rows;               // candidates: reused rows, ascending
  std::span<const float> key_deviation;    // ‖fresh key − reused key‖₂ over all heads, at `layer`
  std::span<const float> value_deviation;  // the same of values
  std::span<const float> attention_mass;   // attention the probe rows pay to each row: sum over layers and heads
  std::int32_t layer = 0;
};

// A score writes one float per row; higher is recomputed first. A policy is a copyable struct with
//   static constexpr ScoreTiming timing
//   static constexpr bool uses_keys, uses_values      (during_pass only) which deviations it reads
//   static constexpr const char* name                 for plans and reports
//   Status operator()(const ScoreInputs&, std::span<float> out) const
//   Status validate() const                           (only if it has fields that can be wrong)
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

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
