// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// FlashInferCall by FlashInfer's own kernels: BatchPrefillWithPagedKVCache over bf16, for nvcc and FlashInfer 0.2.5.
// Nothing here allocates or waits.
#pragma once

#include <cuda_engine/flashinfer.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/core/status.hpp>

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <exception>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>

namespace cuda_engine {
namespace detail {

using FlashInferParams =
    flashinfer::BatchPrefillPagedParams<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, std::int32_t>;

// Attention as it is, but for a window that FlashInfer reads and, where there is none, leaves unset.
template <bool masked>
struct FlashInferVariant : flashinfer::DefaultAttention<masked, false, false, false> {
  using Base = flashinfer::DefaultAttention<masked, false, false, false>;
  __device__ FlashInferVariant(const FlashInferParams& params, std::uint32_t sequence, std::uint8_t* shared)
      : Base(params, sequence, shared) {
    this->window_left = this->kv_len;
  }
};

template <std::uint32_t head_dim, bool masked>
cudaError_t launch_flashinfer(const FlashInferParams& params, bool merged,
                              const FlashInferCall<kvblend::BFloat16>& call, cudaStream_t stream) {
  constexpr auto kMode = masked ? flashinfer::MaskMode::kCustom : flashinfer::MaskMode::kCausal;
  return flashinfer::BatchPrefillWithPagedKVCacheDispatched<kFlashInferTile, head_dim, head_dim,
                                                            flashinfer::PosEncodingMode::kNone, false, kMode,
                                                            FlashInferVariant<masked>>(
      params, merged ? reinterpret_cast<__nv_bfloat16*>(call.partial_out) : nullptr, call.partial_sums, stream);
}

}  // namespace detail

inline kvblend::Status attend_with_flashinfer(const FlashInferCall<kvblend::BFloat16>& call, cudaStream_t stream) {
  const auto bf16 = [](const kvblend::BFloat16* values) {  // its parameters are not const
    return const_cast<__nv_bfloat16*>(reinterpret_cast<const __nv_bfloat16*>(values));
  };
  const FlashInferPages<kvblend::BFloat16>& pages = call.pages;
  const std::int64_t strides[3] = {pages.page_stride, pages.row_stride, pages.head_stride};
  const auto kv_heads = static_cast<std::uint32_t>(call.shape.kv_heads);
  const auto heads = static_cast<std::uint32_t>(call.shape.heads);
  const auto head_dim = static_cast<std::uint32_t>(call.shape.head_dim);
  const flashinfer::paged_kv_t<__nv_bfloat16, std::int32_t> cache(
      kv_heads, pages.page_size, head_dim, 1, flashinfer::QKVLayout::kNHD, bf16(pages.keys), bf16(pages.values),
      strides, const_cast<std::int32_t*>(pages.indices), call.tables.page_indptr, call.tables.last_page_len);
  auto* const mask = const_cast<std::uint8_t*>(reinterpret_cast<const std::uint8_t*>(call.mask));
  detail::FlashInferParams params(bf16(call.queries), cache, mask, call.tables.q_indptr, call.tables.mask_indptr,
                                  nullptr, bf16(call.out), nullptr, nullptr, heads,
                                  static_cast<std::int32_t>(call.query_stride), call.shape.head_dim, -1, 0.0f,
                                  call.scale, 1.0f, 1.0f);
  params.request_indices = call.tables.request_indices;
  params.qo_tile_indices = call.tables.qo_tile_indices;
  params.kv_tile_indices = call.tables.kv_tile_indices;
  params.merge_indptr = call.tables.merge_indptr;
  params.o_indptr = call.tables.o_indptr;
  params.kv_chunk_size_ptr = call.tables.kv_chunk_size;
  params.max_total_num_rows = static_cast<std::uint32_t>(call.count);
  params.padded_batch_size = static_cast<std::uint32_t>(call.plan.entries());
  const bool merged = call.plan.chunks > 1;
  const auto launch = [&] {
    if (call.shape.head_dim == 64) {
      return call.mask != nullptr ? detail::launch_flashinfer<64, true>(params, merged, call, stream)
                                  : detail::launch_flashinfer<64, false>(params, merged, call, stream);
    }
    return call.mask != nullptr ? detail::launch_flashinfer<128, true>(params, merged, call, stream)
                                : detail::launch_flashinfer<128, false>(params, merged, call, stream);
  };
  // It throws where a GPU has too little shared memory.
  try {
    if (const cudaError_t error = launch(); error != cudaSuccess) {
      return kvblend::Status::error(kvblend::StatusCode::host_error, "%s", cudaGetErrorString(error)).at("FlashInfer");
    }
  } catch (const std::exception& error) {
    return kvblend::Status::error(kvblend::StatusCode::host_error, "%s", error.what()).at("FlashInfer");
  }
  return {};
}

}  // namespace cuda_engine
