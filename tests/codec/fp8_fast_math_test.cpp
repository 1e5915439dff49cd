// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Compiled with -ffast-math, under a namespace of its own so that no other object file's code stands in: 8-bit floats
// and ggml's blocks must have the same bits in engines built that way.
#define KVBLEND_ABI_NAMESPACE fast_math_fp8_test
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/scaled.hpp>

#include <doctest/doctest.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>
#include "block_oracle.hpp"
#include "float_oracle.hpp"

using float_oracle::bits_of;
using float_oracle::float_of;

namespace {

template <class Codec>
long wrong_words(const float_oracle::SmallFormat& format) {
  long wrong = 0;
  std::vector<std::byte> words;
  for (int word = 0; word < 256; ++word) words.push_back(static_cast<std::byte>(word));
  std::vector<float> values(256);
  Codec::decode(words.data(), values.data(), 256);
  for (int word = 0; word < 256; ++word) {
    const std::uint32_t bits = bits_of(values[static_cast<std::size_t>(word)]);
    if (format.is_number(word) && bits != bits_of(static_cast<float>(format.value(word)))) ++wrong;
    if (!format.is_number(word) && (bits & 0x7f800000u) != 0x7f800000u) ++wrong;
  }
  std::vector<float> more{
      float_of(0x7f800000u), float_of(0xff800000u), float_of(0x7fc00000u), float_of(0x7f800001u), 3e38f, -3e38f};
  for (int word = 0; word < format.largest; ++word) {
    const auto halfway = static_cast<float>((format.value(word) + format.value(word + 1)) / 2);
    for (const std::uint32_t bits : {bits_of(halfway) - 1, bits_of(halfway), bits_of(halfway) + 1}) {
      more.push_back(float_of(bits));
    }
  }
  words.resize(more.size());
  Codec::encode(more.data(), words.data(), static_cast<std::int64_t>(more.size()));
  for (std::size_t i = 0; i < more.size(); ++i) {
    const int expected = i == 0 || i == 4   ? format.largest
                         : i == 1 || i == 5 ? format.largest | 0x80
                         : i < 4            ? 0x7f
                                            : format.nearest(static_cast<double>(more[i]));
    if (static_cast<int>(words[i]) != expected) ++wrong;
  }
  return wrong;
}

}  // namespace

TEST_CASE("all 8-bit floats survive fast math, and values saturate under it") {
  CHECK(wrong_words<kvblend::Fp8E4M3Codec>(float_oracle::kFloat8E4M3) == 0);
  CHECK(wrong_words<kvblend::Fp8E5M2Codec>(float_oracle::kFloat8E5M2) == 0);
}

TEST_CASE("scales that are none are seen under fast math") {
  using kvblend::is_scale;
  CHECK(is_scale(0.5f));
  for (const std::uint32_t bits : {0u, 0x80000000u, 0x7f800000u, 0x7fc00000u, 0xbf800000u, 0x00000001u}) {
    CHECK_FALSE(is_scale(float_of(bits)));
  }
}

TEST_CASE("ggml's blocks have the same bits under fast math") {
  long wrong = 0;
  for (unsigned round = 0; round < 200000; ++round) {
    float values[32];
    block_oracle::fill(round, values);
    std::byte found[34];
    std::byte expected[34];
    kvblend::Q8_0Codec::encode(values, found, 32);
    block_oracle::q8_0(values, expected);
    if (std::memcmp(found, expected, 34) != 0) ++wrong;
    kvblend::Q4_0Codec::encode(values, found, 32);
    block_oracle::q4_0(values, expected);
    if (std::memcmp(found, expected, 18) != 0) ++wrong;
  }
  CHECK(wrong == 0);
}
