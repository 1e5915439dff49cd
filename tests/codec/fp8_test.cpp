// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The 8-bit floats, word by word, against the definition of the formats.
#include <kvblend/codec/fp8.hpp>

#include <doctest/doctest.h>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>
#include "float_oracle.hpp"

using namespace kvblend;
using float_oracle::bits_of;
using float_oracle::float_of;
using float_oracle::SmallFormat;

namespace {

template <class Codec>
constexpr SmallFormat format_of() {
  return Codec::dtype == DType::f8_e4m3 ? float_oracle::kFloat8E4M3 : float_oracle::kFloat8E5M2;
}

std::vector<std::byte> all_words() {
  std::vector<std::byte> words;
  for (int word = 0; word < 256; ++word) words.push_back(static_cast<std::byte>(word));
  return words;
}

template <class Codec>
std::vector<int> encoded(const std::vector<float>& values) {
  std::vector<std::byte> words(values.size());
  Codec::encode(values.data(), words.data(), static_cast<std::int64_t>(values.size()));
  std::vector<int> numbers;
  for (const std::byte word : words) numbers.push_back(static_cast<int>(word));
  return numbers;
}

template <class Codec>
long wrong_encodings(const std::vector<float>& values) {
  const SmallFormat format = format_of<Codec>();
  const auto words = encoded<Codec>(values);
  long wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (words[i] != format.nearest(static_cast<double>(values[i]))) ++wrong;
  }
  return wrong;
}

}  // namespace

TEST_CASE_TEMPLATE("all 256 words decode to what they mean", Codec, Fp8E4M3Codec, Fp8E5M2Codec) {
  const SmallFormat format = format_of<Codec>();
  std::vector<float> values(256);
  Codec::decode(all_words().data(), values.data(), 256);
  int infinities = 0;
  int nans = 0;
  for (int word = 0; word < 256; ++word) {
    CAPTURE(word);
    const float value = values[static_cast<std::size_t>(word)];
    if (format.is_number(word)) {
      CHECK(bits_of(value) == bits_of(static_cast<float>(format.value(word))));
      continue;
    }
    CHECK((bits_of(value) >> 31) == static_cast<std::uint32_t>(word >> 7));
    infinities += std::isinf(value) ? 1 : 0;
    nans += std::isnan(value) ? 1 : 0;
  }
  const bool e4m3 = Codec::dtype == DType::f8_e4m3;
  CHECK(infinities == (e4m3 ? 0 : 2));
  CHECK(nans == (e4m3 ? 2 : 6));
  CHECK(Codec::largest == (e4m3 ? 448.0f : 57344.0f));
}

TEST_CASE_TEMPLATE("every number comes back as itself, and a NaN as a NaN", Codec, Fp8E4M3Codec, Fp8E5M2Codec) {
  const SmallFormat format = format_of<Codec>();
  std::vector<float> values(256);
  Codec::decode(all_words().data(), values.data(), 256);
  const auto back = encoded<Codec>(values);
  for (int word = 0; word < 256; ++word) {
    CAPTURE(word);
    const int found = back[static_cast<std::size_t>(word)];
    if (format.is_number(word)) {
      CHECK(found == word);
    } else if (std::isinf(values[static_cast<std::size_t>(word)])) {
      CHECK(found == (format.largest | (word & 0x80)));
    } else {
      CHECK(found == (0x7f | (word & 0x80)));
    }
  }
}

TEST_CASE_TEMPLATE("halfway values round to even and their neighbours to the nearer", Codec, Fp8E4M3Codec,
                   Fp8E5M2Codec) {
  const SmallFormat format = format_of<Codec>();
  std::vector<float> values;
  for (int word = 0; word < format.largest; ++word) {
    const auto below = static_cast<float>(format.value(word));
    const auto halfway = static_cast<float>((format.value(word) + format.value(word + 1)) / 2);
    for (const float middle : {below, halfway}) {
      const float infinity = std::numeric_limits<float>::infinity();
      for (const float value : {middle, std::nextafter(middle, -infinity), std::nextafter(middle, infinity)}) {
        values.push_back(value);
        values.push_back(-value);
      }
    }
  }
  CHECK(wrong_encodings<Codec>(values) == 0);
}

TEST_CASE_TEMPLATE("what is beyond the largest number becomes it, infinity included, and never a NaN", Codec,
                   Fp8E4M3Codec, Fp8E5M2Codec) {
  const float largest = Codec::largest;
  std::vector<float> values;
  for (const float value : {largest, std::nextafter(largest, 1e9f), largest * 1.03125f, largest * 1.0625f,
                            largest * 1.125f, largest * 1.25f, largest * 2, 1e30f, std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::infinity()}) {
    values.push_back(value);
    values.push_back(-value);
  }
  const auto words = encoded<Codec>(values);
  for (std::size_t i = 0; i < words.size(); ++i) {
    CAPTURE(values[i]);
    CHECK(words[i] == (format_of<Codec>().largest | (i % 2 != 0 ? 0x80 : 0)));
  }
}

TEST_CASE_TEMPLATE("NaNs of any payload stay NaNs", Codec, Fp8E4M3Codec, Fp8E5M2Codec) {
  std::vector<float> values;
  for (const std::uint32_t payload : {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0x7fa00000u, 0x7f900000u}) {
    values.push_back(float_of(payload));
    values.push_back(float_of(payload | 0x80000000u));
  }
  const auto words = encoded<Codec>(values);
  for (std::size_t i = 0; i < words.size(); ++i) CHECK(words[i] == (i % 2 != 0 ? 0xff : 0x7f));
}

TEST_CASE_TEMPLATE("random floats of all magnitudes round to the nearest", Codec, Fp8E4M3Codec, Fp8E5M2Codec) {
  const unsigned seed = 83;
  CAPTURE(seed);
  std::mt19937 random(seed);
  std::vector<float> values{0.0f, -0.0f, float_of(1), float_of(0x80000001u), float_of(0x007fffffu)};
  while (values.size() < 40000) {
    const auto bits = static_cast<std::uint32_t>(random());
    if ((bits & 0x7f800000u) != 0x7f800000u) values.push_back(float_of(bits));
    values.push_back(float_of((bits & 0x807fffffu) | (107u + bits % 40u) << 23));  // 2^-20 to 2^19
  }
  CHECK(wrong_encodings<Codec>(values) == 0);
}

TEST_CASE_TEMPLATE("single numbers convert as runs do, also at compile time", Codec, Fp8E4M3Codec, Fp8E5M2Codec) {
  static_assert(to_float8_e4m3(448.0f).bits == 0x7e && to_float8_e5m2(-1.0f).bits == 0xbc);
  static_assert(to_float(Float8E4M3{0x01}) == 0x1p-9f && to_float(Float8E5M2{0x01}) == 0x1p-16f);
  const unsigned seed = 84;
  CAPTURE(seed);
  std::mt19937 random(seed);
  std::vector<float> values;
  for (int i = 0; i < 1003; ++i) values.push_back(float_of(static_cast<std::uint32_t>(random())));
  const auto words = encoded<Codec>(values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const int alone = Codec::dtype == DType::f8_e4m3 ? to_float8_e4m3(values[i]).bits : to_float8_e5m2(values[i]).bits;
    CHECK(alone == words[i]);
  }
}
