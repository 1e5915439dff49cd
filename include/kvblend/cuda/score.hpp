// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// DeviceScore: what of a score policy runs on the device, for scores made during the pass or after a probe.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/cuda/execution.hpp>
#include <kvblend/select/mean.hpp>
#include <kvblend/select/scores.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// Device memory, one entry a candidate; what the score does not use is empty.
struct DeviceScoreInputs {
  std::span<const float> key_deviation;
  std::span<const float> value_deviation;
  std::span<const float> attention_mass;  // summed over the layers, weighed by values if the score wants them
  std::span<const float> stored;          // the part that was stored with the chunks (combined_score.hpp)
  std::span<float> scores;                // room for them
  std::span<double> scratch;              // at least 16 + an eighth of the candidates
};

// Specialise it for a score of your own, with
//   template <Execution E>
//   static Result<std::span<const float>> queue(const E&, const ScorePolicy&, const DeviceScoreInputs&)
// which queues what makes the scores and returns where they will be: inputs.scores, or one of the inputs as it is. They
// must be what the policy's own operator() makes of the same numbers. With `static constexpr bool has_stored_part = true`
// the policy's member `second` is a before-load score, which the host makes and uploads as inputs.stored.
template <class ScorePolicy>
struct DeviceScore;

template <>
struct DeviceScore<KeyDeviation> {
  template <Execution E>
  static Result<std::span<const float>> queue(const E&, const KeyDeviation&, const DeviceScoreInputs& inputs) {
    return inputs.key_deviation;
  }
};

template <>
struct DeviceScore<ValueDeviation> {
  template <Execution E>
  static Result<std::span<const float>> queue(const E&, const ValueDeviation&, const DeviceScoreInputs& inputs) {
    return inputs.value_deviation;
  }
};

template <>
struct DeviceScore<AttentionMass> {
  template <Execution E>
  static Result<std::span<const float>> queue(const E&, const AttentionMass&, const DeviceScoreInputs& inputs) {
    return inputs.attention_mass;
  }
};

template <>
struct DeviceScore<AttentionValueMass> {
  template <Execution E>
  static Result<std::span<const float>> queue(const E&, const AttentionValueMass&, const DeviceScoreInputs& inputs) {
    return inputs.attention_mass;  // the blend has weighed it
  }
};

// Sums of blocks of both deviations: items are the key's blocks, then the value's.
struct SumBlocks {
  const float* keys;
  const float* values;
  std::int64_t count;  // of each
  kvblend::detail::FiniteSum* sums;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t item) const {
    const std::int64_t blocks = kvblend::detail::mean_blocks(count);
    sums[item] = kvblend::detail::block_sum(item < blocks ? keys : values, count, item % blocks);
  }
};

// scales[0] from the key's sums, scales[1] from the value's.
struct ScaleByMeans {
  const kvblend::detail::FiniteSum* sums;
  std::int64_t blocks;  // of each
  double* scales;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t which) const {
    kvblend::detail::FiniteSum total;
    for (std::int64_t block = 0; block < blocks; ++block) total.add(sums[which * blocks + block]);
    scales[which] = kvblend::detail::scale_of_mean(total.mean());
  }
};

struct ScaledSums {
  const float* keys;
  const float* values;
  const double* scales;
  float* out;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    out[i] = kvblend::detail::scaled_sum(keys[i], scales[0], values[i], scales[1]);
  }
};

template <>
struct DeviceScore<KeyValueDeviation> {
  template <Execution E>
  static Result<std::span<const float>> queue(const E& execution, const KeyValueDeviation&,
                                              const DeviceScoreInputs& inputs) {
    const float* const keys = inputs.key_deviation.data();
    const float* const values = inputs.value_deviation.data();
    const auto count = static_cast<std::int64_t>(inputs.key_deviation.size());
    const std::int64_t blocks = kvblend::detail::mean_blocks(count);
    double* const scales = inputs.scratch.data();
    auto* const sums = reinterpret_cast<kvblend::detail::FiniteSum*>(scales + 2);
    KVBLEND_RETURN_IF_ERROR(execution.for_each(2 * blocks, SumBlocks{keys, values, count, sums}));
    KVBLEND_RETURN_IF_ERROR(execution.for_each(2, ScaleByMeans{sums, blocks, scales}));
    KVBLEND_RETURN_IF_ERROR(execution.for_each(count, ScaledSums{keys, values, scales, inputs.scores.data()}));
    return std::span<const float>(inputs.scores);
  }
};

template <class S>
concept DeviceScored = requires {
  sizeof(DeviceScore<S>);
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
