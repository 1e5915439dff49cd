// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Builds RopeSpecs: from an engine's own frequencies, which is the safest, or by the formula of a plain family
// (scaling.hpp has those that stretch the context); and makes of one spec that of another cache.
//
// What needs no builder of its own: partial rotary embeddings are rotary_dim, bases that differ from layer to layer are
// a spec for each, and so are layers without any.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/rope/spec.hpp>

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// As rotary_dim: all of the head turns.
inline constexpr std::int32_t kWholeHead = -1;

namespace detail {
inline Status check_positive(const char* field, double value) {
  if (is_finite(value) && value > 0) return {};
  return Status::error(StatusCode::invalid_argument, "is %g, must be finite and positive", value).at("rope %s", field);
}
}  // namespace detail

// A layer without rotary embedding: its keys move as they are.
[[nodiscard]] inline Result<RopeSpec> no_rope(std::int32_t head_dim) {
  RopeSpec spec;
  spec.head_dim = head_dim;
  KVBLEND_RETURN_IF_ERROR(validate(spec));
  return spec;
}

// The engine's own frequencies, radians a position, one a pair; rotary_dim is twice their number. Float32 frequencies
// stay what they are, so that EngineAngles rounds as the engine does.
// Errors: what validate(RopeSpec) finds; a rotary_dim that does not fit the number of frequencies.
template <std::floating_point Float>
[[nodiscard]] Result<RopeSpec> rope_from_frequencies(std::int32_t head_dim, std::int32_t rotary_dim,
                                                     RopePairing pairing, std::span<const Float> inv_freq,
                                                     std::int32_t rotary_offset = 0, double attention_factor = 1.0) {
  RopeSpec spec;
  spec.head_dim = head_dim;
  spec.rotary_dim = rotary_dim == kWholeHead ? head_dim : rotary_dim;
  spec.rotary_offset = rotary_offset;
  spec.pairing = pairing;
  spec.attention_factor = attention_factor;
  KVBLEND_RETURN_IF_ERROR(validate(spec));  // before pairs() is trusted
  if (inv_freq.size() != static_cast<std::size_t>(spec.pairs())) {
    return Status::error(StatusCode::mismatch, "has %zu entries for %d pairs", inv_freq.size(), spec.pairs())
        .at("rope inv_freq");
  }
  for (std::size_t pair = 0; pair < inv_freq.size(); ++pair) spec.inv_freq[pair] = static_cast<double>(inv_freq[pair]);
  KVBLEND_RETURN_IF_ERROR(validate(spec));
  return spec;
}

// inv_freq[i] = theta^(−2i / rotary_dim) (Su et al., arXiv 2104.09864, section 3.2.2).
[[nodiscard]] inline Result<RopeSpec> plain_rope(std::int32_t head_dim, double theta,
                                                 RopePairing pairing = RopePairing::neox,
                                                 std::int32_t rotary_dim = kWholeHead) {
  RopeSpec spec;
  spec.head_dim = head_dim;
  spec.rotary_dim = rotary_dim == kWholeHead ? head_dim : rotary_dim;
  spec.pairing = pairing;
  KVBLEND_RETURN_IF_ERROR(validate(spec));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("theta", theta));
  for (std::int32_t pair = 0; pair < spec.pairs(); ++pair) {
    spec.inv_freq[static_cast<std::size_t>(pair)] = 1.0 / std::pow(theta, 2.0 * pair / spec.rotary_dim);
  }
  KVBLEND_RETURN_IF_ERROR(validate(spec));  // a tiny theta's powers may overflow
  return spec;
}

