// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Lanes: a vector register of floats, for the loops that all data passes through. GNU vector types, which g++, clang
// and nvcc's host pass turn into the registers of whatever CPU is compiled for; no intrinsics and no dispatch.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/codec/each.hpp>
#include <kvblend/core/config.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// Formulas that serve single numbers on the device as well cannot take lanes under nvcc, which knows them on the host
// only: there the lanes go through the formulas one by one.
#if defined(__CUDACC__)
#define KVBLEND_VECTOR_FORMULAS 0
#else
#define KVBLEND_VECTOR_FORMULAS 1
#endif

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Values a register holds. Types wider than a register would be taken apart by the compiler, at a great loss.
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline constexpr std::int32_t kLanes = 16;
#elif defined(__AVX2__)
inline constexpr std::int32_t kLanes = 8;
#else
inline constexpr std::int32_t kLanes = 4;
#endif

// Passed by reference only: by value, their calling convention would depend on the target.
using FloatLanes = float __attribute__((vector_size(kLanes * 4)));
using Int32Lanes = std::int32_t __attribute__((vector_size(kLanes * 4)));
using UInt32Lanes = std::uint32_t __attribute__((vector_size(kLanes * 4)));
using UInt16Lanes = std::uint16_t __attribute__((vector_size(kLanes * 2)));
using Int16Lanes = std::int16_t __attribute__((vector_size(kLanes * 2)));
using UInt8Lanes = std::uint8_t __attribute__((vector_size(kLanes)));

// A codec of single values that turns kLanes of them at a time:
//   load    kLanes stored values at `source` (any alignment) to lanes
//   store   lanes to kLanes stored values at `destination` (any alignment)
// with the bits that decode and encode have.
template <class C>
concept LaneCodec = RunCodec<C> &&(C::block_values == 1) &&
                    requires(const C codec, const std::byte* source, std::byte* destination, FloatLanes& lanes) {
  { codec.load(source, lanes) } -> std::same_as<void>;
  { codec.store(lanes, destination) } -> std::same_as<void>;
};

// The same for a codec of blocks that whole lanes hold, one block at a time:
//   load_block, store_block
template <class C>
concept LaneBlockCodec = RunCodec<C> &&(C::block_values % kLanes == 0) &&
                         requires(const C codec, const std::byte* source, std::byte* destination,
                                  const FloatLanes* block, FloatLanes* lanes) {
  { codec.load_block(source, lanes) } -> std::same_as<void>;
  { codec.store_block(block, destination) } -> std::same_as<void>;
};

namespace detail {

// Any lanes from and to memory of any alignment.
template <class Lanes>
void read_lanes(const void* source, Lanes& lanes) {
  std::memcpy(&lanes, source, sizeof lanes);
}
template <class Lanes>
void write_lanes(const Lanes& lanes, void* destination) {
  std::memcpy(destination, &lanes, sizeof lanes);
}

}  // namespace detail

// `count` values, lanes by lanes, the rest one by one through `one`, which turns a stored value into a float. A device
// has no lanes: there all go one by one.
template <class Stored, LaneCodec C, class One>
KVBLEND_HOST_DEVICE void decode_lanes([[maybe_unused]] const C& codec, const std::byte* source, float* values,
                                      std::int64_t count, const One& one) {
#if KVBLEND_ON_DEVICE
  detail::decode_each<Stored>(source, values, count, one);
#else
  const std::int64_t whole = count - count % kLanes;
  for (std::int64_t at = 0; at < whole; at += kLanes) {
    FloatLanes lanes;
    codec.load(source + at * C::block_bytes, lanes);
    detail::write_lanes(lanes, values + at);
  }
  for (std::int64_t at = whole; at < count; ++at) {
    Stored stored;
    std::memcpy(&stored, source + at * C::block_bytes, sizeof stored);
    values[at] = one(stored);
  }
#endif
}

// The way back.
template <LaneCodec C, class One>
KVBLEND_HOST_DEVICE void encode_lanes([[maybe_unused]] const C& codec, const float* values, std::byte* destination,
                                      std::int64_t count, const One& one) {
#if KVBLEND_ON_DEVICE
  detail::encode_each(values, destination, count, one);
#else
  const std::int64_t whole = count - count % kLanes;
  for (std::int64_t at = 0; at < whole; at += kLanes) {
    FloatLanes lanes;
    detail::read_lanes(values + at, lanes);
    codec.store(lanes, destination + at * C::block_bytes);
  }
  for (std::int64_t at = whole; at < count; ++at) {
    const auto stored = one(values[at]);
    std::memcpy(destination + at * C::block_bytes, &stored, sizeof stored);
  }
#endif
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
