// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The families that stretch the context: their formulas at points worked out by hand, and what each builder refuses, by
// the name of the field. tests/backend/rope_golden_test.cpp holds them against a peer's keys.
#include <kvblend/rope/can_shift.hpp>
#include <kvblend/rope/scaling.hpp>

#include <doctest/doctest.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

using namespace kvblend;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kHuge = std::numeric_limits<double>::max();

std::string field(const Status& status) { return status.ok() ? "ok" : status.where(); }

DynamicNtkScaling dynamic(double factor, double original_length) { return {factor, original_length}; }

YarnScaling yarn(double factor, double original_length) {
  YarnScaling scaling;
  scaling.factor = factor;
  scaling.original_length = original_length;
  return scaling;
}

}  // namespace

// llama.cpp pull request 8676: llama 3's frequency factors were loaded and never applied.
TEST_CASE("llama3 divides slow frequencies, keeps fast ones and blends between") {
  const RopeSpec spec = llama3_rope(8, 10000, {8, 1, 4, 64}).value;
  const double expected[] = {1, .013042, .00125, .000125};
  for (std::size_t i = 0; i < 4; ++i) CHECK(spec.inv_freq[i] == doctest::Approx(expected[i]).epsilon(1e-4));
}

TEST_CASE("a fixed alpha stretches the base") {
  const RopeSpec spec = ntk_alpha_rope(128, 10000, 1000).value;
  const double base = 10000 * std::pow(1000.0, 128.0 / 126);
  for (std::size_t i = 0; i < 64; ++i) {
    CHECK(spec.inv_freq[i] == doctest::Approx(std::exp(-std::log(base) * static_cast<double>(i) / 64)).epsilon(1e-12));
  }
  CHECK(ntk_alpha_rope(64, 10000, 1).value == plain_rope(64, 10000).value);
}

// transformers issue 25104: dynamic NTK's base depends on the length.
TEST_CASE("the dynamic base is plain up to the original length and grows beyond") {
  for (const std::int64_t length : {0, 1, 7, 8}) {
    CHECK(dynamic_ntk_rope(4, 1e4, dynamic(2, 8), length).value == plain_rope(4, 1e4).value);
  }
  const RopeSpec at_16 = dynamic_ntk_rope(4, 1e4, dynamic(2, 8), 16).value;
  CHECK(at_16.inv_freq[0] == 1);
  CHECK(1 / (at_16.inv_freq[1] * at_16.inv_freq[1]) == doctest::Approx(9e4).epsilon(1e-12));
  CHECK(at_16 == plain_rope(4, 9e4).value);
  const RopeSpec at_9 = dynamic_ntk_rope(4, 1e4, dynamic(2, 8), 9).value;
  CHECK(at_9.inv_freq[1] < 1e-2);
  CHECK(at_9.inv_freq[1] > at_16.inv_freq[1]);
}

TEST_CASE("YaRN keeps fast pairs, divides slow ones and blends between") {
  // theta e^8 over 16 pairs: pair i turns length · e^(−i/2) / 2π times.
  YarnScaling scaling = yarn(4, 1000);
  scaling.beta_fast = 20;
  scaling.beta_slow = 1;
  const auto pair_of = [](double turns) { return 2 * std::log(1000 / (turns * 2 * std::acos(-1.0))); };
  const double low = std::floor(pair_of(20));
  const double high = std::ceil(pair_of(1));
  REQUIRE(low > 0);
  REQUIRE(high < 15);
  const RopeSpec truncated = yarn_rope(32, std::exp(8.0), scaling).value;
  scaling.truncate = false;
  const RopeSpec exact = yarn_rope(32, std::exp(8.0), scaling).value;
  for (int i = 0; i < 16; ++i) {
    CAPTURE(i);
    const double plain = std::exp(-i / 2.0);
    const auto blended = [plain, i](double from, double to) {
      const double slow = std::min(1.0, std::max(0.0, (i - from) / (to - from)));
      return plain * (1 - slow) + plain / 4 * slow;
    };
    const auto at = static_cast<std::size_t>(i);
    CHECK(truncated.inv_freq[at] == doctest::Approx(blended(low, high)).epsilon(1e-12));
    CHECK(exact.inv_freq[at] == doctest::Approx(blended(pair_of(20), pair_of(1))).epsilon(1e-12));
  }
  CHECK(truncated.inv_freq[0] == 1);
  CHECK(truncated.inv_freq[15] == doctest::Approx(std::exp(-7.5) / 4).epsilon(1e-12));
}

