// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ggml's blocks against their description, step by step. tests/engine compares them with ggml itself.
#include <kvblend/codec/ggml_blocks.hpp>

#include <doctest/doctest.h>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>
#include "block_oracle.hpp"
#include "float_oracle.hpp"

using namespace kvblend;
using float_oracle::bits_of;

namespace {

template <class Codec>
void expected_block(const float* values, std::byte* block) {
  if (std::is_same_v<Codec, Q8_0Codec>) {
    block_oracle::q8_0(values, block);
  } else {
    block_oracle::q4_0(values, block);
  }
}

template <class Codec>
std::vector<std::byte> encoded(const std::vector<float>& values) {
  const auto count = static_cast<std::int64_t>(values.size());
  std::vector<std::byte> bytes(static_cast<std::size_t>(bytes_of<Codec>(count)));
  Codec::encode(values.data(), bytes.data(), count);
  return bytes;
}

template <class Codec>
std::vector<float> decoded(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / Codec::block_bytes * 32);
  Codec::decode(bytes.data(), values.data(), static_cast<std::int64_t>(values.size()));
  return values;
}

template <class Codec>
float scale_of(const std::vector<std::byte>& bytes) {
  std::uint16_t word = 0;
  std::memcpy(&word, bytes.data(), 2);
  return to_float(Float16{word});
}

}  // namespace

TEST_CASE_TEMPLATE("blocks have the bits that the description gives", Codec, Q8_0Codec, Q4_0Codec) {
  for (unsigned round = 0; round < 20000; ++round) {
    CAPTURE(round);
    std::vector<float> values(32);
    block_oracle::fill(round, values.data());
    std::vector<std::byte> expected(Codec::block_bytes);
    expected_block<Codec>(values.data(), expected.data());
    REQUIRE(encoded<Codec>(values) == expected);
  }
}

TEST_CASE("q8_0 decodes to number times scale") {
  for (const std::uint16_t scale : {std::uint16_t{0x3c00}, std::uint16_t{0x0001}, std::uint16_t{0x9234}}) {
    for (int first = 0; first < 256; first += 32) {
      std::vector<std::byte> block(34);
      std::memcpy(block.data(), &scale, 2);
      for (int i = 0; i < 32; ++i) block[static_cast<std::size_t>(2 + i)] = static_cast<std::byte>(first + i);
      const auto values = decoded<Q8_0Codec>(block);
      for (int i = 0; i < 32; ++i) {
        const int number = first + i < 128 ? first + i : first + i - 256;
        const double expected = number * float_oracle::kFloat16.value(scale);
        CHECK(static_cast<double>(values[static_cast<std::size_t>(i)]) == expected);
      }
    }
  }
}

TEST_CASE("q4_0 decodes low halves first, then high ones, 8 standing for 0") {
  const std::uint16_t scale = 0x3800;  // 0.5
  std::vector<std::byte> block(18);
  std::memcpy(block.data(), &scale, 2);
  for (int i = 0; i < 16; ++i) block[static_cast<std::size_t>(2 + i)] = static_cast<std::byte>(i + 16 * (15 - i));
  const auto values = decoded<Q4_0Codec>(block);
  for (int i = 0; i < 16; ++i) {
    CHECK(values[static_cast<std::size_t>(i)] == static_cast<float>(i - 8) * 0.5f);
    CHECK(values[static_cast<std::size_t>(i + 16)] == static_cast<float>(7 - i) * 0.5f);
  }
}

TEST_CASE_TEMPLATE("values come back within a step of the scale, and their bytes after that", Codec, Q8_0Codec,
                   Q4_0Codec) {
  const unsigned seed = 85;
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 500; ++round) {
    std::vector<float> values(128);
    for (float& value : values) value = std::ldexp(static_cast<float>(random()) / 4294967296.0f - 0.4f, round % 12);
    const auto bytes = encoded<Codec>(values);
    const auto back = decoded<Codec>(bytes);
    for (std::size_t block = 0; block < 4; ++block) {
      const std::vector<std::byte> one(bytes.begin() + static_cast<std::ptrdiff_t>(block) * Codec::block_bytes,
                                       bytes.begin() + static_cast<std::ptrdiff_t>(block + 1) * Codec::block_bytes);
      // Half a step; q4_0 has numbers to 7 on the side that its extreme is not on, a whole step there; and the scale
      // is rounded to 11 bits.
      const float step = std::abs(scale_of<Codec>(one)) * (std::is_same_v<Codec, Q8_0Codec> ? 0.57f : 1.01f);
      for (std::size_t i = 32 * block; i < 32 * (block + 1); ++i) CHECK(std::abs(back[i] - values[i]) <= step);
    }
    CHECK(encoded<Codec>(back) == bytes);
  }
}

TEST_CASE_TEMPLATE("a block of zeros decodes to zeros, and one too small for its scale as well", Codec, Q8_0Codec,
                   Q4_0Codec) {
  for (const float value : {0.0f, -0.0f, 1e-30f, -1e-37f, 1e-40f, std::numeric_limits<float>::denorm_min()}) {
    CAPTURE(value);
    for (const float back : decoded<Codec>(encoded<Codec>(std::vector<float>(32, value)))) CHECK(back == 0.0f);
  }
}

TEST_CASE_TEMPLATE("a NaN makes its block NaN and leaves the others", Codec, Q8_0Codec, Q4_0Codec) {
  for (std::size_t at = 0; at < 32; ++at) {
    std::vector<float> values(96, 1.5f);
    values[32 + at] = std::numeric_limits<float>::quiet_NaN();
    values[32 + (at + 5) % 32] = std::numeric_limits<float>::infinity();
    const auto back = decoded<Codec>(encoded<Codec>(values));
    for (std::size_t i = 0; i < 96; ++i) CHECK(std::isnan(back[i]) == (i >= 32 && i < 64));
  }
}

TEST_CASE_TEMPLATE("an infinity makes the scale infinite", Codec, Q8_0Codec, Q4_0Codec) {
  for (const float value : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> values(32, 2.0f);
    values[7] = value;
    CHECK(std::isinf(scale_of<Codec>(encoded<Codec>(values))));
  }
}

TEST_CASE_TEMPLATE("runs of blocks at any address stay within their bytes", Codec, Q8_0Codec, Q4_0Codec) {
  for (std::size_t misaligned = 0; misaligned < 5; ++misaligned) {
    for (std::int64_t count = 0; count <= 160; count += 32) {
      CAPTURE(misaligned);
      CAPTURE(count);
      const auto size = static_cast<std::size_t>(bytes_of<Codec>(count));
      std::vector<std::byte> bytes(misaligned + size + 4, std::byte{0xaa});
      std::vector<float> values(static_cast<std::size_t>(count));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 70.0f;
      Codec::encode(values.data(), bytes.data() + misaligned, count);
      const std::vector<std::byte> inner(bytes.begin() + static_cast<std::ptrdiff_t>(misaligned), bytes.end() - 4);
      CHECK(inner == encoded<Codec>(values));
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        if (i < misaligned || i >= misaligned + size) CHECK(bytes[i] == std::byte{0xaa});
      }
      std::vector<float> back(values.size() + 1, -1.0f);
      Codec::decode(bytes.data() + misaligned, back.data(), count);
      CHECK(back.back() == -1.0f);
      back.pop_back();
      CHECK(back == decoded<Codec>(inner));
    }
  }
}
