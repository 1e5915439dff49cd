// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// PortableBackend: the back end that needs nothing but the standard library. One thread, plain loops, readable: what
// the others are tested against.
#pragma once

#include <kvblend/core/types.hpp>
#include <kvblend/fuse/backend.hpp>
#include <kvblend/fuse/drift.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/rope/rotate.hpp>
#include <kvblend/rope/shifter.hpp>
#include <kvblend/select/deviation.hpp>
#include <kvblend/select/top_k.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

struct PortableBackend : PortableMover {
  template <class Stored, WritablePlane Keys, WritablePlane Values>
  void place(const RopeSpec& spec, std::span<const PlacedRun> runs, const Stored& stored, const Keys& keys,
             const Values& values, std::span<const std::uint8_t> computed) const {
    if (any_overlaps(runs, stored, keys, values)) computed = {};  // whole runs, which shift_rows puts in order
    place_rows<PortableRotation>(spec, runs, stored, keys, values, computed, 0, rows_of(runs));
  }

  template <ReadablePlane P, ReadablePlane Q>
  void deviation(const P& fresh, std::span<const ActiveIndex> which, std::span<const Row> rows, const Q& reused,
                 std::span<float> out) const {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      out[i] = row_deviation(fresh, which[i].value, reused, rows[i].value);
    }
  }

  template <ReadablePlane P, WritablePlane Q>
  void merge(const P& fresh, std::span<const Row> rows, const Q& destination) const {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      copy_row(fresh, static_cast<std::int64_t>(i), destination, rows[i].value);
    }
  }

  template <ReadablePlane P, WritablePlane Q>
  void drift(const P& fresh, std::span<const Row> rows, std::span<const PlacedRun> runs, const Q& reused,
             std::span<const DriftRole> roles, double share, std::span<float> moves) const {
    const std::int64_t tasks = static_cast<std::int64_t>(runs.size()) * reused.layout.heads();
    for (std::int64_t task = 0; task < tasks; ++task) find_drift(fresh, rows, runs, reused, roles, share, moves, task);
    move_rows(runs, reused, roles, moves, 0, rows_of(runs));
  }

  void top_k(std::span<const float> scores, std::int32_t k, std::span<std::uint64_t> scratch,
             std::span<ActiveIndex> out) const {
    select_top_k(scores, k, scratch, out);
  }
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