// Plain, with all frequencies divided by `factor` (position interpolation, arXiv 2306.15595).
[[nodiscard]] inline Result<RopeSpec> linear_rope(std::int32_t head_dim, double theta, double factor,
                                                  RopePairing pairing = RopePairing::neox,
                                                  std::int32_t rotary_dim = kWholeHead) {
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("factor", factor));
  Result<RopeSpec> spec = plain_rope(head_dim, theta, pairing, rotary_dim);
  if (!spec.ok()) return spec;
  for (double& frequency : spec.value.inv_freq) frequency /= factor;
  KVBLEND_RETURN_IF_ERROR(validate(spec.value));
  return spec;
}

// How M-RoPE deals the pairs out to the three positions of a token.
enum class AxisOrder : std::uint8_t {
  sectioned,    // the first pairs to time, then height, then width (Qwen2-VL)
  interleaved,  // t h w t h w … until height and width have theirs; time has the rest (Qwen3-VL)
};

// `spec` with M-RoPE's axes: sections[0], [1] and [2] pairs turn by a token's time, height and width position. For
// text, where the three are one, the rotation is `spec`'s own (arXiv 2409.12191, section 2.1; Hugging Face
// transformers, qwen2_vl's apply_multimodal_rotary_pos_emb and qwen3_vl's apply_interleaved_mrope, "mrope_section").
// Errors: sections that are not three, are negative, do not add up to the pairs, or cannot be interleaved.
[[nodiscard]] inline Result<RopeSpec> with_axes(const RopeSpec& spec, std::span<const std::int32_t> sections,
                                                AxisOrder order) {
  KVBLEND_RETURN_IF_ERROR(validate(spec));
  if (sections.size() != kRopeAxes) {
    return Status::error(StatusCode::invalid_argument, "has %zu entries, must have 3", sections.size())
        .at("rope sections");
  }
  std::int64_t sum = 0;
  for (std::size_t axis = 0; axis < kRopeAxes; ++axis) {
    if (sections[axis] < 0) {
      return Status::error(StatusCode::invalid_argument, "is %d", sections[axis]).at("rope sections[%zu]", axis);
    }
    sum += sections[axis];
  }
  if (sum != spec.pairs()) {
    return Status::error(StatusCode::mismatch, "add up to %lld, the spec has %d pairs", static_cast<long long>(sum),
                         spec.pairs())
        .at("rope sections");
  }
  RopeSpec out = spec;
  out.axis_of_pair = {};
  std::int32_t first = sections[0];
  for (std::int32_t axis = 1; axis < kRopeAxes; ++axis) {
    const std::int32_t count = sections[static_cast<std::size_t>(axis)];
    const bool apart = order == AxisOrder::interleaved;
    if (apart && count > 0 && kRopeAxes * (count - 1) + axis >= spec.pairs()) {
      return Status::error(StatusCode::invalid_argument, "is %d, every third of %d pairs is fewer", count, spec.pairs())
          .at("rope sections[%d]", axis);
    }
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int32_t pair = apart ? kRopeAxes * i + axis : first + i;
      out.axis_of_pair[static_cast<std::size_t>(pair)] = static_cast<std::uint8_t>(axis);
    }
    first += count;
  }
  return out;
}

// The same rotation inside a head of `head_dim` values, of which spec's own begin at `offset`: DeepSeek's expanded keys
// (64 rotated values from 128 on, of 192) and the rows of its latent cache (64 from 512 on, of 576).
// Errors: a head that cannot hold them.
[[nodiscard]] inline Result<RopeSpec> within_head(const RopeSpec& spec, std::int32_t head_dim, std::int32_t offset) {
  KVBLEND_RETURN_IF_ERROR(validate(spec));
  if (offset < 0 || offset > kMaxHeadDim || std::int64_t{offset} + spec.head_dim > head_dim) {
    return Status::error(StatusCode::invalid_argument, "is %d, a head of %d has no room for %d values there", offset,
                         head_dim, spec.head_dim)
        .at("rope offset");
  }
  RopeSpec out = spec;
  out.head_dim = head_dim;
  out.rotary_offset += offset;
  KVBLEND_RETURN_IF_ERROR(validate(out));
  return out;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
