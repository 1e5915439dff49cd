// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// CudaMachine: CudaDevice on a stream of its own, with events for a clock and a CUDA Graph as its recorder. For nvcc.
#pragma once

#include <cuda_engine/cuda_device.cuh>
#include <cuda_engine/passages.hpp>
#include <kvblend/cuda/streams.cuh>

#include <cuda_runtime.h>

#if defined(__CUDACC__)

namespace cuda_engine {

// A stream that is there before the device that borrows it.
class OwnedStream {
 public:
  OwnedStream()
      : status_(kvblend::cuda::status_of(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream")) {}
  ~OwnedStream() {
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
  }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  [[nodiscard]] const kvblend::Status& status() const { return status_; }

 private:
  cudaStream_t stream_ = nullptr;
  kvblend::Status status_;
};

class CudaMachine {
 public:
  using Device = CudaDevice;

  CudaMachine() : device_(stream_.get()) {
    status_ = stream_.status().ok() ? device_.status() : stream_.status();
    if (status_.ok()) status_ = copies_.status();
    for (cudaEvent_t& event : events_) {
      if (status_.ok()) status_ = of(cudaEventCreate(&event), "cudaEventCreate");
    }
    for (cudaEvent_t& event : marks_) {
      if (status_.ok()) status_ = of(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    }
  }
  ~CudaMachine() {
    forget();
    for (cudaEvent_t event : events_) destroy(event);
    for (cudaEvent_t event : marks_) destroy(event);
  }
  CudaMachine(const CudaMachine&) = delete;
  CudaMachine& operator=(const CudaMachine&) = delete;

  [[nodiscard]] const kvblend::Status& status() const { return status_; }
  [[nodiscard]] Device& device() { return device_; }
  kvblend::Status start() { return of(cudaEventRecord(events_[0], stream_.get()), "cudaEventRecord"); }
  kvblend::Status stop() { return of(cudaEventRecord(events_[1], stream_.get()), "cudaEventRecord"); }
  kvblend::Status milliseconds(double& out) {
    float milliseconds = 0;
    KVBLEND_RETURN_IF_ERROR(of(cudaEventSynchronize(events_[1]), "cudaEventSynchronize"));
    KVBLEND_RETURN_IF_ERROR(of(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]), "cudaEventElapsedTime"));
    out = static_cast<double>(milliseconds);
    return {};
  }

  template <class Body>
  kvblend::Status record(const Body& body) {
    forget();
    cudaGraph_t graph = nullptr;
    KVBLEND_RETURN_IF_ERROR(
        of(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture"));
    const kvblend::Status body_status = body();
    const kvblend::Status end_status = of(cudaStreamEndCapture(stream_.get(), &graph), "cudaStreamEndCapture");
    kvblend::Status status = body_status.ok() ? end_status : body_status;
    if (status.ok()) status = of(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    return status;
  }
  kvblend::Status replay() { return of(cudaGraphLaunch(graph_, stream_.get()), "cudaGraphLaunch"); }

  using Streams = kvblend::cuda::CudaStreams;
  [[nodiscard]] Streams streams() const { return {stream_.get(), copies_.get(), marks_, kLoadDepth}; }

 private:
  static kvblend::Status of(cudaError_t error, const char* call) { return kvblend::cuda::status_of(error, call); }
  static void destroy(cudaEvent_t event) {
    if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
  }
  void forget() {
    if (graph_ != nullptr) static_cast<void>(cudaGraphExecDestroy(graph_));
    graph_ = nullptr;
  }

  OwnedStream stream_, copies_;
  Device device_;
  kvblend::Status status_;
  cudaEvent_t events_[2] = {};               // start and stop
  cudaEvent_t marks_[2 * kLoadDepth] = {};
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace cuda_engine

#endif
