// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a model's file says about the rotation of its keys, layer by layer: the result of both readers.
#pragma once

#include <kvblend/rope/spec.hpp>

#include <string>
#include <vector>

namespace rope_config {

struct LayerRope {
  kvblend::RopeSpec spec;
  const char* family = "none";  // plain, linear, dynamic, ntk_alpha, yarn, longrope, llama3, proportional, none
};

struct ModelRope {
  std::string model;               // the configuration's model_type, the GGUF file's architecture
  std::vector<LayerRope> layers;   // one a layer
  std::vector<std::string> notes;  // what the caller should know: a choice made here, a difference between engines
};

// Why a model has no rope to describe.
inline constexpr const char* kAlibi =
    "biases attention by ALiBi: its keys hold no position, describe its layers by no_rope() and copy them";
inline constexpr const char* kAdded =
    "adds positions to the embeddings: its keys hold them in a way that no rotation undoes";
inline constexpr const char* kBias = "biases attention by relative positions: its keys hold no position, use no_rope()";
inline constexpr const char* kRecurrent = "keeps a recurrent state in place of keys";

}  // namespace rope_config
