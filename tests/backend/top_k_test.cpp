// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every back end picks the same rows: exactly k, ascending, by the written rule for ties, NaN and infinities.
#include <kvblend/select/top_k.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>
#include "support.hpp"

using namespace kvblend;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class Backend>
std::vector<int> picks(const std::vector<float>& scores, std::int32_t k) {
  std::vector<std::uint64_t> scratch(scores.size());
  std::vector<ActiveIndex> out(scores.size() + 1, ActiveIndex(-7));
  Backend{}.top_k(scores, k, scratch, out);
  std::vector<int> indices;
  for (const ActiveIndex index : out) {
    if (index.value == -7) break;
    indices.push_back(index.value);
  }
  return indices;
}

// The rule, word by word.
std::vector<int> expected_picks(const std::vector<float>& scores, std::int32_t k) {
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto of = [&](int i) { return scores[static_cast<std::size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    if (std::isnan(of(a)) || std::isnan(of(b))) return std::isnan(of(a)) && !std::isnan(of(b));
    return of(a) > of(b);
  });
  order.resize(static_cast<std::size_t>(std::clamp(k, 0, static_cast<std::int32_t>(scores.size()))));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace

TEST_CASE_TEMPLATE("the best come out ascending by the written rule", Backend, KVBLEND_TEST_BACKENDS) {
  struct Case {
    std::vector<float> scores;
    std::int32_t k;
    std::vector<int> expected;
  };
  const Case cases[] = {
      {{}, 3, {}},
      {{1, 2, 3}, 0, {}},
      {{1, 2, 3}, -1, {}},
      {{1, 2, 3}, 9, {0, 1, 2}},
      {{1, 5, 3, 4}, 2, {1, 3}},
      {{2, 2, 2, 2}, 2, {0, 1}},
      {{1, kNaN, kInfinity, 2}, 1, {1}},
      {{1, kNaN, kInfinity, 2}, 2, {1, 2}},
      {{kNaN, -kNaN, kNaN}, 2, {0, 1}},
      {{-0.0f, 0.0f, -0.0f}, 2, {0, 1}},
      {{0.0f, -0.0f, 1e-45f}, 2, {0, 2}},
      {{-1e-45f, -0.0f}, 1, {1}},
      {{-kInfinity, -3e38f}, 1, {1}},
      {{-1, -2, -kInfinity}, 2, {0, 1}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.k);
    CHECK(picks<Backend>(c.scores, c.k) == c.expected);
  }
}

// sglang pull request 30645, vLLM issue 52109: ties or an infinity gave random picks.
TEST_CASE_TEMPLATE("ties fill up from the lowest index in a long prompt", Backend, KVBLEND_TEST_BACKENDS) {
  std::vector<float> scores(5000, 0.0f);
  const int ones[] = {4999, 4000, 3777, 2500, 2499, 1600, 9};
  for (const int one : ones) scores[static_cast<std::size_t>(one)] = 1.0f;
  CHECK(picks<Backend>(scores, 1500) == expected_picks(scores, 1500));
  const std::vector<int> picked = picks<Backend>(scores, 1500);
  REQUIRE(picked.size() == 1500);
  CHECK(picked[1493] == 1493);  // 1494 zeros and the one at 9, then the other six
  CHECK(picked.back() == 4999);
  scores[3000] = kInfinity;
  CHECK(picks<Backend>(scores, 1) == std::vector<int>{3000});
  CHECK(picks<Backend>(scores, 1500) == expected_picks(scores, 1500));
}

TEST_CASE_TEMPLATE("random scores with many ties are picked by the rule", Backend, KVBLEND_TEST_BACKENDS) {
  const unsigned seed = 31;
  CAPTURE(seed);
  std::mt19937 random(seed);
  const float special[] = {0.0f, -0.0f, kInfinity, -kInfinity, kNaN, 1e-45f, -1e-45f, 3e38f};
  for (int round = 0; round < 500; ++round) {
    CAPTURE(round);
    std::vector<float> scores(random() % 200);
    for (float& score : scores) {
      score = random() % 4 == 0 ? special[random() % 8] : static_cast<float>(static_cast<int>(random() % 21) - 10);
    }
    const auto k = static_cast<std::int32_t>(random() % 220);
    CHECK(picks<Backend>(scores, k) == expected_picks(scores, k));
  }
}
