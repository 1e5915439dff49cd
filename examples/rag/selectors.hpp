// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Selectors by name: the demo chooses one at run time, the library wants a type.
#pragma once

#include <rag/host.hpp>

#include <kvblend/kvblend.hpp>

#include <string>

namespace rag {

// Calls body(score) with the score policy of that name. Body returns the same type for all.
template <class Body>
auto with_score(const std::string& name, Body&& body) {
  if (name == "first_k") return body(kvblend::FirstK{});
  if (name == "random") return body(kvblend::RandomScore{});
  if (name == "key_deviation") return body(kvblend::KeyDeviation{});
  if (name == "value_deviation") return body(kvblend::ValueDeviation{});
  if (name == "attention_mass") return body(kvblend::AttentionMass{});
  return body(kvblend::KeyValueDeviation{});
}

inline kvblend::ScoreTiming timing_of(const std::string& name) {
  return with_score(name, [](auto score) { return decltype(score)::timing; });
}

// Calls body(selector) with the selector that the selection names.
template <class Body>
auto with_selector(const Selection& selection, Body&& body) {
  return with_score(selection.selector, [&](auto score) {
    using Score = decltype(score);
    if (selection.schedule == "gradual") {
      kvblend::GradualBudget budget;
      budget.ratio = selection.ratio;
      return body(kvblend::DeviationSelector<Score, kvblend::GradualBudget>(score, budget));
    }
    return body(kvblend::DeviationSelector<Score, kvblend::RatioBudget>(score, kvblend::RatioBudget{selection.ratio}));
  });
}

}  // namespace rag
