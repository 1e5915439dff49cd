// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the threads of a device do with runs of values, here on the CPU: the same bits as the lanes of the CPU's own
// code, at any alignment, and nothing written beside the run.
#include <kvblend/codec/each.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/core/copy.hpp>

#include <doctest/doctest.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>
#include "block_oracle.hpp"
#include "float_oracle.hpp"

using namespace kvblend;
using float_oracle::bits_of;

namespace {

constexpr std::byte kUntouched{0xa5};

// Memory that starts `skew` bytes past a multiple of 64.
struct Skewed {
  std::vector<std::byte> memory;
  std::byte* at;

  Skewed(std::size_t bytes, std::size_t skew, std::byte beside = kUntouched) : memory(bytes + 192, beside) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    at = memory.data() + (128 - address % 64) + skew;
  }
  [[nodiscard]] bool untouched_beside(std::size_t bytes) const {
    for (const std::byte* p = memory.data(); p < memory.data() + memory.size(); ++p) {
      if ((p < at || p >= at + bytes) && *p != kUntouched) return false;
    }
    return true;
  }
};

std::vector<float> random_numbers(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    do {
      value = float_oracle::float_of(static_cast<std::uint32_t>(random()));
    } while ((bits_of(value) & 0x7f800000u) == 0x7f800000u);
  }
  return values;
}

template <class Codec, class Word, class FromFloat, class ToFloat>
struct Format {
  using codec = Codec;
  using word = Word;
  using from_float = FromFloat;
  using to_float = ToFloat;
};
using F32 = Format<F32Codec, float, detail::Unchanged, detail::Unchanged>;
using F16 = Format<F16Codec, Float16, detail::ToFloat16, detail::ToFloat>;
using Bf16 = Format<Bf16Codec, BFloat16, detail::ToBFloat16, detail::ToFloat>;
using E4M3 = Format<Fp8E4M3Codec, std::uint8_t, detail::ToFp8<detail::E4M3Format>, detail::FromFp8<detail::E4M3Format>>;
using E5M2 = Format<Fp8E5M2Codec, std::uint8_t, detail::ToFp8<detail::E5M2Format>, detail::FromFp8<detail::E5M2Format>>;

template <class Codec>
std::vector<std::byte> oracle_block(const float* values) {
  std::vector<std::byte> block(Codec::block_bytes);
  if constexpr (std::is_same_v<Codec, Q8_0Codec>) {
    block_oracle::q8_0(values, block.data());
  } else {
    block_oracle::q4_0(values, block.data());
  }
  return block;
}

}  // namespace

TEST_CASE_TEMPLATE("runs one by one have the bits of runs in lanes", F, F32, F16, Bf16, E4M3, E5M2) {
  using Codec = typename F::codec;
  for (const std::size_t skew : {0u, 1u, 2u, 4u, 16u, 31u}) {
    for (std::int64_t count = 0; count <= 67; ++count) {
      CAPTURE(skew);
      CAPTURE(count);
      const auto values = random_numbers(static_cast<std::size_t>(count), static_cast<unsigned>(count));
      const auto bytes = static_cast<std::size_t>(bytes_of<Codec>(count));
      std::vector<std::byte> expected(bytes);
      Codec::encode(values.data(), expected.data(), count);
      const Skewed stored(bytes, skew);
      detail::encode_each(values.data(), stored.at, count, typename F::from_float{});
      REQUIRE(std::vector<std::byte>(stored.at, stored.at + bytes) == expected);
      REQUIRE(stored.untouched_beside(bytes));

      std::vector<float> wanted(static_cast<std::size_t>(count)), got(static_cast<std::size_t>(count) + 1, -1.5f);
      Codec::decode(stored.at, wanted.data(), count);
      detail::decode_each<typename F::word>(stored.at, got.data(), count, typename F::to_float{});
      for (std::size_t i = 0; i < wanted.size(); ++i) REQUIRE(bits_of(got[i]) == bits_of(wanted[i]));
      REQUIRE(bits_of(got.back()) == bits_of(-1.5f));
    }
  }
}

TEST_CASE_TEMPLATE("blocks one by one have the bits that the description gives", Codec, Q8_0Codec, Q4_0Codec) {
  using Block = typename Codec::Block;
  for (unsigned round = 0; round < 20000; ++round) {
    CAPTURE(round);
    float values[32];
    block_oracle::fill(round, values);
    const auto expected = oracle_block<Codec>(values);
    const Skewed stored(expected.size(), round % 5);
    detail::encode_block_each(Block{}, values, stored.at);
    REQUIRE(std::vector<std::byte>(stored.at, stored.at + expected.size()) == expected);
    REQUIRE(stored.untouched_beside(expected.size()));
    float wanted[32], got[32];
    Codec::decode(stored.at, wanted, 32);
    detail::decode_block_each(Block{}, stored.at, got);
    REQUIRE(std::memcmp(got, wanted, sizeof got) == 0);
  }
}

TEST_CASE_TEMPLATE("blocks one by one take NaN and infinity and zeros as those in lanes do", Codec, Q8_0Codec,
                   Q4_0Codec) {
  const std::uint32_t special[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u, 0x80000000u, 1u, 0x7f7fffffu};
  for (const std::uint32_t bits : special) {
    for (int at = 0; at < 32; at += 5) {
      for (const float beside : {0.0f, -0.0f, 1.0f, -3e38f}) {
        CAPTURE(bits);
        CAPTURE(at);
        CAPTURE(beside);
        float values[32];
        for (float& value : values) value = beside;
        values[at] = float_oracle::float_of(bits);
        std::byte wanted[Codec::block_bytes], got[Codec::block_bytes];
        Codec::encode(values, wanted, 32);
        detail::encode_block_each(typename Codec::Block{}, values, got);
        REQUIRE(std::memcmp(got, wanted, sizeof got) == 0);
      }
    }
  }
}

TEST_CASE("copies by alignment copy what is asked for and nothing beside") {
  for (std::size_t from_skew = 0; from_skew < 17; ++from_skew) {
    for (std::size_t to_skew = 0; to_skew < 17; ++to_skew) {
      for (std::size_t bytes = 0; bytes <= 66; ++bytes) {
        CAPTURE(from_skew);
        CAPTURE(to_skew);
        CAPTURE(bytes);
        const Skewed from(bytes, from_skew, std::byte{0x5a}), to(bytes, to_skew);
        for (std::size_t i = 0; i < bytes; ++i) from.at[i] = static_cast<std::byte>(i + 1);
        detail::copy_by_alignment(detail::address(from.at) | detail::address(to.at), from.at, to.at,
                                  static_cast<std::int64_t>(bytes));
        REQUIRE((bytes == 0 || std::memcmp(from.at, to.at, bytes) == 0));
        REQUIRE(to.untouched_beside(bytes));
      }
      const Skewed from(34, from_skew, std::byte{0x5a}), to(34, to_skew);
      for (std::size_t i = 0; i < 34; ++i) from.at[i] = static_cast<std::byte>(i + 1);
      detail::copy_few<34>(detail::address(from.at) | detail::address(to.at), from.at, to.at);
      REQUIRE(std::memcmp(from.at, to.at, 34) == 0);
      REQUIRE(to.untouched_beside(34));
    }
  }
}
