// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// CudaDevice: bf16 on a borrowed stream, cuBLAS for products, a block of threads for each row. For nvcc.
#pragma once

#include <cuda_engine/device.hpp>
#include <cuda_engine/flash_attention.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/cuda/stream_execution.cuh>

#include <cstddef>
#include <cstdint>
#include <cublas_v2.h>
#include <cuda_runtime.h>

// Defined as 1 where FlashInfer's headers are at hand.
#ifndef KVBLEND_WITH_FLASHINFER
#define KVBLEND_WITH_FLASHINFER 0
#endif
#if KVBLEND_WITH_FLASHINFER
#include <cuda_engine/flashinfer_attention.cuh>
#endif

namespace cuda_engine {

inline constexpr int kTeamThreads = 256;

#if defined(__CUDACC__)

// The threads of a block.
class BlockTeam {
 public:
  __device__ explicit BlockTeam(float* shared) : shared_(shared) {}  // kTeamThreads / 32 floats

  [[nodiscard]] __device__ std::int32_t rank() const { return static_cast<std::int32_t>(threadIdx.x); }
  [[nodiscard]] __device__ std::int32_t size() const { return kTeamThreads; }
  __device__ void sync() const { __syncthreads(); }
  [[nodiscard]] __device__ float sum(float x) const { return reduce(x, Sum{}); }
  [[nodiscard]] __device__ float max(float x) const { return reduce(x, Max{}); }

 private:
  struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
  };
  struct Max {
    __device__ float operator()(float a, float b) const { return a > b ? a : b; }
  };
  template <class Join>
  __device__ float reduce(float x, Join join) const {
    for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, step));
    __syncthreads();  // the reduction before this one was read
    if (threadIdx.x % 32 == 0) shared_[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared_[0];
    for (int warp = 1; warp < kTeamThreads / 32; ++warp) x = join(x, shared_[warp]);
    return x;
  }
  float* shared_;
};

template <class F>
__global__ void __launch_bounds__(kTeamThreads) rows_kernel(F f) {
  __shared__ float shared[kTeamThreads / 32];
  f(static_cast<std::int64_t>(blockIdx.x), BlockTeam(shared));
}

// A thread of a warp, as FlashTile wants it.
class TensorLane {
 public:
  [[nodiscard]] __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ void sync() const { __syncthreads(); }
  __device__ void copy(void* to, const void* from) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared(to)), "l"(from) : "memory");
  }
  __device__ void commit() const { asm volatile("cp.async.commit_group;" ::: "memory"); }
  __device__ void wait(int newest) const {
    if (newest == 0) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    }
  }
  __device__ void load(std::uint32_t (&out)[4], const void* from, bool across) const {
    if (across) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                   : "r"(shared(from))
                   : "memory");
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                   : "r"(shared(from))
                   : "memory");
    }
  }
  __device__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) const {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  [[nodiscard]] __device__ std::uint32_t pack(float low, float high) const {
    std::uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
  [[nodiscard]] __device__ float quad_max(float x) const {
    for (int step = 1; step < 4; step *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, x, step);
      x = other > x ? other : x;
    }
    return x;
  }
  [[nodiscard]] __device__ float quad_sum(float x) const {
    for (int step = 1; step < 4; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }

 private:
  [[nodiscard]] static __device__ unsigned shared(const void* generic) {
    return static_cast<unsigned>(__cvta_generic_to_shared(generic));
  }
};

// The last tiles see most: they go first.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) flash_kernel(FlashAttention args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const TensorLane lane;
  FlashTile<Shape, TensorLane>(args, lane, reinterpret_cast<BFloat16*>(shared))
      .run(static_cast<std::int32_t>(gridDim.x - 1 - blockIdx.x), static_cast<std::int32_t>(blockIdx.y));
}

class CudaDevice {
 public:
  using Scalar = kvblend::BFloat16;
  using Codec = kvblend::Bf16Codec;
  using Execution = kvblend::cuda::StreamExecution;

