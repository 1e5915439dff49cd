// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// DeviceScores of sums and products whose second part is stored with the chunks: the host makes that one, once for all
// candidates, since it is the same at every layer.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/cuda/execution.hpp>
#include <kvblend/cuda/score.hpp>
#include <kvblend/select/combine.hpp>
#include <kvblend/select/mean.hpp>
#include <kvblend/select/prior.hpp>
#include <kvblend/select/scores.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

template <class S>
concept HasStoredPart = requires {
  requires DeviceScore<S>::has_stored_part;
};
// There is room for one stored part.
template <class S>
concept OneDeviceScore = DeviceScored<S> && !HasStoredPart<S>;

// means[which] from the sums of the first part's blocks, then the second's.
struct MeansOfParts {
  const kvblend::detail::FiniteSum* sums;
  std::int64_t blocks;  // of each
  double* means;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t which) const {
    kvblend::detail::FiniteSum total;
    for (std::int64_t block = 0; block < blocks; ++block) total.add(sums[which * blocks + block]);
    means[which] = total.mean();
  }
};

template <bool multiplies>
struct CombineParts {
  const float* first;
  const float* second;
  const double* means;
  float* out;

  KVBLEND_HOST_DEVICE void operator()(std::int64_t i) const {
    const float a = kvblend::detail::over_mean(first[i], means[0]);
    const float b = kvblend::detail::over_mean(second[i], means[1]);
    out[i] = multiplies ? a * b : a + b;
  }
};

namespace detail {

template <bool multiplies, class Combined, class A>
struct WithStoredPart {
  template <Execution E>
  static Result<std::span<const float>> queue(const E& execution, const Combined& score,
                                              const DeviceScoreInputs& inputs) {
    const Result<std::span<const float>> first = DeviceScore<A>::queue(execution, score.first, inputs);
    KVBLEND_RETURN_IF_ERROR(first.status);
    const float* const a = first.value.data();
    const float* const b = inputs.stored.data();
    const auto count = static_cast<std::int64_t>(inputs.stored.size());
    const std::int64_t blocks = kvblend::detail::mean_blocks(count);
    double* const means = inputs.scratch.data();
    auto* const sums = reinterpret_cast<kvblend::detail::FiniteSum*>(means + 2);
    KVBLEND_RETURN_IF_ERROR(execution.for_each(2 * blocks, SumBlocks{a, b, count, sums}));
    KVBLEND_RETURN_IF_ERROR(execution.for_each(2, MeansOfParts{sums, blocks, means}));
    KVBLEND_RETURN_IF_ERROR(execution.for_each(count, CombineParts<multiplies>{a, b, means, inputs.scores.data()}));
    return std::span<const float>(inputs.scores);
  }
};

}  // namespace detail

template <OneDeviceScore A, class Prior>
struct DeviceScore<SumScore<A, StoredScore<Prior>>>
    : detail::WithStoredPart<false, SumScore<A, StoredScore<Prior>>, A> {
  static constexpr bool has_stored_part = true;
};

template <OneDeviceScore A, class Prior>
struct DeviceScore<ProductScore<A, StoredScore<Prior>>>
    : detail::WithStoredPart<true, ProductScore<A, StoredScore<Prior>>, A> {
  static constexpr bool has_stored_part = true;
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
