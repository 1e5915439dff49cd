// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a node of llama.cpp's graphs does, told by its op, its inputs and the names of the cache. None of this is
// promised: whoever acts on it checks what it finds.
#pragma once

#include <cstdint>

struct ggml_tensor;

namespace llama_cpp {

// The number behind a prefix: 7 of "l_out-7"; -1 if the name is another.
std::int32_t number_behind(const char* name, const char* prefix);

// What a tensor is a view, or a converted copy, of.
const ggml_tensor* origin_of(const ggml_tensor* tensor);

enum class Cache : std::uint8_t { none, keys, values };

// Of a node that writes rows into the cache: which, and of which layer.
Cache cache_written(const ggml_tensor* node, std::int32_t& layer);

// Of a node that attends: its mask, and the layer whose keys it reads. Null for other nodes.
ggml_tensor* mask_of(ggml_tensor* node, std::int32_t& layer);

// By how much attention is biased by distance (ALiBi), of a node that attends.
float max_bias_of(const ggml_tensor* node);

}  // namespace llama_cpp
