// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Drift: what becomes of the reused rows that a blend does not recompute. In CacheBlend they stay as they were stored;
// CommonDrift moves them the way that the recomputed rows of their segment went.
#pragma once

#include <kvblend/core/bits.hpp>
#include <kvblend/core/config.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/prompt/prompt.hpp>
#include <kvblend/select/deviation.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// They stay as they were stored.
struct NoDrift {
  static constexpr bool moves = false;
};

// How a row takes part in a drift: it is moved, or tells the others where to, or neither.
enum class DriftRole : std::uint8_t { moves, tells, none };

// A passage's tokens deviate from a full prefill each in its own way, but in part all alike: what stands before them is
// another text. The question attends to sums over many of them, in which their own parts cancel and the common one does
// not. The recomputed rows tell it: with the deviations δ = fresh − reused of those in a segment, by layer and head, and
// their directions e = δ / ‖δ‖, the other rows of the segment move by
//
//   share · h · ē · c / ‖ē‖²     h   harmonic mean of ‖δ‖
//                                ē   mean of e
//                                c   mean cosine of two different e, or 0 if it is negative
//
// c / ‖ē‖² is 1 where all went the same way and near 0 where they went at random: c estimates the square of the true
// mean's length without the bias that ‖ē‖² has. Directions and the harmonic mean keep single rows that are far off, such
// as a chunk's head, from moving all others; where some hardly deviate, nothing moves far. `share` is below 1 because
// rows that a selector prefers are not quite like the others: after a choice by attention or by stored scores drift
// helps, after one of the rows that deviate most, or of chunk heads alone, it can harm.
//
// Keys are taken as cached, rotated. Layer 0 depends on the token alone and is left as it is, as are exact and resident
// rows, and segments with less than two recomputed rows. Rows that run because their logits are wanted tell nothing.
// Values that are a part of the keys, as in MLA, move with them. Where an engine runs a pass in parts (pass_host.hpp), a
// segment in several of them moves in each by the rows of that part.
struct CommonDrift {
  static constexpr bool moves = true;

  std::span<float> memory;  // at least floats() of them, until the blend ends
  float share = 0.7f;       // in [0, 1]

  // `row_values`: kv_heads · head_dim, the largest of all layers' keys and values.
  [[nodiscard]] static std::size_t floats(const Prompt& prompt, std::int64_t row_values) {
    const auto cached = std::count_if(prompt.segments().begin(), prompt.segments().end(),
                                      [](const Segment& segment) { return segment.kind == SegmentKind::cached; });
    return static_cast<std::size_t>(cached * row_values);
  }
  [[nodiscard]] Status validate() const {
    if (share >= 0.0f && share <= 1.0f) return {};  // not if it is NaN
    return Status::error(StatusCode::invalid_argument, "%.9g is not in [0, 1]", static_cast<double>(share))
        .at("drift share");
  }

  // Moves a layer's keys and values. Fresh row i is row rows[i]; rows ascend.
  template <class Backend, class FreshKeys, class FreshValues, class Keys, class Values>
  Status move(const Backend& backend, std::span<const DriftRole> roles, std::span<const PlacedRun> runs,
              std::span<const Row> rows, const FreshKeys& fresh_keys, const Keys& keys, const FreshValues& fresh_values,
              const Values& values) const;
};

namespace detail {

// Values of one row, all heads.
template <ReadablePlane P>
[[nodiscard]] std::size_t row_values(const P& plane) {
  return static_cast<std::size_t>(plane.layout.heads()) * static_cast<std::size_t>(plane.layout.head_dim());
}

// Leaves in `move` what the run's rows of one head are to move by. Fresh row i is row rows[i]; rows ascend. A row that a
// layout skips, that did not deviate, or whose deviation is not finite, tells nothing.
template <ReadablePlane P, ReadablePlane Q>
void common_drift(const P& fresh, std::span<const Row> rows, const ShiftRun& run, const Q& reused, std::int32_t head,
                  std::span<const DriftRole> roles, double share, float* move) {
  const std::int32_t head_dim = reused.layout.head_dim();
  const auto first = std::lower_bound(rows.begin(), rows.end(), run.destination);
  const auto last = std::lower_bound(first, rows.end(), Row(run.destination.value + run.count));
  alignas(64) double sum[kMaxHeadDim];
  std::fill_n(sum, head_dim, 0.0);
  double inverse_lengths = 0;
  double n = 0;
  for (auto row = first; row != last; ++row) {
    const std::int64_t active = row - rows.begin();
    if (roles[static_cast<std::size_t>(row->value)] != DriftRole::tells) continue;
    if (skips_row(fresh.layout, active) || skips_row(reused.layout, row->value)) continue;
    alignas(64) float staged_fresh[kMaxHeadDim];
    alignas(64) float staged_reused[kMaxHeadDim];
    const float* a = head_floats(fresh, active, head, staged_fresh);
    const float* b = head_floats(reused, row->value, head, staged_reused);
    const double distance = PortableDistance::squared(a, b, head_dim);
    if (!is_finite(distance) || !(distance > 0)) continue;
    const double inverse = 1 / std::sqrt(distance);
    for (std::int32_t i = 0; i < head_dim; ++i) {
      sum[i] += inverse * (static_cast<double>(a[i]) - static_cast<double>(b[i]));
    }
    inverse_lengths += inverse;
    n += 1;
  }
  double squared = 0;
  for (std::int32_t i = 0; i < head_dim; ++i) squared += sum[i] * sum[i];
  // n² ‖ē‖² is the sum of all cosines, of which n are those of a row with itself.
  const double cosine = n > 1 ? (squared - n) / (n * (n - 1)) : 0;
  const double scale = cosine > 0 ? share * n / inverse_lengths * cosine * n / squared : 0;
  for (std::int32_t i = 0; i < head_dim; ++i) move[i] = static_cast<float>(scale * sum[i]);
}

template <WritablePlane Q>
struct MovedHead {
  const Q& plane;
  std::int64_t row;
  const float* moves;  // [heads, head_dim]