TEST_CASE("YaRN's magnitude is explicit, a ratio of two, or by factor") {
  YarnScaling scaling = yarn(40, 4096);
  const auto factor = [&scaling] { return yarn_rope(64, 10000, scaling).value.attention_factor; };
  CHECK(factor() == doctest::Approx(0.1 * std::log(40.0) + 1).epsilon(1e-14));
  scaling.mscale = 1;  // of no effect alone
  CHECK(factor() == doctest::Approx(0.1 * std::log(40.0) + 1).epsilon(1e-14));
  scaling.mscale_all_dim = 1;
  CHECK(factor() == 1);
  scaling.mscale = 0.75;
  scaling.mscale_all_dim = 0.5;
  CHECK(factor() == doctest::Approx((0.075 * std::log(40.0) + 1) / (0.05 * std::log(40.0) + 1)).epsilon(1e-14));
  scaling.attention_factor = 1.25;
  CHECK(factor() == 1.25);
  CHECK(yarn_rope(64, 10000, yarn(1, 4096)).value.attention_factor == 1);
  CHECK(yarn_rope(64, 10000, yarn(0.5, 4096)).value.attention_factor == 1);
  CHECK(yarn_rope(128, 1e6, yarn(4, 32768)).value.attention_factor == doctest::Approx(1.1386).epsilon(1e-4));
}

TEST_CASE("longrope changes to the long list one token past the original length") {
  const std::vector<double> ones(4, 1.0);
  const std::vector<double> longs = {1, 2, 4, 8};
  LongropeScaling scaling;
  scaling.short_factors = ones;
  scaling.long_factors = longs;
  scaling.original_length = 4096;
  const RopeSpec plain = plain_rope(8, 10000).value;
  for (const std::int64_t length : {std::int64_t{0}, std::int64_t{4095}, std::int64_t{4096}}) {
    CHECK(longrope(8, 10000, scaling, length).value == plain);
  }
  for (const std::int64_t length : {std::int64_t{4097}, std::int64_t{1} << 40}) {
    const RopeSpec spec = longrope(8, 10000, scaling, length).value;
    for (std::size_t i = 0; i < 4; ++i) CHECK(spec.inv_freq[i] == plain.inv_freq[i] / longs[i]);
    CHECK(spec.attention_factor == 1);
  }
  scaling.factor = 32;
  for (const std::int64_t length : {4096, 4097}) {
    CHECK(longrope(8, 10000, scaling, length).value.attention_factor ==
          doctest::Approx(std::sqrt(1 + 5.0 / 12)).epsilon(1e-14));
  }
  scaling.attention_factor = 1.19;
  CHECK(longrope(8, 10000, scaling, 1).value.attention_factor == 1.19);
  scaling.attention_factor = 0;
  scaling.factor = 0.5;
  CHECK(longrope(8, 10000, scaling, 1).value.attention_factor == 1);
}

TEST_CASE("proportional rope has pairs over the whole head of which the last do not turn") {
  const RopeSpec spec = proportional_rope(512, 1e6, 0.25, 2).value;
  CHECK(spec.rotary_dim == 512);
  const RopeSpec plain = plain_rope(512, 1e6).value;
  for (std::size_t i = 0; i < 256; ++i) CHECK(spec.inv_freq[i] == (i < 64 ? plain.inv_freq[i] / 2 : 0));
  CHECK(proportional_rope(512, 1e6, 1).value == plain);
  CHECK(proportional_rope(512, 1e6, 0).value.inv_freq[0] == 0);
  CHECK(proportional_rope(16, 1e6, 0.2).value.inv_freq[0] == 1);  // floor(1.6) = 1
  CHECK(proportional_rope(16, 1e6, 0.2).value.inv_freq[1] == 0);
}

TEST_CASE("all families take partial heads and both pairings") {
  const std::vector<double> factors(8, 2.0);
  LongropeScaling lists;
  lists.short_factors = lists.long_factors = factors;
  lists.original_length = 64;
  for (const auto pairing : {RopePairing::neox, RopePairing::interleaved}) {
    const Result<RopeSpec> specs[] = {
        llama3_rope(40, 10000, {8, 1, 4, 64}, pairing, 16),
        ntk_alpha_rope(40, 10000, 3, pairing, 16),
        dynamic_ntk_rope(40, 10000, dynamic(2, 64), 100, pairing, 16),
        yarn_rope(40, 10000, yarn(4, 64), pairing, 16),
        longrope(40, 10000, lists, 100, pairing, 16),
    };
    for (const Result<RopeSpec>& spec : specs) {
      REQUIRE(spec.ok());
      CHECK(spec.value.head_dim == 40);
      CHECK(spec.value.pairs() == 8);
      CHECK(spec.value.pairing == pairing);
      CHECK(spec.value.inv_freq[0] <= 1);
      CHECK(spec.value.inv_freq[7] < plain_rope(40, 10000, pairing, 16).value.inv_freq[7]);
    }
  }
}

