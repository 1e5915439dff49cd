// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a GGUF file leaves to llama.cpp's code of its architecture: how values pair, and which layers turn by what. The
// facts are those of llama.cpp as of the release that cmake/dependencies.cmake fetches (llama_model_rope_type in
// src/llama-model.cpp, load_arch_hparams and the graphs in src/models).
#pragma once

#include <cstdint>
#include <string_view>

namespace rope_config {

enum class GgufPairing : std::uint8_t {
  norm,           // interleaved
  neox,           // neox
  mrope,          // neox, with three positions in sections
  imrope,         // neox, with three positions by turns
  norm_or_mrope,  // mrope if the file has sections
  neox_or_mrope,
};

enum class GgufLayers : std::uint8_t {
  alike,
  every_fourth_without,  // layers 3, 7, … have no rope
  sliding_only,          // full attention layers have none
  sliding_only_of_64,    // the same in a model of 64 layers, else all have it
  sliding_alike,         // sliding layers may have a base of their own
  sliding_own,           // sliding layers have base 10 000 unless the file says otherwise, and no scaling
  sliding_plain,         // sliding layers have the same base, and no scaling
};

struct GgufArchitecture {
  const char* name;
  GgufPairing pairing = GgufPairing::neox;
  GgufLayers layers = GgufLayers::alike;
  std::int32_t period = 0;          // every period-th layer is a full attention layer, where the file does not say
  bool needs_window = false;        // without attention.sliding_window all layers are alike
  bool divides_full_only = false;   // rope_freqs is for full attention layers
  bool reads_betas = false;         // YaRN's, which are 32 and 1 elsewhere
  double log_multiplier_scale = 0;  // YaRN's log multiplier is read, times this
  bool mscale_cancels = false;      // the magnitude is 1 whatever the log multiplier
  bool may_lack_rope = false;       // rope.scaling.finetuned false: no rope
};

// Null if the architecture is not known.
const GgufArchitecture* find_gguf_architecture(std::string_view name);

// Why llama.cpp rotates no keys of this architecture; null if it does, or the architecture is not known.
const char* why_gguf_has_no_rope(std::string_view name);

}  // namespace rope_config
