// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Compiled with -ffast-math, under a namespace of its own so that no other object file's code stands in: conversions
// must give the same bits in engines built that way.
#define KVBLEND_ABI_NAMESPACE fast_math_test
#include <kvblend/codec/floats.hpp>

#include <doctest/doctest.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>
#include "float_oracle.hpp"

TEST_CASE("all f16 words survive under fast math") {
  std::vector<std::uint16_t> words;
  for (std::uint32_t word = 0; word < 65536; ++word) words.push_back(static_cast<std::uint16_t>(word));
  std::vector<std::byte> bytes(words.size() * 2);
  std::memcpy(bytes.data(), words.data(), bytes.size());
  std::vector<float> values(words.size());
  kvblend::F16Codec::decode(bytes.data(), values.data(), 65536);
  kvblend::F16Codec::encode(values.data(), bytes.data(), 65536);
  long wrong = 0;
  for (std::size_t i = 0; i < words.size(); ++i) {
    std::uint16_t back = 0;
    std::memcpy(&back, bytes.data() + 2 * i, 2);
    const bool nan = float_oracle::kFloat16.is_nan(words[i]);
    if (back != (words[i] | (nan ? 0x0200 : 0))) ++wrong;
    if (!nan && float_oracle::kFloat16.exponent(words[i]) != 31 &&
        float_oracle::bits_of(values[i]) !=
            float_oracle::bits_of(static_cast<float>(float_oracle::kFloat16.value(words[i])))) {
      ++wrong;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("all bf16 words survive under fast math") {
  long wrong = 0;
  for (std::uint32_t word = 0; word < 65536; ++word) {
    const kvblend::BFloat16 stored{static_cast<std::uint16_t>(word)};
    const std::uint16_t back = kvblend::to_bfloat16(kvblend::to_float(stored)).bits;
    if (back != (word | (float_oracle::kBFloat16.is_nan(stored.bits) ? 0x0040u : 0u))) ++wrong;
  }
  CHECK(wrong == 0);
}
