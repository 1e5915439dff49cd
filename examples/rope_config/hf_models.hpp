// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a config.json leaves to the code of its model_type: how values pair, which layers turn, and the values that hold
// where a field is absent. The facts are those of Hugging Face transformers 5.24 (configuration_*.py, modeling_*.py).
#pragma once

#include <cstdint>
#include <string_view>

namespace rope_config {

enum class HfPairing : std::uint8_t {
  neox,
  interleaved,
  by_field,  // interleaved unless rope_interleave is false
};

// Which layers turn, and by what.
enum class HfLayers : std::uint8_t {
  alike,
  no_rope_list,       // no_rope_layers: 0 is a layer without rope; else one every no_rope_layer_interval, or 4
  sliding_only,       // full attention layers have no rope
  sliding_if_window,  // the same, but all have it where sliding_window is null
  local_and_global,   // sliding layers have a base of their own, and no scaling
  gemma4,             // as local_and_global, with wider heads in full attention layers
};

struct HfModel {
  const char* type;  // model_type, less "_text"
  HfPairing pairing = HfPairing::neox;
  double theta = 10000;
  double local_theta = 0;      // of sliding layers, where they have their own
  std::int32_t head_dim = 0;   // 0: hidden_size / num_attention_heads
  double partial = 0;          // partial_rotary_factor; 0: the model always turns whole heads
  bool by_rotary_dim = false;  // rotary_dim is required
  HfLayers layers = HfLayers::alike;
  std::int32_t period = 0;                 // every period-th layer is a full attention layer...
  const char* period_field = nullptr;      // ...or by this field
  bool latent = false;                     // multi-head latent attention: the key's rope part is cached beside a latent
  const std::int32_t* sections = nullptr;  // M-RoPE's, where mrope_section is absent
  bool axes_interleaved = false;           // M-RoPE's order
};

// Null if the type is not known.
const HfModel* find_hf_model(std::string_view type);

// Why a model of this type has no rotation to describe; null if it has one, or is not known.
const char* why_no_rope(std::string_view type);

}  // namespace rope_config
