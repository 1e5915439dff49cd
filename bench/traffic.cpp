// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How many bytes the device's kernels move, against the least that would do: the functors of kvblend/cuda run on the
// CPU and each of their loads and stores is recorded. Fails where a kernel moves more than its limit.
#include "traffic/kernels.hpp"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

namespace {

using namespace bench;

double ratio(const Bytes& bytes, const Bytes& least) {
  return static_cast<double>(bytes.both()) / static_cast<double>(least.both());
}
double megabytes(std::int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

}  // namespace

// --json FILE
int main(int argc, char** argv) {
  std::string json;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
  }

  std::printf(
      "One layer: %d rows of %d heads of %d values, %d picked, blocks of %d rows. Megabytes; bytes count in\n"
      "sectors of %d. memory: a sector counts again when %u warps of %d did not touch it. warps: it counts once\n"
      "for each warp. Ratios are to least.\n\n%-7s %-8s %-11s %8s %8s %8s %8s %8s  %s\n",
      kTrafficRows, kTrafficHeads, kTrafficHeadDim, kTrafficPicked, kTrafficBlock, static_cast<int>(kSectorBytes),
      kCachedWarps, static_cast<int>(kWarpItems), "kernel", "dtype", "layout", "least", "read", "written", "memory",
      "warps", "limit");
  bool failed = false;
  auto list = nlohmann::ordered_json::array();
  for (const KernelTraffic& k : measure_kernels()) {
    const double memory = ratio(k.traffic.memory, k.least);
    const double warps = ratio(k.traffic.warps, k.least);
    const bool over = memory > k.limit;
    const bool lost = k.traffic.memory.both() < k.least.both();  // nothing does with less: accesses went unseen
    failed = failed || over || lost;
    std::printf("%-7s %-8s %-11s %8.3f %8.3f %8.3f %8.3f %8.3f  %.1f%s\n", k.kernel, k.dtype, k.layout,
                megabytes(k.least.both()), megabytes(k.traffic.memory.read), megabytes(k.traffic.memory.written),
                memory, warps, k.limit,
                over   ? " EXCEEDED"
                : lost ? " NOT ALL RECORDED"
                       : "");
    list.push_back({{"kernel", k.kernel},
                    {"dtype", k.dtype},
                    {"layout", k.layout},
                    {"least_bytes", k.least.both()},
                    {"read_bytes", k.traffic.memory.read},
                    {"written_bytes", k.traffic.memory.written},
                    {"ratio", memory},
                    {"warp_ratio", warps},
                    {"limit", k.limit}});
  }
  if (!json.empty()) {
    std::ofstream file(json);
    file << list.dump(1) << '\n';
    if (!file.good()) {
      std::fprintf(stderr, "%s: cannot write\n", json.c_str());
      return 1;
    }
  }
  return failed ? 1 : 0;
}
