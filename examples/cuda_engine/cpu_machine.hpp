// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// CpuMachine: CpuDevice with a clock, so that the benchmark's flow can be tried where there is no GPU.
#pragma once

#include <cuda_engine/cpu_device.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace cuda_engine {

class CpuMachine {
 public:
  using Device = CpuDevice<>;

  [[nodiscard]] Device& device() { return device_; }
  kvblend::Status start() { return now(first_); }
  kvblend::Status stop() { return now(last_); }
  kvblend::Status milliseconds(double& out) {
    out = std::chrono::duration<double, std::milli>(last_ - first_).count();
    return {};
  }
  template <class Body>
  kvblend::Status record(const Body& body) {
    body_ = body;  // what it refers to must live until it is replayed
    return {};
  }
  kvblend::Status replay() { return body_(); }

  // One queue does all at once, in order.
  struct Streams {
    kvblend::Status copy(void* device, const void* host, std::size_t bytes) const {
      if (bytes > 0) std::memcpy(device, host, bytes);
      return {};
    }
    kvblend::Status mark_copied(std::int32_t) const { return {}; }
    kvblend::Status await_copied(std::int32_t) const { return {}; }
    kvblend::Status mark_read(std::int32_t) const { return {}; }
    kvblend::Status await_read(std::int32_t) const { return {}; }
  };
  [[nodiscard]] Streams streams() const { return {}; }

 private:
  using Clock = std::chrono::steady_clock;
  static kvblend::Status now(Clock::time_point& out) {
    out = Clock::now();
    return {};
  }

  Device device_;
  Clock::time_point first_, last_;
  std::function<kvblend::Status()> body_;
};

}  // namespace cuda_engine
