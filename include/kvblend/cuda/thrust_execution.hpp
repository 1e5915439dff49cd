// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ThrustExecution: an Execution over a policy of one of Thrust's host systems, thrust::cpp::par, thrust::omp::par or
// thrust::tbb::par. Device memory is then host memory, and each call returns when its work is done.
#pragma once

#include <kvblend/cuda/execution.hpp>

#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// `policy` is copied: the type of thrust::cpp::par is thrust::system::cpp::detail::par_t, and so on. Sorts are the
// standard library's, since Thrust's allocate.
template <class Policy>
class ThrustExecution {
 public:
  ThrustExecution() = default;
  explicit ThrustExecution(Policy policy) : policy_(policy) {}

  template <class Functor>
  Status for_each(std::int64_t count, Functor functor) const {
    if (count > 0) thrust::for_each_n(policy_, thrust::counting_iterator<std::int64_t>(0), count, functor);
    return {};
  }

  Status sort(std::span<std::uint64_t> keys, std::span<std::byte>) const {
    std::sort(keys.begin(), keys.end());
    return {};
  }
  [[nodiscard]] std::size_t sort_bytes(std::int64_t) const { return 0; }

  Status upload(void* device, const void* host, std::size_t bytes) const {
    if (bytes > 0 && device != host) std::memcpy(device, host, bytes);
    return {};
  }

 private:
  Policy policy_{};
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
