// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Builds RopeSpecs: from an engine's own frequencies, which is the safest, or by the formula of a common family.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/rope/spec.hpp>

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// As rotary_dim: all of the head turns.
inline constexpr std::int32_t kWholeHead = -1;

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
  if (!is_finite(theta) || theta <= 0) {
    return Status::error(StatusCode::invalid_argument, "is %g, must be finite and positive", theta).at("rope theta");
  }
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
  if (!is_finite(factor) || factor <= 0) {
    return Status::error(StatusCode::invalid_argument, "is %g, must be finite and positive", factor).at("rope factor");
  }
  Result<RopeSpec> spec = plain_rope(head_dim, theta, pairing, rotary_dim);
  if (!spec.ok()) return spec;
  for (double& frequency : spec.value.inv_freq) frequency /= factor;
  KVBLEND_RETURN_IF_ERROR(validate(spec.value));
  return spec;
}

// What a llama 3.1 configuration says: rope_scaling's factor, low_freq_factor, high_freq_factor and
// original_max_position_embeddings.
struct Llama3Scaling {
  double factor = 8;
  double low_frequency_factor = 1;
  double high_frequency_factor = 4;
  double original_length = 8192;
};

// Frequencies that turn fewer than low_frequency_factor times within original_length are divided by `factor`, those
// that turn more than high_frequency_factor times stay, and those between are blended linearly in the number of turns
// (Hugging Face transformers, modeling_rope_utils.py, rope_type "llama3").
[[nodiscard]] inline Result<RopeSpec> llama3_rope(std::int32_t head_dim, double theta, const Llama3Scaling& scaling,
                                                  RopePairing pairing = RopePairing::neox,
                                                  std::int32_t rotary_dim = kWholeHead) {
  struct Field {
    const char* name;
    double value;
  };
  const Field fields[] = {{"factor", scaling.factor},
                          {"low_frequency_factor", scaling.low_frequency_factor},
                          {"high_frequency_factor", scaling.high_frequency_factor},
                          {"original_length", scaling.original_length}};
  for (const Field& field : fields) {
    if (!is_finite(field.value) || field.value <= 0) {
      return Status::error(StatusCode::invalid_argument, "is %g, must be finite and positive", field.value)
          .at("rope %s", field.name);
    }
  }
  if (scaling.low_frequency_factor >= scaling.high_frequency_factor) {
    return Status::error(StatusCode::invalid_argument, "is %g, must be below high_frequency_factor %g",
                         scaling.low_frequency_factor, scaling.high_frequency_factor)
        .at("rope low_frequency_factor");
  }
  Result<RopeSpec> spec = plain_rope(head_dim, theta, pairing, rotary_dim);
  if (!spec.ok()) return spec;
  for (std::int32_t pair = 0; pair < spec.value.pairs(); ++pair) {
    double& frequency = spec.value.inv_freq[static_cast<std::size_t>(pair)];
    const double turns = scaling.original_length * frequency / (2 * std::numbers::pi);
    const double kept =
        (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor);
    if (kept <= 0) {
      frequency /= scaling.factor;
    } else if (kept < 1) {
      frequency = (1 - kept) * frequency / scaling.factor + kept * frequency;
    }
  }
  KVBLEND_RETURN_IF_ERROR(validate(spec.value));
  return spec;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
