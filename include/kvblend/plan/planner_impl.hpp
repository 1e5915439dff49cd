// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How RecomputePlanner decides; included by planner.hpp. Each candidate fills the caller's memory with its own segments
// and layers, so the one that is taken is computed last.
#pragma once

#include <kvblend/plan/planner.hpp>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// A cost model is the host's code: what it returns is checked like any input. The bound keeps sums finite.
template <CostModel Cost>
Result<double> RecomputePlanner<Cost>::seconds(const Problem& problem, std::int32_t rows) const {
  const double s = cost.seconds(rows, problem.context);
  if (!is_nan(s) && s >= 0.0 && s <= 1e60) return s;
  return Status::error(StatusCode::invalid_argument, "%g s for %d rows over a context of %d", s, rows, problem.context)
      .at("cost.seconds");
}

template <CostModel Cost>
template <class Bytes>
Status RecomputePlanner<Cost>::check_bytes(const Bytes& bytes, Problem& problem) const {
  for (std::int32_t l = 0; l < problem.layers; ++l) {
    const auto b = static_cast<std::int64_t>(bytes(l));
    if (b < 0) {
      return Status::error(StatusCode::invalid_argument, "%lld is negative", static_cast<long long>(b))
          .at("bytes_per_token, layer %d", l);
    }
    problem.largest_bytes = (std::max)(problem.largest_bytes, static_cast<double>(b));
  }
  return {};
}

template <CostModel Cost>
template <class Bytes>
auto RecomputePlanner<Cost>::examine(const PlanInputs& inputs, const Bytes& bytes, const PlanMemory& memory) const
    -> Result<Problem> {
  KVBLEND_RETURN_IF_ERROR(options.validate());
  KVBLEND_RETURN_IF_ERROR(cost.validate());
  const Prompt& prompt = inputs.prompt;
  const std::span<const Segment> segments = prompt.segments();
  if (inputs.held_in.size() != segments.size()) {
    return Status::error(StatusCode::mismatch, "%zu entries for %zu segments", inputs.held_in.size(), segments.size())
        .at("held_in");
  }
  if (memory.segments.size() != segments.size()) {
    return Status::error(StatusCode::mismatch, "%zu entries for %zu segments", memory.segments.size(), segments.size())
        .at("memory.segments");
  }
  if (memory.layers.empty() || memory.layers.size() > 1000000) {
    return Status::error(StatusCode::invalid_argument, "%zu layers", memory.layers.size()).at("memory.layers");
  }
  if (inputs.tiers.size() > static_cast<std::size_t>(kMaxTiers)) {
    return Status::error(StatusCode::out_of_range, "%zu, at most %d", inputs.tiers.size(), kMaxTiers).at("tiers");
  }
  for (std::size_t t = 0; t < inputs.tiers.size(); ++t) {
    KVBLEND_RETURN_IF_ERROR(inputs.tiers[t].validate(static_cast<std::int32_t>(t)));
  }

  Problem problem;
  bool last_is_cached = false;  // or resident
  bool last_is_exact = false;
  problem.layers = static_cast<std::int32_t>(memory.layers.size());
  problem.context = prompt.rows();
  problem.computable = (std::max)(prompt.rows() - prompt.resident_rows(), prompt.empty() ? 0 : 1);
  if (options.timing == ScoreTiming::during_pass && options.check_layer >= problem.layers) {
    return Status::error(StatusCode::out_of_range, "layer %d of a model of %d", options.check_layer, problem.layers)
        .at("check_layer");
  }
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const Segment& segment = segments[s];
    memory.segments[s] = SegmentPlan{};
    memory.segments[s].kind = segment.kind;
    memory.segments[s].exact = segment.exact;
    memory.segments[s].tokens = segment.size();
    if (segment.kind == SegmentKind::cached) {
      if ((std::uint64_t{inputs.held_in[s]} >> inputs.tiers.size()) != 0) {
        return Status::error(StatusCode::out_of_range, "names a tier beyond the %zu there are", inputs.tiers.size())
            .at("held_in, segment %zu", s);
      }
      problem.cached_tokens += segment.size();
      if (segment.exact) problem.exact_tokens += segment.size();
    }
    if (segment.size() > 0) {
      last_is_cached = segment.kind != SegmentKind::fresh;
      last_is_exact = segment.exact;
    }
  }
  // The last row runs in any case, since its logits are wanted.
  problem.mandatory = prompt.fresh_rows() + (last_is_cached ? 1 : 0);
  problem.runnable = prompt.fresh_rows() + prompt.reused_rows() + (last_is_exact ? 1 : 0);
  KVBLEND_RETURN_IF_ERROR(check_bytes(bytes, problem));
  return problem;
}

