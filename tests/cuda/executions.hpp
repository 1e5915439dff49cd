// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The executions that the CUDA back end is tested on: Thrust's host systems; under nvcc a stream that is waited for
// after each call, so that tests written for the host may look at what it did (device_main.cpp makes their memory the
// device's too).
#pragma once

#include <kvblend/cuda.cuh>

#if !defined(__CUDACC__)
#include <kvblend/cuda/thrust_execution.hpp>
#endif

#include <doctest/doctest.h>
#include <cstddef>
#include <cstdint>
#include <span>

#if !defined(__CUDACC__)
#include <thrust/system/cpp/execution_policy.h>
#include <thrust/system/omp/execution_policy.h>
#endif

namespace kvblend_test {

#if defined(__CUDACC__)

class WaitingStream {
 public:
  template <class Functor>
  kvblend::Status for_each(std::int64_t count, Functor functor) const {
    return wait(stream_.for_each(count, functor));
  }
  kvblend::Status sort(std::span<std::uint64_t> keys, std::span<std::byte> scratch) const {
    return wait(stream_.sort(keys, scratch));
  }
  [[nodiscard]] std::size_t sort_bytes(std::int64_t count) const { return stream_.sort_bytes(count); }
  kvblend::Status upload(void* device, const void* host, std::size_t bytes) const {
    return wait(stream_.upload(device, host, bytes));
  }

 private:
  kvblend::Status wait(const kvblend::Status& queued) const {
    if (!queued.ok()) return queued;
    return kvblend::cuda::status_of(cudaStreamSynchronize(stream_.stream()), "cudaStreamSynchronize");
  }

  kvblend::cuda::StreamExecution stream_;
};

using AnyExecution = WaitingStream;
#define KVBLEND_TEST_EXECUTIONS kvblend_test::WaitingStream

#else

using ThrustCpp = kvblend::cuda::ThrustExecution<thrust::system::cpp::detail::par_t>;
using ThrustOmp = kvblend::cuda::ThrustExecution<thrust::system::omp::detail::par_t>;

using AnyExecution = ThrustCpp;
#define KVBLEND_TEST_EXECUTIONS kvblend_test::ThrustCpp, kvblend_test::ThrustOmp

#endif

}  // namespace kvblend_test

#if defined(__CUDACC__)
TYPE_TO_STRING_AS("stream", kvblend_test::WaitingStream);
#else
TYPE_TO_STRING_AS("thrust cpp", kvblend_test::ThrustCpp);
TYPE_TO_STRING_AS("thrust omp", kvblend_test::ThrustOmp);
#endif
