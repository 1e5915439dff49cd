// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The score policies: stored saliency, first-k and random (before anything is loaded), key and value deviation (during
// the pass), attention mass (after a probe pass). Each is one small struct, as a new one would be; combine.hpp and
// chunk_rules.hpp make others of them.
#pragma once

#include <kvblend/core/arithmetic.hpp>
#include <kvblend/core/bits.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/select/mean.hpp>
#include <kvblend/select/prior.hpp>
#include <kvblend/select/score.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

namespace detail {

// The segment of each row of an ascending list, in one walk over both.
class SegmentCursor {
 public:
  explicit SegmentCursor(const Prompt& prompt) : segments_(prompt.segments()) {}

  // Index of the segment that `row` lies in; segments().size() behind the last.
  [[nodiscard]] std::size_t find(Row row) {
    while (at_ < segments_.size() && segments_[at_].end_row() <= row) ++at_;
    return at_;
  }

 private:
  std::span<const Segment> segments_;
  std::size_t at_ = 0;
};

inline Status not_reused(Row row) {
  return Status::error(StatusCode::invalid_argument, "row %d is no row of a cached segment", row.value).at("rows");
}

// Deviations in units of their mean; what has the mean 0 stays.
[[nodiscard]] KVBLEND_HOST_DEVICE inline double scale_of_mean(double mean) { return mean > 0.0 ? 1.0 / mean : 1.0; }
[[nodiscard]] KVBLEND_HOST_DEVICE inline float scaled_sum(float a, double a_scale, float b, double b_scale) {
  return static_cast<float>(
      rounded_sum(rounded_product(static_cast<double>(a), a_scale), rounded_product(static_cast<double>(b), b_scale)));
}

// A well-mixed 64-bit value of (seed, row): the finalizer of splitmix64 over a Weyl step per row.
inline std::uint64_t mix(std::uint64_t seed, std::uint64_t row) {
  std::uint64_t x = seed + (row + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct BeforeLoad {
  static constexpr ScoreTiming timing = ScoreTiming::before_load;
  static constexpr bool uses_keys = false;
  static constexpr bool uses_values = false;
};

}  // namespace detail

// The score stored with the chunk for this token, times a prior of the distance from its position in this prompt to the
// prompt's last position. An error names the segment whose chunk has no scores.
template <PositionPrior Prior = PowerLawPrior>
struct StoredScore : detail::BeforeLoad {
  static constexpr const char* name = "stored_score";
  Prior prior{};

  StoredScore() = default;
  explicit StoredScore(const Prior& p) : prior(p) {}

  [[nodiscard]] Status validate() const { return prior.validate(); }
  [[nodiscard]] bool covers(const Prompt& prompt) const { return detail::has_stored_scores(prompt); }

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    if (inputs.rows.empty()) return {};
    const std::span<const Segment> segments = inputs.prompt.segments();
    const Position question = inputs.prompt.position(Row(inputs.prompt.rows() - 1));
    detail::SegmentCursor cursor(inputs.prompt);
    for (std::size_t i = 0; i < inputs.rows.size(); ++i) {
      const Row row = inputs.rows[i];
      const std::size_t s = cursor.find(row);
      if (s == segments.size() || segments[s].kind != SegmentKind::cached) return detail::not_reused(row);
      const Segment& segment = segments[s];
      if (segment.chunk->scores.empty()) {
        return Status::error(StatusCode::not_found, "the chunk has no stored scores").at("segment %zu", s);
      }
      const auto token = static_cast<std::size_t>(segment.chunk_offset + (row - segment.first_row));
      const double weight = prior(question - segment.position(row));
      out[i] = static_cast<float>(static_cast<double>(segment.chunk->scores[token]) * weight);
    }
    return {};
  }
};

// The first tokens of every segment before later ones of any (EPIC, arXiv 2410.15332): token j of its segment scores -j.
struct FirstK : detail::BeforeLoad {
  static constexpr const char* name = "first_k";

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    const std::span<const Segment> segments = inputs.prompt.segments();
    detail::SegmentCursor cursor(inputs.prompt);
    for (std::size_t i = 0; i < inputs.rows.size(); ++i) {
      const std::size_t s = cursor.find(inputs.rows[i]);
      if (s == segments.size()) return detail::not_reused(inputs.rows[i]);
      out[i] = -static_cast<float>(inputs.rows[i] - segments[s].first_row);
    }
    return {};
  }
};

// A control: uniform in [0, 1), a function of seed and row alone.
struct RandomScore : detail::BeforeLoad {
  static constexpr const char* name = "random";
  std::uint64_t seed = 0;

  RandomScore() = default;
  explicit RandomScore(std::uint64_t s) : seed(s) {}

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    for (std::size_t i = 0; i < inputs.rows.size(); ++i) {
      const std::uint64_t bits = detail::mix(seed, static_cast<std::uint64_t>(inputs.rows[i].value));
      out[i] = static_cast<float>(bits >> 40) * 0x1p-24f;
    }
    return {};
  }
};

// How far the reused keys are from fresh ones (CacheBlend, arXiv 2405.16444, section 4.2).
struct KeyDeviation {
  static constexpr ScoreTiming timing = ScoreTiming::during_pass;
  static constexpr bool uses_keys = true;
  static constexpr bool uses_values = false;
  static constexpr const char* name = "key_deviation";

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    std::copy(inputs.key_deviation.begin(), inputs.key_deviation.end(), out.begin());
    return {};
  }
};

// The same of values.
struct ValueDeviation {
  static constexpr ScoreTiming timing = ScoreTiming::during_pass;
  static constexpr bool uses_keys = false;
  static constexpr bool uses_values = true;
  static constexpr const char* name = "value_deviation";

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    std::copy(inputs.value_deviation.begin(), inputs.value_deviation.end(), out.begin());
    return {};
  }
};

// Both, each divided by its mean over the candidates so that neither's scale decides. A side whose mean is 0 says
// nothing and counts 0. NaN and infinity stay out of the means and in their own row's score.
struct KeyValueDeviation {
  static constexpr ScoreTiming timing = ScoreTiming::during_pass;
  static constexpr bool uses_keys = true;
  static constexpr bool uses_values = true;
  static constexpr const char* name = "key_value_deviation";

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    const double key_scale = detail::scale_of_mean(detail::finite_mean(inputs.key_deviation));
    const double value_scale = detail::scale_of_mean(detail::finite_mean(inputs.value_deviation));
    for (std::size_t i = 0; i < inputs.rows.size(); ++i) {
      out[i] = detail::scaled_sum(inputs.key_deviation[i], key_scale, inputs.value_deviation[i], value_scale);
    }
    return {};
  }
};

// What the probe rows, usually the question's, attend to under full reuse.
struct AttentionMass {
  static constexpr ScoreTiming timing = ScoreTiming::after_probe;
  static constexpr bool uses_keys = false;
  static constexpr bool uses_values = false;
  static constexpr const char* name = "attention_mass";

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    std::copy(inputs.attention_mass.begin(), inputs.attention_mass.end(), out.begin());
    return {};
  }
};

// The same, weighed by the values that attention fetches: Σ over layers of (Σ over heads of attention)·‖value‖₂. A sink
// draws much attention to a small value, and changes little.
struct AttentionValueMass {
  static constexpr ScoreTiming timing = ScoreTiming::after_probe;
  static constexpr bool uses_keys = false;
  static constexpr bool uses_values = true;
  static constexpr const char* name = "attention_value_mass";

  [[nodiscard]] Status operator()(const ScoreInputs& inputs, std::span<float> out) const {
    return AttentionMass{}(inputs, out);  // the blend has weighed it
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
