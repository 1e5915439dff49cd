// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LaneRotation: the rotation of the CPU back ends, registers of pairs at a time.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/lanes.hpp>
#include <kvblend/rope/rotate.hpp>

#include <algorithm>
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

template <class C>
concept LanesOrBlocks = LaneCodec<C> || LaneBlockCodec<C>;

// Whole lanes, or blocks, from and to memory.
template <LanesOrBlocks C, std::size_t count>
void load_all(const C& codec, const std::byte* source, FloatLanes (&lanes)[count]) {
  constexpr std::size_t kStep = (std::max)(C::block_values / kLanes, 1);
  for (std::size_t j = 0; j < count; j += kStep) {
    const std::byte* const at = source + bytes_of<C>(static_cast<std::int64_t>(j) * kLanes);
    if constexpr (LaneBlockCodec<C>) {
      codec.load_block(at, lanes + j);
    } else {
      codec.load(at, lanes[j]);
    }
  }
}
template <LanesOrBlocks C, std::size_t count>
void store_all(const C& codec, const FloatLanes (&lanes)[count], std::byte* destination) {
  constexpr std::size_t kStep = (std::max)(C::block_values / kLanes, 1);
  for (std::size_t j = 0; j < count; j += kStep) {
    std::byte* const at = destination + bytes_of<C>(static_cast<std::int64_t>(j) * kLanes);
    if constexpr (LaneBlockCodec<C>) {
      codec.store_block(lanes + j, at);
    } else {
      codec.store(lanes[j], at);
    }
  }
}

// Values that pass through the registers at a time.
template <LanesOrBlocks From, LanesOrBlocks To>
inline constexpr std::int32_t kValuesAtOnce = (std::max)({kLanes, std::int32_t{From::block_values},
                                                          std::int32_t{To::block_values}});

}  // namespace detail

// PortableRotation, but that values never leave the registers between decoding and encoding where both codecs can turn
// lanes or blocks of them. What is left over goes through the plain loops, as all does on a device, which has no lanes.
struct LaneRotation : PortableRotation {
  template <RunCodec From, RunCodec To>
  KVBLEND_HOST_DEVICE static void halves(const From& from, const To& to, const float* cosines, const float* sines,
                                         std::int32_t pairs, const std::byte* in_a, const std::byte* in_b,
                                         std::byte* out_a, std::byte* out_b) {
    std::int32_t at = 0;
#if !KVBLEND_ON_DEVICE
    if constexpr (detail::LanesOrBlocks<From> && detail::LanesOrBlocks<To>) {
      constexpr std::int32_t kStep = detail::kValuesAtOnce<From, To>;
      for (; at + kStep <= pairs; at += kStep) {
        FloatLanes a[std::size_t{kStep / kLanes}], b[std::size_t{kStep / kLanes}];
        detail::load_all(from, in_a + bytes_of<From>(at), a);
        detail::load_all(from, in_b + bytes_of<From>(at), b);
        for (std::int32_t j = 0; j < kStep / kLanes; ++j) {
          FloatLanes cosine, sine;
          detail::read_lanes(cosines + at + j * kLanes, cosine);
          detail::read_lanes(sines + at + j * kLanes, sine);
          const FloatLanes x = a[j] * cosine - b[j] * sine;
          b[j] = b[j] * cosine + a[j] * sine;
          a[j] = x;
        }
        detail::store_all(to, a, out_a + bytes_of<To>(at));
        detail::store_all(to, b, out_b + bytes_of<To>(at));
      }
    }
#endif
    if (at == pairs) return;
    PortableRotation::halves(from, to, cosines + at, sines + at, pairs - at, in_a + bytes_of<From>(at),
                             in_b + bytes_of<From>(at), out_a + bytes_of<To>(at), out_b + bytes_of<To>(at));
  }

  template <RunCodec From, RunCodec To>
  KVBLEND_HOST_DEVICE static void neighbours(const From& from, const To& to, const float* cosines, const float* sines,
                                             std::int32_t pairs, const std::byte* in, std::byte* out) {
    std::int32_t at = 0;
#if !KVBLEND_ON_DEVICE
    if constexpr (detail::LanesOrBlocks<From> && detail::LanesOrBlocks<To>) {
      constexpr std::make_integer_sequence<std::int32_t, kLanes> kEach{};
      constexpr std::int32_t kStep = (std::max)(detail::kValuesAtOnce<From, To>, 2 * kLanes);
      for (; 2 * at + kStep <= 2 * pairs; at += kStep / 2) {
        FloatLanes values[std::size_t{kStep / kLanes}];
        detail::load_all(from, in + bytes_of<From>(2 * at), values);
        for (std::int32_t j = 0; j < kStep / kLanes; j += 2) {
          FloatLanes a, b, cosine, sine;
          detail::split_neighbours(values[j], values[j + 1], a, b, kEach);
          detail::read_lanes(cosines + at + j / 2 * kLanes, cosine);
          detail::read_lanes(sines + at + j / 2 * kLanes, sine);
          const FloatLanes x = a * cosine - b * sine;
          const FloatLanes y = b * cosine + a * sine;
          detail::join_neighbours(x, y, values[j], values[j + 1], kEach);
        }
        detail::store_all(to, values, out + bytes_of<To>(2 * at));
      }
    }
#endif
    if (at == pairs) return;
    PortableRotation::neighbours(from, to, cosines + at, sines + at, pairs - at, in + bytes_of<From>(2 * at),
                                 out + bytes_of<To>(2 * at));
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
