// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Builds the RopeSpecs of the families that stretch a model's context: llama 3, NTK, YaRN, longrope, proportional. Each
// by the formula that engines use, so that keys they cached are turned by what turned them.
//
// Length-dependent families (dynamic NTK, longrope) take the length for which the frequencies hold, the highest
// position of the pass + 1. Keys cached in a pass of another length move from the spec of that length to the spec of
// this one.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/rope/builders.hpp>
#include <kvblend/rope/spec.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// What a llama 3.1 configuration says: rope_scaling's factor, low_freq_factor, high_freq_factor and
// original_max_position_embeddings.
struct Llama3Scaling {
  double factor = 8;
  double low_frequency_factor = 1;
  double high_frequency_factor = 4;
  double original_length = 8192;
};

// Dynamic NTK: factor, and max_position_embeddings, up to which nothing is stretched.
struct DynamicNtkScaling {
  double factor = 1;
  double original_length = 0;
};

// YaRN: factor, original_max_position_embeddings, beta_fast, beta_slow, truncate, mscale, mscale_all_dim and
// attention_factor, by these names. Zero mscales are absent ones.
struct YarnScaling {
  double factor = 1;
  double original_length = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  bool truncate = true;
  double mscale = 0;
  double mscale_all_dim = 0;
  double attention_factor = 0;  // 0: by formula
};

// Longrope: short_factor and long_factor, one entry a pair, original_max_position_embeddings, attention_factor.
struct LongropeScaling {
  std::span<const double> short_factors;
  std::span<const double> long_factors;
  double original_length = 0;
  double factor = 0;            // max_position_embeddings / original_length; 0: none
  double attention_factor = 0;  // 0: by formula
};

namespace detail {

// Zero stands for a field that is absent.
inline Status check_positive_or_absent(const char* field, double value) {
  if (is_finite(value) && value >= 0) return {};
  return Status::error(StatusCode::invalid_argument, "is %g, must be finite and positive, or 0 for none", value)
      .at("rope %s", field);
}

inline Status check_length(std::int64_t length) {
  if (length >= 0) return {};
  return Status::error(StatusCode::invalid_argument, "is %lld", static_cast<long long>(length)).at("rope length");
}

// Plain rope with a base stretched by `stretch`, which keeps the last pair's angle at `stretch` times the length what
// it was: theta · stretch^(d / (d − 2)), d = rotary_dim.
inline Result<RopeSpec> ntk_rope(std::int32_t head_dim, double theta, double stretch, const char* field,
                                 RopePairing pairing, std::int32_t rotary_dim) {
  Result<RopeSpec> plain = plain_rope(head_dim, theta, pairing, rotary_dim);
  if (!plain.ok()) return plain;
  const std::int32_t dim = plain.value.rotary_dim;
  if (dim == 2) {
    return Status::error(StatusCode::invalid_argument, "is 2, NTK scaling needs more").at("rope rotary_dim");
  }
  const double base = theta * std::pow(stretch, static_cast<double>(dim) / (dim - 2));
  if (!is_finite(base) || base <= 0) {
    return Status::error(StatusCode::invalid_argument, "makes theta %g", base).at("rope %s", field);
  }
  return plain_rope(head_dim, base, pairing, rotary_dim);
}

// The pair that turns `turns` times within `length` positions, as a real number.
inline double yarn_pair(double turns, double length, double theta, std::int32_t rotary_dim) {
  return rotary_dim * std::log(length / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
}

inline double yarn_magnitude(double factor, double scale) {
  return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
}

}  // namespace detail

// Frequencies that turn fewer than low_frequency_factor times within original_length are divided by `factor`, those
// that turn more than high_frequency_factor times stay, and those between are blended linearly in the number of turns
// (Hugging Face transformers, modeling_rope_utils.py, rope_type "llama3").
[[nodiscard]] inline Result<RopeSpec> llama3_rope(std::int32_t head_dim, double theta, const Llama3Scaling& scaling,
                                                  RopePairing pairing = RopePairing::neox,
                                                  std::int32_t rotary_dim = kWholeHead) {
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("factor", scaling.factor));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("low_frequency_factor", scaling.low_frequency_factor));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("high_frequency_factor", scaling.high_frequency_factor));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("original_length", scaling.original_length));
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

