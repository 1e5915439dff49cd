// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Whether loading hides behind recompute: a store throttled so that loading a layer takes 0.5, 1 and 2 times its
// recompute at 15 %, the TTFT that comes out of it, what choosing the rows takes of it, and the planner's ratio against
// the best of a sweep. The selector is one that chooses before anything is loaded, by scores stored with the chunks.
#include "workload.hpp"

#include <rag/layer_time.hpp>

#include <cmath>
#include <cstdio>
#include <deque>
#include <vector>

namespace {

using namespace bench;

using Selector = DeviationSelector<StoredScore<PowerLawPrior>, RatioBudget>;
constexpr std::int32_t kStagingLayers = 4;

Selector at_ratio(double ratio) { return Selector({}, RatioBudget{ratio}); }

// Scores for the workload's chunks, which were stored without. Drawn at random: neither the time to choose nor the time
// to run what was chosen depends on them.
std::vector<std::vector<float>> store_scores(Workload& work) {
  std::vector<std::vector<float>> all;
  for (ChunkInfo& info : work.infos) {
    std::vector<float>& scores = all.emplace_back();
    std::uint64_t state = all.size();
    for (std::size_t i = 0; i < info.tokens.size(); ++i) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      scores.push_back(static_cast<float>(state >> 40));
    }
    info.scores = scores;
  }
  return all;
}

// Readers of the chunks in memory, behind one link.
struct ThrottledStore {
  Link<> link;
  std::deque<MemoryReader> readers;
  std::deque<ThrottledReader<MemoryReader>> throttled;
  std::vector<ChunkSource> sources;

  ThrottledStore(const Workload& work, double bandwidth) : link(bandwidth, 0) {
    for (const ChunkHandle& chunk : work.chunks) {
      readers.emplace_back(chunk);
      throttled.emplace_back(readers.back(), link);
      sources.emplace_back(ChunkReaderRef(throttled.back()));
    }
    sources.emplace_back();
  }
};

struct Timing {
  double ttft_s = 0;
  double recompute_s = 0;  // everything but waiting for layers
  double select_s = 0;
};

// Median over the repeats.
Timing measure(Workload& work, const std::vector<ChunkSource>& sources, double ratio, int repeats) {
  std::vector<double> ttft, recompute, select;
  for (int i = 0; i < repeats; ++i) {
    BlendReport report;
    ttft.push_back(work.blend(at_ratio(ratio), sources, kStagingLayers, report));
    recompute.push_back(ttft.back() - report.fusor.load_s);
    select.push_back(report.fusor.select_s);
  }
  return {median(ttft), median(recompute), median(select)};
}

LinearCostModel calibrate_cost(Workload& work) {
  CalibrationOptions options;
  options.max_context = work.prompt.rows();
  const Result<CostFit> fit = calibrate(rag::LayerTime{*work.engine, work.pool, work.chunks.back()}, options);
  require(fit.status);
  return fit.value.model;
}

// Where TTFT begins to rise: the ratio at which a flat piece and a rising line that starts there fit the sweep best. One
// noisy run does not move it, as it would a threshold over the shortest.
double knee_of(const std::vector<double>& ratios, const std::vector<double>& ttft_s) {
  double best_error = -1;
  double knee = ratios[0];
  for (std::size_t at = 0; at + 2 < ratios.size(); ++at) {
    double flat = 0;
    for (std::size_t i = 0; i <= at; ++i) flat += ttft_s[i] / static_cast<double>(at + 1);
    double xy = 0;
    double xx = 0;
    for (std::size_t i = at + 1; i < ratios.size(); ++i) {
      xy += (ratios[i] - ratios[at]) * (ttft_s[i] - flat);
      xx += (ratios[i] - ratios[at]) * (ratios[i] - ratios[at]);
    }
    double error = 0;
    for (std::size_t i = 0; i < ratios.size(); ++i) {
      const double fit = i <= at ? flat : flat + xy / xx * (ratios[i] - ratios[at]);
      error += (ttft_s[i] - fit) * (ttft_s[i] - fit);
    }
    if (best_error < 0 || error < best_error) {
      best_error = error;
      knee = ratios[at];
    }
  }
  return knee;
}

