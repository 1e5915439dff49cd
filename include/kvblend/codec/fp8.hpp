// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The codecs of 8-bit floats, OCP e4m3 ("fn") and e5m2, without a scale; codec/scaled.hpp puts one to them. As in
// codec/floats.hpp, conversions are integer operations and one float addition, free of branches.
//
// Encoding saturates, as the caches of inference engines do: whatever is beyond the largest number, infinity included,
// becomes the largest number. Only a NaN becomes a NaN.
// Formats: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, section 5.
#pragma once

#include <kvblend/codec/byte_lanes.hpp>
#include <kvblend/codec/codec.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/lanes.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// 8-bit floats by their bits, sign first.
struct Float8E4M3 {  // exponent bias 7; up to 448; no infinity; 0x7f and 0xff are NaN
  std::uint8_t bits;
};
struct Float8E5M2 {  // exponent bias 15; up to 57344; 0x7c is infinity, what follows it NaN
  std::uint8_t bits;
};

namespace detail {

// What tells one 8-bit float from another.
struct E4M3Format {
  static constexpr DType kDType = DType::f8_e4m3;
  static constexpr int kFractionBits = 3;
  static constexpr std::int32_t kBias = 7;
  static constexpr std::int32_t kLargest = 0x7e;           // the word of the largest number; those above are special
  static constexpr std::int32_t kLargestF32 = 0x43e00000;  // 448
  static constexpr float kLargestFloat = 448.0f;
  static constexpr float kSmallestNormal = 0x1p-6f;
};
struct E5M2Format {
  static constexpr DType kDType = DType::f8_e5m2;
  static constexpr int kFractionBits = 2;
  static constexpr std::int32_t kBias = 15;
  static constexpr std::int32_t kLargest = 0x7b;
  static constexpr std::int32_t kLargestF32 = 0x47600000;  // 57344
  static constexpr float kLargestFloat = 57344.0f;
  static constexpr float kSmallestNormal = 0x1p-14f;
};

// For one number or for lanes of them: Int is std::int32_t or Int32Lanes, the low 8 bits of which are the word; Float
// goes with it.

// Exact. Words above the largest number keep their fraction and get the exponent of infinity and NaN.
template <class Format, class Float, class Int>
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Float fp8_to_float(const Int& word) {
  constexpr int kShift = 23 - Format::kFractionBits;
  const Int magnitude = word & 0x7f;
  const Int normal = (magnitude << kShift) + ((127 - Format::kBias) << 23);
  // A subnormal has the smallest normal's exponent and lacks its leading 1: give it one and take that away. Done to a
  // normal number this gives no less than the number itself, so the smaller of the two is right. No subnormal float
  // takes part, which engines that flush them to zero would lose.
  const Float subnormal = __builtin_bit_cast(Float, normal + (1 << 23)) - Format::kSmallestNormal;
  const Int finite = smaller<Int>(normal, __builtin_bit_cast(Int, subnormal));
  const Int bits = magnitude > Format::kLargest ? finite | 0x7f800000 : finite;
  return __builtin_bit_cast(Float, bits | ((word & 0x80) << 24));
}

// To nearest, ties to even, saturating.
template <class Format, class Int, class Float>
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Int float_to_fp8(const Float& value) {
  constexpr int kShift = 23 - Format::kFractionBits;
  constexpr std::int32_t kLeast = (128 - Format::kBias) << 23;  // the smallest normal number
  const Int all = __builtin_bit_cast(Int, value);
  const Int magnitude = all & 0x7fffffff;
  const Int saturated = smaller<Int>(magnitude, Int{} + Format::kLargestF32);
  // The power of two below the value, or below which values are subnormal. Adding the value divided by 2^kShift to it
  // makes the hardware round at the last bit that is kept, and leaves the kept bits, the leading 1 among them, in the
  // sum's lowest. The power's exponent is put on top of them. A word's exponents start at kLeast's: kLess takes that
  // off, in the 8 bits that count.
  constexpr std::int32_t kLess = -(kLeast >> kShift) & 0xff;
  static_assert(kLess % 2 == 0, "kvblend: ties would go to odd words");
  const Int power = (larger<Int>(saturated, Int{} + kLeast) & 0x7f800000) | kLess;
  const Float sum = __builtin_bit_cast(Float, saturated) * (1.0f / (1 << kShift)) + __builtin_bit_cast(Float, power);
  const Int word = __builtin_bit_cast(Int, sum) + (power >> kShift);
  return (magnitude > 0x7f800000 ? Int{} + 0x7f : word) | ((all >> 24) & 0x80);
}

}  // namespace detail