// A base stretched once and for all: theta · alpha^(d / (d − 2)), d = rotary_dim (HunYuan, whose configuration calls it
// "dynamic" and gives an alpha; Hugging Face transformers, modeling_hunyuan_v1_dense.py).
[[nodiscard]] inline Result<RopeSpec> ntk_alpha_rope(std::int32_t head_dim, double theta, double alpha,
                                                     RopePairing pairing = RopePairing::neox,
                                                     std::int32_t rotary_dim = kWholeHead) {
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("alpha", alpha));
  return detail::ntk_rope(head_dim, theta, alpha, "alpha", pairing, rotary_dim);
}

// Plain up to original_length; beyond, the base grows with the length L: theta · (factor · L / original_length −
// (factor − 1))^(d / (d − 2)), d = rotary_dim (Hugging Face transformers, modeling_rope_utils.py, rope_type "dynamic").
[[nodiscard]] inline Result<RopeSpec> dynamic_ntk_rope(std::int32_t head_dim, double theta,
                                                       const DynamicNtkScaling& scaling, std::int64_t length,
                                                       RopePairing pairing = RopePairing::neox,
                                                       std::int32_t rotary_dim = kWholeHead) {
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("factor", scaling.factor));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("original_length", scaling.original_length));
  KVBLEND_RETURN_IF_ERROR(detail::check_length(length));
  const double reached = (std::max)(static_cast<double>(length), scaling.original_length);
  const double stretch = scaling.factor * reached / scaling.original_length - (scaling.factor - 1);
  return detail::ntk_rope(head_dim, theta, stretch, "factor", pairing, rotary_dim);
}

// Pairs that turn more than beta_fast times within original_length keep their frequency, those that turn fewer than
// beta_slow times have it divided by `factor`, and those between are blended linearly in the pair's number; `truncate`
// rounds the ends of that range outwards. The magnitude is 0.1 ln(factor) + 1, or with both mscales the ratio of that
// with mscale and with mscale_all_dim before the logarithm (YaRN, arXiv 2309.00071, sections 3.2 to 3.4; Hugging Face
// transformers, modeling_rope_utils.py, rope_type "yarn").
[[nodiscard]] inline Result<RopeSpec> yarn_rope(std::int32_t head_dim, double theta, const YarnScaling& scaling,
                                                RopePairing pairing = RopePairing::neox,
                                                std::int32_t rotary_dim = kWholeHead) {
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("factor", scaling.factor));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("original_length", scaling.original_length));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("beta_fast", scaling.beta_fast));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("beta_slow", scaling.beta_slow));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive_or_absent("mscale", scaling.mscale));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive_or_absent("mscale_all_dim", scaling.mscale_all_dim));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive_or_absent("attention_factor", scaling.attention_factor));
  if (scaling.beta_fast < scaling.beta_slow) {
    return Status::error(StatusCode::invalid_argument, "is %g, must be at least beta_slow %g", scaling.beta_fast,
                         scaling.beta_slow)
        .at("rope beta_fast");
  }
  Result<RopeSpec> spec = plain_rope(head_dim, theta, pairing, rotary_dim);
  if (!spec.ok()) return spec;
  if (theta <= 1) {
    return Status::error(StatusCode::invalid_argument, "is %g, YaRN needs one above 1", theta).at("rope theta");
  }
  const std::int32_t dim = spec.value.rotary_dim;
  double low = detail::yarn_pair(scaling.beta_fast, scaling.original_length, theta, dim);
  double high = detail::yarn_pair(scaling.beta_slow, scaling.original_length, theta, dim);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = (std::max)(low, 0.0);
  high = (std::min)(high, static_cast<double>(dim - 1));
  // Engines disagree on what happens then, and no model was trained so.
  if (dim > 0 && high < low) {
    return Status::error(StatusCode::invalid_argument, "is %g, which leaves no pair between beta_fast and beta_slow",
                         scaling.original_length)
        .at("rope original_length");
  }
  if (low == high) high += 0.001;  // as the peer does
  for (std::int32_t pair = 0; pair < spec.value.pairs(); ++pair) {
    double& frequency = spec.value.inv_freq[static_cast<std::size_t>(pair)];
    const double divided = std::clamp((pair - low) / (high - low), 0.0, 1.0);
    frequency = frequency / scaling.factor * divided + frequency * (1 - divided);
  }
  if (scaling.attention_factor > 0) {
    spec.value.attention_factor = scaling.attention_factor;
  } else if (scaling.mscale > 0 && scaling.mscale_all_dim > 0) {
    spec.value.attention_factor = detail::yarn_magnitude(scaling.factor, scaling.mscale) /
                                  detail::yarn_magnitude(scaling.factor, scaling.mscale_all_dim);
  } else {
    spec.value.attention_factor = detail::yarn_magnitude(scaling.factor, 1);
  }
  KVBLEND_RETURN_IF_ERROR(validate(spec.value));
  return spec;
}

