// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Budget: how many of the reused rows to recompute at each layer.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

struct BudgetInputs {
  std::int32_t reused_rows = 0;   // of the whole prompt: what a ratio is a share of
  std::int32_t layer = 0;         // the layer whose rows are being chosen
  std::int32_t first_layer = 0;   // the first layer at which there is a choice (a score's check layer, or 0)
  std::int32_t layers = 0;        // of the model
  std::span<const float> scores;  // of the candidates
};

// A budget is a copyable struct with
//   Status validate() const                        names the field that is out of range or NaN
//   std::int32_t rows(const BudgetInputs&) const   rows to keep, at most scores.size()
//   std::int32_t most_rows(reused) const           the most it can keep of `reused` rows at any layer, known before any
//                                                  score; 0: there is nothing to score
//   bool narrows_at(layer, first_layer) const      whether `layer` chooses anew among the rows kept so far
//   static constexpr bool reads_scores             (optional) false: rows() asks how many scores there are, and reads
//                                                  none, so that they need not be known yet
template <class B>
concept Budget = requires(const B budget, const BudgetInputs& inputs, std::int32_t layer) {
  { budget.validate() } -> std::same_as<Status>;
  { budget.rows(inputs) } -> std::same_as<std::int32_t>;
  { budget.most_rows(layer) } -> std::same_as<std::int32_t>;
  { budget.narrows_at(layer, layer) } -> std::same_as<bool>;
};

// Whether the number of rows is known before the scores are.
template <class B>
inline constexpr bool kReadsScores = true;
template <class B>
requires requires { B::reads_scores; }
inline constexpr bool kReadsScores<B> = B::reads_scores;

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
