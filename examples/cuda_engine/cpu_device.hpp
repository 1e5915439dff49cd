// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// CpuDevice: host memory, one of Thrust's host systems, and Eigen's products, in float32 or with a GPU's bf16. It runs
// the engine without a GPU.
#pragma once

#include <cuda_engine/device.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/cuda/thrust_execution.hpp>

#include <thrust/system/cpp/execution_policy.h>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace cuda_engine {

// As BLAS would, with sums in float32. In cpu_gemm.cpp, the only file that knows Eigen.
void multiply_on_cpu(const Gemm& gemm, float);
void multiply_on_cpu(const Gemm& gemm, kvblend::BFloat16);

template <class T = float, class Policy = std::remove_const_t<decltype(thrust::cpp::par)>>
class CpuDevice {
 public:
  using Scalar = T;
  using Codec = std::conditional_t<std::same_as<T, float>, kvblend::F32Codec, kvblend::Bf16Codec>;
  using Execution = kvblend::cuda::ThrustExecution<Policy>;

  CpuDevice() = default;
  explicit CpuDevice(Policy policy) : execution_(policy) {}

  [[nodiscard]] const Execution& execution() const { return execution_; }

  template <class F>
  kvblend::Status rows(std::int64_t count, F f) {
    return execution_.for_each(count, Alone<F>{f});
  }
  kvblend::Status multiply(const Gemm& gemm) {
    multiply_on_cpu(gemm, T{});
    return {};
  }
  kvblend::Status finish() { return {}; }
  kvblend::Status download(void* host, const void* device, std::size_t bytes) {
    if (bytes > 0) std::memcpy(host, device, bytes);
    return {};
  }

  static void* allocate(std::size_t bytes) {
    const std::size_t whole = (bytes + 63) / 64 * 64;
    void* memory = std::aligned_alloc(64, whole);
    if (memory != nullptr) std::memset(memory, 0, whole);
    return memory;
  }
  static void release(void* memory) { std::free(memory); }
  static void* allocate_host(std::size_t bytes) { return allocate(bytes); }
  static void release_host(void* memory) { std::free(memory); }

 private:
  template <class F>
  struct Alone {
    F f;
    void operator()(std::int64_t row) const { f(row, SoloTeam{}); }
  };
  Execution execution_;
};

static_assert(Device<CpuDevice<>>);

}  // namespace cuda_engine
