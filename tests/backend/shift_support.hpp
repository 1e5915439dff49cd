// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the tests of moving keys share: the oracle in double, and a move that must succeed.
#pragma once

#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/shifter.hpp>

#include <doctest/doctest.h>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvblend_test {

using namespace kvblend;

inline ShiftRun make_run(int source, int destination, int count, int old_first, int new_first) {
  return {Row(destination), source, count, Position(old_first), Position(new_first)};
}

// One key turned in double by `distance` positions: the oracle.
inline std::vector<double> turned(const RopeSpec& spec, const std::vector<float>& key, std::int32_t distance) {
  std::vector<double> out(key.begin(), key.end());
  const std::int32_t half = spec.rotary_dim / 2;
  for (std::int32_t pair = 0; pair < half; ++pair) {
    const double angle = spec.inv_freq[static_cast<std::size_t>(pair)] * distance;
    const bool neox = spec.pairing == RopePairing::neox;
    const auto a = static_cast<std::size_t>(spec.rotary_offset + (neox ? pair : 2 * pair));
    const auto b = a + static_cast<std::size_t>(neox ? half : 1);
    const double x = out[a];
    const double y = out[b];
    out[a] = x * std::cos(angle) - y * std::sin(angle);
    out[b] = y * std::cos(angle) + x * std::sin(angle);
  }
  return out;
}

inline bool near(const std::vector<float>& actual, const std::vector<double>& expected, double relative,
                 double absolute) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!(std::abs(static_cast<double>(actual[i]) - expected[i]) <= absolute + relative * std::abs(expected[i]))) {
      return false;
    }
  }
  return true;
}

template <class Backend, class Angles = ExactAngles, class P, class Q>
void must_shift(const RopeSpec& spec, const ShiftRun& run, const P& source, const Q& destination) {
  std::vector<float> scratch(static_cast<std::size_t>(RopeShifter<Angles>::scratch_size(spec, run)));
  const RopeShifter<Angles, Backend> shifter;
  const Status status = shifter.shift(spec, spec, run, source, destination, scratch);
  REQUIRE_MESSAGE(status.ok(), status.where() << ": " << status.message());
}

}  // namespace kvblend_test
