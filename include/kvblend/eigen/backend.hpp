// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// EigenBackend: the CPU back end. The row loops are those of the portable one; keys turn in registers, distances are
// Eigen's, and the rows are shared out over the caller's threads.
#pragma once

#include <kvblend/core/executor.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/fuse/backend.hpp>
#include <kvblend/fuse/drift.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/rope/lane_rotation.hpp>
#include <kvblend/rope/rotate.hpp>
#include <kvblend/select/deviation.hpp>
#include <kvblend/select/top_k.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <Eigen/Core>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// PortableDistance with float sums within a head. Differences above 1e19 become infinite here, and not there.
struct EigenDistance {
  static double squared(const float* a, const float* b, std::int32_t count) {
    const Eigen::Map<const Eigen::ArrayXf> x(a, count), y(b, count);
    return static_cast<double>((x - y).square().sum());
  }
};

// `executor` is kept by value: a handle to the caller's threads, which outlive the back end.
template <Executor E = SerialExecutor>
class EigenBackend {
 public:
  EigenBackend() = default;
  explicit EigenBackend(E executor) : executor_(executor) {}

  template <ReadablePlane P, WritablePlane Q>
  void shift(const RopeSpec& spec, const RotationTable& table, const ShiftRun& run, const P& source,
             const Q& destination) const {
    if (run_overlaps(run, source, destination)) {
      shift_rows<LaneRotation>(spec, table, run, 0, run.count, source, destination);
      return;
    }
    for_blocks(run.count, [&](std::int32_t begin, std::int32_t end) {
      shift_rows<LaneRotation>(spec, table, run, begin, end, source, destination);
    });
  }

  template <class Stored, WritablePlane Keys, WritablePlane Values>
  void place(const RopeSpec& spec, std::span<const PlacedRun> runs, const Stored& stored, const Keys& keys,
             const Values& values, std::span<const std::uint8_t> computed) const {
    const std::int64_t rows = rows_of(runs);
    if (any_overlaps(runs, stored, keys, values)) {  // whole runs on one thread, which shift_rows puts in order
      place_rows<LaneRotation>(spec, runs, stored, keys, values, {}, 0, rows);
      return;
    }
    for_blocks(static_cast<std::int32_t>(rows), [&](std::int32_t begin, std::int32_t end) {
      place_rows<LaneRotation>(spec, runs, stored, keys, values, computed, begin, end);
    });
  }

  template <ReadablePlane P, ReadablePlane Q>
  void deviation(const P& fresh, std::span<const ActiveIndex> which, std::span<const Row> rows, const Q& reused,
                 std::span<float> out) const {
    for_blocks(static_cast<std::int32_t>(rows.size()), [&](std::int32_t begin, std::int32_t end) {
      for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
        out[i] = row_deviation<EigenDistance>(fresh, which[i].value, reused, rows[i].value);
      }
    });
  }

  template <ReadablePlane P, WritablePlane Q>
  void merge(const P& fresh, std::span<const Row> rows, const Q& destination) const {
    for_blocks(static_cast<std::int32_t>(rows.size()), [&](std::int32_t begin, std::int32_t end) {
      for (std::int32_t i = begin; i < end; ++i) {
        copy_row(fresh, i, destination, rows[static_cast<std::size_t>(i)].value);
      }
    });
  }

  template <ReadablePlane P, WritablePlane Q>
  void drift(const P& fresh, std::span<const Row> rows, std::span<const PlacedRun> runs, const Q& reused,
             std::span<const DriftRole> roles, double share, std::span<float> moves) const {
    const std::int64_t tasks = static_cast<std::int64_t>(runs.size()) * reused.layout.heads();
    executor_.parallel_for(
        tasks, [&](std::int64_t task) { find_drift(fresh, rows, runs, reused, roles, share, moves, task); });
    for_blocks(static_cast<std::int32_t>(rows_of(runs)),
               [&](std::int32_t begin, std::int32_t end) { move_rows(runs, reused, roles, moves, begin, end); });
  }

  // Some microseconds for a long prompt: not worth a thread.
  void top_k(std::span<const float> scores, std::int32_t k, std::span<std::uint64_t> scratch,
             std::span<ActiveIndex> out) const {
    select_top_k(scores, k, scratch, out);
  }

 private:
  // Rows of a block: enough that a thread reads and writes on without a break, few enough that a chunk keeps several
  // threads busy. Each row is computed alone, so the blocks decide no bits.
  static constexpr std::int32_t kLeastBlockRows = 32;
  static constexpr std::int32_t kMostBlockRows = 256;
  static constexpr std::int32_t kBlocks = 32;

  template <class Body>
  void for_blocks(std::int32_t rows, const Body& body) const {
    const std::int32_t block_rows = std::clamp(rows / kBlocks, kLeastBlockRows, kMostBlockRows);
    if (rows <= block_rows) {
      if (rows > 0) body(0, rows);
      return;
    }
    const std::int64_t blocks = (std::int64_t{rows} + block_rows - 1) / block_rows;
    executor_.parallel_for(blocks, [&body, rows, block_rows](std::int64_t block) {
      const std::int64_t begin = block * block_rows;
      const std::int64_t end = (std::min)(begin + block_rows, std::int64_t{rows});
      body(static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end));
    });
  }

  E executor_{};
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
