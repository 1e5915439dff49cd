// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The codecs of plain floats: f32, f16, bf16. Conversions are integer operations and one exact addition, free of
// branches, so that compilers vectorise them for any target.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/codec/lanes.hpp>
#include <kvblend/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__F16C__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define KVBLEND_X86_LANES 16
#elif defined(__F16C__) && defined(__AVX2__)
#define KVBLEND_X86_LANES 8
#else
#define KVBLEND_X86_LANES 0
#endif
#if KVBLEND_X86_LANES
#if defined(__GNUC__) && !defined(__clang__)  // g++'s own header reads an undefined register on purpose
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

// 16-bit floats to 32-bit ones and back, for one number or for lanes of them: Int is std::int32_t or Int32Lanes, its
// low 16 bits are the number, UInt and Float go with it. Where numbers are written, what stands above the 16 bits is
// dropped.

template <class Float, class Int>
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Float half_to_float(const Int& half) {
  const Int magnitude = half & 0x7fff;
  // Both exponents are biased: 127 - 15 lifts a finite one, 255 - 31 takes all ones to all ones.
  const Int lift = magnitude < 0x7c00 ? Int{} + ((127 - 15) << 23) : Int{} + ((255 - 31) << 23);
  // Subnormals are multiples of 2^-24, the unit of [0.5, 1): put the bits there and subtract the 0.5. No subnormal
  // float takes part, which engines that flush them to zero would lose.
  const Float tiny = __builtin_bit_cast(Float, magnitude | 0x3f000000) - 0.5f;
  const Int bits = magnitude < 0x0400 ? __builtin_bit_cast(Int, tiny) : (magnitude << 13) + lift;
  return __builtin_bit_cast(Float, bits | ((half & 0x8000) << 16));
}

template <class Int, class UInt, class Float>
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Int float_to_half(const Float& value) {
  const Int all = __builtin_bit_cast(Int, value);
  const Int magnitude = all & 0x7fffffff;
  // Unsigned, since g++ changes the order of these sums in lanes, and a signed one could overflow.
  const UInt odd = __builtin_bit_cast(UInt, magnitude >> 13) & 1u;
  const UInt sum = __builtin_bit_cast(UInt, magnitude) - (((127u - 15u) << 23) - 0x0fffu) + odd;
  const Int normal = __builtin_bit_cast(Int, sum) >> 13;
  // Adding 0.5 makes the hardware round at 2^-24.
  const Float tiny = __builtin_bit_cast(Float, magnitude) + 0.5f;
  const Int subnormal = __builtin_bit_cast(Int, tiny) - 0x3f000000;
  const Int nan = 0x7e00 | ((magnitude >> 13) & 0x03ff);
  const Int special = magnitude < 0x7f800001 ? Int{} + 0x7c00 : nan;
  const Int finite = magnitude < 0x38800000 ? subnormal : normal;  // 2^-14
  const Int rounded = magnitude < 0x47800000 ? finite : special;   // 2^16
  return rounded | ((all >> 16) & 0x8000);
}

template <class Int, class UInt, class Float>
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr UInt float_to_bfloat(const Float& value) {
  const UInt all = __builtin_bit_cast(UInt, value);
  const UInt upper = all >> 16;
  const UInt rounded = (all + 0x7fffu + (upper & 1u)) >> 16;
  const Int magnitude = __builtin_bit_cast(Int, all & 0x7fffffffu);
  return magnitude < 0x7f800001 ? rounded : upper | 0x0040u;
}

}  // namespace detail

// Exact. A NaN keeps its sign and payload (F16Codec may make it quiet).
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr float to_float(Float16 value) {
  return detail::half_to_float<float>(std::int32_t{value.bits});
}

// To nearest, ties to even; beyond 65504 by half a unit or more: infinity. A NaN stays one, and becomes quiet.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr Float16 to_float16(float value) {
  return {static_cast<std::uint16_t>(detail::float_to_half<std::int32_t, std::uint32_t>(value))};
}

// Exact.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr float to_float(BFloat16 value) {
  return __builtin_bit_cast(float, std::uint32_t{value.bits} << 16);
}

