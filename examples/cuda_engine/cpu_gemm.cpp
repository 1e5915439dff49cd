// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Products on the CPU, column-major as BLAS has them: what is told to cuBLAS is tried here.
#include <cuda_engine/cpu_device.hpp>
#include <cuda_engine/functors.hpp>
#include <Eigen/Core>
#include <type_traits>

namespace cuda_engine {

namespace {

// Floats where they lie, or a copy as floats.
template <class T>
auto matrix(const void* base, std::int64_t offset, std::int32_t rows, std::int32_t columns, std::int64_t leading) {
  const T* from = static_cast<const T*>(base) + offset;
  if constexpr (std::is_same_v<T, float>) {
    return Eigen::Map<const Eigen::MatrixXf, 0, Eigen::OuterStride<>>(from, rows, columns,
                                                                      Eigen::OuterStride<>(leading));
  } else {
    Eigen::MatrixXf out(rows, columns);
    for (std::int32_t column = 0; column < columns; ++column) {
      for (std::int32_t row = 0; row < rows; ++row) out(row, column) = load(from[column * leading + row]);
    }
    return out;
  }
}

template <class C>
void add(const Gemm& gemm, std::int64_t offset, const Eigen::MatrixXf& product) {
  C* to = static_cast<C*>(gemm.c) + offset;
  for (std::int32_t column = 0; column < gemm.n; ++column) {
    for (std::int32_t row = 0; row < gemm.m; ++row) {
      C& c = to[column * gemm.ldc + row];
      // As in BLAS, what is there is not read where beta is 0.
      store(c, gemm.alpha * product(row, column) + (gemm.beta == 0 ? 0.0f : gemm.beta * load(c)));
    }
  }
}

template <class T>
void multiply(const Gemm& gemm) {
  for (std::int32_t i = 0; i < gemm.batch; ++i) {
    const auto b = matrix<T>(gemm.b, i * gemm.stride_b, gemm.k, gemm.n, gemm.ldb);
    Eigen::MatrixXf product(gemm.m, gemm.n);
    if (gemm.transpose_a) {
      product.noalias() = matrix<T>(gemm.a, i * gemm.stride_a, gemm.k, gemm.m, gemm.lda).transpose() * b;
    } else {
      product.noalias() = matrix<T>(gemm.a, i * gemm.stride_a, gemm.m, gemm.k, gemm.lda) * b;
    }
    if (gemm.c_is_float) {
      add<float>(gemm, i * gemm.stride_c, product);
    } else {
      add<T>(gemm, i * gemm.stride_c, product);
    }
  }
}

}  // namespace

void multiply_on_cpu(const Gemm& gemm, float) { multiply<float>(gemm); }
void multiply_on_cpu(const Gemm& gemm, kvblend::BFloat16) { multiply<kvblend::BFloat16>(gemm); }

}  // namespace cuda_engine
