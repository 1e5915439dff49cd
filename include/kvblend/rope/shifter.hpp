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

namespace detail {

// Rows and positions of a run stay within 0 … 2^31 - 1.
inline Status check_run(const ShiftRun& run) {
  if (run.count < 0) return Status::error(StatusCode::invalid_argument, "is %d", run.count).at("run count");
  struct Field {
    const char* name;
    std::int32_t first;
  };
  const Field fields[] = {{"source", run.source},
                          {"destination", run.destination.value},
                          {"old_first", run.old_first.value},
                          {"new_first", run.new_first.value}};
  for (const Field& field : fields) {
    const std::int64_t end = std::int64_t{field.first} + run.count;
    if (field.first < 0 || end - 1 > (std::numeric_limits<std::int32_t>::max)()) {
      return Status::error(StatusCode::out_of_range, "first is %d, of %d rows", field.first, run.count)
          .at("run %s", field.name);
    }
  }
  return {};
}

}  // namespace detail

// Angles is the rule by which the engine turns its keys (angles.hpp), Mover does the work on planes.
template <AngleRule Angles = ExactAngles, class Mover = PortableMover>
class RopeShifter {
 public:
  RopeShifter() = default;
  explicit RopeShifter(Mover mover) : mover_(mover) {}

  // Floats of scratch that let a run go in one piece. Any number from least_scratch() on will do.
  [[nodiscard]] static std::int64_t scratch_size(const RopeSpec& spec, const ShiftRun& run) {
    return stays_put(spec, run) ? 0 : RotationTable::size<Angles>(spec, run);
  }
  [[nodiscard]] static std::int64_t least_scratch(const RopeSpec& spec) { return std::int64_t{2} * spec.pairs(); }

  // Rotates `run.count` keys, from rows run.source… of `source` at positions run.old_first…, to rows run.destination…
  // of `destination` at positions run.new_first…. `stored` is the spec the keys were rotated by, `wanted` the cache's.
  // Values outside the rotated part are copied. The amplitude is in the keys already and is not applied again. Keys
  // that stay at their position, or have no rope, keep their bits where both planes have one codec.
  // Both planes may be the same memory, in place or with overlapping ranges; otherwise they must not overlap.
  // Errors, found before anything is written: specs that differ or are invalid (can_shift), planes of another shape,
  // rows without memory, a negative count or position, a last position or row beyond 2^31 - 1, too little scratch.
  template <ReadablePlane P, WritablePlane Q>
  Status shift(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run, const P& source,
               const Q& destination, std::span<float> scratch) const {
    KVBLEND_RETURN_IF_ERROR(check(stored, wanted, run, source, destination));
    if (run.count == 0) return {};
    if (stays_put(wanted, run)) {
      mover_.shift(wanted, RotationTable{}, run, source, destination);
      return {};
    }
    const auto room = static_cast<std::int64_t>(scratch.size());
    const std::int64_t least = least_scratch(wanted);
    if (room < least) {
      return Status::error(StatusCode::insufficient_space, "needs %lld floats, has %lld", static_cast<long long>(least),
                           static_cast<long long>(room))
          .at("scratch");
    }
    // As many rows at a time as have room in the table, in the order in which none is overwritten before it is read.
    const std::int64_t rows_at_once = Angles::uniform ? run.count : (std::min)(room / least, std::int64_t{run.count});
    const auto step = static_cast<std::int32_t>(rows_at_once);
    const bool backwards = same_rows(source, destination) && run.destination.value > run.source;
    std::int32_t left = run.count;
    while (left > 0) {
      ShiftRun part = run;
      part.count = (std::min)(step, left);
      const std::int32_t at = backwards ? left - part.count : run.count - left;
      part.source += at;
      part.destination = run.destination + at;
      part.old_first = run.old_first + at;
      part.new_first = run.new_first + at;
      const Result<RotationTable> table = RotationTable::make<Angles>(wanted, part, scratch);
      KVBLEND_RETURN_IF_ERROR(table.status);
      mover_.shift(wanted, table.value, part, source, destination);
      left -= part.count;
    }
    return {};
  }

  // The checks of shift() alone, but for the scratch.
  template <ReadablePlane P, WritablePlane Q>
  static Status check(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run, const P& source,
                      const Q& destination) {
    KVBLEND_RETURN_IF_ERROR(can_shift(stored, wanted));
    KVBLEND_RETURN_IF_ERROR(detail::check_run(run));
    KVBLEND_RETURN_IF_ERROR(check_shape(source, "source"));
    KVBLEND_RETURN_IF_ERROR(check_shape(destination, "destination"));
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
    KVBLEND_RETURN_IF_ERROR(check_rows(source, run.source, run.count, "source"));
    return check_rows(destination, run.destination.value, run.count, "destination");
  }

 private:
  Mover mover_{};
};

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
