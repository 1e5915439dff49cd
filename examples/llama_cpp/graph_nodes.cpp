// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <llama_cpp/graph_nodes.hpp>

#include <cstdlib>
#include <cstring>
#include <limits>

#include "ggml.h"

namespace llama_cpp {

std::int32_t number_behind(const char* name, const char* prefix) {
  const std::size_t length = std::strlen(prefix);
  if (std::strncmp(name, prefix, length) != 0 || name[length] < '0' || name[length] > '9') return -1;
  char* end = nullptr;
  const long number = std::strtol(name + length, &end, 10);
  return *end == '\0' && number < std::numeric_limits<std::int32_t>::max() ? static_cast<std::int32_t>(number) : -1;
}

const ggml_tensor* origin_of(const ggml_tensor* tensor) {
  for (;;) {
    if (tensor->view_src != nullptr && tensor->op != GGML_OP_CPY) {
      tensor = tensor->view_src;
    } else if ((tensor->op == GGML_OP_CPY || tensor->op == GGML_OP_CONT) && tensor->src[0] != nullptr) {
      tensor = tensor->src[0];
    } else {
      return tensor;
    }
  }
}

Cache cache_written(const ggml_tensor* node, std::int32_t& layer) {
  if (node->op != GGML_OP_SET_ROWS) return Cache::none;
  const ggml_tensor* cache = node;
  while (cache->view_src != nullptr) cache = cache->view_src;
  layer = number_behind(cache->name, "cache_k_l");
  if (layer >= 0) return Cache::keys;
  layer = number_behind(cache->name, "cache_v_l");
  return layer >= 0 ? Cache::values : Cache::none;
}

ggml_tensor* mask_of(ggml_tensor* node, std::int32_t& layer) {
  const ggml_tensor* keys = nullptr;
  ggml_tensor* mask = nullptr;
  if (node->op == GGML_OP_FLASH_ATTN_EXT) {
    keys = node->src[1];
    mask = node->src[3];
  } else if (node->op == GGML_OP_SOFT_MAX && node->src[1] != nullptr) {
    const ggml_tensor* product = node->src[0];
    while (product != nullptr && product->op != GGML_OP_MUL_MAT) product = product->src[0];
    if (product == nullptr) return nullptr;
    keys = product->src[0];
    mask = node->src[1];
  } else {
    return nullptr;
  }
  layer = number_behind(origin_of(keys)->name, "cache_k_l");
  return layer >= 0 ? mask : nullptr;
}

float max_bias_of(const ggml_tensor* node) {
  float bias = 0;
  std::memcpy(&bias, &node->op_params[1], sizeof bias);
  return bias;
}

}  // namespace llama_cpp
