// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The codecs of plain floats: f32, f16, bf16, and the way from a DType known at run time to one of them. Conversions are
// integer operations and one exact addition, free of branches, so that compilers vectorise them for any target.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

// value < limit ? yes : no, for non-negative value and limit, without a branch that compilers could put back.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr std::int32_t select_below(std::int32_t value, std::int32_t limit,
                                                                      std::int32_t yes, std::int32_t no) {
  const std::int32_t mask = (value - limit) >> 31;
  return (yes & mask) | (no & ~mask);
}

}  // namespace detail

// Exact. A NaN keeps its sign and payload.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr float to_float(Float16 value) {
  const auto sign = (std::uint32_t{value.bits} & 0x8000u) << 16;
  const auto magnitude = static_cast<std::int32_t>(value.bits & 0x7fffu);
  const std::int32_t shifted = magnitude << 13;
  // Both exponents are biased: 127 - 15 lifts a finite one, 255 - 31 takes all ones to all ones.
  const std::int32_t large = shifted + detail::select_below(magnitude, 0x7c00, (127 - 15) << 23, (255 - 31) << 23);
  // Subnormals are multiples of 2^-24, the unit of [0.5, 1): put the bits there and subtract the 0.5. No subnormal
  // float takes part, which engines that flush them to zero would lose.
  const float tiny = __builtin_bit_cast(float, magnitude | 0x3f000000) - 0.5f;
  const std::int32_t bits = detail::select_below(magnitude, 0x0400, __builtin_bit_cast(std::int32_t, tiny), large);
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) | sign);
}

// To nearest, ties to even; beyond 65504 by half a unit or more: infinity. A NaN stays one, and becomes quiet.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Float16 to_float16(float value) {
  const auto all = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t sign = (all & 0x80000000u) >> 16;
  const auto magnitude = static_cast<std::int32_t>(all & 0x7fffffffu);
  const std::int32_t normal = (magnitude - ((127 - 15) << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 makes the hardware round at 2^-24.
  const float tiny = __builtin_bit_cast(float, magnitude) + 0.5f;
  const std::int32_t subnormal = __builtin_bit_cast(std::int32_t, tiny) - 0x3f000000;
  const std::int32_t nan = 0x7e00 | ((magnitude >> 13) & 0x03ff);
  const std::int32_t special = detail::select_below(magnitude, 0x7f800001, 0x7c00, nan);
  const std::int32_t finite = detail::select_below(magnitude, 0x38800000, subnormal, normal);  // 2^-14
  const std::int32_t rounded = detail::select_below(magnitude, 0x47800000, finite, special);   // 2^16
  return {static_cast<std::uint16_t>(static_cast<std::uint32_t>(rounded) | sign)};
}

// Exact.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr float to_float(BFloat16 value) {
  return __builtin_bit_cast(float, std::uint32_t{value.bits} << 16);
}

// To nearest, ties to even. A NaN stays one, and becomes quiet.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr BFloat16 to_bfloat16(float value) {
  const auto all = __builtin_bit_cast(std::uint32_t, value);
  const auto magnitude = static_cast<std::int32_t>(all & 0x7fffffffu);
  const auto rounded = static_cast<std::int32_t>((all + 0x7fffu + ((all >> 16) & 1u)) >> 16);
  const auto nan = static_cast<std::int32_t>((all >> 16) | 0x0040u);
  return {static_cast<std::uint16_t>(detail::select_below(magnitude, 0x7f800001, rounded, nan))};
}

namespace detail {

struct ToFloat {
  template <class Stored>
  KVBLEND_HOST_DEVICE constexpr float operator()(Stored value) const {
    return to_float(value);
  }
};
struct ToFloat16 {
  KVBLEND_HOST_DEVICE constexpr Float16 operator()(float value) const { return to_float16(value); }
};
struct ToBFloat16 {
  KVBLEND_HOST_DEVICE constexpr BFloat16 operator()(float value) const { return to_bfloat16(value); }
};

// `count` values From at `source` to as many To at `destination`, both of any alignment. Blocks of a fixed size in
// local arrays are what compilers vectorise at -O2 as well.
template <class From, class To, class Convert>
void convert(const void* source, void* destination, std::int64_t count, Convert convert_one) {
  constexpr std::size_t kBlock = 16;
  const auto* in = static_cast<const std::byte*>(source);
  auto* out = static_cast<std::byte*>(destination);
  const std::size_t size = count > 0 ? static_cast<std::size_t>(count) : 0;
  for (std::size_t blocks = size / kBlock; blocks > 0; --blocks) {
    From from[kBlock];
    To to[kBlock];
    std::memcpy(from, in, sizeof from);
    for (std::size_t j = 0; j < kBlock; ++j) to[j] = convert_one(from[j]);
    std::memcpy(out, to, sizeof to);
    in += sizeof from;
    out += sizeof to;
  }
  const std::size_t rest = size % kBlock;
  for (std::size_t j = 0; j < rest; ++j) {
    From from;
    std::memcpy(&from, in + j * sizeof from, sizeof from);
    const To to = convert_one(from);
    std::memcpy(out + j * sizeof to, &to, sizeof to);
  }
}

}  // namespace detail

struct F32Codec {
  static constexpr DType dtype = DType::f32;
  static constexpr std::int32_t block_values = 1;
  static constexpr std::int32_t block_bytes = 4;

  static void decode(const std::byte* source, float* values, std::int64_t count) {
    if (count > 0) std::memcpy(values, source, static_cast<std::size_t>(count) * sizeof(float));
  }
  static void encode(const float* values, std::byte* destination, std::int64_t count) {
    if (count > 0) std::memcpy(destination, values, static_cast<std::size_t>(count) * sizeof(float));
  }
};

struct F16Codec {
  static constexpr DType dtype = DType::f16;
  static constexpr std::int32_t block_values = 1;
  static constexpr std::int32_t block_bytes = 2;

  static void decode(const std::byte* source, float* values, std::int64_t count) {
    detail::convert<Float16, float>(source, values, count, detail::ToFloat{});
  }
  static void encode(const float* values, std::byte* destination, std::int64_t count) {
    detail::convert<float, Float16>(values, destination, count, detail::ToFloat16{});
  }
};

struct Bf16Codec {
  static constexpr DType dtype = DType::bf16;
  static constexpr std::int32_t block_values = 1;
  static constexpr std::int32_t block_bytes = 2;

  static void decode(const std::byte* source, float* values, std::int64_t count) {
    detail::convert<BFloat16, float>(source, values, count, detail::ToFloat{});
  }
  static void encode(const float* values, std::byte* destination, std::int64_t count) {
    detail::convert<float, BFloat16>(values, destination, count, detail::ToBFloat16{});
  }
};

static_assert(Codec<F32Codec> && Codec<F16Codec> && Codec<Bf16Codec>);

// Calls use(C{}) with the codec of `dtype` and returns what it returns, a Status or a Result. Once per plane, not per
// value: the loops within know their codec at compile time. A dtype that is none of ours is an error.
template <class Use>
[[nodiscard]] auto with_codec(DType dtype, Use&& use) -> decltype(use(F32Codec{})) {
  static_assert(std::convertible_to<Status, decltype(use(F32Codec{}))>, "`use` must return a Status or a Result");
  switch (dtype) {
    case DType::f32: return use(F32Codec{});
    case DType::f16: return use(F16Codec{});
    case DType::bf16: return use(Bf16Codec{});
  }
  return Status::error(StatusCode::unsupported, "no codec for dtype %d", static_cast<int>(dtype)).at("dtype");
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
