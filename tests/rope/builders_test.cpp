// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Specs: frequencies given and plain, the transforms, what each builder refuses by the name of the field, and which
// specs go together. The families that stretch the context are in scaling_test.cpp.
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

// flash-linear-attention pull request 1177, flash-attention issue 1195: odd or oversized rotary dims read past the
// head.
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
    const std::vector<double> two(2, 1.0);
    CHECK(field(rope_from_frequencies<double>(4, 4, RopePairing::neox, two, 0, bad).status) == "rope attention_factor");
  }
  CHECK(field(plain_rope(64, 1e-320).status).find("rope inv_freq[") == 0);  // its powers overflow
  const double too_fast[] = {1, -1e30};                                     // times a position, beyond float
  CHECK(field(rope_from_frequencies<double>(4, 4, RopePairing::neox, too_fast).status) == "rope inv_freq[1]");
}

TEST_CASE("axes are dealt out in sections or in turn") {
  const RopeSpec plain = plain_rope(16, 10000).value;
  const std::vector<std::int32_t> sections = {2, 3, 3}, uneven = {4, 2, 2};
  const auto axes = [](const Result<RopeSpec>& spec) {
    REQUIRE_MESSAGE(spec.ok(), spec.status.where() << ": " << spec.status.message());
    return std::vector<int>(spec.value.axes().begin(), spec.value.axes().end());
  };
  CHECK(axes(with_axes(plain, sections, AxisOrder::sectioned)) == std::vector<int>{0, 0, 1, 1, 1, 2, 2, 2});
  CHECK(axes(with_axes(plain, uneven, AxisOrder::sectioned)) == std::vector<int>{0, 0, 0, 0, 1, 1, 2, 2});
  CHECK(axes(with_axes(plain, uneven, AxisOrder::interleaved)) == std::vector<int>{0, 1, 2, 0, 1, 2, 0, 0});
  const RopeSpec dealt = with_axes(plain, uneven, AxisOrder::interleaved).value;
  CHECK(same_frequencies(dealt, plain));
  CHECK_FALSE(dealt == plain);
  // Once more from an M-RoPE spec: nothing of the first deal is left.
  CHECK(axes(with_axes(dealt, std::vector<std::int32_t>{8, 0, 0}, AxisOrder::sectioned)) == std::vector<int>(8, 0));

  struct Case {
    std::vector<std::int32_t> sections;
    AxisOrder order;
    const char* where;
  };
  const Case cases[] = {
      {{8}, AxisOrder::sectioned, "rope sections"},
      {{2, 3, 3, 0}, AxisOrder::sectioned, "rope sections"},
      {{}, AxisOrder::interleaved, "rope sections"},
      {{2, 3, 2}, AxisOrder::sectioned, "rope sections"},
      {{2, 3, 4}, AxisOrder::interleaved, "rope sections"},
      {{std::numeric_limits<std::int32_t>::max(), 3, 3}, AxisOrder::sectioned, "rope sections"},
      {{-1, 6, 3}, AxisOrder::sectioned, "rope sections[0]"},
      {{10, 1, -3}, AxisOrder::interleaved, "rope sections[2]"},
      {{1, 4, 3}, AxisOrder::interleaved, "rope sections[1]"},  // h at 1, 4, 7 and 10, of 8
      {{2, 3, 3}, AxisOrder::interleaved, "rope sections[2]"},  // w at 2, 5 and 8
      {{3, 3, 2}, AxisOrder::interleaved, "ok"},
  };
  for (const Case& c : cases) {
    CAPTURE(std::string(c.where));
    CHECK(field(with_axes(plain, c.sections, c.order).status) == c.where);
  }
  RopeSpec bad = plain;
  bad.inv_freq[3] = kNaN;
  CHECK(field(with_axes(bad, sections, AxisOrder::sectioned).status) == "rope inv_freq[3]");
  bad = plain;
  bad.axis_of_pair[7] = 3;
  CHECK(field(validate(bad)) == "rope axis_of_pair[7]");
  bad = plain;
  bad.axis_of_pair[8] = 3;  // of no pair
  CHECK(field(validate(bad)) == "ok");
  CHECK(bad == plain);
}

