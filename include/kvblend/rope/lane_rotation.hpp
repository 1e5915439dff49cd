// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LaneRotation: the rotation of the CPU back ends, registers of pairs at a time.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/lanes.hpp>
#include <kvblend/rope/rotate.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

// The values with even, and with odd, index of `low` and `high` put after each other; and the way back.
template <std::int32_t... Lane>
void split_neighbours(const FloatLanes& low, const FloatLanes& high, FloatLanes& even, FloatLanes& odd,
                      std::integer_sequence<std::int32_t, Lane...>) {
#if KVBLEND_VECTOR_FORMULAS
  even = __builtin_shufflevector(low, high, (2 * Lane)...);
  odd = __builtin_shufflevector(low, high, (2 * Lane + 1)...);
#else
  ((even[Lane] = 2 * Lane < kLanes ? low[2 * Lane % kLanes] : high[2 * Lane % kLanes]), ...);
  ((odd[Lane] = 2 * Lane < kLanes ? low[(2 * Lane + 1) % kLanes] : high[(2 * Lane + 1) % kLanes]), ...);
#endif
}
template <std::int32_t... Lane>
void join_neighbours(const FloatLanes& even, const FloatLanes& odd, FloatLanes& low, FloatLanes& high,
                     std::integer_sequence<std::int32_t, Lane...>) {
#if KVBLEND_VECTOR_FORMULAS
  low = __builtin_shufflevector(even, odd, (Lane / 2 + Lane % 2 * kLanes)...);
  high = __builtin_shufflevector(even, odd, (Lane / 2 + kLanes / 2 + Lane % 2 * kLanes)...);
#else
  ((low[Lane] = Lane % 2 == 0 ? even[Lane / 2] : odd[Lane / 2]), ...);
  ((high[Lane] = Lane % 2 == 0 ? even[Lane / 2 + kLanes / 2] : odd[Lane / 2 + kLanes / 2]), ...);
#endif
}

}  // namespace detail

// PortableRotation, but that values never leave the registers between decoding and encoding where both codecs are of
// single values. Blocks pass through a buffer; what is left over goes through the plain loops.
struct LaneRotation : PortableRotation {
  template <RunCodec From, RunCodec To>
  static void halves(const From& from, const To& to, const float* cosines, const float* sines, std::int32_t pairs,
                     const std::byte* in_a, const std::byte* in_b, std::byte* out_a, std::byte* out_b) {
    std::int32_t at = 0;
    if constexpr (LaneCodec<From> && LaneCodec<To>) {
      for (; at + kLanes <= pairs; at += kLanes) {
        FloatLanes a, b, cosine, sine;
        from.load(in_a + bytes_of<From>(at), a);
        from.load(in_b + bytes_of<From>(at), b);
        detail::read_lanes(cosines + at, cosine);
        detail::read_lanes(sines + at, sine);
        const FloatLanes x = a * cosine - b * sine;
        const FloatLanes y = b * cosine + a * sine;
        to.store(x, out_a + bytes_of<To>(at));
        to.store(y, out_b + bytes_of<To>(at));
      }
    }
    if constexpr (!LaneCodec<From> || !LaneCodec<To>) {
      constexpr std::int32_t kStep = kPairsAtOnce<From, To>;
      alignas(64) float a[std::size_t{kStep}];
      alignas(64) float b[std::size_t{kStep}];
      for (; at + kStep <= pairs; at += kStep) {  // a count that compilers know
        from.decode(in_a + bytes_of<From>(at), a, kStep);
        from.decode(in_b + bytes_of<From>(at), b, kStep);
        auto* const floats_a = reinterpret_cast<std::byte*>(a);
        auto* const floats_b = reinterpret_cast<std::byte*>(b);
        halves(F32Codec{}, F32Codec{}, cosines + at, sines + at, kStep, floats_a, floats_b, floats_a, floats_b);
        to.encode(a, out_a + bytes_of<To>(at), kStep);
        to.encode(b, out_b + bytes_of<To>(at), kStep);
      }
    }
    if (at == pairs) return;
    PortableRotation::halves(from, to, cosines + at, sines + at, pairs - at, in_a + bytes_of<From>(at),
                             in_b + bytes_of<From>(at), out_a + bytes_of<To>(at), out_b + bytes_of<To>(at));
  }

  template <RunCodec From, RunCodec To>
  static void neighbours(const From& from, const To& to, const float* cosines, const float* sines, std::int32_t pairs,
                         const std::byte* in, std::byte* out) {
    std::int32_t at = 0;
    if constexpr (LaneCodec<From> && LaneCodec<To>) {
      constexpr std::make_integer_sequence<std::int32_t, kLanes> kEach{};
      for (; at + kLanes <= pairs; at += kLanes) {
        FloatLanes low, high, a, b, cosine, sine;
        from.load(in + bytes_of<From>(2 * at), low);
        from.load(in + bytes_of<From>(2 * at + kLanes), high);
        detail::split_neighbours(low, high, a, b, kEach);
        detail::read_lanes(cosines + at, cosine);
        detail::read_lanes(sines + at, sine);
        const FloatLanes x = a * cosine - b * sine;
        const FloatLanes y = b * cosine + a * sine;
        detail::join_neighbours(x, y, low, high, kEach);
        to.store(low, out + bytes_of<To>(2 * at));
        to.store(high, out + bytes_of<To>(2 * at + kLanes));
      }
    }
    if constexpr (!LaneCodec<From> || !LaneCodec<To>) {
      constexpr std::int32_t kStep = kPairsAtOnce<From, To>;
      alignas(64) float values[2 * std::size_t{kStep}];
      for (; at + kStep <= pairs; at += kStep) {
        from.decode(in + bytes_of<From>(2 * at), values, 2 * kStep);
        auto* const floats = reinterpret_cast<std::byte*>(values);
        neighbours(F32Codec{}, F32Codec{}, cosines + at, sines + at, kStep, floats, floats);
        to.encode(values, out + bytes_of<To>(2 * at), 2 * kStep);
      }
    }
    if (at == pairs) return;
    PortableRotation::neighbours(from, to, cosines + at, sines + at, pairs - at, in + bytes_of<From>(2 * at),
                                 out + bytes_of<To>(2 * at));
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
