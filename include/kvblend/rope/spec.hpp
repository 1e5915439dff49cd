// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// RopeSpec: what a layer's rotary embedding does, as plain data. An engine passes the frequencies it uses itself
// (rope_from_frequencies) or has the common families built here; RopeShifter moves keys by it.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <array>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

inline constexpr std::int32_t kMaxHeadDim = 1024;
inline constexpr std::int32_t kMaxRopePairs = kMaxHeadDim / 2;

enum class RopePairing : std::uint8_t {
  neox,         // value i rotates with value i + rotary_dim / 2
  interleaved,  // value 2i rotates with value 2i + 1
};

// The rotation of one layer's keys at position p: pair i turns by p · inv_freq[i] radians. Values outside
// [rotary_offset, rotary_offset + rotary_dim) are left alone. rotary_dim 0 is a layer without rope.
struct RopeSpec {
  std::int32_t head_dim = 0;
  std::int32_t rotary_dim = 0;
  std::int32_t rotary_offset = 0;
  RopePairing pairing = RopePairing::neox;
  // Magnitude the engine multiplies into rotated values (YaRN). Cached keys hold it already, so a shift never applies
  // it; it stands here because two specs that differ in it are not convertible.
  double attention_factor = 1.0;
  std::array<double, kMaxRopePairs> inv_freq{};  // radians a position, the first rotary_dim / 2 are used

  [[nodiscard]] std::int32_t pairs() const { return rotary_dim / 2; }
  [[nodiscard]] std::span<const double> frequencies() const {
    return {inv_freq.data(), static_cast<std::size_t>(pairs())};
  }
  friend bool operator==(const RopeSpec&, const RopeSpec&) = default;
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
