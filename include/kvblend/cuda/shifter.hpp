// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// cuda::Shifter: RopeShifter on the device. Moves the keys of a run from where they were computed to where a prompt wants
// them; the component for callers that only want this.
#pragma once

#include <kvblend/core/status.hpp>
#include <kvblend/cuda/execution.hpp>
#include <kvblend/cuda/operations.hpp>
#include <kvblend/cuda/planes.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/rope/angles.hpp>
#include <kvblend/rope/can_shift.hpp>
#include <kvblend/rope/shifter.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

template <Execution E, AngleRule Angles = ExactAngles>
class Shifter {
 public:
  explicit Shifter(E execution = E()) : operations_(execution) {}

  // Floats of the run's rotation table, for which shift() wants room on either side.
  [[nodiscard]] static std::int64_t table_size(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run) {
    return RotationTable::size<Angles>(stored, wanted, run);
  }

  // Queues what RopeShifter::shift does. Planes and their tables are the device's. The table is made in `host`, pinned
  // memory that must stay as it is until the work is done, and read from `device`.
  // Errors are RopeShifter's, but for rows that a table of blocks does not have: they are passed over.
  template <ReadablePlane P, WritablePlane Q>
  Status shift(const RopeSpec& stored, const RopeSpec& wanted, const ShiftRun& run, const P& source,
               const Q& destination, std::span<float> host, std::span<float> device) const {
    KVBLEND_RETURN_IF_ERROR(can_shift(stored, wanted).status);
    KVBLEND_RETURN_IF_ERROR(kvblend::detail::check_run(run));
    KVBLEND_RETURN_IF_ERROR(kvblend::detail::check_move<DevicePlanes>(wanted, {run.destination, run.source, run.count},
                                                                      source, destination));
    const auto floats = static_cast<std::size_t>(table_size(stored, wanted, run));
    if (device.size() < floats) {
      return Status::error(StatusCode::insufficient_space, "needs %zu floats on the device, has %zu", floats,
                           device.size())
          .at("rotation table");
    }
    const Result<RotationTable> table = RotationTable::make<Angles>(stored, wanted, run, host);
    KVBLEND_RETURN_IF_ERROR(table.status);
    KVBLEND_RETURN_IF_ERROR(operations_.execution().upload(device.data(), host.data(), floats * sizeof(float)));
    return operations_.shift(wanted, table.value.moved_to(device.data()), run, source, destination);
  }

 private:
  Operations<E> operations_;
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
