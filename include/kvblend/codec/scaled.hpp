// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scaled<Inner, Scales>: a codec around another that stores value / scale, as engines do with fp8. Scales says where
// the scale of a row's head is: one for all (TensorScale), one a head (HeadScales), or one a row, or row and head,
// beside the data (TokenScales).
//
// A scale is a positive, normal float. Encoding divides by it and saturates as Inner does, so that no finite value
// becomes a NaN.
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/codec/lanes.hpp>
#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/copy.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>

#include <cfloat>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Zero, negative, infinite and NaN are none, and neither is a subnormal, which engines may flush to zero.
[[nodiscard]] KVBLEND_HOST_DEVICE constexpr bool is_scale(float scale) {
  const auto bits = __builtin_bit_cast(std::uint32_t, scale);
  return bits >= 0x00800000u && bits < 0x7f800000u;
}

// What a policy of scales must have; check names the scale that is missing.
template <class S>
concept ScalePolicy = std::is_trivially_copyable_v<S> &&
    requires(const S scales, std::int64_t row, std::int32_t head, std::int32_t heads) {
  { scales.scale(row, head) } -> std::same_as<float>;
  { scales.check(heads) } -> std::same_as<Status>;
  { scales.same_as(scales) } -> std::same_as<bool>;
};

// One scale for all of a plane.
struct TensorScale {
  float value = 0;  // none

  [[nodiscard]] KVBLEND_HOST_DEVICE float scale(std::int64_t, std::int32_t) const { return value; }
  Status check(std::int32_t heads) const;
  [[nodiscard]] KVBLEND_HOST_DEVICE bool same_as(const TensorScale& other) const;
};

// One scale for each KV head: [count], which must be the plane's number of heads.
struct HeadScales {
  const float* values = nullptr;
  std::int32_t count = 0;

  [[nodiscard]] KVBLEND_HOST_DEVICE float scale(std::int64_t, std::int32_t head) const { return values[head]; }
  Status check(std::int32_t heads) const;
  [[nodiscard]] KVBLEND_HOST_DEVICE bool same_as(const HeadScales& other) const;
};

// One f32, of any alignment, for each row and head, or for each row if the layout has one head. L is a layout as
// memory/ has them, with head_dim 1: its offset(row, head, 0) are bytes from `base`, so scales lie in pages, slots or
// strides as rows do. Scales that are read must have been written; check_stored_rows sees to it. With Byte = const
// std::byte they can be read only; else writing a row chooses and stores its scales.
template <class L, class Byte = std::byte>
struct TokenScales {
  Byte* base = nullptr;
  L layout{};

  TokenScales() = default;
  KVBLEND_HOST_DEVICE TokenScales(Byte* b, L l) : base(b), layout(l) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE bool per_head() const { return layout.heads() != 1; }
  [[nodiscard]] KVBLEND_HOST_DEVICE Byte* at(std::int64_t row, std::int32_t head) const {
    return base + layout.offset(row, per_head() ? head : 0, 0);
  }
  [[nodiscard]] KVBLEND_HOST_DEVICE float scale(std::int64_t row, std::int32_t head) const {
    alignas(16) float value = 0;
    detail::read_bytes<sizeof(float)>(at(row, head), &value);
    return value;
  }
  KVBLEND_HOST_DEVICE void put(std::int64_t row, std::int32_t head, float value) const
      requires(!std::is_const_v<Byte>) {
    alignas(16) const float stored = value;
    detail::write_bytes<sizeof(stored)>(&stored, at(row, head));
  }

  Status check(std::int32_t heads) const;
  [[nodiscard]] KVBLEND_HOST_DEVICE bool covers(std::int64_t row) const { return layout.contains(row); }
  // Whether the row has memory for its scales, and scales in it.
  Status check_row(std::int64_t row) const;
  // Whether bytes may be copied to rows with the `other` scales: to as many of them, and such that are written along.
  template <class M, class B>
  [[nodiscard]] KVBLEND_HOST_DEVICE bool same_as(const TokenScales<M, B>& other) const {
    return !std::is_const_v<B> && layout.heads() == other.layout.heads();
  }
};

