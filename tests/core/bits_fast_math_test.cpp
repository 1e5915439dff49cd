// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Compiled with -ffast-math, under a namespace of its own so that no other object file's code stands in: NaN and
// infinity must still be seen.
#define KVBLEND_ABI_NAMESPACE fast_math_test
#include <kvblend/core/bits.hpp>

#include <doctest/doctest.h>
#include <cstdint>
#include <cstring>

namespace {

float float_of(std::uint32_t word) {
  const volatile std::uint32_t hidden = word;
  const std::uint32_t bits = hidden;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
double double_of(std::uint64_t word) {
  const volatile std::uint64_t hidden = word;
  const std::uint64_t bits = hidden;
  double value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

TEST_CASE("NaN and infinity are seen under fast math") {
  struct Case {
    std::uint32_t bits;
    bool nan;
    bool finite;
  };
  const Case cases[] = {{0, false, true},           {0x80000000u, false, true},  {1, false, true},
                        {0x7f7fffffu, false, true}, {0x7f800000u, false, false}, {0xff800000u, false, false},
                        {0x7f800001u, true, false}, {0x7fc00000u, true, false},  {0xffffffffu, true, false}};
  for (const Case& c : cases) {
    CAPTURE(c.bits);
    CHECK(kvblend::is_nan(float_of(c.bits)) == c.nan);
    CHECK(kvblend::is_finite(float_of(c.bits)) == c.finite);
  }
  CHECK(kvblend::is_nan(double_of(0x7ff8000000000000u)));
  CHECK(kvblend::is_nan(double_of(0xfff0000000000001u)));
  CHECK_FALSE(kvblend::is_nan(double_of(0x7ff0000000000000u)));
  CHECK_FALSE(kvblend::is_finite(double_of(0xfff0000000000000u)));
  CHECK(kvblend::is_finite(double_of(0x7fefffffffffffffu)));
}
