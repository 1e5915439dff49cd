// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Device: what the engine needs of the machine it runs on - memory, row work by teams of threads, and matrix products.
// CpuDevice (cpu_device.hpp) tests the engine's logic; CudaDevice (cuda_device.cuh) is what it is for.
#pragma once

#include <kvblend/core/config.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/cuda/execution.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace cuda_engine {

// The threads that do one row together; each runs the same functor over every size()-th group of values.
//   sum(x), max(x)   over the threads' x; each gets the result. All threads call them, as they do sync()
//   sync()           what the others wrote is seen behind it
// This one is a team of one.
struct SoloTeam {
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t rank() const { return 0; }
  [[nodiscard]] KVBLEND_HOST_DEVICE std::int32_t size() const { return 1; }
  [[nodiscard]] KVBLEND_HOST_DEVICE float sum(float x) const { return x; }
  [[nodiscard]] KVBLEND_HOST_DEVICE float max(float x) const { return x; }
  KVBLEND_HOST_DEVICE void sync() const {}
};

// c = alpha · op(a) · b + beta · c for each of a batch, column-major as BLAS has it: op(a) is [m, k], b [k, n], c [m,
// n]. Leading dimensions and strides from matrix to matrix are in elements. a and b hold the device's Scalar.
struct Gemm {
  bool transpose_a = false;
  std::int32_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t lda = 0, stride_a = 0;
  const void* b = nullptr;
  std::int64_t ldb = 0, stride_b = 0;
  void* c = nullptr;
  std::int64_t ldc = 0, stride_c = 0;
  bool c_is_float = false;  // else it is Scalar
  std::int32_t batch = 1;
  float alpha = 1, beta = 0;
};

// The same product as the engine thinks of it, row-major: y [rows, columns] from x [rows, inner] and either
// weights_transposed: w [columns, inner], y = x · wᵀ, or else w [inner, columns], y = x · w. A row-major matrix is the
// transpose of a column-major one, so that yᵀ = op(w) · xᵀ.
template <class T>
struct RowMajor {
  const T* x = nullptr;
  std::int64_t x_stride = 0;  // from row to row
  const T* w = nullptr;
  std::int64_t w_stride = 0;
  bool w_transposed = true;
  std::int64_t rows = 0, columns = 0, inner = 0;

  template <class Y>
  [[nodiscard]] Gemm into(Y* y, std::int64_t y_stride) const {
    Gemm gemm;
    gemm.transpose_a = w_transposed;
    gemm.m = static_cast<std::int32_t>(columns);
    gemm.n = static_cast<std::int32_t>(rows);
    gemm.k = static_cast<std::int32_t>(inner);
    gemm.a = w;
    gemm.lda = w_stride;
    gemm.b = x;
    gemm.ldb = x_stride;
    gemm.c = y;
    gemm.ldc = y_stride;
    gemm.c_is_float = std::same_as<Y, float>;
    return gemm;
  }
};

namespace detail {
struct RowProbe {
  template <class Team>
  KVBLEND_HOST_DEVICE void operator()(std::int64_t, const Team&) const {}
};
}  // namespace detail

//   execution()         what is handed to kvblend's own parts, on the same queue
//   rows(count, f)      f(row, team) for each row in [0, count), in any order; f is a named struct, passed by value
//   multiply(gemm)
//   finish()            waits until all is done
//   download(…)         copies to the host and waits
//   allocate(bytes)     zeroed device memory, or nullptr; allocate_host(bytes): zeroed host memory that uploads are
//                       asynchronous from
// All but the last three lines only queue work: they may be captured in a CUDA Graph.
template <class D>
concept Device = requires(D& device, std::int64_t count, const Gemm& gemm, void* memory, std::size_t bytes) {
  typename D::Scalar;  // weights, activations and cache
  typename D::Codec;   // kvblend's codec of Scalar
  requires kvblend::cuda::Execution<typename D::Execution>;
  { device.execution() } -> std::same_as<const typename D::Execution&>;
  { device.rows(count, detail::RowProbe{}) } -> std::same_as<kvblend::Status>;
  { device.multiply(gemm) } -> std::same_as<kvblend::Status>;
  { device.finish() } -> std::same_as<kvblend::Status>;
  { device.download(memory, memory, bytes) } -> std::same_as<kvblend::Status>;
  { D::allocate(bytes) } -> std::same_as<void*>;
  { D::release(memory) } -> std::same_as<void>;
  { D::allocate_host(bytes) } -> std::same_as<void*>;
  { D::release_host(memory) } -> std::same_as<void>;
};

// Owned memory of a device, or host memory that it copies from.
enum class Where : std::uint8_t { device, host };

template <class D, class T, Where where = Where::device>
class Array {
 public:
  Array() = default;

  kvblend::Status allocate(std::int64_t count, const char* name) {
    size_ = count;
    if (count <= 0) return {};
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    data_.reset(static_cast<T*>(where == Where::device ? D::allocate(bytes) : D::allocate_host(bytes)));
    if (data_ != nullptr) return {};
    return kvblend::Status::error(kvblend::StatusCode::insufficient_space, "%zu bytes are not to be had", bytes)
        .at("%s", name);
  }

  [[nodiscard]] T* data() { return data_.get(); }
  [[nodiscard]] const T* data() const { return data_.get(); }
  [[nodiscard]] std::int64_t size() const { return size_; }
  // Of host memory.
  [[nodiscard]] T& operator[](std::int64_t i) { return data_.get()[i]; }
  [[nodiscard]] const T& operator[](std::int64_t i) const { return data_.get()[i]; }

 private:
  struct Release {
    void operator()(T* data) const {
      if constexpr (where == Where::device) {
        D::release(data);
      } else {
        D::release_host(data);
      }
    }
  };
  std::unique_ptr<T, Release> data_;
  std::int64_t size_ = 0;
};

}  // namespace cuda_engine
