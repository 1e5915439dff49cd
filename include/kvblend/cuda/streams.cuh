// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// CudaStreams: the Streams of LayerLoader on two CUDA streams. To be part of a graph, the loader is opened while the
// blend's stream is captured: the first mark takes the stream of copies into the capture.
#pragma once

#if defined(__CUDACC__)

#include <kvblend/cuda/layer_loader.hpp>
#include <kvblend/cuda/stream_execution.cuh>

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {
namespace cuda {

// Streams and events are borrowed. `events` has 2 · depth, made with cudaEventDisableTiming: those of copies, then
// those of reads.
class CudaStreams {
 public:
  CudaStreams(cudaStream_t blend, cudaStream_t copies, const cudaEvent_t* events, std::int32_t depth)
      : blend_(blend), copies_(copies), events_(events), depth_(depth) {}

  Status copy(void* device, const void* host, std::size_t bytes) const {
    return status_of(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, copies_), "copy");
  }
  Status mark_copied(std::int32_t slot) const { return mark(events_[slot], copies_); }
  Status await_copied(std::int32_t slot) const { return await(events_[slot], blend_); }
  Status mark_read(std::int32_t slot) const { return mark(events_[depth_ + slot], blend_); }
  Status await_read(std::int32_t slot) const { return await(events_[depth_ + slot], copies_); }

 private:
  static Status mark(cudaEvent_t event, cudaStream_t stream) {
    return status_of(cudaEventRecord(event, stream), "cudaEventRecord");
  }
  static Status await(cudaEvent_t event, cudaStream_t stream) {
    return status_of(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
  }

  cudaStream_t blend_;
  cudaStream_t copies_;
  const cudaEvent_t* events_;
  std::int32_t depth_;
};

}  // namespace cuda
}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE

#endif
