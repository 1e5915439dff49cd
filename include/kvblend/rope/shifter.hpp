// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// RopeShifter: moves the keys of a run from where they were computed to where a prompt wants them - from the pristine
// copy, in one rotation, into the caller's memory. The component for callers that only want this; LayerwiseFusor uses
// the same parts.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/can_shift.hpp>
#include <kvblend/rope/rotate.hpp>
#include <kvblend/rope/spec.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// The default way to move rows: this thread, plain loops. PortableBackend and EigenBackend may stand in its place.
struct PortableMover {
  template <ReadablePlane P, WritablePlane Q>
  void shift(const RopeSpec& spec, const RotationTable& table, const ShiftRun& run, const P& source,
             const Q& destination) const {
    shift_rows<PortableRotation>(spec, table, run, 0, run.count, source, destination);
  }
};

// Rows that move together, at positions that are listed apart.
struct RowMove {
  Row destination{};        // row of the host's cache
  std::int32_t source = 0;  // row of the chunk
  std::int32_t count = 0;
};

namespace detail {

// `count` rows or positions from `first` on stay within 0 … 2^31 - 1.
inline Status check_range(const char* field, std::int32_t first, std::int32_t count) {
  if (first >= 0 && std::int64_t{first} + count - 1 <= (std::numeric_limits<std::int32_t>::max)()) return {};
  return Status::error(StatusCode::out_of_range, "first is %d, of %d rows", first, count).at("run %s", field);
}

inline Status check_rows_moved(const RowMove& rows) {
  if (rows.count < 0) return Status::error(StatusCode::invalid_argument, "is %d", rows.count).at("run count");
  KVBLEND_RETURN_IF_ERROR(check_range("source", rows.source, rows.count));
  return check_range("destination", rows.destination.value, rows.count);
}

inline Status check_run(const ShiftRun& run) {
  KVBLEND_RETURN_IF_ERROR(check_rows_moved({run.destination, run.source, run.count}));
  KVBLEND_RETURN_IF_ERROR(check_range("old_first", run.old_first.value, run.count));
  return check_range("new_first", run.new_first.value, run.count);
}

inline Status check_positions(const char* list, std::span<const AxisPositions> positions, std::int32_t count) {
  if (positions.size() != static_cast<std::size_t>(count)) {
    return Status::error(StatusCode::mismatch, "has %zu entries for %d rows", positions.size(), count).at("%s", list);
  }
  for (std::size_t i = 0; i < positions.size(); ++i) {
    for (const std::int32_t position : positions[i].axis) {
      if (position < 0) return Status::error(StatusCode::out_of_range, "is %d", position).at("%s[%zu]", list, i);
    }
  }
  return {};
}

// Whether `rows` can be moved between the planes.
template <class Planes, ReadablePlane P, WritablePlane Q>
Status check_move(const RopeSpec& wanted, const RowMove& rows, const P& source, const Q& destination) {
  KVBLEND_RETURN_IF_ERROR(Planes::check_shape(source, "source"));
  KVBLEND_RETURN_IF_ERROR(Planes::check_shape(destination, "destination"));
  if (source.layout.heads() != destination.layout.heads()) {
    return Status::error(StatusCode::mismatch, "has %d heads, the source %d", destination.layout.heads(),
                         source.layout.heads())
        .at("destination");
  }
  if (source.layout.head_dim() != wanted.head_dim || destination.layout.head_dim() != wanted.head_dim) {
    return Status::error(StatusCode::mismatch, "is %d in the source, %d in the destination, %d in the rope spec",
                         source.layout.head_dim(), destination.layout.head_dim(), wanted.head_dim)
        .at("head_dim");
  }
  KVBLEND_RETURN_IF_ERROR(Planes::check_stored_rows(source, rows.source, rows.count, "source"));
  return Planes::check_rows(destination, rows.destination.value, rows.count, "destination");
}

}  // namespace detail

// Angles is the rule by which the engine turns its keys (angles.hpp), Mover does the work on planes.
template <AngleRule Angles = ExactAngles, class Mover = PortableMover>
class RopeShifter {
 public:
  RopeShifter() = default;
  explicit RopeShifter(Mover mover) : mover_(mover) {}

  // Floats of scratch that let a run go in one piece; for rows whose positions are listed, least_scratch() times their
  // number always does. Any number from least_scratch() on will do.
  [[nodiscard]] static std::int64_t scratch_size(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run) {
    return RotationTable::size<Angles>(stored, wanted, run);
  }
  [[nodiscard]] static std::int64_t scratch_size(const RopeSpec& spec, const ShiftRun& run) {
    return scratch_size(spec, spec, run);
  }
  [[nodiscard]] static std::int64_t least_scratch(const RopeSpec& spec) { return std::int64_t{2} * spec.pairs(); }

