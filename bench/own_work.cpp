// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What share of a blend's TTFT is kvblend's own work (shift, score, select, merge), and how that compares with a bare
// memcpy of all stored bytes at the same point of the same blend.
#include "workload.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

using namespace bench;
using Backend = EigenBackend<eigen_engine::PoolExecutor>;

// Moves keys without rotating them, whole runs at a time: the floor. What it blends is worthless.
struct BareCopy : Backend {
  eigen_engine::ThreadPool* pool;

  explicit BareCopy(eigen_engine::ThreadPool& threads) : Backend(eigen_engine::PoolExecutor(threads)), pool(&threads) {}

  template <class Stored, class Keys, class Values>
  void place(const RopeSpec&, std::span<const PlacedRun> runs, const Stored& stored, const Keys& keys,
             const Values& values, std::span<const std::uint8_t>) const {
    const auto tasks = static_cast<std::int64_t>(2 * runs.size());
    pool->run(tasks, [&](std::int64_t task, std::int32_t) {
      const PlacedRun& placed = runs[static_cast<std::size_t>(task / 2)];
      const auto from = task % 2 == 0 ? stored.keys(placed.segment) : stored.values(placed.segment);
      const auto to = task % 2 == 0 ? keys : values;
      std::memcpy(to.at(placed.run.destination.value, 0), from.at(placed.run.source, 0),
                  static_cast<std::size_t>(from.layout.row_stride * placed.run.count));
    });
  }
};

struct Times {
  std::vector<double> ttft, shift, own;
};

template <class Score, class B>
void run(Workload& work, const B& backend, Times& times) {
  using Selector = DeviationSelector<Score, RatioBudget>;
  BlendReport report;
  times.ttft.push_back(work.blend(Selector(Score{}, RatioBudget{0.15}), work.sources(), 1, report, backend));
  const FusorReport& f = report.fusor;
  times.shift.push_back(f.shift_s);
  times.own.push_back((f.shift_s + f.score_s + f.select_s + f.merge_s) / times.ttft.back());
}

template <class Score>
nlohmann::ordered_json measure(Workload& work, int repeats) {
  Times eigen, bare;
  for (int i = 0; i < repeats; ++i) {
    run<Score>(work, Backend(eigen_engine::PoolExecutor(work.pool)), eigen);
    run<Score>(work, BareCopy(work.pool), bare);
  }
  std::printf("%-20s TTFT %.3f s, own work %.1f %% of it; shift %.1f ms, memcpy of all stored bytes %.1f ms\n",
              Score::name, median(eigen.ttft), 100 * median(eigen.own), 1e3 * median(eigen.shift),
              1e3 * median(bare.shift));
  return {{"selector", Score::name},
          {"ttft_s", median(eigen.ttft)},
          {"own_share", median(eigen.own)},
          {"shift_s", median(eigen.shift)},
          {"memcpy_s", median(bare.shift)}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("kvblend's own share of a blend's TTFT at ratio 0.15");
  const Options options = parse(app, argc, argv);
  Workload work(options);
  std::printf("%s, item %d, %d tokens, %d reused, %d threads, ratio 0.15, median of %d\n", work.identity.name.c_str(),
              options.item, work.prompt.rows(), work.prompt.reused_rows(), options.threads, options.repeats);
  nlohmann::ordered_json json = {{"model", work.identity.name}, {"tokens", work.prompt.rows()}};
  json["runs"].push_back(measure<KeyValueDeviation>(work, options.repeats));
  json["runs"].push_back(measure<FirstK>(work, options.repeats));
  json["runs"].push_back(measure<AttentionMass>(work, options.repeats));
  write(options, json);
  return 0;
}