// The most reused rows that a layer recomputes within load_s, all rows it runs counted; 0 if not even one.
template <CostModel Cost>
Result<std::int32_t> RecomputePlanner<Cost>::rows_within(const Problem& problem, std::int32_t reused,
                                                         double load_s) const {
  std::int32_t low = 0;  // fits, or is the answer anyway
  std::int32_t high = reused;
  while (low < high) {
    const std::int32_t middle = low + (high - low) / 2 + (high - low) % 2;
    const Result<double> time = seconds(problem, active_rows(problem, middle));
    KVBLEND_RETURN_IF_ERROR(time.status);
    if (time.value <= load_s) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Chooses the tiers of the segments that `candidate` loads, and fills in what loading takes.
template <CostModel Cost>
template <class Bytes>
Status RecomputePlanner<Cost>::place(const PlanInputs& inputs, const Bytes& bytes, const PlanMemory& memory,
                                     const Problem& problem, ScoreTiming timing, Candidate& candidate) const {
  detail::clear_placement(memory.segments, memory.layers);
  if (candidate.mode == PlanMode::full_recompute) return {};
  const bool exact_only = candidate.mode == PlanMode::prefix;
  const std::int32_t least_rows =
      exact_only ? problem.runnable : active_rows(problem, rows_of_ratio(options.r_min, inputs.prompt.reused_rows()));
  const Result<double> least = seconds(problem, least_rows);
  KVBLEND_RETURN_IF_ERROR(least.status);
  detail::Placement placement;
  placement.exact_only = exact_only;
  placement.overlaps = timing != ScoreTiming::after_probe;
  placement.bytes_per_token = problem.largest_bytes;
  placement.budget_s_per_token = least.value / (exact_only ? problem.exact_tokens : problem.cached_tokens);
  candidate.blocked_segment = placement.choose_tiers(inputs.tiers, inputs.held_in, memory.segments);
  candidate.possible = candidate.blocked_segment < 0;
  if (!candidate.possible) return {};
  for (std::int32_t l = 0; l < problem.layers; ++l) {
    memory.layers[static_cast<std::size_t>(l)].load_s =
        detail::load_layer(inputs.tiers, static_cast<double>(static_cast<std::int64_t>(bytes(l))),
                           options.tiers_in_parallel, memory.segments);
  }
  return {};
}

// Full recompute, or recompute behind the exact prefix.
template <CostModel Cost>
template <class Bytes>
auto RecomputePlanner<Cost>::recompute(const PlanInputs& inputs, const Bytes& bytes, const PlanMemory& memory,
                                       const Problem& problem, PlanMode mode) const -> Result<Candidate> {
  Candidate candidate;
  candidate.mode = mode;
  candidate.kept = inputs.prompt.reused_rows();
  candidate.active = mode == PlanMode::prefix ? problem.runnable : problem.computable;
  KVBLEND_RETURN_IF_ERROR(place(inputs, bytes, memory, problem, ScoreTiming::before_load, candidate));
  if (!candidate.possible) return candidate;
  const Result<double> time = seconds(problem, candidate.active);
  KVBLEND_RETURN_IF_ERROR(time.status);
  for (LayerPlan& layer : memory.layers) {
    layer.recompute_s = time.value;
    layer.ratio = 1.0;
  }
  candidate.ttft_s = run_pipeline(memory.layers, options.staging_layers);
  return candidate;
}

// The plan's ratio and each layer's own, from the layers' load times.
template <CostModel Cost>
Status RecomputePlanner<Cost>::set_ratios(const PlanInputs& inputs, const PlanMemory& memory, const Problem& problem,
                                          ScoreTiming timing, Candidate& candidate) const {
  const std::int32_t reused = inputs.prompt.reused_rows();
  const std::int32_t least = rows_of_ratio(options.r_min, reused);
  candidate.kept = least;
  candidate.ratio = options.r_min;
  double total = 0.0;
  double layer_ratio = 1.0;
  const bool overlaps = timing != ScoreTiming::after_probe;  // otherwise all is loaded before anything is recomputed
  for (std::size_t l = 0; l < memory.layers.size(); ++l) {
    LayerPlan& layer = memory.layers[l];
    total += layer.load_s;
    double ratio = options.r_min;
    if (overlaps && l > 0 && layer.load_s == memory.layers[l - 1].load_s) {
      ratio = layer_ratio;  // equal layers are the rule
    } else if (overlaps) {
      const Result<std::int32_t> rows = rows_within(problem, reused, layer.load_s);
      KVBLEND_RETURN_IF_ERROR(rows.status);
      if (rows.value > least) ratio = static_cast<double>(rows.value) / reused;
    }
    layer_ratio = (std::min)(layer_ratio, ratio);  // a row that was dropped cannot come back
    layer.ratio = layer_ratio;
  }
  if (!overlaps) return {};
  const Result<std::int32_t> rows = rows_within(problem, reused, total / problem.layers);
  KVBLEND_RETURN_IF_ERROR(rows.status);
  if (rows.value > least) {
    candidate.kept = rows.value;
    candidate.ratio = static_cast<double>(rows.value) / reused;
  }
  return {};
}

template <CostModel Cost>
template <class Bytes>
auto RecomputePlanner<Cost>::blend(const PlanInputs& inputs, const Bytes& bytes, const PlanMemory& memory,
                                   const Problem& problem, ScoreTiming timing) const -> Result<Candidate> {
  Candidate candidate;
  candidate.mode = PlanMode::blend;
  KVBLEND_RETURN_IF_ERROR(place(inputs, bytes, memory, problem, timing, candidate));
  if (!candidate.possible) return candidate;
  KVBLEND_RETURN_IF_ERROR(set_ratios(inputs, memory, problem, timing, candidate));
  if (candidate.kept == 0) candidate.mode = PlanMode::reuse;
  candidate.active = active_rows(problem, candidate.kept);

  const Result<double> time = seconds(problem, candidate.active);
  KVBLEND_RETURN_IF_ERROR(time.status);
  // Nothing is chosen where nothing is kept: then all rows need not run up to the check layer.
  const bool checks = timing == ScoreTiming::during_pass && candidate.kept > 0;
  const Result<double> every = seconds(problem, active_rows(problem, inputs.prompt.reused_rows()));
  KVBLEND_RETURN_IF_ERROR(every.status);
  double total_load = 0.0;
  for (std::size_t l = 0; l < memory.layers.size(); ++l) {
    LayerPlan& layer = memory.layers[l];
    layer.recompute_s = time.value;
    const auto check_layer = static_cast<std::size_t>(options.check_layer);
    if (checks && l < check_layer) layer.recompute_s = every.value;
    if (checks && l == check_layer) {
      layer.recompute_s += options.projection_share * (std::max)(every.value - time.value, 0.0);
    }
    total_load += layer.load_s;
  }
  if (timing == ScoreTiming::after_probe) {
    const Result<double> probe = seconds(problem, problem.mandatory);  // those are the rows it runs
    KVBLEND_RETURN_IF_ERROR(probe.status);
    const double probe_s = candidate.kept > 0 ? probe.value * problem.layers : 0.0;
    candidate.ttft_s = run_pipeline(memory.layers, 0, total_load + probe_s);
  } else {
    candidate.ttft_s = run_pipeline(memory.layers, options.staging_layers);
  }
  return candidate;
}

// Why the prompt is not blended, if it is not: into `text`.
template <CostModel Cost>
bool RecomputePlanner<Cost>::refuse(const PlanInputs& inputs, const Candidate& blended, const Candidate& other,
                                    detail::TextWriter& text) const {
  const std::int32_t reused = inputs.prompt.reused_rows();
  const std::int32_t outside = options.timing == ScoreTiming::after_probe
                                   ? detail::segment_out_of_memory(inputs.prompt, inputs.tiers, inputs.held_in)
                                   : -1;
  if (!options.blending_allowed) {
    text.append("calibration advises against blending this model (blending_allowed)");
  } else if (!blended.possible) {
    explain_blocked(inputs, blended.blocked_segment, text);
  } else if (outside >= 0) {
    text.append("a selector that chooses after a probe needs the KV in memory: segment %d is not", outside);
  } else if (blended.kept >= reused && blended.ratio > options.r_min) {
    text.append("loading a layer takes as long as recomputing every row of it");
  } else if (blended.kept >= reused) {
    text.append("r_min %.4g keeps all of %d reused rows", options.r_min, reused);
  } else if (blended.ttft_s >= other.ttft_s) {
    text.append("a blend would take ");
    text.append_time(blended.ttft_s);
    text.append(", this takes ");
    text.append_time(other.ttft_s);
  } else {
    return false;
  }
  return true;
}

template <CostModel Cost>
void RecomputePlanner<Cost>::explain_blocked(const PlanInputs& inputs, std::int32_t segment, detail::TextWriter& text) {
  const TierMask held_in = inputs.held_in[static_cast<std::size_t>(segment)];
  text.append("segment %d lies in no tier", segment);
  bool first = true;
  for (std::size_t t = 0; t < inputs.tiers.size(); ++t) {
    if (((held_in >> t) & 1u) == 0) continue;
    text.append("%s tiers[%zu] '%.40s' with bandwidth_bytes_per_s %g", first ? " that delivers:" : ",", t,
                inputs.tiers[t].name, inputs.tiers[t].bandwidth_bytes_per_s);
    first = false;
  }
}

template <CostModel Cost>
template <LayerBytes Bytes>
Result<Plan> RecomputePlanner<Cost>::plan(const PlanInputs& inputs, const Bytes& bytes_per_token,
                                          const PlanMemory& memory) const {
  const Result<Problem> examined = examine(inputs, bytes_per_token, memory);
  KVBLEND_RETURN_IF_ERROR(examined.status);
  const Problem& problem = examined.value;
  const std::int32_t reused = inputs.prompt.reused_rows();

  Plan plan;
  plan.tiers = inputs.tiers;
  plan.segments = memory.segments;
  plan.layers = memory.layers;
  plan.reused_rows = reused;
  plan.timing = options.timing;
  plan.stored_scores = detail::has_stored_scores(inputs.prompt);
  detail::TextWriter reason{std::span<char>(plan.reason)};
  if (inputs.prompt.empty()) {
    for (LayerPlan& layer : memory.layers) layer = LayerPlan{};
    reason.append("the prompt is empty");
    return plan;
  }

  // What there is to compare a blend with.
  const Result<Candidate> full = recompute(inputs, bytes_per_token, memory, problem, PlanMode::full_recompute);
  KVBLEND_RETURN_IF_ERROR(full.status);
  Candidate other = full.value;
  Candidate prefix;
  prefix.possible = false;
  if (problem.exact_tokens > 0) {
    const Result<Candidate> tried = recompute(inputs, bytes_per_token, memory, problem, PlanMode::prefix);
    KVBLEND_RETURN_IF_ERROR(tried.status);
    prefix = tried.value;
    if (prefix.possible && prefix.ttft_s < full.value.ttft_s) other = prefix;
  }

  Candidate taken = other;
  if (problem.cached_tokens == 0) {
    reason.append("no segment is cached");
  } else if (reused == 0) {
    if (!prefix.possible) {
      explain_blocked(inputs, prefix.blocked_segment, reason);
    } else if (other.mode == PlanMode::prefix) {
      reason.append("every cached segment is in the exact prefix");
    } else {
      reason.append("loading the exact prefix would take ");
      reason.append_time(prefix.ttft_s);
    }
  } else {
    Candidate intended;
    for (std::size_t t = 0; t < kScoreTimings; ++t) {
      const auto timing = static_cast<ScoreTiming>(t);
      if (timing == ScoreTiming::during_pass && options.check_layer >= problem.layers) continue;
      const Result<Candidate> tried = blend(inputs, bytes_per_token, memory, problem, timing);
      KVBLEND_RETURN_IF_ERROR(tried.status);
      if (timing == options.timing) intended = tried.value;
      if (!tried.value.possible) continue;
      const bool in_place = timing != ScoreTiming::after_probe ||
                            detail::segment_out_of_memory(inputs.prompt, inputs.tiers, inputs.held_in) < 0;
      plan.blend_ttft_s[t] = tried.value.ttft_s;
      plan.allowed[t] =
          options.blending_allowed && in_place && tried.value.kept < reused && tried.value.ttft_s < other.ttft_s;
    }
    if (!refuse(inputs, intended, other, reason)) {
      taken = intended;
      if (intended.ratio > options.r_min) {
        reason.append("ratio raised from r_min %.4g until recompute covers loading", options.r_min);
      } else if (options.timing == ScoreTiming::after_probe) {
        reason.append("ratio is r_min: a probe hides no loading");
      } else {
        reason.append("ratio is r_min: recompute already covers loading");
      }
    }
  }

  // Once more, so that the memory holds the one that is taken.
  const bool blended = taken.mode == PlanMode::blend || taken.mode == PlanMode::reuse;
  const Result<Candidate> result = blended ? blend(inputs, bytes_per_token, memory, problem, options.timing)
                                           : recompute(inputs, bytes_per_token, memory, problem, taken.mode);
  KVBLEND_RETURN_IF_ERROR(result.status);
  plan.mode = result.value.mode;
  plan.ratio = result.value.ratio;
  plan.rows_kept = result.value.kept;
  plan.active_rows = result.value.active;
  plan.ttft_s = result.value.ttft_s;
  plan.full_ttft_s = full.value.ttft_s;
  return plan;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