// To nearest, ties to even. A NaN stays one, and becomes quiet.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr BFloat16 to_bfloat16(float value) {
  return {static_cast<std::uint16_t>(detail::float_to_bfloat<std::int32_t, std::uint32_t>(value))};
}

namespace detail {

// to_float16 and to_float, by the hardware's instructions if they are compiled for. A NaN may lose its payload.
[[nodiscard]] KVBLEND_HOST_DEVICE inline Float16 float16_of(float value) {
#if KVBLEND_ON_DEVICE
  Float16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
  return half;
#elif KVBLEND_X86_LANES
  return {static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
#else
  return to_float16(value);
#endif
}
[[nodiscard]] KVBLEND_HOST_DEVICE inline float float_of(Float16 value) {
#if KVBLEND_ON_DEVICE
  float single;
  asm("cvt.f32.f16 %0, %1;" : "=f"(single) : "h"(value.bits));
  return single;
#elif KVBLEND_X86_LANES
  return _cvtsh_ss(value.bits);
#else
  return to_float(value);
#endif
}

// What turns single numbers: those that lanes leave over, by the formulas; on the device all, by its instructions.
struct ToFloat {
  template <class Stored>
  KVBLEND_HOST_DEVICE constexpr float operator()(Stored value) const {
    return to_float(value);
  }
  KVBLEND_HOST_DEVICE float operator()(Float16 value) const {
#if KVBLEND_ON_DEVICE
    return float_of(value);
#else
    return to_float(value);
#endif
  }
};
struct ToFloat16 {
  KVBLEND_HOST_DEVICE Float16 operator()(float value) const {
#if KVBLEND_ON_DEVICE
    return float16_of(value);
#else
    return to_float16(value);
#endif
  }
};
struct ToBFloat16 {
  KVBLEND_HOST_DEVICE constexpr BFloat16 operator()(float value) const { return to_bfloat16(value); }
};

#if KVBLEND_X86_LANES
// The same for lanes of bits.
template <class HalfLanes>
void halves_to_floats(const HalfLanes& bits, FloatLanes& lanes) {
#if KVBLEND_X86_LANES == 16
  lanes = __builtin_bit_cast(FloatLanes, _mm512_cvtph_ps(__builtin_bit_cast(__m256i, bits)));
#else
  lanes = __builtin_bit_cast(FloatLanes, _mm256_cvtph_ps(__builtin_bit_cast(__m128i, bits)));
#endif
}
#endif

}  // namespace detail

struct F32Codec {
  static constexpr DType dtype = DType::f32;
  static constexpr std::int32_t block_values = 1;
  static constexpr std::int32_t block_bytes = 4;

  KVBLEND_HOST_DEVICE static void decode(const std::byte* source, float* values, std::int64_t count) {
#if KVBLEND_ON_DEVICE
    detail::decode_each<float>(source, values, count, detail::Unchanged{});
#else
    if (count > 0) std::memcpy(values, source, static_cast<std::size_t>(count) * sizeof(float));
#endif
  }
  KVBLEND_HOST_DEVICE static void encode(const float* values, std::byte* destination, std::int64_t count) {
#if KVBLEND_ON_DEVICE
    detail::encode_each(values, destination, count, detail::Unchanged{});
#else
    if (count > 0) std::memcpy(destination, values, static_cast<std::size_t>(count) * sizeof(float));
#endif
  }
  static void load(const std::byte* source, FloatLanes& lanes) { detail::read_lanes(source, lanes); }
  static void store(const FloatLanes& lanes, std::byte* destination) { detail::write_lanes(lanes, destination); }
};

struct F16Codec {
  static constexpr DType dtype = DType::f16;
  static constexpr std::int32_t block_values = 1;
  static constexpr std::int32_t block_bytes = 2;