namespace detail {

[[nodiscard]] KVBLEND_HOST_DEVICE inline float fitting_scale(float amax, float largest) {
  const auto bits = __builtin_bit_cast(std::uint32_t, amax) & 0x7fffffffu;
  if (bits == 0) return 1.0f;
  if (bits >= 0x7f800000u) return rounded_quotient(FLT_MAX, largest);
  const float scale = rounded_quotient(__builtin_bit_cast(float, bits), largest);
  return is_scale(scale) ? scale : FLT_MIN;
}

}  // namespace detail

// Inner with a scale: the run codec of one place.
template <RunCodec Inner>
struct ScaledRun {
  static constexpr DType dtype = Inner::dtype;
  static constexpr std::int32_t block_values = Inner::block_values;
  static constexpr std::int32_t block_bytes = Inner::block_bytes;

  float scale = 1;

  KVBLEND_HOST_DEVICE void decode(const std::byte* source, float* values, std::int64_t count) const;
  KVBLEND_HOST_DEVICE void encode(const float* values, std::byte* destination, std::int64_t count) const;
  void load(const std::byte* source, FloatLanes& lanes) const requires LaneCodec<Inner> {
    Inner{}.load(source, lanes);
    lanes *= scale;
  }
  void store(const FloatLanes& lanes, std::byte* destination) const requires LaneCodec<Inner> {
    const FloatLanes quotients = lanes / scale;
    Inner{}.store(quotients, destination);
  }
};

template <RunCodec Inner, ScalePolicy Scales>
struct Scaled {
  static constexpr DType dtype = Inner::dtype;
  static constexpr std::int32_t block_values = Inner::block_values;
  static constexpr std::int32_t block_bytes = Inner::block_bytes;
  static constexpr bool kStoresScales = requires(const Scales scales) { scales.put(0, 0, 1.0f); };
  static_assert(
      !kStoresScales || requires { Inner::largest; },
      "kvblend: scales are made only for codecs that have a largest number, as fp8 has");

  Scales scales{};

  Scaled() = default;
  KVBLEND_HOST_DEVICE explicit Scaled(Scales s) : scales(s) {}

  [[nodiscard]] KVBLEND_HOST_DEVICE ScaledRun<Inner> at(std::int64_t row, std::int32_t head) const {
    return {scales.scale(row, head)};
  }
  Status check(std::int32_t heads) const { return scales.check(heads); }
  [[nodiscard]] KVBLEND_HOST_DEVICE bool covers(std::int64_t row) const requires requires(const Scales s) {
    s.covers(row);
  }
  { return scales.covers(row); }
  Status check_row(std::int64_t row) const requires requires(const Scales s) { s.check_row(row); }
  { return scales.check_row(row); }
  template <class Others>
  [[nodiscard]] KVBLEND_HOST_DEVICE bool stores_like(const Scaled<Inner, Others>& other) const requires
      requires(const Scales s) {
    s.same_as(other.scales);
  }
  { return scales.same_as(other.scales); }

  // What makes it a SelfScalingCodec, if the policy stores scales.
  [[nodiscard]] KVBLEND_HOST_DEVICE bool scale_per_head() const requires(kStoresScales) { return scales.per_head(); }
  // The scale is amax / Inner's largest number; 1 for zeros. Where amax is infinite or NaN, the largest scale that all
  // finite values fit under.
  [[nodiscard]] KVBLEND_HOST_DEVICE ScaledRun<Inner> fitted(float amax) const requires(kStoresScales) {
    return {detail::fitting_scale(amax, Inner::largest)};
  }
  KVBLEND_HOST_DEVICE void put_scale(std::int64_t row, std::int32_t head, const ScaledRun<Inner>& run) const
      requires(kStoresScales) {
    scales.put(row, head, run.scale);
  }
  template <class Others>
  KVBLEND_HOST_DEVICE void copy_scale(std::int64_t row, std::int32_t head, const Scaled<Inner, Others>& from,
                                      std::int64_t from_row, std::int32_t from_head) const requires(kStoresScales) {
    scales.put(row, head, from.scales.scale(from_row, from_head));
  }
};

// ---------------------------------------------------------------------------------------------------------------------