  // Rotates `run.count` keys, from rows run.source… of `source` at positions run.old_first…, to rows run.destination…
  // of `destination` at positions run.new_first…. `stored` is the spec the keys were rotated by, `wanted` the cache's;
  // they may differ in frequencies (can_shift.hpp says what that means). Values outside the rotated part are copied.
  // The amplitude is in the keys already and is not applied again. Keys that keep their position and
  // frequencies, or have no rope, keep their bits where both planes have one codec.
  // Under M-RoPE a run is of text, whose tokens have one position on all axes; or, by a uniform rule and with equal
  // frequencies, of any tokens that go the same distance on all axes.
  // Both planes may be the same memory, by the same base and layout, in place or with overlapping ranges; otherwise
  // they must not overlap.
  // Errors, found before anything is written: specs that are invalid or do not go together (can_shift), planes of
  // another shape, rows without memory, a negative count or position, a last position or row beyond 2^31 - 1, too
  // little scratch.
  template <ReadablePlane P, WritablePlane Q>
  Status shift(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run, const P& source,
               const Q& destination, std::span<float> scratch) const {
    KVBLEND_RETURN_IF_ERROR(check(stored, wanted, run, source, destination));
    return move(stored, wanted, {run.destination, run.source, run.count}, detail::RunPositions(run), source,
                destination, scratch);
  }

  // The same for tokens whose positions are listed, as those of pictures under M-RoPE: row rows.source + i was rotated
  // to old_positions[i] and goes to row rows.destination + i at new_positions[i].
  // Errors besides: a list that has not one entry a row, a negative position.
  template <ReadablePlane P, WritablePlane Q>
  Status shift(const RopeSpec& stored, const RopeSpec& wanted, const RowMove& rows,
               std::span<const AxisPositions> old_positions, std::span<const AxisPositions> new_positions,
               const P& source, const Q& destination, std::span<float> scratch) const {
    KVBLEND_RETURN_IF_ERROR(check(stored, wanted, rows, old_positions, new_positions, source, destination));
    return move(stored, wanted, rows, detail::ListedPositions(wanted, old_positions.data(), new_positions.data()),
                source, destination, scratch);
  }

  // The checks of shift() alone, but for the scratch.
  template <ReadablePlane P, WritablePlane Q>
  static Status check(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run, const P& source,
                      const Q& destination) {
    KVBLEND_RETURN_IF_ERROR(can_shift(stored, wanted).status);
    KVBLEND_RETURN_IF_ERROR(detail::check_run(run));
    return detail::check_move<HostPlanes>(wanted, {run.destination, run.source, run.count}, source, destination);
  }
  template <ReadablePlane P, WritablePlane Q>
  static Status check(const RopeSpec& stored, const RopeSpec& wanted, const RowMove& rows,
                      std::span<const AxisPositions> old_positions, std::span<const AxisPositions> new_positions,
                      const P& source, const Q& destination) {
    KVBLEND_RETURN_IF_ERROR(can_shift(stored, wanted).status);
    KVBLEND_RETURN_IF_ERROR(detail::check_rows_moved(rows));
    KVBLEND_RETURN_IF_ERROR(detail::check_positions("old_positions", old_positions, rows.count));
    KVBLEND_RETURN_IF_ERROR(detail::check_positions("new_positions", new_positions, rows.count));
    return detail::check_move<HostPlanes>(wanted, rows, source, destination);
  }

 private:
  // As many rows at a time as have room in the table and all turn or all stay, in the order in which none is
  // overwritten before it is read.
  template <class Positions, class P, class Q>
  Status move(const RopeSpec& stored, const RopeSpec& wanted, const RowMove& rows, const Positions& positions,
              const P& source, const Q& destination, std::span<float> scratch) const {
    const bool backwards = same_rows(source, destination) && rows.destination.value > rows.source;
    const bool same = same_frequencies(stored, wanted);
    const bool all_stay =
        rows.count == 0 || wanted.rotary_dim == 0 ||
        (same && positions.stays(0) && detail::rows_alike(positions, rows.count, false) == rows.count);
    const auto room = static_cast<std::int64_t>(scratch.size());
    const std::int64_t least = all_stay ? 0 : least_scratch(wanted);
    if (room < least) {
      return Status::error(StatusCode::insufficient_space, "needs %lld floats, has %lld", static_cast<long long>(least),
                           static_cast<long long>(room))
          .at("scratch");
    }
    std::int32_t left = rows.count;
    while (left > 0) {
      const std::int32_t first = backwards ? 0 : rows.count - left;  // of the rows that are left
      std::int32_t count = same ? detail::rows_alike(positions.from(first), left, backwards) : left;
      std::int32_t at = backwards ? left - count : first;
      if (RotationTable::size<Angles>(stored, wanted, positions.from(at), count) > room) {
        count = static_cast<std::int32_t>(room / least);
        at = backwards ? left - count : first;
      }
      const Result<RotationTable> table =
          RotationTable::make<Angles>(stored, wanted, positions.from(at), count, scratch);
      KVBLEND_RETURN_IF_ERROR(table.status);
      const ShiftRun part{rows.destination + at, rows.source + at, count, Position(positions.old_at(at, 0)),
                          Position(positions.new_at(at, 0))};
      mover_.shift(wanted, table.value, part, source, destination);
      left -= count;
    }
    return {};
  }

  Mover mover_{};
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
