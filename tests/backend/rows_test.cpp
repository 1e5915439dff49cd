// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every back end measures deviations and merges rows alike, between scattered rows of any codec.
#include <kvblend/codec/floats.hpp>

#include <kvblend/memory/pools.hpp>

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
using kvblend_test::Rows;

namespace {

std::vector<Row> random_rows(std::mt19937& random, std::int32_t among, std::size_t count) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(among));
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  std::sort(all.begin(), all.end());
  return {all.begin(), all.end()};
}

template <class Backend, class Fresh, class Reused>
void check_deviation(unsigned seed) {
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 30; ++round) {
    CAPTURE(round);
    const auto heads = static_cast<std::int32_t>(1 + random() % 4);
    const auto dim = static_cast<std::int32_t>(1 + random() % 130);
    const std::size_t count = random() % 80;
    Rows<Fresh> fresh(100, heads, dim);
    Rows<Reused> reused(120, heads, dim);
    fresh.fill(random);
    reused.fill(random);
    const std::vector<Row> rows = random_rows(random, 120, count);
    std::vector<ActiveIndex> which;
    for (const Row row : random_rows(random, 100, count)) which.emplace_back(row.value);
    std::vector<float> out(count + 1, -1.0f);
    Backend{}.deviation(fresh.plane(), which, rows, reused.plane(), std::span<float>(out).first(count));
    for (std::size_t i = 0; i < count; ++i) {
      double sum = 0;
      for (std::int32_t head = 0; head < heads; ++head) {
        const auto a = fresh.head(which[i].value, head);
        const auto b = reused.head(rows[i].value, head);
        for (std::size_t j = 0; j < a.size(); ++j) {
          const double difference = static_cast<double>(a[j]) - static_cast<double>(b[j]);
          sum += difference * difference;
        }
      }
      CHECK(static_cast<double>(out[i]) == doctest::Approx(std::sqrt(sum)).epsilon(1e-6));
    }
    CHECK(out[count] == -1.0f);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("deviations are the distances of the rows named", Backend, KVBLEND_TEST_BACKENDS) {
  check_deviation<Backend, F32Codec, F32Codec>(21);
  check_deviation<Backend, F32Codec, F16Codec>(22);
  check_deviation<Backend, Bf16Codec, Bf16Codec>(23);
}

TEST_CASE_TEMPLATE("equal rows deviate by exactly nothing", Backend, KVBLEND_TEST_BACKENDS) {
  std::mt19937 random(24);
  Rows<F16Codec> rows(50, 3, 64);
  rows.fill(random);
  std::vector<Row> all;
  std::vector<ActiveIndex> which;
  for (std::int32_t i = 0; i < 50; ++i) {
    all.emplace_back(i);
    which.emplace_back(i);
  }
  std::vector<float> out(50, 1.0f);
  Backend{}.deviation(rows.plane(), which, all, rows.plane(), out);
  CHECK(std::all_of(out.begin(), out.end(), [](float value) { return value == 0.0f; }));
}

TEST_CASE_TEMPLATE("a NaN in a row shows in its deviation alone", Backend, KVBLEND_TEST_BACKENDS) {
  std::mt19937 random(25);
  for (int at = 0; at < 37; ++at) {
    Rows<F32Codec> fresh(3, 1, 37);
    Rows<F32Codec> reused(3, 1, 37);
    fresh.fill(random);
    reused.fill(random);
    auto bad = fresh.head(1, 0);
    bad[static_cast<std::size_t>(at)] = std::numeric_limits<float>::quiet_NaN();
    fresh.set_head(1, 0, bad);
    const std::vector<Row> rows{Row(0), Row(1), Row(2)};
    const std::vector<ActiveIndex> which{ActiveIndex(0), ActiveIndex(1), ActiveIndex(2)};
    std::vector<float> out(3);
    Backend{}.deviation(fresh.plane(), which, rows, reused.plane(), out);
    CHECK(is_finite(out[0]));
    CHECK(is_nan(out[1]));
    CHECK(is_finite(out[2]));
  }
}

TEST_CASE_TEMPLATE("a row of padding has no memory to compare and deviates by nothing", Backend,
                   KVBLEND_TEST_BACKENDS) {
  const std::vector<std::int64_t> slots{1, -1, 0};
  std::vector<float> cache(8, 2.0f);  // two slots: reading any other is seen by the sanitizers
  const auto pool = block_pool<F32Codec>({2, 1, 1, 4, 0});
  REQUIRE(pool.ok());
  const auto layout = by_slots(pool.value, slots.data(), 3);
  REQUIRE(layout.ok());
  const Plane<F32Codec, SlotLayout<std::int64_t>> reused(reinterpret_cast<std::byte*>(cache.data()), layout.value);
  Rows<F32Codec> fresh(3, 1, 4);
  for (int row = 0; row < 3; ++row) fresh.set_head(row, 0, {5, 2, 2, 2});
  const std::vector<Row> rows{Row(0), Row(1), Row(2)};
  const std::vector<ActiveIndex> which{ActiveIndex(0), ActiveIndex(1), ActiveIndex(2)};
  std::vector<float> out(3, -1.0f);
  Backend{}.deviation(fresh.plane(), which, rows, reused, out);
  CHECK(out == std::vector<float>{3, 0, 3});
}

TEST_CASE_TEMPLATE("merging writes the named rows and no other", Backend, KVBLEND_TEST_BACKENDS) {
  std::mt19937 random(26);
  for (int round = 0; round < 30; ++round) {
    CAPTURE(round);
    const std::size_t count = random() % 100;
    const std::vector<Row> rows = random_rows(random, 150, count);
    Rows<F32Codec> fresh(100, 2, 24);
    Rows<F16Codec> cache(150, 2, 24);
    fresh.fill(random);
    cache.fill(random);
    Rows<F16Codec> expected = cache;
    for (std::size_t i = 0; i < count; ++i) {
      for (std::int32_t head = 0; head < 2; ++head) {
        expected.set_head(rows[i].value, head, fresh.head(static_cast<std::int64_t>(i), head));
      }
    }
    Backend{}.merge(fresh.plane(), rows, cache.plane());
    CHECK(cache.bytes == expected.bytes);
  }
}