namespace detail {

inline Status no_scale(float scale) {
  return Status::error(StatusCode::invalid_argument, "is %g: missing, or not a positive normal number",
                       static_cast<double>(scale));
}

inline constexpr int kScaledBlock = 32;

}  // namespace detail

inline Status TensorScale::check(std::int32_t) const {
  if (!is_scale(value)) return detail::no_scale(value).at("scale");
  return {};
}

KVBLEND_HOST_DEVICE inline bool TensorScale::same_as(const TensorScale& other) const {
  return __builtin_bit_cast(std::uint32_t, value) == __builtin_bit_cast(std::uint32_t, other.value);
}

inline Status HeadScales::check(std::int32_t heads) const {
  if (values == nullptr) return Status::error(StatusCode::invalid_argument, "there are none").at("scales");
  if (count != heads) {
    return Status::error(StatusCode::mismatch, "there are %d for %d heads", count, heads).at("scales");
  }
  for (std::int32_t head = 0; head < count; ++head) {
    if (!is_scale(values[head])) return detail::no_scale(values[head]).at("scales[%d]", head);
  }
  return {};
}

KVBLEND_HOST_DEVICE inline bool HeadScales::same_as(const HeadScales& other) const {
  if (count != other.count) return false;
  if (values == other.values) return true;
  for (std::int32_t head = 0; head < count; ++head) {
    if (__builtin_bit_cast(std::uint32_t, values[head]) != __builtin_bit_cast(std::uint32_t, other.values[head])) {
      return false;
    }
  }
  return true;
}

template <class L, class Byte>
Status TokenScales<L, Byte>::check(std::int32_t heads) const {
  if (base == nullptr) return Status::error(StatusCode::invalid_argument, "there are none").at("scales");
  if (layout.heads() != 1 && layout.heads() != heads) {
    return Status::error(StatusCode::mismatch, "there are %d a row, for %d heads", layout.heads(), heads).at("scales");
  }
  if (layout.head_dim() != 1) {
    return Status::error(StatusCode::invalid_argument, "layout has heads of %d values, should be 1", layout.head_dim())
        .at("scales");
  }
  return {};
}

template <class L, class Byte>
Status TokenScales<L, Byte>::check_row(std::int64_t row) const {
  if (base == nullptr || !layout.contains(row)) {
    return Status::error(StatusCode::out_of_range, "there are none")
        .at("scales of row %lld", static_cast<long long>(row));
  }
  for (std::int32_t head = 0; head < layout.heads(); ++head) {
    const float value = scale(row, head);
    if (!is_scale(value)) {
      return detail::no_scale(value).at("scale of row %lld, head %d", static_cast<long long>(row), head);
    }
  }
  return {};
}

template <RunCodec Inner>
KVBLEND_HOST_DEVICE void ScaledRun<Inner>::decode(const std::byte* source, float* values, std::int64_t count) const {
  const float factor = scale;  // not reloaded for each value that is written
  Inner{}.decode(source, values, count);
  for (; count >= detail::kScaledBlock; count -= detail::kScaledBlock, values += detail::kScaledBlock) {
    for (int j = 0; j < detail::kScaledBlock; ++j) values[j] *= factor;
  }
  for (std::int64_t j = 0; j < count; ++j) values[j] *= factor;
}

template <RunCodec Inner>
KVBLEND_HOST_DEVICE void ScaledRun<Inner>::encode(const float* values, std::byte* destination,
                                                  std::int64_t count) const {
  constexpr std::int64_t kBlock = block_values > detail::kScaledBlock ? block_values : detail::kScaledBlock;
  static_assert(kBlock % block_values == 0);
  float quotients[static_cast<std::size_t>(kBlock)];
  const float divisor = scale;
  for (; count >= kBlock; count -= kBlock, values += kBlock, destination += bytes_of<Inner>(kBlock)) {
    for (int j = 0; j < kBlock; ++j) quotients[j] = values[j] / divisor;
    Inner{}.encode(quotients, destination, kBlock);
  }
  for (std::int64_t j = 0; j < count; ++j) quotients[j] = values[j] / divisor;
  Inner{}.encode(quotients, destination, count);
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
