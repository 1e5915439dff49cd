// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The device's kernels, run on the CPU under the recorder, at the shapes of one layer of an 8B model.
#pragma once

#include "recorder.hpp"

#include <cstdint>
#include <vector>

namespace bench {

inline constexpr std::int32_t kTrafficHeads = 8;
inline constexpr std::int32_t kTrafficHeadDim = 128;
inline constexpr std::int32_t kTrafficRows = 4096;
inline constexpr std::int32_t kTrafficPassages = 8;
inline constexpr std::int32_t kTrafficPicked = kTrafficRows * 15 / 100;
inline constexpr std::int32_t kTrafficBlock = 16;  // rows of a block of a paged cache

struct KernelTraffic {
  const char* kernel;
  const char* dtype;
  const char* layout;  // of the cache
  Bytes least;         // rows that go in, rows or choices that come out
  Traffic traffic;
  double limit;  // of traffic.memory against least
};

[[nodiscard]] std::vector<KernelTraffic> measure_kernels();

}  // namespace bench
