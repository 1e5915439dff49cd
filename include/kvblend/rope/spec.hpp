// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// RopeSpec: what a layer's rotary embedding does, as plain data. An engine passes the frequencies it uses itself, or
// has the common families built (builders.hpp, scaling.hpp); RopeShifter moves keys by it.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

inline constexpr std::int32_t kMaxRopePairs = kMaxHeadDim / 2;

enum class RopePairing : std::uint8_t {
  neox,         // value i rotates with value i + rotary_dim / 2
  interleaved,  // value 2i rotates with value 2i + 1
};

// M-RoPE gives a token three positions: time, height and width. Elsewhere, and in text, the three are one.
inline constexpr std::int32_t kRopeAxes = 3;

// Radians a position: what any position may still be multiplied by in float32.
inline constexpr double kMaxFrequency = 0x1p96;

// Which values of a head turn, and in which pairs; small, for kernels to take by value. Values outside [rotary_offset,
// rotary_offset + rotary_dim) are left alone. rotary_dim 0 is a layer without rope.
struct RopeShape {
  std::int32_t head_dim = 0;
  std::int32_t rotary_dim = 0;
  std::int32_t rotary_offset = 0;
  RopePairing pairing = RopePairing::neox;

  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t pairs() const { return rotary_dim / 2; }
};

// The rotation of one layer's keys at position p: pair i turns by p · inv_freq[i] radians.
struct RopeSpec : RopeShape {
  // Magnitude the engine multiplies into rotated values (YaRN). Cached keys hold it already, so a shift never applies
  // it; it stands here because two specs that differ in it are not convertible.
  double attention_factor = 1.0;
  std::array<double, kMaxRopePairs> inv_freq{};            // radians a position, the first rotary_dim / 2 are used
  std::array<std::uint8_t, kMaxRopePairs> axis_of_pair{};  // which position p is: 0 time (or the only one), 1 h, 2 w

  [[nodiscard]] std::span<const double> frequencies() const { return {inv_freq.data(), used_entries()}; }
  [[nodiscard]] std::span<const std::uint8_t> axes() const { return {axis_of_pair.data(), used_entries()}; }
  // Entries beyond pairs() mean nothing.
  friend bool operator==(const RopeSpec& a, const RopeSpec& b) {
    return a.head_dim == b.head_dim && a.rotary_dim == b.rotary_dim && a.rotary_offset == b.rotary_offset &&
           a.pairing == b.pairing && a.attention_factor == b.attention_factor && same_frequencies(a, b) &&
           std::equal(a.axes().begin(), a.axes().end(), b.axes().begin());
  }
  // Of two specs with the same number of pairs.
  friend bool same_frequencies(const RopeSpec& a, const RopeSpec& b) {
    return std::equal(a.frequencies().begin(), a.frequencies().end(), b.frequencies().begin(), b.frequencies().end());
  }

 private:
  // pairs(), but for specs that validate() has yet to refuse.
  [[nodiscard]] std::size_t used_entries() const {
    return static_cast<std::size_t>(std::clamp(pairs(), std::int32_t{0}, kMaxRopePairs));
  }
};

[[nodiscard]] constexpr const char* to_string(RopePairing pairing) {
  return pairing == RopePairing::neox ? "neox" : "interleaved";
}

// Whether a spec describes a rotation that exists. The error names the field.
inline Status validate(const RopeSpec& spec) {
  const auto invalid = StatusCode::invalid_argument;
  if (spec.head_dim <= 0 || spec.head_dim > kMaxHeadDim) {
    return Status::error(invalid, "is %d, must be in [1, %d]", spec.head_dim, kMaxHeadDim).at("rope head_dim");
  }
  if (spec.rotary_dim < 0 || spec.rotary_dim > spec.head_dim) {
    return Status::error(invalid, "is %d, must be in [0, head_dim %d]", spec.rotary_dim, spec.head_dim)
        .at("rope rotary_dim");
  }
  if (spec.rotary_dim % 2 != 0) {
    return Status::error(invalid, "is %d, pairs need an even number", spec.rotary_dim).at("rope rotary_dim");
  }
  if (spec.rotary_offset < 0 || spec.rotary_offset > spec.head_dim - spec.rotary_dim) {
    return Status::error(invalid, "is %d, with %d rotated values it leaves the head of %d", spec.rotary_offset,
                         spec.rotary_dim, spec.head_dim)
        .at("rope rotary_offset");
  }
  if (spec.pairing != RopePairing::neox && spec.pairing != RopePairing::interleaved) {
    return Status::error(invalid, "is %d", static_cast<int>(spec.pairing)).at("rope pairing");
  }
  if (!is_finite(spec.attention_factor) || spec.attention_factor <= 0) {
    return Status::error(invalid, "is %g, must be finite and positive", spec.attention_factor)
        .at("rope attention_factor");
  }
  for (std::int32_t pair = 0; pair < spec.pairs(); ++pair) {
    const double frequency = spec.inv_freq[static_cast<std::size_t>(pair)];
    if (!is_finite(frequency)) {
      return Status::error(invalid, "is not a finite number").at("rope inv_freq[%d]", pair);
    }
    if (frequency > kMaxFrequency || frequency < -kMaxFrequency) {
      return Status::error(invalid, "is %g, must be within %g", frequency, kMaxFrequency).at("rope inv_freq[%d]", pair);
    }
    const int axis = spec.axis_of_pair[static_cast<std::size_t>(pair)];
    if (axis >= kRopeAxes) {
      return Status::error(invalid, "is %d, must be 0, 1 or 2", axis).at("rope axis_of_pair[%d]", pair);
    }
  }
  return {};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
