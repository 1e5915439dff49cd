// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// DeviationSelector: a score and a budget put together. A blend asks it at which layers to choose and which of the rows
// at hand stay; it knows neither the host nor where the deviations came from.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/select/budget.hpp>
#include <kvblend/select/score.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Memory a choice works in, the caller's. Each span needs at least one entry per candidate row.
struct SelectorScratch {
  std::span<float> scores;
  std::span<std::uint64_t> keys;  // top_k's
  std::span<ActiveIndex> picked;  // the result lies here
};

// When it chooses
//   before_load, after_probe   at layer 0, before any row runs: candidates are all reused rows
//   during_pass                at check_layer, between project and attend: every row ran the layers before it, and
//                              those not kept stop here. 1 is best: at layer 0 keys and values depend on the token
//                              alone, and later layers cost more and choose no better.
// and, where the budget narrows, again at later layers among the rows still kept.
template <Score ScorePolicy, Budget BudgetPolicy>
struct DeviationSelector {
  static_assert(!(detail::writes_places<ScorePolicy>() && kReadsScores<BudgetPolicy>),
                "kvblend: this score writes places, which no budget can count by: take one with reads_scores false");
  static constexpr ScoreTiming timing = ScorePolicy::timing;
  static constexpr bool uses_keys = timing == ScoreTiming::during_pass && ScorePolicy::uses_keys;
  static constexpr bool uses_values = timing == ScoreTiming::during_pass && ScorePolicy::uses_values;
  // Attention is to be weighed by the values it fetches.
  static constexpr bool weighs_values = timing == ScoreTiming::after_probe && ScorePolicy::uses_values;
  static constexpr const char* name = ScorePolicy::name;

  ScorePolicy score{};
  BudgetPolicy budget{};
  std::int32_t check_layer = 1;  // during_pass only

  DeviationSelector() = default;
  explicit DeviationSelector(ScorePolicy score_policy, BudgetPolicy budget_policy = {}, std::int32_t check = 1)
      : score(score_policy), budget(budget_policy), check_layer(check) {}

  // Errors name the field: the budget's, the score's own, or a check_layer outside the model.
  [[nodiscard]] Status validate(std::int32_t layers) const {
    if (layers <= 0) return Status::error(StatusCode::invalid_argument, "%d layers", layers).at("layers");
    if (timing == ScoreTiming::during_pass && (check_layer < 0 || check_layer >= layers)) {
      return Status::error(StatusCode::out_of_range, "layer %d of a model of %d", check_layer, layers)
          .at("check_layer");
    }
    KVBLEND_RETURN_IF_ERROR(detail::validate_score(score));
    return budget.validate();
  }

  // What chooses for this prompt, where that depends on the prompt (chunk_rules.hpp's Fallback); else `name`.
  [[nodiscard]] const char* name_for(const Prompt& prompt) const { return detail::score_name(score, prompt); }

  // The first layer at which fewer than all rows may go on.
  [[nodiscard]] std::int32_t first_layer() const { return timing == ScoreTiming::during_pass ? check_layer : 0; }

  [[nodiscard]] bool chooses_at(std::int32_t layer) const {
    return layer == first_layer() || (layer > first_layer() && budget.narrows_at(layer, first_layer()));
  }

  // The most of `reused` rows it can keep at any layer; 0: it keeps none, and there is nothing to score.
  [[nodiscard]] std::int32_t most_rows(std::int32_t reused) const { return budget.most_rows(reused); }

  // How many of the rows that `scores` are of go on through the rest of `layer`. A budget that does not read scores
  // (kReadsScores) takes any span of the right length.
  [[nodiscard]] std::size_t rows_to_keep(const Prompt& prompt, std::int32_t layer, std::int32_t layers,
                                         std::span<const float> scores) const {
    BudgetInputs inputs;
    inputs.reused_rows = prompt.reused_rows();
    inputs.layer = layer;
    inputs.first_layer = first_layer();
    inputs.layers = layers;
    inputs.scores = scores;
    const std::int32_t wanted = budget.rows(inputs);
    return (std::min)(static_cast<std::size_t>((std::max)(wanted, 0)), scores.size());
  }

  // Which of inputs.rows go on through the rest of inputs.layer: indices into inputs.rows, ascending, each once, in
  // scratch.picked. `layers` is the model's. Rows that must be recomputed anyway are no business of this function.
  // Backend: top_k(scores, k, keys, picked) by the rule of top_k.hpp.
  // Errors: an input the score needs is missing or of another length than rows; scratch too short; the score's own.
  template <class Backend>
  [[nodiscard]] Result<std::span<const ActiveIndex>> choose(const Backend& backend, const ScoreInputs& inputs,
                                                            std::int32_t layers, const SelectorScratch& scratch) const {
    const std::size_t candidates = inputs.rows.size();
    if (candidates == 0 || most_rows(inputs.prompt.reused_rows()) == 0) return std::span<const ActiveIndex>{};
    KVBLEND_RETURN_IF_ERROR(check(inputs, scratch));

    const std::span<float> scores = scratch.scores.first(candidates);
    ScoreInputs score_inputs = inputs;
    score_inputs.scratch = {scratch.keys.first(candidates), scratch.picked.first(candidates)};
    KVBLEND_RETURN_IF_ERROR(detail::run_score(score, score_inputs, scores));
    const std::size_t k = rows_to_keep(inputs.prompt, inputs.layer, layers, scores);

    const std::span<ActiveIndex> picked = scratch.picked.first(k);
    if (k == candidates) {
      for (std::size_t i = 0; i < k; ++i) picked[i] = ActiveIndex(static_cast<std::int32_t>(i));
    } else if (k > 0) {
      backend.top_k(std::span<const float>(scores), static_cast<std::int32_t>(k), scratch.keys.first(candidates),
                    picked);
    }
    return std::span<const ActiveIndex>(picked);
  }

 private:
  static Status check(const ScoreInputs& inputs, const SelectorScratch& scratch) {
    const std::size_t candidates = inputs.rows.size();
    KVBLEND_RETURN_IF_ERROR(check_length("key_deviation", uses_keys, inputs.key_deviation.size(), candidates));
    KVBLEND_RETURN_IF_ERROR(check_length("value_deviation", uses_values, inputs.value_deviation.size(), candidates));
    KVBLEND_RETURN_IF_ERROR(
        check_length("attention_mass", timing == ScoreTiming::after_probe, inputs.attention_mass.size(), candidates));
    const std::size_t room = (std::min)((std::min)(scratch.scores.size(), scratch.keys.size()), scratch.picked.size());
    if (room < candidates) {
      return Status::error(StatusCode::insufficient_space, "%zu entries for %zu rows", room, candidates).at("scratch");
    }
    return {};
  }

  static Status check_length(const char* field, bool needed, std::size_t length, std::size_t candidates) {
    if (!needed || length == candidates) return {};
    return Status::error(StatusCode::mismatch, "%zu entries for %zu rows", length, candidates).at("%s", field);
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