TEST_CASE("scaling fields that are no scale are refused by name") {
  const std::vector<double> two(2, 1.0);
  const auto lists = [&two](double original_length, double factor = 0, double attention_factor = 0) {
    LongropeScaling scaling;
    scaling.short_factors = scaling.long_factors = two;
    scaling.original_length = original_length;
    scaling.factor = factor;
    scaling.attention_factor = attention_factor;
    return scaling;
  };
  struct Case {
    const char* where;
    std::function<Status(double)> build;
  };
  const Case always[] = {
      {"rope factor",
       [](double bad) {
         return llama3_rope(8, 10000, {bad, 1, 4, 64}).status;
       }},
      {"rope low_frequency_factor",
       [](double bad) {
         return llama3_rope(8, 10000, {8, bad, 4, 64}).status;
       }},
      {"rope high_frequency_factor",
       [](double bad) {
         return llama3_rope(8, 10000, {8, 1, bad, 64}).status;
       }},
      {"rope original_length",
       [](double bad) {
         return llama3_rope(8, 10000, {8, 1, 4, bad}).status;
       }},
      {"rope theta",
       [](double bad) {
         return llama3_rope(8, bad, {8, 1, 4, 64}).status;
       }},
      {"rope alpha", [](double bad) { return ntk_alpha_rope(8, 10000, bad).status; }},
      {"rope theta", [](double bad) { return ntk_alpha_rope(8, bad, 2).status; }},
      {"rope factor", [](double bad) { return dynamic_ntk_rope(8, 10000, dynamic(bad, 64), 9).status; }},
      {"rope original_length", [](double bad) { return dynamic_ntk_rope(8, 10000, dynamic(2, bad), 9).status; }},
      {"rope theta", [](double bad) { return dynamic_ntk_rope(8, bad, dynamic(2, 64), 9).status; }},
      {"rope factor", [](double bad) { return yarn_rope(8, 10000, yarn(bad, 64)).status; }},
      {"rope original_length", [](double bad) { return yarn_rope(8, 10000, yarn(4, bad)).status; }},
      {"rope theta", [](double bad) { return yarn_rope(8, bad, yarn(4, 64)).status; }},
      {"rope beta_fast",
       [](double bad) {
         YarnScaling scaling = yarn(4, 64);
         scaling.beta_fast = bad;
         return yarn_rope(8, 10000, scaling).status;
       }},
      {"rope beta_slow",
       [](double bad) {
         YarnScaling scaling = yarn(4, 64);
         scaling.beta_slow = bad;
         return yarn_rope(8, 10000, scaling).status;
       }},
      {"rope original_length", [lists](double bad) { return longrope(4, 10000, lists(bad), 9).status; }},
      {"rope theta", [lists](double bad) { return longrope(4, bad, lists(64), 9).status; }},
      {"rope factor", [](double bad) { return proportional_rope(8, 10000, 0.5, bad).status; }},
      {"rope theta", [](double bad) { return proportional_rope(8, bad, 0.5).status; }},
  };
  const Case but_zero[] = {
      {"rope mscale",
       [](double bad) {
         YarnScaling scaling = yarn(4, 64);
         scaling.mscale = bad;
         return yarn_rope(8, 10000, scaling).status;
       }},
      {"rope mscale_all_dim",
       [](double bad) {
         YarnScaling scaling = yarn(4, 64);
         scaling.mscale_all_dim = bad;
         return yarn_rope(8, 10000, scaling).status;
       }},
      {"rope attention_factor",
       [](double bad) {
         YarnScaling scaling = yarn(4, 64);
         scaling.attention_factor = bad;
         return yarn_rope(8, 10000, scaling).status;
       }},
      {"rope factor", [lists](double bad) { return longrope(4, 10000, lists(64, bad), 9).status; }},
      {"rope attention_factor", [lists](double bad) { return longrope(4, 10000, lists(64, 0, bad), 9).status; }},
      {"rope partial_factor", [](double bad) { return proportional_rope(8, 10000, bad).status; }},
      {"rope short_factors[1]",
       [](double bad) {
         const std::vector<double> list = {1, bad}, good = {1, 1};
         LongropeScaling scaling;
         scaling.short_factors = list;
         scaling.long_factors = good;
         scaling.original_length = 64;
         return longrope(4, 10000, scaling, 100).status;  // also where it is not the one used
       }},
      {"rope long_factors[0]",
       [](double bad) {
         const std::vector<double> list = {bad, 1}, good = {1, 1};
         LongropeScaling scaling;
         scaling.short_factors = good;
         scaling.long_factors = list;
         scaling.original_length = 64;
         return longrope(4, 10000, scaling, 1).status;
       }},
  };
  for (const double bad : {-1.0, kInfinity, -kInfinity, kNaN, 0.0}) {
    CAPTURE(bad);
    for (const Case& c : always) {
      CHECK(field(c.build(bad)) == c.where);
      CHECK(c.build(bad).code() == StatusCode::invalid_argument);
    }
    if (bad == 0.0) continue;
    for (const Case& c : but_zero) CHECK(field(c.build(bad)) == c.where);
  }
}