// Exact; a NaN stays one (the codecs may make it quiet).
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr float to_float(Float8E4M3 value) {
  return detail::fp8_to_float<detail::E4M3Format, float>(std::int32_t{value.bits});
}
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr float to_float(Float8E5M2 value) {
  return detail::fp8_to_float<detail::E5M2Format, float>(std::int32_t{value.bits});
}

// To nearest, ties to even; beyond 448 or 57344, infinity included: that number. A NaN stays one.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Float8E4M3 to_float8_e4m3(float value) {
  return {static_cast<std::uint8_t>(detail::float_to_fp8<detail::E4M3Format, std::int32_t>(value))};
}
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Float8E5M2 to_float8_e5m2(float value) {
  return {static_cast<std::uint8_t>(detail::float_to_fp8<detail::E5M2Format, std::int32_t>(value))};
}

namespace detail {

template <class Format>
struct FromFp8 {
  KVBLEND_HOST_DEVICE constexpr float operator()(std::uint8_t word) const {
    return fp8_to_float<Format, float>(std::int32_t{word});
  }
};
template <class Format>
struct ToFp8 {
  KVBLEND_HOST_DEVICE constexpr std::uint8_t operator()(float value) const {
    return static_cast<std::uint8_t>(float_to_fp8<Format, std::int32_t>(value));
  }
};

#if KVBLEND_X86_LANES && KVBLEND_VECTOR_FORMULAS
// fp8_to_float by the hardware's conversion of 16-bit floats, which keeps subnormals in any mode of the CPU, but makes
// NaNs quiet. An e5m2 word is the upper half of a 16-bit float; an e4m3 word has all the bits of one 256 times smaller.
inline void words_to_floats(const UInt8Lanes& words, FloatLanes& lanes, E5M2Format) {
  Int16Lanes wide;
  widen_signed(words, wide);
  halves_to_floats(wide << 8, lanes);
}
inline void words_to_floats(const UInt8Lanes& words, FloatLanes& lanes, E4M3Format) {
  Int16Lanes wide;
  widen_signed(words, wide);
  wide <<= 7;
  // The two upper bits are the sign. The lower of them becomes 0 or, where the magnitude's bits are all ones, 1: a NaN.
  halves_to_floats(wide ^ ((wide + 0x80) & 0x4000), lanes);
  lanes *= 256.0f;
}
#endif

template <class Format>
struct Fp8Codec {
  static constexpr DType dtype = Format::kDType;
  static constexpr std::int32_t block_values = 1;
  static constexpr std::int32_t block_bytes = 1;
  static constexpr float largest = Format::kLargestFloat;  // nvcc cannot make it of the bits

  KVBLEND_HOST_DEVICE static void decode(const std::byte* source, float* values, std::int64_t count) {
    decode_lanes<std::uint8_t>(Fp8Codec{}, source, values, count, FromFp8<Format>{});
  }
  KVBLEND_HOST_DEVICE static void encode(const float* values, std::byte* destination, std::int64_t count) {
    encode_lanes(Fp8Codec{}, values, destination, count, ToFp8<Format>{});
  }
  static void load(const std::byte* source, FloatLanes& lanes) {
    UInt8Lanes words;
    read_lanes(source, words);
#if KVBLEND_X86_LANES && KVBLEND_VECTOR_FORMULAS
    words_to_floats(words, lanes, Format{});
#elif KVBLEND_VECTOR_FORMULAS
    Int32Lanes wide;
    widen(words, wide);
    lanes = fp8_to_float<Format, FloatLanes>(wide);
#else
    for (std::int32_t i = 0; i < kLanes; ++i) lanes[i] = FromFp8<Format>{}(words[i]);
#endif
  }
  static void store(const FloatLanes& lanes, std::byte* destination) {
#if KVBLEND_VECTOR_FORMULAS
    UInt8Lanes words;
    narrow(float_to_fp8<Format, Int32Lanes>(lanes), words);
#else
    UInt8Lanes words;
    for (std::int32_t i = 0; i < kLanes; ++i) words[i] = ToFp8<Format>{}(lanes[i]);
#endif
    write_lanes(words, destination);
  }
};

}  // namespace detail

// Without a scale: what is stored is the value. `largest` is the largest number there is.
using Fp8E4M3Codec = detail::Fp8Codec<detail::E4M3Format>;
using Fp8E5M2Codec = detail::Fp8Codec<detail::E5M2Format>;

static_assert(LaneCodec<Fp8E4M3Codec> && LaneCodec<Fp8E5M2Codec>);

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
