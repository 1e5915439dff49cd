// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How cuda::Fusor picks rows on the device: what a score is made from comes together by candidate, then the best are
// listed.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/cuda/choose.hpp>
#include <kvblend/cuda/combined_score.hpp>
#include <kvblend/cuda/execution.hpp>
#include <kvblend/cuda/operations.hpp>
#include <kvblend/cuda/score.hpp>
#include <kvblend/cuda/workspace.hpp>
#include <kvblend/select/score.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {
namespace detail {

// What of FusorSpace a score wants.
template <Score S>
[[nodiscard]] constexpr FusorSpace::Needs needs_of() {
  FusorSpace::Needs needs;
  needs.scores = S::timing != ScoreTiming::before_load;
  needs.mass = S::timing == ScoreTiming::after_probe;
  needs.weighed = needs.mass && S::uses_values;
  needs.stored = needs.scores && HasStoredPart<S>;
  return needs;
}

// Of the layer of a probe pass whose norms are in space.value_deviation: what was paid to `rows` goes weighed on to the
// sums.
template <Execution E>
Status weigh_mass(const E& execution, const FusorSpace& space, std::span<const Row> rows) {
  return execution.for_each(
      static_cast<std::int64_t>(rows.size()),
      WeighMass{rows.data(), space.value_deviation.data(), space.mass.data(), space.weighed_mass.data()});
}

// The best of `rows` to `chosen`; how many is known. `inputs` has their deviations, if the score uses any.
template <Execution E, Score S>
Status pick_rows(const Operations<E>& operations, const S& score, const FusorSpace& space, DeviceScoreInputs inputs,
                 std::span<const Row> rows, std::span<Row> chosen) {
  const E& execution = operations.execution();
  const auto count = static_cast<std::int64_t>(rows.size());
  const auto gather = [&](std::span<const float> by_row, std::span<float> out) {
    return execution.for_each(count, GatherByRow{rows.data(), by_row.data(), out.data()});
  };
  if constexpr (needs_of<S>().mass) {  // deviations are not needed: their memory serves
    KVBLEND_RETURN_IF_ERROR(gather(needs_of<S>().weighed ? space.weighed_mass : space.mass, space.key_deviation));
    inputs.attention_mass = space.key_deviation.first(rows.size());
  }
  if constexpr (needs_of<S>().stored) {
    KVBLEND_RETURN_IF_ERROR(gather(space.stored_by_row, space.stored));
    inputs.stored = space.stored.first(rows.size());
  }
  inputs.scores = space.scores.first(rows.size());
  inputs.scratch = space.sums;
  const Result<std::span<const float>> scores = DeviceScore<S>::queue(execution, score, inputs);
  KVBLEND_RETURN_IF_ERROR(scores.status);
  const auto picks = static_cast<std::int32_t>(chosen.size());
  const std::span<ActiveIndex> picked = space.picked.first(chosen.size());
  KVBLEND_RETURN_IF_ERROR(operations.top_k(scores.value, picks, space.keys.first(rows.size()), picked));
  return execution.for_each(picks, GatherRows{rows.data(), picked.data(), chosen.data()});
}

}  // namespace detail
}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