  KVBLEND_HOST_DEVICE static void decode(const std::byte* source, float* values, std::int64_t count) {
    decode_lanes<Float16>(F16Codec{}, source, values, count, detail::ToFloat{});
  }
  KVBLEND_HOST_DEVICE static void encode(const float* values, std::byte* destination, std::int64_t count) {
    encode_lanes(F16Codec{}, values, destination, count, detail::ToFloat16{});
  }
  // x86 has instructions for it, if they are compiled for.
  static void load(const std::byte* source, FloatLanes& lanes) {
    UInt16Lanes bits;
    detail::read_lanes(source, bits);
#if KVBLEND_X86_LANES
    detail::halves_to_floats(bits, lanes);
#elif KVBLEND_VECTOR_FORMULAS
    lanes = detail::half_to_float<FloatLanes>(__builtin_convertvector(bits, Int32Lanes));
#else
    for (std::int32_t i = 0; i < kLanes; ++i) lanes[i] = to_float(Float16{bits[i]});
#endif
  }
  static void store(const FloatLanes& lanes, std::byte* destination) {
#if KVBLEND_X86_LANES == 16
    const auto bits = _mm512_cvtps_ph(__builtin_bit_cast(__m512, lanes), _MM_FROUND_TO_NEAREST_INT);
#elif KVBLEND_X86_LANES == 8
    const auto bits = _mm256_cvtps_ph(__builtin_bit_cast(__m256, lanes), _MM_FROUND_TO_NEAREST_INT);
#elif KVBLEND_VECTOR_FORMULAS
    const auto bits = __builtin_convertvector(detail::float_to_half<Int32Lanes, UInt32Lanes>(lanes), UInt16Lanes);
#else
    UInt16Lanes bits;
    for (std::int32_t i = 0; i < kLanes; ++i) bits[i] = to_float16(lanes[i]).bits;
#endif
    detail::write_lanes(bits, destination);
  }
};

struct Bf16Codec {
  static constexpr DType dtype = DType::bf16;
  static constexpr std::int32_t block_values = 1;
  static constexpr std::int32_t block_bytes = 2;

  KVBLEND_HOST_DEVICE static void decode(const std::byte* source, float* values, std::int64_t count) {
    decode_lanes<BFloat16>(Bf16Codec{}, source, values, count, detail::ToFloat{});
  }
  KVBLEND_HOST_DEVICE static void encode(const float* values, std::byte* destination, std::int64_t count) {
    encode_lanes(Bf16Codec{}, values, destination, count, detail::ToBFloat16{});
  }
  static void load(const std::byte* source, FloatLanes& lanes) {
    UInt16Lanes bits;
    detail::read_lanes(source, bits);
#if KVBLEND_X86_LANES == 16  // one instruction that g++ makes three of
    const auto wide = __builtin_bit_cast(UInt32Lanes, _mm512_cvtepu16_epi32(__builtin_bit_cast(__m256i, bits)));
#else
    const auto wide = __builtin_convertvector(bits, UInt32Lanes);
#endif
    lanes = __builtin_bit_cast(FloatLanes, wide << 16);
  }
  static void store(const FloatLanes& lanes, std::byte* destination) {
#if KVBLEND_X86_LANES == 16 && defined(__AVX512BF16__)
    // The instruction takes subnormals for zeros: where a number has no exponent, the formula has to do it.
    const auto numbers = __builtin_bit_cast(__m512, lanes);
    if (_mm512_test_epi32_mask(_mm512_castps_si512(numbers), _mm512_set1_epi32(0x7f800000)) == 0xffff) [[likely]] {
      detail::write_lanes(_mm512_cvtneps_pbh(numbers), destination);
      return;
    }
#endif
#if KVBLEND_VECTOR_FORMULAS
    const auto bits = __builtin_convertvector(detail::float_to_bfloat<Int32Lanes, UInt32Lanes>(lanes), UInt16Lanes);
#else
    UInt16Lanes bits;
    for (std::int32_t i = 0; i < kLanes; ++i) bits[i] = to_bfloat16(lanes[i]).bits;
#endif
    detail::write_lanes(bits, destination);
  }
};

static_assert(LaneCodec<F32Codec> && LaneCodec<F16Codec> && LaneCodec<Bf16Codec>);

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
