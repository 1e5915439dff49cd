// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// StreamExecution: an Execution over the caller's CUDA stream. Everything it queues can be captured in a CUDA Graph.
// For nvcc and other CUDA compilers; nothing is declared for others.
#pragma once

#if defined(__CUDACC__)

#include <kvblend/cuda/execution.hpp>

#include <cstddef>
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>
#include <cub/util_type.cuh>
#include <cuda_runtime_api.h>
#include <span>

// CCCL before 2.4 (CUDA 12.4) has no cub::DeviceFor; Thrust's loop launches the same kernel.
#if __has_include(<cub/device/device_for.cuh>)
#include <cub/device/device_for.cuh>
#define KVBLEND_HAS_CUB_DEVICE_FOR 1
#else
#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/system/cuda/execution_policy.h>
#define KVBLEND_HAS_CUB_DEVICE_FOR 0
#endif

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

[[nodiscard]] inline Status status_of(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  return Status::error(StatusCode::host_error, "%s", cudaGetErrorString(error)).at("%s", call);
}

// The stream is borrowed and must be one of the current device when work is queued.
class StreamExecution {
 public:
  explicit StreamExecution(cudaStream_t stream = nullptr) : stream_(stream) {}

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  template <class Functor>
  Status for_each(std::int64_t count, Functor functor) const {
    if (count <= 0) return {};
#if KVBLEND_HAS_CUB_DEVICE_FOR
    return status_of(cub::DeviceFor::Bulk(count, functor, stream_), "for_each");
#else
    thrust::for_each_n(thrust::cuda::par_nosync.on(stream_), thrust::counting_iterator<std::int64_t>(0), count,
                       functor);
    return status_of(cudaPeekAtLastError(), "for_each");
#endif
  }

  Status sort(std::span<std::uint64_t> keys, std::span<std::byte> scratch) const {
    if (keys.size() < 2) return {};
    const auto count = static_cast<std::int64_t>(keys.size());
    const auto misaligned = reinterpret_cast<std::uintptr_t>(scratch.data()) % kAlignment;
    const std::size_t skipped = misaligned == 0 ? 0 : kAlignment - misaligned;
    const std::size_t other_bytes = skipped + aligned(keys.size_bytes());
    if (scratch.size() < sort_bytes(count)) {
      return Status::error(StatusCode::insufficient_space, "needs %zu bytes, has %zu", sort_bytes(count),
                           scratch.size())
          .at("scratch");
    }
    cub::DoubleBuffer<std::uint64_t> buffers(keys.data(),
                                             reinterpret_cast<std::uint64_t*>(scratch.data() + skipped));
    std::size_t temporary = scratch.size() - other_bytes;
    KVBLEND_RETURN_IF_ERROR(status_of(cub::DeviceRadixSort::SortKeys(scratch.data() + other_bytes, temporary, buffers,
                                                                     count, 0, 64, stream_),
                                      "sort"));
    if (buffers.Current() == keys.data()) return {};
    return status_of(
        cudaMemcpyAsync(keys.data(), buffers.Current(), keys.size_bytes(), cudaMemcpyDeviceToDevice, stream_), "sort");
  }

  [[nodiscard]] std::size_t sort_bytes(std::int64_t count) const {
    if (count < 2) return 0;
    std::size_t temporary = 0;
    cub::DoubleBuffer<std::uint64_t> buffers;
    // Without memory it only says what it needs. A failure shows again in sort().
    static_cast<void>(cub::DeviceRadixSort::SortKeys(nullptr, temporary, buffers, count, 0, 64, stream_));
    return kAlignment + aligned(static_cast<std::size_t>(count) * sizeof(std::uint64_t)) + temporary;
  }

  Status upload(void* device, const void* host, std::size_t bytes) const {
    if (bytes == 0) return {};
    return status_of(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "upload");
  }

 private:
  static constexpr std::size_t kAlignment = 256;
  [[nodiscard]] static std::size_t aligned(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  cudaStream_t stream_ = nullptr;
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE

#endif