  // The stream must outlive it. Errors of set-up are in status().
  explicit CudaDevice(cudaStream_t stream) : execution_(stream) {
    workspace_ = allocate(kWorkspaceBytes);
    if (workspace_ == nullptr) {
      status_ = kvblend::Status::error(kvblend::StatusCode::insufficient_space, "is not to be had").at("workspace");
      return;
    }
    status_ = of(cublasCreate(&blas_), "cublasCreate");
    if (status_.ok()) status_ = of(cublasSetStream(blas_, stream), "cublasSetStream");
    // One of its own, which a captured graph may go on using. Setting the stream would undo it.
    if (status_.ok()) status_ = of(cublasSetWorkspace(blas_, workspace_, kWorkspaceBytes), "cublasSetWorkspace");
  }
  ~CudaDevice() {
    if (blas_ != nullptr) static_cast<void>(cublasDestroy(blas_));
    release(workspace_);
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  [[nodiscard]] const kvblend::Status& status() const { return status_; }
  [[nodiscard]] const Execution& execution() const { return execution_; }
  [[nodiscard]] cudaStream_t stream() const { return execution_.stream(); }

  template <class F>
  kvblend::Status rows(std::int64_t count, F f) {
    if (count <= 0) return {};
    rows_kernel<<<static_cast<unsigned>(count), kTeamThreads, 0, stream()>>>(f);
    return kvblend::cuda::status_of(cudaPeekAtLastError(), "row kernel");
  }

  kvblend::Status multiply(const Gemm& g) {
    if (g.m == 0 || g.n == 0) return {};
    const cublasOperation_t op = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cudaDataType type = g.c_is_float ? CUDA_R_32F : CUDA_R_16BF;
    if (g.batch == 1) {
      return of(cublasGemmEx(blas_, op, CUBLAS_OP_N, g.m, g.n, g.k, &g.alpha, g.a, CUDA_R_16BF, static_cast<int>(g.lda),
                             g.b, CUDA_R_16BF, static_cast<int>(g.ldb), &g.beta, g.c, type, static_cast<int>(g.ldc),
                             CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                "cublasGemmEx");
    }
    return of(cublasGemmStridedBatchedEx(blas_, op, CUBLAS_OP_N, g.m, g.n, g.k, &g.alpha, g.a, CUDA_R_16BF,
                                         static_cast<int>(g.lda), g.stride_a, g.b, CUDA_R_16BF,
                                         static_cast<int>(g.ldb), g.stride_b, &g.beta, g.c, type,
                                         static_cast<int>(g.ldc), g.stride_c, g.batch, CUBLAS_COMPUTE_32F,
                                         CUBLAS_GEMM_DEFAULT),
              "cublasGemmStridedBatchedEx");
  }

  // Attention in one kernel, where there is one for the heads: see Attention.
  [[nodiscard]] static bool has_attention(std::int32_t head_dim) { return head_dim == 64 || head_dim == 128; }
  kvblend::Status attend(const FlashAttention& args) {
    if (args.keys.layout.head_dim() == 64) return launch<FlashShape<64>>(args);
    return launch<FlashShape<128>>(args);
  }

#if KVBLEND_WITH_FLASHINFER
  // See FlashInferDevice.
  [[nodiscard]] static bool has_flashinfer(std::int32_t head_dim) { return head_dim == 64 || head_dim == 128; }
  [[nodiscard]] std::int32_t multiprocessors() const {
    int device = 0, count = 0;
    const bool known = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
    return known ? count : 1;
  }
  kvblend::Status attend(const FlashInferCall<Scalar>& call) { return attend_with_flashinfer(call, stream()); }
#endif

  kvblend::Status finish() { return kvblend::cuda::status_of(cudaStreamSynchronize(stream()), "finish"); }
  kvblend::Status download(void* host, const void* device, std::size_t bytes) {
    if (bytes == 0) return {};
    KVBLEND_RETURN_IF_ERROR(kvblend::cuda::status_of(
        cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream()), "download"));
    return finish();
  }

  static void* allocate(std::size_t bytes) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());  // said by the null pointer
      return nullptr;
    }
    // The work queued later may be on a stream that does not wait for this one.
    if (cudaMemset(memory, 0, bytes) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess) return memory;
    release(memory);
    return nullptr;
  }
  static void release(void* memory) { static_cast<void>(cudaFree(memory)); }
  static void* allocate_host(std::size_t bytes) {
    void* memory = nullptr;
    if (cudaMallocHost(&memory, bytes) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return nullptr;
    }
    for (std::size_t i = 0; i < bytes; ++i) static_cast<unsigned char*>(memory)[i] = 0;
    return memory;
  }
  static void release_host(void* memory) { static_cast<void>(cudaFreeHost(memory)); }

 private:
  static constexpr std::size_t kWorkspaceBytes = std::size_t{64} << 20;  // Hopper's kernels want 32 MiB

  template <class Shape>
  kvblend::Status launch(const FlashAttention& args) {
    KVBLEND_RETURN_IF_ERROR(kvblend::cuda::status_of(
        cudaFuncSetAttribute(flash_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             Shape::kSharedBytes),
        "cudaFuncSetAttribute"));
    const std::int64_t tiles = (std::int64_t{args.count} * args.group + Shape::kRows - 1) / Shape::kRows;
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(args.keys.layout.heads()));
    flash_kernel<Shape><<<grid, Shape::kThreads, Shape::kSharedBytes, stream()>>>(args);
    return kvblend::cuda::status_of(cudaPeekAtLastError(), "attention kernel");
  }

  static kvblend::Status of(cublasStatus_t status, const char* call) {
    if (status == CUBLAS_STATUS_SUCCESS) return {};
    return kvblend::Status::error(kvblend::StatusCode::host_error, "%s", cublasGetStatusString(status)).at("%s", call);
  }

  Execution execution_;
  kvblend::Status status_;
  cublasHandle_t blas_ = nullptr;
  void* workspace_ = nullptr;
};

static_assert(Device<CudaDevice>);
#if KVBLEND_WITH_FLASHINFER
static_assert(FlashInferDevice<CudaDevice>);
#endif

#endif

}  // namespace cuda_engine