double planned_ratio(const Workload& work, const LinearCostModel& cost, double bandwidth) {
  const std::array<Tier, 1> tiers = {Tier("throttled", bandwidth)};
  std::vector<TierMask> held_in(work.segments.size(), 1);
  held_in.back() = 0;
  std::vector<SegmentPlan> segment_plans(work.segments.size());
  std::vector<LayerPlan> layer_plans(static_cast<std::size_t>(work.identity.layers));
  PlannerOptions options;
  options.staging_layers = kStagingLayers;
  const RecomputePlanner<LinearCostModel> planner(cost, options);
  const UniformBytes bytes(std::int64_t{2} * work.identity.kv_heads * work.identity.head_dim * 4);
  const Result<Plan> plan = planner.plan({work.prompt, tiers, held_in}, bytes, {segment_plans, layer_plans});
  require(plan.status);
  return plan.value.ratio;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Layer-wise loading behind recompute, and the planner's ratio");
  const Options options = parse(app, argc, argv);
  Workload work(options);
  const std::vector<std::vector<float>> scores = store_scores(work);
  const double full_s = work.full_prefill();
  const auto layers = static_cast<double>(work.identity.layers);
  double bytes = 0;
  for (const ChunkHandle& chunk : work.chunks) bytes += static_cast<double>(total_bytes(chunk->identity()));

  std::printf(
      "%s, item %d, %d tokens, %d reused, %d threads, selector stored_score, full prefill %.3f s, medians of %d\n",
      work.identity.name.c_str(), options.item, work.prompt.rows(), work.prompt.reused_rows(), options.threads, full_s,
      options.repeats);
  nlohmann::ordered_json json = {{"model", work.identity.name}, {"tokens", work.prompt.rows()}};
  for (const double factor : {0.5, 1.0, 2.0}) {
    // All of one factor is measured in a row: on a shared machine minutes differ more than runs do.
    const LinearCostModel cost = calibrate_cost(work);
    const double load_s = factor * measure(work, work.sources(), 0.15, options.repeats).recompute_s;
    const double bandwidth = bytes / load_s;
    ThrottledStore store(work, bandwidth);
    std::vector<double> ttft, recompute, select;
    for (int i = 0; i < options.repeats; ++i) {
      const Timing throttled = measure(work, store.sources, 0.15, 1);
      ttft.push_back(throttled.ttft_s);
      select.push_back(throttled.select_s);
      recompute.push_back(measure(work, work.sources(), 0.15, 1).recompute_s);
    }
    const Timing timing = {median(ttft), median(recompute), median(select)};
    const double bound = 1.15 * std::max(load_s, timing.recompute_s) + load_s / layers;
    std::printf("\nloading a layer takes %.1fx its recompute at ratio 0.15: %.1f MB/s, load %.3f s, recompute %.3f s\n",
                factor, bandwidth * 1e-6, load_s, timing.recompute_s);
    std::printf("  TTFT %.3f s, bound 1.15 max(load, recompute) + first layer = %.3f s: %s\n", timing.ttft_s, bound,
                timing.ttft_s <= bound ? "within" : "ABOVE");
    std::printf("  choosing the rows %.6f s: %.3f %% of TTFT\n", timing.select_s,
                100 * timing.select_s / timing.ttft_s);

    // The best ratio is the highest that costs no time: TTFT stays where loading alone (or r_min) puts it. Ratios take
    // turns, so that a busy moment of the machine touches all of them.
    const double planned = planned_ratio(work, cost, bandwidth);
    std::vector<double> ratios;
    for (double ratio = 0.15; ratio <= 0.1 + 0.2 * factor; ratio *= 1.06) ratios.push_back(ratio);
    std::vector<std::vector<double>> seconds(ratios.size());
    for (int repeat = 0; repeat < options.repeats; ++repeat) {
      for (std::size_t i = 0; i < ratios.size(); ++i) {
        seconds[i].push_back(measure(work, store.sources, ratios[i], 1).ttft_s);
      }
    }
    std::printf("  ratio  TTFT\n");
    nlohmann::ordered_json sweep;
    std::vector<double> medians;
    for (std::size_t i = 0; i < ratios.size(); ++i) {
      const double ttft_s = median(seconds[i]);
      medians.push_back(ttft_s);
      std::printf("  %.3f  %.3f s\n", ratios[i], ttft_s);
      sweep.push_back({{"ratio", ratios[i]}, {"ttft_s", ttft_s}});
    }
    const double best = knee_of(ratios, medians);
    std::printf("  planner's ratio %.3f, best of the sweep %.3f: %+.1f %%\n", planned, best,
                100 * (planned / best - 1));
    json["runs"].push_back({{"load_over_recompute", factor},
                            {"bandwidth", bandwidth},
                            {"load_s", load_s},
                            {"recompute_s", timing.recompute_s},
                            {"ttft_s", timing.ttft_s},
                            {"select_s", timing.select_s},
                            {"bound_s", bound},
                            {"planned_ratio", planned},
                            {"best_ratio", best},
                            {"sweep", sweep}});
  }
  write(options, json);
  return 0;
}
