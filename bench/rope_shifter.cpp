// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How fast keys move: RopeShifter (read, rotate, write) against memcpy of the same bytes, one right after the other in
// each measurement, over memory that no cache holds. The cases (rope_shifter/) are compiled twice, for this
// machine (-march=native) and for the compiler's default target.
#include "rope_shifter/cases.hpp"

#include <benchmark/benchmark.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace bench {
void register_native(Arena& arena);
void register_default_target(Arena& arena);
}  // namespace bench

namespace {

using namespace bench;

struct Figures {
  double gbps = 0;
  double memcpy_gbps = 0;
  double ratio = 0;
};

// Keeps the median over the repetitions of each case.
class Reporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.error_occurred) std::fprintf(stderr, "%s\n", run.error_message.c_str());
      if (run.aggregate_name != "median") continue;
      figures[static_cast<std::size_t>(run.counters.at("case").value)] = {
          run.counters.at("gbps").value, run.counters.at("memcpy_gbps").value, run.counters.at("ratio").value};
    }
  }
  std::map<std::size_t, Figures> figures;  // by case
};

// The figures of one target, printed and as JSON.
nlohmann::ordered_json report(const std::map<std::size_t, Figures>& figures, const std::string& target,
                              const char* compiled) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  std::printf("\n%s\n%-8s %8s %7s %-9s %7s %7s %6s\n", compiled, "codec", "head_dim", "threads", "backend", "GB/s",
              "memcpy", "ratio");
  for (const auto& [which, figure] : figures) {
    const Case& of = cases()[which];
    if (of.target != target) continue;
    std::printf("%-8s %8d %7d %-9s %7.2f %7.2f %6.2f\n", of.codec, of.head_dim, of.threads, of.backend, figure.gbps,
                figure.memcpy_gbps, figure.ratio);
    list.push_back({{"codec", of.codec},
                    {"head_dim", of.head_dim},
                    {"threads", of.threads},
                    {"backend", of.backend},
                    {"gbps", figure.gbps},
                    {"memcpy_gbps", figure.memcpy_gbps},
                    {"ratio", figure.ratio}});
  }
  return list;
}

bool write(const std::string& path, const nlohmann::ordered_json& figures) {
  std::ofstream file(path);
  file << figures.dump(1) << '\n';
  if (file.good()) return true;
  std::fprintf(stderr, "%s: cannot write\n", path.c_str());
  return false;
}

}  // namespace

// The options are Google Benchmark's; before them --json FILE, for the figures of this machine's target. Those of the
// default target go to a file beside it, whose name ends in _default_target.json.
int main(int argc, char** argv) {
  std::string json;
  std::vector<char*> arguments = {argv[0]};
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json = argv[++i];
    } else {
      arguments.push_back(argv[i]);
    }
  }
  std::string defaults[] = {"--benchmark_enable_random_interleaving=true", "--benchmark_repetitions=9",
                            "--benchmark_min_time=0.04"};
  for (std::string& option : defaults) arguments.insert(arguments.begin() + 1, option.data());
  auto count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;

  Arena arena;
  if (!arena.ok()) {
    std::fprintf(stderr, "cannot get %zu MiB of memory\n", 2 * (Arena::kBytes >> 20));
    return 1;
  }
  std::printf("%d heads, %d tokens at new positions; GB/s count bytes read and bytes written; medians of 9\n", kHeads,
              kTokens);
  register_native(arena);
  register_default_target(arena);
  Reporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  benchmark::Shutdown();

  const auto native = report(reporter.figures, "native", "compiled for this machine (-O3 -march=native)");
  const auto plain = report(reporter.figures, "default_target", "compiled for the compiler's default target (-O3)");
  if (json.empty()) return 0;
  std::string beside = json;
  if (beside.ends_with(".json")) beside.resize(beside.size() - 5);
  return write(json, native) && write(beside + "_default_target.json", plain) ? 0 : 1;
}
