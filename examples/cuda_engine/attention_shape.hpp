// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A layer's heads, and what computes their attention.
#pragma once

#include <cstdint>

namespace cuda_engine {

enum class AttentionBy : std::uint8_t {
  own,         // one kernel of this engine (flash_attention.hpp) where the device has it for the heads, else products
  products,    // matrix products and a softmax
  flashinfer,  // FlashInfer's batch prefill (flashinfer.hpp), in programs that are built with it
};

[[nodiscard]] constexpr const char* to_string(AttentionBy by) {
  switch (by) {
    case AttentionBy::own: return "own";
    case AttentionBy::products: return "products";
    case AttentionBy::flashinfer: return "flashinfer";
  }
  return "?";
}

struct AttentionShape {
  std::int32_t heads = 0, kv_heads = 0, head_dim = 0;
  [[nodiscard]] std::int32_t group() const { return heads / kv_heads; }
  [[nodiscard]] std::int32_t query_values() const { return heads * head_dim; }
  [[nodiscard]] std::int32_t key_values() const { return kv_heads * head_dim; }
  [[nodiscard]] std::int32_t qkv_values() const { return query_values() + 2 * key_values(); }
};

}  // namespace cuda_engine
