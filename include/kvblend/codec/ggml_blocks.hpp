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
#include <kvblend/codec/ggml_each.hpp>
#include <kvblend/codec/lanes.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

inline constexpr std::int32_t kBlockLanes = kGgmlBlockValues / kLanes;  // that hold a block

// The same bits, of which the compiler knows nothing.
[[nodiscard]] inline std::uint32_t unknown_to_compiler(std::uint32_t bits) {
  __asm__("" : "+r"(bits));
  return bits;
}

// Bits of the largest magnitude among a block's values; NaNs are above infinity.
[[nodiscard]] inline std::int32_t largest_bits(const FloatLanes* values) {
  Int32Lanes largest = __builtin_bit_cast(Int32Lanes, values[0]) & 0x7fffffff;
  for (std::int32_t j = 1; j < kBlockLanes; ++j) {
    const Int32Lanes bits = __builtin_bit_cast(Int32Lanes, values[j]) & 0x7fffffff;
    largest = largest < bits ? bits : largest;
  }
  return largest_lane(largest);
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

// lanes * factor, and nothing that is done to the product is fused with it.
inline void multiply(const FloatLanes& lanes, float factor, FloatLanes& product) {
#if defined(__x86_64__) && KVBLEND_VECTOR_FORMULAS
  product = lanes * factor;
  __asm__("" : "+x"(product));
#else
  product = __builtin_bit_cast(FloatLanes, __builtin_bit_cast(UInt32Lanes, lanes * factor) ^ unknown_to_compiler(0));
#endif
}

inline void put_q8_0_numbers(const FloatLanes* values, float factor, std::byte* numbers) {
  for (std::int32_t j = 0; j < kBlockLanes; ++j) {
    FloatLanes product;
    multiply(values[j], factor, product);
    const auto sign = __builtin_bit_cast(UInt32Lanes, product) & 0x80000000u;
    const FloatLanes sum = product + __builtin_bit_cast(FloatLanes, sign | kAlmostHalf);
    UInt8Lanes bytes;
    narrow(__builtin_convertvector(sum, Int32Lanes), bytes);
    write_lanes(bytes, numbers + j * kLanes);
  }
}

inline void put_q4_0_numbers(const FloatLanes* values, float factor, std::byte* numbers) {
  for (std::int32_t j = 0; j < kBlockLanes / 2; ++j) {
    FloatLanes low_product;
    FloatLanes high_product;
    multiply(values[j], factor, low_product);
    multiply(values[j + kBlockLanes / 2], factor, high_product);
    const auto low = __builtin_convertvector(low_product + 8.5f, Int32Lanes);
    const auto high = __builtin_convertvector(high_product + 8.5f, Int32Lanes);
    UInt8Lanes bytes;
    narrow((low < 15 ? low : 15) | ((high < 15 ? high : 15) << 4), bytes);
    write_lanes(bytes, numbers + j * kLanes);
  }
}

inline void get_q8_0_values(const std::byte* numbers, float scale, FloatLanes* values) {
  for (std::int32_t j = 0; j < kBlockLanes; ++j) {
    UInt8Lanes bytes;
    read_lanes(numbers + j * kLanes, bytes);
    Int32Lanes wide;
    widen_signed(bytes, wide);
    values[j] = __builtin_convertvector(wide, FloatLanes) * scale;
  }
}

inline void get_q4_0_values(const std::byte* numbers, float scale, FloatLanes* values) {
  for (std::int32_t j = 0; j < kBlockLanes / 2; ++j) {
    UInt8Lanes bytes;
    read_lanes(numbers + j * kLanes, bytes);
    Int32Lanes wide;
    widen(bytes, wide);
    values[j] = __builtin_convertvector((wide & 15) - 8, FloatLanes) * scale;
    values[j + kBlockLanes / 2] = __builtin_convertvector((wide >> 4) - 8, FloatLanes) * scale;
  }
}

inline void encode_q8_0(const FloatLanes* values, std::byte* block) {
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

inline void encode_q4_0(const FloatLanes* lanes, std::byte* block) {
  std::byte* numbers = block + sizeof(Float16);
  float values[kGgmlBlockValues];
  std::memcpy(values, lanes, sizeof values);
  const std::int32_t largest = largest_bits(lanes);
  const float extreme = largest == 0 ? 0.0f : first_of_magnitude(values, largest);
  const float scale = as_computed(as_computed(extreme) * -0.125f);  // -0 for a block of zeros
  const float factor = as_computed(1.0f / scale);
  if (largest <= kInfinityBits && is_usable_factor(factor)) {
    put_scale(float16_of(scale), block);
    put_q4_0_numbers(lanes, factor, numbers);
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

// `count` values, block by block.
template <LaneBlockCodec C>
KVBLEND_HOST_DEVICE void decode_blocks([[maybe_unused]] const C& codec, const std::byte* source, float* values,
                                       std::int64_t count) {
  for (std::int64_t at = 0; at < count; at += C::block_values, source += C::block_bytes) {
#if KVBLEND_ON_DEVICE
    decode_block_each(typename C::Block{}, source, values + at);
#else
    FloatLanes lanes[std::size_t{C::block_values / kLanes}];
    codec.load_block(source, lanes);
    write_lanes(lanes, values + at);
#endif
  }
}
template <LaneBlockCodec C>
KVBLEND_HOST_DEVICE void encode_blocks([[maybe_unused]] const C& codec, const float* values, std::byte* destination,
                                       std::int64_t count) {
  for (std::int64_t at = 0; at < count; at += C::block_values, destination += C::block_bytes) {
#if KVBLEND_ON_DEVICE
    encode_block_each(typename C::Block{}, values + at, destination);
#else
    FloatLanes lanes[std::size_t{C::block_values / kLanes}];
    read_lanes(values + at, lanes);
    codec.store_block(lanes, destination);
#endif
  }
}

}  // namespace detail

// Runs are multiples of 32 values.
struct Q8_0Codec {
  using Block = detail::Q8_0Block;
  static constexpr DType dtype = DType::q8_0;
  static constexpr std::int32_t block_values = kGgmlBlockValues;
  static constexpr std::int32_t block_bytes = 34;

  KVBLEND_HOST_DEVICE static void decode(const std::byte* source, float* values, std::int64_t count) {
    detail::decode_blocks(Q8_0Codec{}, source, values, count);
  }
  KVBLEND_HOST_DEVICE static void encode(const float* values, std::byte* destination, std::int64_t count) {
    detail::encode_blocks(Q8_0Codec{}, values, destination, count);
  }
  static void load_block(const std::byte* source, FloatLanes* lanes) {
    detail::get_q8_0_values(source + sizeof(Float16), detail::scale_of_block(source), lanes);
  }
  static void store_block(const FloatLanes* lanes, std::byte* destination) { detail::encode_q8_0(lanes, destination); }
};

struct Q4_0Codec {
  using Block = detail::Q4_0Block;
  static constexpr DType dtype = DType::q4_0;
  static constexpr std::int32_t block_values = kGgmlBlockValues;
  static constexpr std::int32_t block_bytes = 18;

  KVBLEND_HOST_DEVICE static void decode(const std::byte* source, float* values, std::int64_t count) {
    detail::decode_blocks(Q4_0Codec{}, source, values, count);
  }
  KVBLEND_HOST_DEVICE static void encode(const float* values, std::byte* destination, std::int64_t count) {
    detail::encode_blocks(Q4_0Codec{}, values, destination, count);
  }
  static void load_block(const std::byte* source, FloatLanes* lanes) {
    detail::get_q4_0_values(source + sizeof(Float16), detail::scale_of_block(source), lanes);
  }
  static void store_block(const FloatLanes* lanes, std::byte* destination) { detail::encode_q4_0(lanes, destination); }
};

static_assert(LaneBlockCodec<Q8_0Codec> && LaneBlockCodec<Q4_0Codec>);

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
