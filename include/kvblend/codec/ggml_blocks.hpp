// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The codecs of ggml's blocks of 32 values: q8_0 (a Float16 scale d, then 32 signed bytes q; value = q * d) and q4_0
// (d, then 16 bytes: value j has the low half of byte j, value j + 16 its high half; value = (q - 8) * d).
//
// Encoding gives the bits of ggml's reference quantiser (ggml/src/ggml-quants.c, quantize_row_q8_0_ref and
// quantize_row_q4_0_ref: no fused multiply-add, halves away from zero), whatever flags this is compiled with. llama.cpp
// writes its cache (ggml_set_rows, ggml_cpy) with the CPU back end's from_float: for q4_0 that is the reference
// everywhere; for q8_0 it is on machines without vectors, while the AVX code (ggml/src/ggml-cpu/arch/x86/quants.c)
// multiplies by 127 / max in place of 1 / d and takes halves to even, the NEON code does the latter: its q differs by 1
// where a value lies halfway or next to it, a few in a million. d is the same, and so is the meaning of every bit.
//
// ggml converts infinities and NaNs to integers, which C++ leaves open. Here a block with a NaN becomes all NaN, and
// one with an infinity gets an infinite d.
// A block that was encoded, decoded and encoded again has the same bits, unless d as a Float16 is 0 or infinite:
// largest magnitude below 4e-6 (q8_0) or 2e-7 (q4_0), from 8.3e6 or 5.2e5 on.
#pragma once

#include <kvblend/codec/byte_lanes.hpp>
#include <kvblend/codec/codec.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/lanes.hpp>
#include <kvblend/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

inline constexpr std::int32_t kGgmlBlockValues = 32;

namespace detail {

// The same float, of which the compiler knows nothing: what it came from is not fused with or folded into what is done
// to it, whatever the flags allow. Not even that it is the same each time (volatile): a divisor that is would have its
// reciprocal taken once for all.
[[nodiscard]] inline float as_computed(float value) {
  auto bits = __builtin_bit_cast(std::uint32_t, value);
  __asm__ volatile("" : "+r"(bits));
  return __builtin_bit_cast(float, bits);
}
[[nodiscard]] inline std::uint32_t unknown_to_compiler(std::uint32_t bits) {
  __asm__("" : "+r"(bits));
  return bits;
}

[[nodiscard]] KVBLEND_HOST_DEVICE constexpr std::int32_t magnitude_bits(float value) {
  return static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, value) & 0x7fffffffu);
}

// Bits of the largest magnitude among a block's values; NaNs are above infinity.
[[nodiscard]] inline std::int32_t largest_bits(const float* values) {
  Int32Lanes largest{};
  for (std::int32_t j = 0; j < kGgmlBlockValues; j += kLanes) {
    Int32Lanes bits;
    read_lanes(values + j, bits);
    bits &= 0x7fffffff;
    largest = largest < bits ? bits : largest;
  }
  std::int32_t most[std::size_t{kLanes}];
  write_lanes(largest, most);
  for (std::int32_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::int32_t j = 0; j < width; ++j) most[j] = most[j] < most[j + width] ? most[j + width] : most[j];
  }
  return most[0];
}

// The first of the values with that magnitude, as ggml takes it.
[[nodiscard]] inline float first_of_magnitude(const float* values, std::int32_t magnitude) {
  std::int32_t first = kGgmlBlockValues - 1;
  for (std::int32_t j = 0; j < kGgmlBlockValues; ++j) {
    const std::int32_t candidate = magnitude_bits(values[j]) == magnitude ? j : kGgmlBlockValues - 1;
    first = candidate < first ? candidate : first;
  }
  return values[first];
}

inline void put_scale(Float16 scale, std::byte* block) { std::memcpy(block, &scale.bits, sizeof scale.bits); }
[[nodiscard]] inline float scale_of_block(const std::byte* block) {
  Float16 scale{};
  std::memcpy(&scale.bits, block, sizeof scale.bits);
  return float_of(scale);
}

inline constexpr Float16 kFloat16NaN{0x7e00};
inline constexpr std::int32_t kInfinityBits = 0x7f800000;

[[nodiscard]] inline bool is_usable_factor(float factor) {
  const std::int32_t magnitude = magnitude_bits(factor);
  return magnitude != 0 && magnitude < kInfinityBits;
}

// lanes * factor, and nothing that is done to the product is fused with it.
inline void multiply(const float* values, float factor, FloatLanes& product) {
  FloatLanes lanes;
  read_lanes(values, lanes);
  product = __builtin_bit_cast(FloatLanes, __builtin_bit_cast(UInt32Lanes, lanes * factor) ^ unknown_to_compiler(0));
}

inline void put_q8_0_numbers(const float* values, float factor, std::byte* numbers) {
  for (std::int32_t j = 0; j < kGgmlBlockValues; j += kLanes) {
    FloatLanes product;
    multiply(values + j, factor, product);
    const auto bits = __builtin_bit_cast(Int32Lanes, product);
    // Halves away from zero: the largest float below 0.5 carries them, and no value below a half.
    const FloatLanes sum = __builtin_bit_cast(FloatLanes, bits & 0x7fffffff) + 0x1.fffffep-2f;
    const auto magnitude = __builtin_convertvector(sum, Int32Lanes);
    const Int32Lanes sign = bits >> 31;
    UInt8Lanes bytes;
    narrow((magnitude ^ sign) - sign, bytes);
    write_lanes(bytes, numbers + j);
  }
}