TEST_CASE("a rotation stands in a larger head") {
  const RopeSpec part = plain_rope(64, 10000, RopePairing::interleaved).value;
  const Result<RopeSpec> expanded = within_head(part, 192, 128);
  REQUIRE(expanded.ok());
  CHECK(expanded.value.head_dim == 192);
  CHECK(expanded.value.rotary_dim == 64);
  CHECK(expanded.value.rotary_offset == 128);
  CHECK(expanded.value.pairing == RopePairing::interleaved);
  CHECK(same_frequencies(expanded.value, part));
  CHECK(within_head(part, 576, 512).value.rotary_offset == 512);
  CHECK(within_head(expanded.value, 200, 8).value.rotary_offset == 136);
  CHECK(within_head(part, 64, 0).value == part);
  CHECK(field(within_head(part, 192, 129).status) == "rope offset");
  CHECK(field(within_head(part, 192, -1).status) == "rope offset");
  CHECK(field(within_head(part, 192, std::numeric_limits<std::int32_t>::max()).status) == "rope offset");
  CHECK(field(within_head(part, std::numeric_limits<std::int32_t>::max(), 512).status) == "rope head_dim");
  CHECK(field(within_head(part, 63, 0).status) == "rope offset");
  RopeSpec bad = part;
  bad.rotary_dim = 5;
  CHECK(field(within_head(bad, 192, 128).status) == "rope rotary_dim");
}

TEST_CASE("whether keys can move is answered by rotate, copy, or the field that differs") {
  const RopeSpec spec = plain_rope(64, 10000).value;
  const auto answer = [](const Result<ShiftKind>& kind) {
    if (!kind.ok()) return field(kind.status);
    return std::string(kind.value == ShiftKind::rotate ? "rotate" : "copy");
  };
  CHECK(answer(can_shift(spec, spec)) == "rotate");
  CHECK(answer(can_shift(no_rope(64).value, no_rope(64).value)) == "copy");
  CHECK(answer(can_shift(no_rope(64).value, no_rope(32).value)) == "rope head_dim");
  RopeSpec other = plain_rope(128, 10000).value;
  CHECK(answer(can_shift(spec, other)) == "rope head_dim");
  other = plain_rope(64, 10000, RopePairing::neox, 32).value;
  CHECK(answer(can_shift(spec, other)) == "rope rotary_dim");
  CHECK(answer(can_shift(no_rope(64).value, spec)) == "rope rotary_dim");
  CHECK(answer(can_shift(spec, no_rope(64).value)) == "rope rotary_dim");
  other = plain_rope(64, 10000, RopePairing::interleaved).value;
  CHECK(answer(can_shift(spec, other)) == "rope pairing");
  other = spec;
  other.attention_factor = 1.1386;
  CHECK(answer(can_shift(spec, other)) == "rope attention_factor");
  other = spec;
  other.axis_of_pair[31] = 2;
  CHECK(answer(can_shift(spec, other)) == "rope axis_of_pair[31]");
  CHECK(can_shift(spec, other).status.code() == StatusCode::mismatch);
  RopeSpec first = plain_rope(64, 10000, RopePairing::neox, 32).value;
  other = first;
  other.rotary_offset = 8;
  CHECK(answer(can_shift(first, other)) == "rope rotary_offset");
  other = no_rope(64).value;
  other.attention_factor = 2;  // of nothing
  CHECK(answer(can_shift(no_rope(64).value, other)) == "copy");
  other = spec;
  other.inv_freq[0] = kNaN;
  CHECK(can_shift(other, other).status.code() == StatusCode::invalid_argument);

  // Frequencies may differ.
  other = spec;
  other.inv_freq[5] *= 1.0000001;
  CHECK(answer(can_shift(spec, other)) == "rotate");
  ShiftRun run{Row(2), 0, 4, Position(3), Position(9)};
  CHECK(answer(can_shift(spec, spec, run)) == "rotate");
  CHECK(answer(can_shift(no_rope(64).value, no_rope(64).value, run)) == "copy");
  run.new_first = run.old_first;
  CHECK(answer(can_shift(spec, spec, run)) == "copy");
  CHECK(answer(can_shift(spec, other, run)) == "rotate");
  CHECK(answer(can_shift(spec, plain_rope(128, 10000).value, run)) == "rope head_dim");
}
