// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Specs: the formulas of the common families, and what each builder refuses, by the name of the field.
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/can_shift.hpp>

#include <doctest/doctest.h>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

using namespace kvblend;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::string field(const Status& status) { return status.ok() ? "ok" : status.where(); }

}  // namespace

TEST_CASE("plain and linear frequencies follow their formulas") {
  const RopeSpec plain = plain_rope(128, 10000).value;
  CHECK(plain.pairs() == 64);
  for (std::size_t i = 0; i < 64; ++i) {
    CHECK(plain.inv_freq[i] == doctest::Approx(std::exp(-std::log(1e4) * static_cast<double>(i) / 64)).epsilon(1e-13));
  }
  const RopeSpec linear = linear_rope(128, 10000, 4).value;
  for (std::size_t i = 0; i < 64; ++i) CHECK(linear.inv_freq[i] == plain.inv_freq[i] / 4);
  const RopeSpec partial = plain_rope(64, 10000, RopePairing::interleaved, 16).value;
  CHECK(partial.pairs() == 8);
  CHECK(partial.inv_freq[4] == doctest::Approx(0.01).epsilon(1e-13));
  CHECK(no_rope(64).value.pairs() == 0);
}

TEST_CASE("an engine's own frequencies are kept as they are") {
  const std::vector<float> own{1.0f, 0.1f, 0.0f, -0.01f};
  const auto spec = rope_from_frequencies<float>(12, 8, RopePairing::neox, own, 4, 1.25);
  REQUIRE(spec.ok());
  for (std::size_t i = 0; i < own.size(); ++i) CHECK(static_cast<float>(spec.value.inv_freq[i]) == own[i]);
  CHECK(spec.value.rotary_offset == 4);
  CHECK(spec.value.attention_factor == 1.25);
  CHECK(field(rope_from_frequencies<float>(8, 8, RopePairing::neox, std::span(own).first(3)).status) ==
        "rope inv_freq");
  const std::vector<double> bad{1, kInfinity};
  CHECK(field(rope_from_frequencies<double>(4, 4, RopePairing::neox, bad).status) == "rope inv_freq[1]");
}

// flash-linear-attention pull request 1177, flash-attention issue 1195: odd or oversized rotary dims read past the head.
TEST_CASE("rotary dims that do not fit the head are refused") {
  CHECK(field(plain_rope(8, 10000, RopePairing::neox, 5).status) == "rope rotary_dim");
  CHECK(field(plain_rope(8, 10000, RopePairing::neox, 10).status) == "rope rotary_dim");
  CHECK(field(plain_rope(8, 10000, RopePairing::neox, -2).status) == "rope rotary_dim");
  CHECK(field(plain_rope(7, 10000).status) == "rope rotary_dim");
  CHECK(field(plain_rope(72, 10000, RopePairing::interleaved).status) == "ok");
  CHECK(field(plain_rope(0, 10000).status) == "rope head_dim");
  CHECK(field(plain_rope(-8, 10000).status) == "rope head_dim");
  CHECK(field(plain_rope(1026, 10000).status) == "rope head_dim");
  CHECK(field(plain_rope(1024, 10000).status) == "ok");
  CHECK(field(no_rope(0).status) == "rope head_dim");
  CHECK(field(no_rope(7).status) == "ok");
  const std::vector<double> four(4, 1.0);
  CHECK(field(rope_from_frequencies<double>(8, 8, RopePairing::neox, four, 1).status) == "rope rotary_offset");
  CHECK(field(rope_from_frequencies<double>(8, 8, RopePairing::neox, four, -1).status) == "rope rotary_offset");
  CHECK(field(rope_from_frequencies<double>(12, 8, RopePairing::neox, four, std::numeric_limits<std::int32_t>::max())
                  .status) == "rope rotary_offset");
}

TEST_CASE("numbers that are no scale are refused by name") {
  for (const double bad : {0.0, -1.0, kInfinity, -kInfinity, kNaN}) {
    CAPTURE(bad);
    CHECK(field(plain_rope(8, bad).status) == "rope theta");
    CHECK(field(linear_rope(8, 10000, bad).status) == "rope factor");
    CHECK(field(linear_rope(8, bad, 4).status) == "rope theta");
    CHECK(field(llama3_rope(8, 10000, {bad, 1, 4, 64}).status) == "rope factor");
    CHECK(field(llama3_rope(8, 10000, {8, bad, 4, 64}).status) == "rope low_frequency_factor");
    CHECK(field(llama3_rope(8, 10000, {8, 1, bad, 64}).status) == "rope high_frequency_factor");
    CHECK(field(llama3_rope(8, 10000, {8, 1, 4, bad}).status) == "rope original_length");
    const std::vector<double> two(2, 1.0);
    CHECK(field(rope_from_frequencies<double>(4, 4, RopePairing::neox, two, 0, bad).status) == "rope attention_factor");
  }
  CHECK(field(llama3_rope(8, 10000, {8, 4, 4, 64}).status) == "rope low_frequency_factor");
  CHECK(field(plain_rope(64, 1e-320).status).find("rope inv_freq[") == 0);  // its powers overflow
}

TEST_CASE("keys move between equal specs only and the refusal names the field") {
  const RopeSpec spec = plain_rope(64, 10000).value;
  CHECK(field(can_shift(spec, spec)) == "ok");
  RopeSpec other = plain_rope(128, 10000).value;
  CHECK(field(can_shift(spec, other)) == "rope head_dim");
  other = plain_rope(64, 10000, RopePairing::neox, 32).value;
  CHECK(field(can_shift(spec, other)) == "rope rotary_dim");
  CHECK(field(can_shift(no_rope(64).value, spec)) == "rope rotary_dim");
  other = plain_rope(64, 10000, RopePairing::interleaved).value;
  CHECK(field(can_shift(spec, other)) == "rope pairing");
  other = spec;
  other.attention_factor = 1.1386;
  CHECK(field(can_shift(spec, other)) == "rope attention_factor");
  other = spec;
  other.inv_freq[5] *= 1.0000001;
  CHECK(field(can_shift(spec, other)) == "rope inv_freq[5]");
  CHECK(can_shift(spec, other).code() == StatusCode::mismatch);
  RopeSpec first = plain_rope(64, 10000, RopePairing::neox, 32).value;
  other = first;
  other.rotary_offset = 8;
  CHECK(field(can_shift(first, other)) == "rope rotary_offset");
  other = no_rope(64).value;
  other.attention_factor = 2;  // of nothing
  CHECK(field(can_shift(no_rope(64).value, other)) == "ok");
  other = spec;
  other.inv_freq[0] = kNaN;
  CHECK(can_shift(other, other).code() == StatusCode::invalid_argument);
}

// transformers issue 25104: dynamic NTK's base depends on the length, and moving by the distance alone is wrong.
TEST_CASE("keys of another length's dynamic base are refused") {
  const RopeSpec at_8 = plain_rope(4, 1e4).value;
  const RopeSpec at_16 = plain_rope(4, 9e4).value;
  CHECK(field(can_shift(at_8, at_16)) == "rope inv_freq[1]");
}
