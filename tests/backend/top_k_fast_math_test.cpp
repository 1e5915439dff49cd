// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Compiled with -ffast-math, under a namespace of its own so that no other object file's code stands in: the rule for
// NaN, infinities and zeros must hold in engines built that way.
#define KVBLEND_ABI_NAMESPACE fast_math_test
#include <kvblend/select/top_k.hpp>

#include <doctest/doctest.h>
#include <cstdint>
#include <cstring>
#include <vector>

TEST_CASE("top k keeps its rule under fast math") {
  // 1, NaN, +inf, -0, +0, -inf, by their bits, as literals would be assumed away.
  const volatile std::uint32_t bits[] = {0x3f800000u, 0x7fc00000u, 0x7f800000u, 0x80000000u, 0u, 0xff800000u};
  std::vector<float> scores;
  for (const volatile std::uint32_t& word : bits) {
    const std::uint32_t copy = word;
    float score = 0;
    std::memcpy(&score, &copy, sizeof score);
    scores.push_back(score);
  }
  const std::vector<std::vector<int>> expected{{}, {1}, {1, 2}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}};
  for (std::size_t k = 0; k < expected.size(); ++k) {
    std::vector<std::uint64_t> scratch(scores.size());
    std::vector<kvblend::ActiveIndex> out(scores.size());
    const auto count = kvblend::select_top_k(scores, static_cast<std::int32_t>(k), scratch, out);
    std::vector<int> picked;
    for (std::int32_t i = 0; i < count; ++i) picked.push_back(out[static_cast<std::size_t>(i)].value);
    CHECK(picked == expected[k]);
  }
}
