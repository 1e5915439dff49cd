// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Lanes of integers from and to bytes, for the codecs that store bytes: by the steps that g++ 12 makes the fewest
// instructions of, which for widening are x86's own where it has them.
#pragma once

#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/lanes.hpp>
#include <kvblend/core/config.hpp>

#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

#if KVBLEND_X86_LANES
[[nodiscard]] inline __m128i in_register(const UInt8Lanes& bytes) {
#if KVBLEND_X86_LANES == 16
  return __builtin_bit_cast(__m128i, bytes);
#else
  return _mm_cvtsi64_si128(__builtin_bit_cast(long long, bytes));
#endif
}
#endif

inline void widen(const UInt8Lanes& bytes, Int32Lanes& wide) {
#if KVBLEND_X86_LANES == 16
  wide = __builtin_bit_cast(Int32Lanes, _mm512_cvtepu8_epi32(in_register(bytes)));
#elif KVBLEND_X86_LANES == 8
  wide = __builtin_bit_cast(Int32Lanes, _mm256_cvtepu8_epi32(in_register(bytes)));
#else
  if constexpr (kLanes > 4) {
    wide = __builtin_convertvector(__builtin_convertvector(bytes, UInt16Lanes), Int32Lanes);
  } else {
    wide = __builtin_convertvector(bytes, Int32Lanes);
  }
#endif
}

// Bytes with a sign.
inline void widen_signed(const UInt8Lanes& bytes, Int32Lanes& wide) {
#if KVBLEND_X86_LANES == 16
  wide = __builtin_bit_cast(Int32Lanes, _mm512_cvtepi8_epi32(in_register(bytes)));
#elif KVBLEND_X86_LANES == 8
  wide = __builtin_bit_cast(Int32Lanes, _mm256_cvtepi8_epi32(in_register(bytes)));
#else
  widen(bytes, wide);
  wide = (wide ^ 0x80) - 0x80;
#endif
}
#if KVBLEND_X86_LANES
inline void widen_signed(const UInt8Lanes& bytes, Int16Lanes& wide) {
#if KVBLEND_X86_LANES == 16
  wide = __builtin_bit_cast(Int16Lanes, _mm256_cvtepi8_epi16(in_register(bytes)));
#else
  wide = __builtin_bit_cast(Int16Lanes, _mm_cvtepi8_epi16(in_register(bytes)));
#endif
}
#endif

// Of each lane the low 8 bits.
inline void narrow(const Int32Lanes& wide, UInt8Lanes& bytes) {
  if constexpr (kLanes < 16) {
    bytes = __builtin_convertvector(__builtin_convertvector(wide, UInt16Lanes), UInt8Lanes);
  } else {
    bytes = __builtin_convertvector(wide, UInt8Lanes);
  }
}

// The largest of the lanes.
[[nodiscard]] inline std::int32_t largest_lane(const Int32Lanes& lanes) {
#if KVBLEND_X86_LANES == 16
  return _mm512_reduce_max_epi32(__builtin_bit_cast(__m512i, lanes));
#elif KVBLEND_X86_LANES == 8
  const auto all = __builtin_bit_cast(__m256i, lanes);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
  std::int32_t most = lanes[0];
  for (std::int32_t i = 1; i < kLanes; ++i) most = most < lanes[i] ? lanes[i] : most;
  return most;
#endif
}

}  // namespace detail

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
