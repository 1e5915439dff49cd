// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Selectors by name. The library wants a type, the demo and the benchmarks choose at run time: a score policy behind a
// virtual call, and one type of selector for each way a score can be known, however many scores there are.
#pragma once

#include <rag/host.hpp>

#include <kvblend/kvblend.hpp>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rag {

class AnyScore {
 public:
  AnyScore() = default;
  AnyScore(const AnyScore&) = delete;
  AnyScore& operator=(const AnyScore&) = delete;
  virtual ~AnyScore() = default;

  [[nodiscard]] virtual kvblend::Status score(const kvblend::ScoreInputs& inputs, std::span<float> out) const = 0;
  [[nodiscard]] virtual kvblend::Status validate() const = 0;
};

struct SelectorTraits {
  const char* name;
  kvblend::ScoreTiming timing;
  bool weighs_values;        // attention times ‖v‖
  bool needs_stored_scores;  // every chunk must have them
  bool drifts;               // the rows not chosen move by CommonDrift
};

// All that with_selector() knows, the simple ones first.
std::vector<SelectorTraits> all_selectors();
// Errors: none of that name.
kvblend::Result<SelectorTraits> selector_traits(std::string_view name);
// `prior`: of stored scores, by whatever selector reads them with "the model's" prior; bins 0: the power law.
kvblend::Result<std::unique_ptr<AnyScore>> make_score(std::string_view name, const kvblend::BinnedPrior& prior);

// Fills in `seen` from the first scores of a blend.
void look(const kvblend::ScoreInputs& inputs, std::span<const float> scores, ScoresSeen& seen);

// AnyScore as the score policy that a selector is made with.
template <kvblend::ScoreTiming Timing, bool WeighsValues = false>
struct NamedScore {
  static constexpr kvblend::ScoreTiming timing = Timing;
  static constexpr bool uses_keys = Timing == kvblend::ScoreTiming::during_pass;
  static constexpr bool uses_values = uses_keys || WeighsValues;
  static constexpr const char* name = "chosen by name";
  static constexpr std::int32_t held = kvblend::kAllScratch;  // what the score does with it is known at run time

  const AnyScore* score = nullptr;
  const char* own_name = name;
  ScoresSeen* seen = nullptr;

  [[nodiscard]] const char* name_for(const kvblend::Prompt&) const { return own_name; }
  [[nodiscard]] kvblend::Status validate() const { return score->validate(); }
  [[nodiscard]] kvblend::Status operator()(const kvblend::ScoreInputs& inputs, std::span<float> out) const {
    KVBLEND_RETURN_IF_ERROR(score->score(inputs, out));
    if (seen != nullptr && seen->rows == 0) look(inputs, out, *seen);
    return {};
  }
};

// Calls body(selector), which returns a Status, with the selector that the selection names.
template <class Body>
kvblend::Status with_selector(const Selection& selection, Body&& body) {
  using namespace kvblend;
  const Result<SelectorTraits> traits = selector_traits(selection.selector);
  KVBLEND_RETURN_IF_ERROR(traits.status);
  const auto any = make_score(selection.selector, selection.prior);
  KVBLEND_RETURN_IF_ERROR(any.status);
  const auto with_budget = [&](auto score) -> Status {
    using Score = decltype(score);
    score.score = any.value.get();
    score.own_name = traits.value.name;
    score.seen = selection.seen;
    if (selection.schedule == "gradual") {
      return body(DeviationSelector<Score, GradualBudget>(score, GradualBudget(selection.ratio)));
    }
    return body(DeviationSelector<Score, RatioBudget>(score, RatioBudget(selection.ratio)));
  };
  switch (traits.value.timing) {
    case ScoreTiming::before_load: return with_budget(NamedScore<ScoreTiming::before_load>{});
    case ScoreTiming::during_pass: return with_budget(NamedScore<ScoreTiming::during_pass>{});
    case ScoreTiming::after_probe: break;
  }
  if (traits.value.weighs_values) return with_budget(NamedScore<ScoreTiming::after_probe, true>{});
  return with_budget(NamedScore<ScoreTiming::after_probe>{});
}

}  // namespace rag
