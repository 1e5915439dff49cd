// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Backend: Operations in the shape of the CPU back ends, so that what is written for those - RopeShifter, the tests -
// runs on device memory. Where no host code may wait between the steps of a blend, use cuda::Fusor.
#pragma once

#include <kvblend/cuda/execution.hpp>
#include <kvblend/cuda/operations.hpp>
#include <kvblend/fuse/backend.hpp>
#include <kvblend/fuse/place.hpp>
#include <kvblend/rope/rotate.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// Spans are device memory, but for `runs`, whose tables are. The operations of the concept cannot fail: the first error
// of queueing is left in `status`, if one was passed.
template <Execution E>
class Backend {
 public:
  Backend() = default;
  explicit Backend(E execution, std::span<std::byte> scratch = {}, Status* status = nullptr)
      : operations_(execution, scratch), status_(status) {}

  template <ReadablePlane P, WritablePlane Q>
  void shift(const RopeShape& shape, const RotationTable& table, const ShiftRun& run, const P& source,
             const Q& destination) const {
    note(operations_.shift(shape, table, run, source, destination));
  }

  template <class Stored, WritablePlane Keys, WritablePlane Values>
  void place(const RopeShape& shape, std::span<const PlacedRun> runs, const Stored& stored, const Keys& keys,
             const Values& values, std::span<const std::uint8_t> computed) const {
    note(place_runs(operations_, shape, runs, stored, keys, values, computed.data()));
  }

  template <ReadablePlane P, ReadablePlane Q>
  void deviation(const P& fresh, std::span<const ActiveIndex> which, std::span<const Row> rows, const Q& reused,
                 std::span<float> out) const {
    note(operations_.deviation(fresh, which, rows, reused, out));
  }

  template <ReadablePlane P, WritablePlane Q>
  void merge(const P& fresh, std::span<const Row> rows, const Q& destination) const {
    note(operations_.merge(fresh, rows, destination));
  }

  void top_k(std::span<const float> scores, std::int32_t k, std::span<std::uint64_t> scratch,
             std::span<ActiveIndex> out) const {
    note(operations_.top_k(scores, k, scratch, out));
  }

 private:
  void note(const Status& status) const {
    if (status_ != nullptr && status_->ok() && !status.ok()) *status_ = status;
  }

  Operations<E> operations_{};
  Status* status_ = nullptr;
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
