// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The float codecs, bit by bit, against the definition of the formats.
#include <kvblend/codec/with_codec.hpp>

#include <doctest/doctest.h>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>
#include "float_oracle.hpp"

using namespace kvblend;
using float_oracle::bits_of;
using float_oracle::float_of;
using float_oracle::Format;

namespace {

template <class Codec>
constexpr Format format_of() {
  return Codec::dtype == DType::f16 ? float_oracle::kFloat16 : float_oracle::kBFloat16;
}

std::vector<std::byte> bytes_of_words(const std::vector<std::uint16_t>& words) {
  std::vector<std::byte> bytes(words.size() * 2);
  std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

template <class Codec>
std::vector<std::uint16_t> encoded(const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * 2);
  Codec::encode(values.data(), bytes.data(), static_cast<std::int64_t>(values.size()));
  std::vector<std::uint16_t> words(values.size());
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

std::vector<std::uint16_t> all_words() {
  std::vector<std::uint16_t> words;
  for (std::uint32_t word = 0; word < 65536; ++word) words.push_back(static_cast<std::uint16_t>(word));
  return words;
}

template <class Codec>
long wrong_encodings(const std::vector<float>& values) {
  const Format format = format_of<Codec>();
  const auto words = encoded<Codec>(values);
  long wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (words[i] != format.nearest(static_cast<double>(values[i]))) ++wrong;
  }
  return wrong;
}

}  // namespace