inline void put_q4_0_numbers(const float* values, float factor, std::byte* numbers) {
  constexpr std::int32_t kHalf = kGgmlBlockValues / 2;
  for (std::int32_t j = 0; j < kHalf; j += kLanes) {
    FloatLanes low_product;
    FloatLanes high_product;
    multiply(values + j, factor, low_product);
    multiply(values + kHalf + j, factor, high_product);
    const auto low = __builtin_convertvector(low_product + 8.5f, Int32Lanes);
    const auto high = __builtin_convertvector(high_product + 8.5f, Int32Lanes);
    UInt8Lanes bytes;
    narrow((low < 15 ? low : 15) | ((high < 15 ? high : 15) << 4), bytes);
    write_lanes(bytes, numbers + j);
  }
}

inline void get_q8_0_values(const std::byte* numbers, float scale, float* values) {
  for (std::int32_t j = 0; j < kGgmlBlockValues; j += kLanes) {
    UInt8Lanes bytes;
    read_lanes(numbers + j, bytes);
    Int32Lanes wide;
#if KVBLEND_X86_LANES == 16  // one instruction that g++ makes five of
    wide = __builtin_bit_cast(Int32Lanes, _mm512_cvtepi8_epi32(__builtin_bit_cast(__m128i, bytes)));
#else
    widen(bytes, wide);
    wide = (wide ^ 0x80) - 0x80;
#endif
    const FloatLanes scaled = __builtin_convertvector(wide, FloatLanes) * scale;
    write_lanes(scaled, values + j);
  }
}

inline void get_q4_0_values(const std::byte* numbers, float scale, float* values) {
  constexpr std::int32_t kHalf = kGgmlBlockValues / 2;
  for (std::int32_t j = 0; j < kHalf; j += kLanes) {
    UInt8Lanes bytes;
    read_lanes(numbers + j, bytes);
    Int32Lanes wide;
    widen(bytes, wide);
    const FloatLanes low = __builtin_convertvector((wide & 15) - 8, FloatLanes) * scale;
    const FloatLanes high = __builtin_convertvector((wide >> 4) - 8, FloatLanes) * scale;
    write_lanes(low, values + j);
    write_lanes(high, values + kHalf + j);
  }
}

inline void encode_q8_0(const float* values, std::byte* block) {
  std::byte* numbers = block + sizeof(Float16);
  const std::int32_t largest = largest_bits(values);
  const float scale = as_computed(__builtin_bit_cast(float, largest) / as_computed(127.0f));
  const float factor = as_computed(1.0f / scale);
  if (largest <= kInfinityBits && is_usable_factor(factor)) {
    put_scale(float16_of(scale), block);
    put_q8_0_numbers(values, factor, numbers);
    return;
  }
  put_scale(largest > kInfinityBits ? kFloat16NaN : float16_of(scale), block);
  std::memset(numbers, 0, kGgmlBlockValues);
}

inline void encode_q4_0(const float* values, std::byte* block) {
  std::byte* numbers = block + sizeof(Float16);
  const std::int32_t largest = largest_bits(values);
  const float extreme = largest == 0 ? 0.0f : first_of_magnitude(values, largest);
  const float scale = as_computed(as_computed(extreme) * -0.125f);  // -0 for a block of zeros
  const float factor = as_computed(1.0f / scale);
  if (largest <= kInfinityBits && is_usable_factor(factor)) {
    put_scale(float16_of(scale), block);
    put_q4_0_numbers(values, factor, numbers);
    return;
  }
  put_scale(largest > kInfinityBits ? kFloat16NaN : float16_of(scale), block);
  for (int j = 0; j < kGgmlBlockValues / 2; ++j) {
    // An infinite value is the extreme, number 0; all others are nothing beside it. Without one, all values are 0.
    const bool low = magnitude_bits(values[j]) == kInfinityBits;
    const bool high = magnitude_bits(values[j + kGgmlBlockValues / 2]) == kInfinityBits;
    numbers[j] = static_cast<std::byte>((low ? 0 : 8) | (high ? 0 : 8 << 4));
  }
}

}  // namespace detail

// Runs are multiples of 32 values.
struct Q8_0Codec {
  static constexpr DType dtype = DType::q8_0;
  static constexpr std::int32_t block_values = kGgmlBlockValues;
  static constexpr std::int32_t block_bytes = 34;

  static void decode(const std::byte* source, float* values, std::int64_t count) {
    for (std::int64_t done = 0; done < count; done += block_values, source += block_bytes) {
      detail::get_q8_0_values(source + sizeof(Float16), detail::scale_of_block(source), values + done);
    }
  }
  static void encode(const float* values, std::byte* destination, std::int64_t count) {
    for (std::int64_t done = 0; done < count; done += block_values, destination += block_bytes) {
      detail::encode_q8_0(values + done, destination);
    }
  }
};

struct Q4_0Codec {
  static constexpr DType dtype = DType::q4_0;
  static constexpr std::int32_t block_values = kGgmlBlockValues;
  static constexpr std::int32_t block_bytes = 18;

  static void decode(const std::byte* source, float* values, std::int64_t count) {
    for (std::int64_t done = 0; done < count; done += block_values, source += block_bytes) {
      detail::get_q4_0_values(source + sizeof(Float16), detail::scale_of_block(source), values + done);
    }
  }
  static void encode(const float* values, std::byte* destination, std::int64_t count) {
    for (std::int64_t done = 0; done < count; done += block_values, destination += block_bytes) {
      detail::encode_q4_0(values + done, destination);
    }
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
