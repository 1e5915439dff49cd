// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The codec of vLLM's fp8_ds_mla latents: 512 values as 8-bit floats, followed by a float scale for each 128 of them.
// The rotated values that follow in memory are a plane of their own (memory/engines.hpp, vllm_fp8_ds_mla).
#pragma once

#include <kvblend/codec/codec.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/core/copy.hpp>
#include <kvblend/core/types.hpp>

#include <cfloat>
#include <cstddef>
#include <cstdint>

namespace kvblend::inline KVBLEND_ABI_NAMESPACE {

// Scales are chosen as vLLM does (csrc/cache_kernels.cu, concat_and_cache_ds_mla_kernel): the largest magnitude of the
// 128 over 448, at least FLT_MIN, and a value is divided by its scale. An infinity counts as the
// largest float, beside which the rest of its 128 values are next to nothing.
struct DsMlaLatentCodec {
  static constexpr DType dtype = DType::f8_e4m3;
  static constexpr std::int32_t block_values = 512;
  static constexpr std::int32_t group_values = 128;  // that share a scale
  static constexpr std::int32_t groups = block_values / group_values;
  static constexpr std::int32_t block_bytes = block_values + groups * 4;

  KVBLEND_HOST_DEVICE static void decode(const std::byte* source, float* values, std::int64_t count) {
    for (; count > 0; count -= block_values, source += block_bytes, values += block_values) {
      KVBLEND_ROLLED
      for (std::int32_t group = 0; group < groups; ++group) {
        alignas(16) float scale;
        detail::read_bytes<sizeof(float)>(source + block_values + group * 4, &scale);
        float* const to = values + group * group_values;
        Fp8E4M3Codec::decode(source + group * group_values, to, group_values);
        KVBLEND_ROLLED
        for (std::int32_t i = 0; i < group_values; ++i) to[i] *= scale;
      }
    }
  }

  KVBLEND_HOST_DEVICE static void encode(const float* values, std::byte* destination, std::int64_t count) {
    for (; count > 0; count -= block_values, destination += block_bytes, values += block_values) {
      KVBLEND_ROLLED
      for (std::int32_t group = 0; group < groups; ++group) {
        const float* const from = values + group * group_values;
        const float most = detail::largest_magnitude(from, group_values);
        const float largest = most > FLT_MAX ? FLT_MAX : most;
        const float fitting = largest / Fp8E4M3Codec::largest;
        alignas(16) const float scale = fitting > FLT_MIN ? fitting : FLT_MIN;
        float scaled[group_values];
        for (std::int32_t i = 0; i < group_values; ++i) scaled[i] = from[i] / scale;
        Fp8E4M3Codec::encode(scaled, destination + group * group_values, group_values);
        detail::write_bytes<sizeof(float)>(&scale, destination + block_values + group * 4);
      }
    }
  }
};
static_assert(RunCodec<DsMlaLatentCodec>);

}  // namespace kvblend::inline KVBLEND_ABI_NAMESPACE