TEST_CASE_TEMPLATE("all 65536 words decode to what they mean", Codec, F16Codec, Bf16Codec) {
  const Format format = format_of<Codec>();
  const auto words = all_words();
  std::vector<float> values(words.size());
  Codec::decode(bytes_of_words(words).data(), values.data(), 65536);
  long wrong = 0;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::uint16_t word = words[i];
    const std::uint32_t sign = static_cast<std::uint32_t>(word >> 15) << 31;
    std::uint32_t expected = 0;
    if (format.exponent(word) == format.largest_exponent()) {  // the fraction is a NaN's payload
      expected = sign | 0x7f800000u | static_cast<std::uint32_t>(format.fraction(word)) << (23 - format.fraction_bits);
    } else {
      expected = bits_of(static_cast<float>(format.value(word)));
    }
    const std::uint32_t quiet = format.is_nan(word) ? 0x00400000u : 0;  // which NaNs may become
    if (bits_of(values[i]) != expected && bits_of(values[i]) != (expected | quiet)) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("every word but a signalling NaN comes back as itself", Codec, F16Codec, Bf16Codec) {
  const Format format = format_of<Codec>();
  const auto words = all_words();
  std::vector<float> values(words.size());
  Codec::decode(bytes_of_words(words).data(), values.data(), 65536);
  const auto back = encoded<Codec>(values);
  long wrong = 0;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const int quiet = format.is_nan(words[i]) ? 1 << (format.fraction_bits - 1) : 0;
    if (back[i] != (words[i] | quiet)) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("halfway values round to even and their neighbours to the nearer", Codec, F16Codec, Bf16Codec) {
  const Format format = format_of<Codec>();
  std::vector<float> values;
  const int infinity = format.largest_exponent() << format.fraction_bits;
  for (int word = 0; word < infinity; ++word) {
    const auto low = static_cast<std::uint16_t>(word);
    const double below = format.value(low);
    const double above = word + 1 == infinity ? std::ldexp(1.0, format.largest_exponent() - format.bias())
                                              : format.value(static_cast<std::uint16_t>(word + 1));
    const double middle = (below + above) / 2;
    if (middle > 3.402823466e38) continue;
    const auto halfway = static_cast<float>(middle);
    for (const float value : {static_cast<float>(below), halfway, std::nextafter(halfway, 0.0f),
                              std::nextafter(halfway, 3.402823466e38f)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  CHECK(values.size() > 200000);
  CHECK(wrong_encodings<Codec>(values) == 0);
}

TEST_CASE_TEMPLATE("random floats of all magnitudes round to the nearest", Codec, F16Codec, Bf16Codec) {
  const unsigned seed = 51;
  CAPTURE(seed);
  std::mt19937 random(seed);
  std::vector<float> values;
  while (values.size() < 300000) {
    const auto bits = static_cast<std::uint32_t>(random());
    if ((bits & 0x7f800000u) != 0x7f800000u) values.push_back(float_of(bits));
    const std::uint32_t in_range = (bits & 0x807fffffu) | (90u + bits % 60u) << 23;  // 2^-37 to 2^22
    values.push_back(float_of(in_range));
  }
  CHECK(wrong_encodings<Codec>(values) == 0);
}

TEST_CASE_TEMPLATE("infinities stay and NaNs stay quiet ones", Codec, F16Codec, Bf16Codec) {
  const Format format = format_of<Codec>();
  const auto infinity = static_cast<std::uint16_t>(format.largest_exponent() << format.fraction_bits);
  const std::vector<float> values{float_of(0x7f800000u), float_of(0xff800000u), float_of(0x7fc00000u),
                                  float_of(0xffc00000u), float_of(0x7f800001u), float_of(0xff800001u),
                                  float_of(0x7fffffffu), float_of(0xffffffffu)};
  const auto words = encoded<Codec>(values);
  CHECK(words[0] == infinity);
  CHECK(words[1] == (infinity | 0x8000));
  for (std::size_t i = 2; i < words.size(); ++i) {
    CAPTURE(i);
    CHECK(format.is_nan(words[i]));
    CHECK((words[i] >> 15) == (bits_of(values[i]) >> 31));
    CHECK((words[i] & (1 << (format.fraction_bits - 1))) != 0);
  }
}

TEST_CASE("f32 copies bits") {
  const std::uint32_t words[] = {0, 0x80000000u, 0x7f800001u, 0xffffffffu, 0x3f800000u, 1};
  float values[6];
  std::byte bytes[24];
  F32Codec::decode(reinterpret_cast<const std::byte*>(words), values, 6);
  F32Codec::encode(values, bytes, 6);
  CHECK(std::memcmp(bytes, words, sizeof words) == 0);
}

TEST_CASE_TEMPLATE("runs of any length at any address stay within their bytes", Codec, F32Codec, F16Codec, Bf16Codec,
                   Fp8E4M3Codec, Fp8E5M2Codec) {
  for (std::size_t misaligned = 0; misaligned < 5; ++misaligned) {
    for (std::int64_t count = 0; count < 40; ++count) {
      CAPTURE(misaligned);
      CAPTURE(count);
      const auto size = static_cast<std::size_t>(bytes_of<Codec>(count));
      std::vector<std::byte> bytes(misaligned + size + 4, std::byte{0xaa});
      std::vector<float> values(static_cast<std::size_t>(count));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 4) / 4;
      Codec::encode(values.data(), bytes.data() + misaligned, count);
      std::vector<float> back(values.size() + 1, -1.0f);
      Codec::decode(bytes.data() + misaligned, back.data(), count);
      CHECK(back.back() == -1.0f);
      back.pop_back();
      CHECK(back == values);
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        if (i < misaligned || i >= misaligned + size) CHECK(bytes[i] == std::byte{0xaa});
      }
    }
  }
}

namespace {

struct NameOf {
  template <class Codec>
  Result<DType> operator()(Codec) const {
    return Codec::dtype;
  }
};

}  // namespace

TEST_CASE("a dtype known at run time finds its codec") {
  for (const DType dtype : kAllDTypes) {
    const Result<DType> found = with_codec(dtype, NameOf{});
    REQUIRE(found.ok());
    CHECK(found.value == dtype);
  }
  const Result<DType> none = with_codec(static_cast<DType>(99), NameOf{});
  CHECK(none.status.code() == StatusCode::unsupported);
  CHECK(std::string(none.status.where()) == "dtype");
}
