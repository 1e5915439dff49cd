// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// RecomputePlanner: what to do with a prompt, from where its chunks lie and what loading and compute cost. This is the
// loading controller of CacheBlend (arXiv 2405.16444, section 5.1).
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/plan/cost_model.hpp>
#include <kvblend/plan/pipeline.hpp>
#include <kvblend/plan/placement.hpp>
#include <kvblend/plan/plan.hpp>
#include <kvblend/plan/tier.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/select/budgets.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

struct PlannerOptions {
  double r_min = 0.15;  // in [0, 1]: the least ratio whose quality the model's calibration vouches for, or until there
                        // is one the paper's 15 %
  ScoreTiming timing = ScoreTiming::before_load;  // of the selector that will choose
  std::int32_t check_layer = 1;                   // of a during_pass selector
  // Of a layer's time, in [0, 1]: queries, keys and values of its rows. What rows that a during_pass selector drops at
  // its check layer still cost there.
  double projection_share = 0.1;
  std::int32_t staging_layers = 0;  // layers that may be in memory before they are done; 0: all
  bool tiers_in_parallel = false;   // reads from different tiers overlap; otherwise all reads stand in one queue
  bool blending_allowed = true;     // false: the model's calibration advises against blending it

  // Errors name the field.
  [[nodiscard]] Status validate() const {
    KVBLEND_RETURN_IF_ERROR(detail::check_share(r_min, "r_min"));
    KVBLEND_RETURN_IF_ERROR(detail::check_share(projection_share, "projection_share"));
    if (check_layer < 0) {
      return Status::error(StatusCode::invalid_argument, "%d is negative", check_layer).at("check_layer");
    }
    if (staging_layers >= 0) return {};
    return Status::error(StatusCode::invalid_argument, "%d is negative", staging_layers).at("staging_layers");
  }
};

// Bytes that one token's keys and values take at a layer, as stored; >= 0 (0: the layer has no KV of its own).
template <class B>
concept LayerBytes = requires(const B bytes, std::int32_t layer) {
  { bytes(layer) } -> std::convertible_to<std::int64_t>;
};

struct UniformBytes {
  std::int64_t per_token = 0;

  UniformBytes() = default;
  explicit UniformBytes(std::int64_t bytes) : per_token(bytes) {}
  [[nodiscard]] std::int64_t operator()(std::int32_t) const { return per_token; }
};

struct PlanInputs {
  const Prompt& prompt;
  std::span<const Tier> tiers;        // from the cheapest to hold a chunk in to the dearest; at most kMaxTiers
  std::span<const TierMask> held_in;  // [segments of the prompt]: the tiers its chunk lies in; of cached ones only
};

// What the plan is written into, the caller's.
struct PlanMemory {
  std::span<SegmentPlan> segments;  // [segments of the prompt]
  std::span<LayerPlan> layers;      // [layers of the model]
};

// Ratio: max(r_min, the largest share of the reused rows whose recompute at a layer takes no longer than the layer's
// load), so that compute which would wait for the loader improves the answer instead. It is found exactly, by bisection
// over whole rows with the rows that must run anyway counted in. Where layers differ in bytes the plan's one ratio
// balances the totals, and LayerPlan::ratio says what each layer could have.
// Tier of a segment: the cheapest that loads a layer of it within the segment's share, by tokens, of a layer's recompute
// at r_min; if none does, the fastest. A selector that needs a probe pass hides nothing: fastest, in memory first.
// Recompute in full, or behind the exact prefix, where the KV cannot be had, where the ratio reaches 1, where the
// selector needs the KV in memory and it is not there, where calibration advises against blending, and where the
// predicted TTFT is no shorter.
template <CostModel Cost>
struct RecomputePlanner {
  Cost cost{};  // seconds of one layer; layers are taken to cost alike
  PlannerOptions options{};

  RecomputePlanner() = default;
  explicit RecomputePlanner(const Cost& cost_model, const PlannerOptions& planner_options = {})
      : cost(cost_model), options(planner_options) {}

  // Errors: options, cost, a tier's or layer's numbers out of range (names the field); memory or held_in of another
  // length than the prompt's segments; no layers; a bit of held_in beyond the tiers. A tier that delivers nothing is no
  // error: what lies only there is recomputed, and the reason says so. No number in the plan is NaN or infinite.
  template <LayerBytes Bytes>
  [[nodiscard]] Result<Plan> plan(const PlanInputs& inputs, const Bytes& bytes_per_token,
                                  const PlanMemory& memory) const;

 private:
  // What the candidates share, computed once.
  struct Problem {
    std::int32_t layers = 0;
    std::int32_t context = 0;     // rows of the prompt
    std::int32_t mandatory = 0;   // rows that run in any case: fresh ones, and the last, whose logits are wanted
    std::int32_t runnable = 0;    // those, and all reused rows
    std::int32_t computable = 0;  // rows that are not resident, at least the last
    std::int32_t cached_tokens = 0;
    std::int32_t exact_tokens = 0;  // of them, in the exact prefix
    double largest_bytes = 0.0;     // a token at the layer that has most
  };

  // One way to go about the prompt.
  struct Candidate {
    PlanMode mode = PlanMode::full_recompute;
    bool possible = true;
    std::int32_t blocked_segment = -1;  // why it is not possible
    std::int32_t kept = 0;
    std::int32_t active = 0;
    double ratio = 1.0;
    double ttft_s = 0.0;
  };

  template <class Bytes>
  Result<Problem> examine(const PlanInputs& inputs, const Bytes& bytes, const PlanMemory& memory) const;
  template <class Bytes>
  Status check_bytes(const Bytes& bytes, Problem& problem) const;

  Result<double> seconds(const Problem& problem, std::int32_t rows) const;
  static std::int32_t active_rows(const Problem& problem, std::int32_t kept) {
    return problem.mandatory + (std::min)(kept, problem.runnable - problem.mandatory);
  }
  Result<std::int32_t> rows_within(const Problem& problem, std::int32_t reused, double load_s) const;

  template <class Bytes>
  Status place(const PlanInputs& inputs, const Bytes& bytes, const PlanMemory& memory, const Problem& problem,
               ScoreTiming timing, Candidate& candidate) const;
  template <class Bytes>
  Result<Candidate> recompute(const PlanInputs& inputs, const Bytes& bytes, const PlanMemory& memory,
                              const Problem& problem, PlanMode mode) const;
  template <class Bytes>
  Result<Candidate> blend(const PlanInputs& inputs, const Bytes& bytes, const PlanMemory& memory,
                          const Problem& problem, ScoreTiming timing) const;
  Status set_ratios(const PlanInputs& inputs, const PlanMemory& memory, const Problem& problem, ScoreTiming timing,
                    Candidate& candidate) const;
  bool refuse(const PlanInputs& inputs, const Candidate& blended, const Candidate& other,
              detail::TextWriter& text) const;
  static void explain_blocked(const PlanInputs& inputs, std::int32_t segment, detail::TextWriter& text);
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE

#include <kvblend/plan/planner_impl.hpp>  // IWYU pragma: export