TEST_CASE("fields that do not go together are refused by name") {
  CHECK(field(llama3_rope(8, 10000, {8, 4, 4, 64}).status) == "rope low_frequency_factor");
  CHECK(field(proportional_rope(8, 10000, 1.01).status) == "rope partial_factor");
  CHECK(field(proportional_rope(7, 10000, 0.5).status) == "rope rotary_dim");
  CHECK(field(dynamic_ntk_rope(8, 10000, dynamic(2, 64), -1).status) == "rope length");
  CHECK(field(dynamic_ntk_rope(8, 10000, dynamic(2, 64), 9, RopePairing::neox, 2).status) == "rope rotary_dim");
  CHECK(field(dynamic_ntk_rope(8, 10000, dynamic(2, 64), 9, RopePairing::neox, 5).status) == "rope rotary_dim");
  CHECK(field(ntk_alpha_rope(8, 10000, 2, RopePairing::neox, 10).status) == "rope rotary_dim");
  CHECK(field(ntk_alpha_rope(2, 10000, 2).status) == "rope rotary_dim");
  CHECK(field(yarn_rope(8, 1, yarn(4, 64)).status) == "rope theta");
  CHECK(field(yarn_rope(8, 10000, yarn(4, 1e-30)).status) == "rope original_length");
  YarnScaling scaling = yarn(4, 64);
  scaling.beta_slow = 33;
  CHECK(field(yarn_rope(8, 10000, scaling).status) == "rope beta_fast");

  const std::vector<double> two(2, 1.0), three(3, 1.0);
  LongropeScaling lists;
  lists.short_factors = three;
  lists.long_factors = two;
  lists.original_length = 64;
  CHECK(field(longrope(4, 10000, lists, 1).status) == "rope short_factors");
  CHECK(longrope(4, 10000, lists, 1).status.code() == StatusCode::mismatch);
  lists.short_factors = two;
  lists.long_factors = {};
  CHECK(field(longrope(4, 10000, lists, 1).status) == "rope long_factors");
  lists.long_factors = two;
  CHECK(field(longrope(4, 10000, lists, -1).status) == "rope length");
  CHECK(field(longrope(8, 10000, lists, 1).status) == "rope short_factors");
  lists.factor = 32;
  lists.original_length = 1;
  CHECK(field(longrope(4, 10000, lists, 1).status) == "rope original_length");
}

TEST_CASE("numbers that overflow are refused by name") {
  CHECK(field(ntk_alpha_rope(8, 10000, kHuge).status) == "rope alpha");
  CHECK(field(ntk_alpha_rope(8, 1e300, 1e300).status) == "rope alpha");
  CHECK(field(ntk_alpha_rope(8, 10000, 1e-320).status) == "rope alpha");  // makes theta zero
  CHECK(field(dynamic_ntk_rope(8, 10000, dynamic(kHuge, 64), 100).status) == "rope factor");
  CHECK(field(dynamic_ntk_rope(8, 10000, dynamic(2, 1e-300), 1 << 20).status) == "rope factor");
  CHECK(field(dynamic_ntk_rope(8, 10000, dynamic(2, 64), std::numeric_limits<std::int64_t>::max()).status) == "ok");
  CHECK(field(linear_rope(8, 10000, 1e-320).status).find("rope inv_freq[") == 0);
  CHECK(field(llama3_rope(8, 10000, {1e-320, 1, 4, 1e-6}).status).find("rope inv_freq[") == 0);
  CHECK(field(yarn_rope(8, 10000, yarn(1e-320, 64)).status).find("rope inv_freq[") == 0);
  const std::vector<double> tiny(4, 1e-320);
  LongropeScaling lists;
  lists.short_factors = lists.long_factors = tiny;
  lists.original_length = 64;
  CHECK(field(longrope(8, 10000, lists, 1).status).find("rope inv_freq[") == 0);
}