  KVBLEND_HOST_DEVICE void operator()(std::int32_t head, float* values) const {
    const std::int32_t head_dim = plane.layout.head_dim();
    decode_head(plane, row, head, values);
    for (std::int32_t i = 0; i < head_dim; ++i) values[i] += moves[std::int64_t{head} * head_dim + i];
  }
};

template <WritablePlane Q>
void move_row(const Q& plane, std::int64_t row, const float* moves) {
  if (skips_row(plane.layout, row)) return;
  const MovedHead<Q> moved{plane, row, moves};
  if constexpr (SelfScalingCodec<typename Q::codec_type>) {
    write_scaled_row(plane, row, moved);
  } else {
    const std::int32_t head_dim = plane.layout.head_dim();
    alignas(64) float staged[kMaxHeadDim];
    for (std::int32_t head = 0; head < plane.layout.heads(); ++head) {
      if (float* values = floats_in_place(plane, row, head); values != nullptr) {
        const float* move = moves + std::int64_t{head} * head_dim;
        for (std::int32_t i = 0; i < head_dim; ++i) values[i] += move[i];
        continue;
      }
      moved(head, staged);
      encode_head(plane, row, head, staged);
    }
  }
}

}  // namespace detail

// The two steps of a back end's drift(). Moves are [runs, heads, head_dim].

// One run's one head: `task` in [0, runs · heads).
template <ReadablePlane P, ReadablePlane Q>
void find_drift(const P& fresh, std::span<const Row> rows, std::span<const PlacedRun> runs, const Q& reused,
                std::span<const DriftRole> roles, double share, std::span<float> moves, std::int64_t task) {
  const std::int32_t heads = reused.layout.heads();
  const auto head = static_cast<std::int32_t>(task % heads);
  detail::common_drift(fresh, rows, runs[static_cast<std::size_t>(task / heads)].run, reused, head, roles, share,
                       moves.data() + task * reused.layout.head_dim());
}

// Of rows [begin, end) of all runs, counted one run after the other, those that move. Segments that stay where they are
// are not touched.
template <WritablePlane Q>
void move_rows(std::span<const PlacedRun> runs, const Q& reused, std::span<const DriftRole> roles,
               std::span<const float> moves, std::int64_t begin, std::int64_t end) {
  const std::size_t width = detail::row_values(reused);
  std::int64_t before = 0;
  const float* move = moves.data();
  for (const PlacedRun& placed : runs) {
    const auto count = std::int64_t{placed.run.count};
    const std::int64_t first = std::clamp(begin - before, std::int64_t{0}, count);
    const std::int64_t last = std::clamp(end - before, std::int64_t{0}, count);
    if (first < last && std::any_of(move, move + width, [](float value) { return value != 0; })) {
      for (std::int64_t row = placed.run.destination.value + first; row < placed.run.destination.value + last; ++row) {
        if (roles[static_cast<std::size_t>(row)] == DriftRole::moves) detail::move_row(reused, row, move);
      }
    }
    before += count;
    move += width;
  }
}

template <class Backend, class FreshKeys, class FreshValues, class Keys, class Values>
Status CommonDrift::move(const Backend& backend, std::span<const DriftRole> roles, std::span<const PlacedRun> runs,
                         std::span<const Row> rows, const FreshKeys& fresh_keys, const Keys& keys,
                         const FreshValues& fresh_values, const Values& values) const {
  const std::size_t needed = runs.size() * (std::max)(detail::row_values(keys), detail::row_values(values));
  if (memory.size() < needed) {
    return Status::error(StatusCode::insufficient_space, "needs %zu floats, has %zu", needed, memory.size())
        .at("drift memory");
  }
  backend.drift(fresh_keys, rows, runs, keys, roles, share, memory);
  if (static_cast<const void*>(values.base) == static_cast<const void*>(keys.base)) return {};  // they moved along
  backend.drift(fresh_values, rows, runs, values, roles, share, memory);
  return {};
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
