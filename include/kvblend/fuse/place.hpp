// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Placing: one layer's cached segments into the host's cache, keys rotated and values copied. The loop under the CPU
// back ends, over all segments at once, so that a layer is one piece of work to share out and not one per segment.
#pragma once

#include <kvblend/memory/rows.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/rotate.hpp>
#include <kvblend/rope/spec.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// A cached segment on its way.
struct PlacedRun {
  std::int32_t segment = 0;
  ShiftRun run;
  RotationTable table;
};

// Where the stored planes of a layer are: source.keys(segment, layer), source.values(segment, layer).
template <class Source>
struct StoredLayer {
  Source* source;
  std::int32_t layer;

  [[nodiscard]] auto keys(std::int32_t segment) const { return source->keys(segment, layer); }
  [[nodiscard]] auto values(std::int32_t segment) const { return source->values(segment, layer); }
};

[[nodiscard]] inline std::int64_t rows_of(std::span<const PlacedRun> runs) {
  std::int64_t rows = 0;
  for (const PlacedRun& placed : runs) rows += placed.run.count;
  return rows;
}

// Whether rows of a run are read from where others are written, so that its rows must go in order.
template <class Stored, class Keys, class Values>
[[nodiscard]] bool any_overlaps(std::span<const PlacedRun> runs, const Stored& stored, const Keys& keys,
                                const Values& values) {
  return std::any_of(runs.begin(), runs.end(), [&](const PlacedRun& placed) {
    return run_overlaps(placed.run, stored.keys(placed.segment), keys) ||
           run_overlaps(placed.run, stored.values(placed.segment), values);
  });
}

// Rows [begin, end) of all runs, counted one run after the other, but for those with computed[row] != 0 (by row of the
// prompt; empty: place all). Such rows are written by whoever computes them.
template <class Rotation, class Stored, class Keys, class Values>
void place_rows(const RopeSpec& spec, std::span<const PlacedRun> runs, const Stored& stored, const Keys& keys,
                const Values& values, std::span<const std::uint8_t> computed, std::int64_t begin, std::int64_t end) {
  std::int64_t before = 0;
  for (const PlacedRun& placed : runs) {
    const auto count = std::int64_t{placed.run.count};
    const auto first = static_cast<std::int32_t>(std::clamp(begin - before, std::int64_t{0}, count));
    const auto last = static_cast<std::int32_t>(std::clamp(end - before, std::int64_t{0}, count));
    before += count;
    const std::int64_t to = placed.run.destination.value;
    const auto is_computed = [computed, to](std::int32_t i) {
      return !computed.empty() && computed[static_cast<std::size_t>(to + i)] != 0;
    };
    for (std::int32_t at = first; at < last;) {
      std::int32_t stop = at;
      while (stop < last && !is_computed(stop)) ++stop;
      if (at < stop) {
        shift_rows<Rotation>(spec, placed.table, placed.run, at, stop, stored.keys(placed.segment), keys);
        copy_rows(stored.values(placed.segment), std::int64_t{placed.run.source} + at, values, to + at, stop - at);
      }
      at = stop + 1;
    }
  }
}

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
