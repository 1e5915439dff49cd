// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ggml's blocks of 32 values by single numbers, as a thread of a device turns them, with the bits that the lanes of
// ggml_blocks.hpp give.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/copy.hpp>
#include <kvblend/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

inline constexpr std::int32_t kGgmlBlockValues = 32;

namespace detail {

struct Q8_0Block {
  Float16 scale;
  std::int8_t numbers[kGgmlBlockValues];
};
struct Q4_0Block {
  Float16 scale;
  std::uint8_t numbers[kGgmlBlockValues / 2];
};
static_assert(sizeof(Q8_0Block) == 34 && sizeof(Q4_0Block) == 18);

[[nodiscard]] KVBLEND_HOST_DEVICE constexpr std::int32_t magnitude_bits(float value) {
  return static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, value) & 0x7fffffffu);
}

inline constexpr Float16 kFloat16NaN{0x7e00};
inline constexpr std::int32_t kInfinityBits = 0x7f800000;

[[nodiscard]] KVBLEND_HOST_DEVICE inline bool is_usable_factor(float factor) {
  const std::int32_t magnitude = magnitude_bits(factor);
  return magnitude != 0 && magnitude < kInfinityBits;
}

// Added before a truncation it carries halves away from zero, and no value below a half: the largest float below 0.5.
inline constexpr std::uint32_t kAlmostHalf = 0x3effffffu;

// Bits of the largest magnitude among a block's values; NaNs are above infinity.
[[nodiscard]] KVBLEND_HOST_DEVICE inline std::int32_t largest_bits_each(const float* values) {
  std::int32_t largest = 0;
  KVBLEND_UNROLL
  for (int j = 0; j < kGgmlBlockValues; ++j) largest = larger(largest, magnitude_bits(values[j]));
  return largest;
}

[[nodiscard]] KVBLEND_HOST_DEVICE inline std::int32_t q4_0_number(float value, float factor) {
  const float sum = rounded_sum(rounded_product(value, factor), 8.5f);
  return smaller(static_cast<std::int32_t>(sum), std::int32_t{15});
}
// Where the extreme is infinite it has number 0, and all others are nothing beside it. Where all are 0, so are these.
[[nodiscard]] KVBLEND_HOST_DEVICE inline std::int32_t q4_0_beside_infinity(float value) {
  return magnitude_bits(value) == kInfinityBits ? 0 : 8;
}

// One block by single numbers, as a thread of a device turns it, with the bits that lanes give.
KVBLEND_HOST_DEVICE inline void decode_block_each(Q8_0Block, const std::byte* block, float* values) {
  alignas(16) Q8_0Block stored;
  read_bytes<sizeof(stored)>(block, &stored);
  const float scale = float_of(stored.scale);
  KVBLEND_UNROLL
  for (int j = 0; j < kGgmlBlockValues; ++j) values[j] = static_cast<float>(stored.numbers[j]) * scale;
}
KVBLEND_HOST_DEVICE inline void decode_block_each(Q4_0Block, const std::byte* block, float* values) {
  alignas(16) Q4_0Block stored;
  read_bytes<sizeof(stored)>(block, &stored);
  const float scale = float_of(stored.scale);
  KVBLEND_UNROLL
  for (int j = 0; j < kGgmlBlockValues / 2; ++j) {
    values[j] = static_cast<float>((stored.numbers[j] & 15) - 8) * scale;
    values[j + kGgmlBlockValues / 2] = static_cast<float>((stored.numbers[j] >> 4) - 8) * scale;
  }
}

KVBLEND_HOST_DEVICE inline void encode_block_each(Q8_0Block, const float* values, std::byte* block) {
  alignas(16) Q8_0Block stored{};
  const std::int32_t largest = largest_bits_each(values);
  const float scale = rounded_quotient(__builtin_bit_cast(float, largest), 127.0f);
  const float factor = rounded_quotient(1.0f, scale);
  stored.scale = largest > kInfinityBits ? kFloat16NaN : float16_of(scale);
  if (largest <= kInfinityBits && is_usable_factor(factor)) {
    KVBLEND_UNROLL
    for (int j = 0; j < kGgmlBlockValues; ++j) {
      const float product = rounded_product(values[j], factor);
      const std::uint32_t sign = __builtin_bit_cast(std::uint32_t, product) & 0x80000000u;
      const float sum = rounded_sum(product, __builtin_bit_cast(float, sign | kAlmostHalf));
      stored.numbers[j] = static_cast<std::int8_t>(static_cast<std::int32_t>(sum));
    }
  }
  write_bytes<sizeof(stored)>(&stored, block);
}
KVBLEND_HOST_DEVICE inline void encode_block_each(Q4_0Block, const float* values, std::byte* block) {
  alignas(16) Q4_0Block stored{};
  constexpr int kHalf = kGgmlBlockValues / 2;
  const std::int32_t largest = largest_bits_each(values);
  float extreme = 0;  // the first value of that magnitude; 0 for a block of zeros, whatever their signs
  KVBLEND_UNROLL
  for (int j = kGgmlBlockValues - 1; j >= 0; --j) {
    if (largest != 0 && magnitude_bits(values[j]) == largest) extreme = values[j];
  }
  const float scale = rounded_product(extreme, -0.125f);
  const float factor = rounded_quotient(1.0f, scale);
  stored.scale = largest > kInfinityBits ? kFloat16NaN : float16_of(scale);
  const bool usable = largest <= kInfinityBits && is_usable_factor(factor);
  KVBLEND_UNROLL
  for (int j = 0; j < kHalf; ++j) {
    const std::int32_t low = usable ? q4_0_number(values[j], factor) : q4_0_beside_infinity(values[j]);
    const std::int32_t high = usable ? q4_0_number(values[j + kHalf], factor) : q4_0_beside_infinity(values[j + kHalf]);
    stored.numbers[j] = static_cast<std::uint8_t>(low | high << 4);
  }
  write_bytes<sizeof(stored)>(&stored, block);
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