// Every frequency divided by its own factor: short_factors' up to original_length, long_factors' from
// original_length + 1 on. The magnitude, sqrt(1 + ln(factor) / ln(original_length)) where factor is above 1, is the
// same for both (LongRoPE, arXiv 2402.13753; Hugging Face transformers, modeling_rope_utils.py, rope_type "longrope").
[[nodiscard]] inline Result<RopeSpec> longrope(std::int32_t head_dim, double theta, const LongropeScaling& scaling,
                                               std::int64_t length, RopePairing pairing = RopePairing::neox,
                                               std::int32_t rotary_dim = kWholeHead) {
  KVBLEND_RETURN_IF_ERROR(detail::check_positive("original_length", scaling.original_length));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive_or_absent("factor", scaling.factor));
  KVBLEND_RETURN_IF_ERROR(detail::check_positive_or_absent("attention_factor", scaling.attention_factor));
  KVBLEND_RETURN_IF_ERROR(detail::check_length(length));
  Result<RopeSpec> spec = plain_rope(head_dim, theta, pairing, rotary_dim);
  if (!spec.ok()) return spec;
  struct List {
    const char* name;
    std::span<const double> factors;
  };
  const List lists[] = {{"short_factors", scaling.short_factors}, {"long_factors", scaling.long_factors}};
  for (const List& list : lists) {
    if (list.factors.size() != static_cast<std::size_t>(spec.value.pairs())) {
      return Status::error(StatusCode::mismatch, "has %zu entries for %d pairs", list.factors.size(),
                           spec.value.pairs())
          .at("rope %s", list.name);
    }
    for (std::size_t i = 0; i < list.factors.size(); ++i) {
      if (is_finite(list.factors[i]) && list.factors[i] > 0) continue;
      return Status::error(StatusCode::invalid_argument, "is %g, must be finite and positive", list.factors[i])
          .at("rope %s[%zu]", list.name, i);
    }
  }
  const bool is_long = static_cast<double>(length) > scaling.original_length;
  for (std::size_t i = 0; i < scaling.short_factors.size(); ++i) {
    spec.value.inv_freq[i] /= is_long ? scaling.long_factors[i] : scaling.short_factors[i];
  }
  if (scaling.attention_factor > 0) {
    spec.value.attention_factor = scaling.attention_factor;
  } else if (scaling.factor > 1) {
    if (scaling.original_length <= 1) {
      return Status::error(StatusCode::invalid_argument, "is %g, the magnitude needs one above 1",
                           scaling.original_length)
          .at("rope original_length");
    }
    spec.value.attention_factor = std::sqrt(1 + std::log(scaling.factor) / std::log(scaling.original_length));
  }
  KVBLEND_RETURN_IF_ERROR(validate(spec.value));
  return spec;
}

// Pairs over the whole head, plain frequencies over `factor` for the first floor(partial_factor · head_dim / 2), none
// for the others: these are pairs of the rotation all the same, so that it is not partial rotary (Gemma 4's full
// attention layers; Hugging Face transformers, modeling_rope_utils.py, rope_type "proportional").
[[nodiscard]] inline Result<RopeSpec> proportional_rope(std::int32_t head_dim, double theta, double partial_factor,
                                                        double factor = 1, RopePairing pairing = RopePairing::neox) {
  if (!is_finite(partial_factor) || partial_factor < 0 || partial_factor > 1) {
    return Status::error(StatusCode::invalid_argument, "is %g, must be in [0, 1]", partial_factor)
        .at("rope partial_factor");
  }
  Result<RopeSpec> spec = linear_rope(head_dim, theta, factor, pairing);
  if (!spec.ok()) return spec;
  const auto turning = static_cast<std::int32_t>(std::floor(partial_factor * head_dim / 2));
  for (std::int32_t pair = turning; pair < spec.value.pairs(); ++pair) {
    spec.value.inv_freq[static_cast<std::size_t>(pair)] = 0;
  }
  return spec;
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
