// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One rope object of a config.json - rope_parameters, one of its layer types, or the older rope_scaling - as a
// RopeSpec.
#pragma once

#include <rope_config/json_fields.hpp>
#include <rope_config/model_rope.hpp>

#include <kvblend/rope/spec.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace rope_config {

// What the rope object's fields depend on outside it.
struct RopeContext {
  std::int32_t head_dim = 0;
  kvblend::RopePairing pairing = kvblend::RopePairing::neox;
  // What holds where the object has no rope_theta or partial_rotary_factor, and the path of the field that says so.
  double theta = 10000;
  double partial = 1;
  std::string theta_path;
  std::string partial_path;
  bool takes_partial = true;               // false: the model turns whole heads, whatever a partial_rotary_factor says
  std::optional<std::int32_t> rotary_dim;  // gptj's, in place of a partial factor
  std::optional<double> longest;           // max_position_embeddings
  std::optional<double> original_length;   // original_max_position_embeddings beside the object, which goes before
  std::int64_t length = 0;                 // the highest position of the pass + 1; 0: within the original length
  bool takes_alpha = false;                // HunYuan: "dynamic" with alpha does not depend on the length
  bool yarn_is_longrope = false;           // Phi-3: early files call it "yarn" or "su"
  std::optional<std::vector<std::int32_t>> sections;  // M-RoPE's, where mrope_section is absent
  bool axes_interleaved = false;
};

// Errors name the field: a type nobody knows, a field that is missing, of another type, or out of its range.
kvblend::Result<LayerRope> read_rope_object(const Fields& rope, const RopeContext& context);

// Whether the frequencies of such a family hold for one length only.
bool depends_on_length(const LayerRope& layer);

}  // namespace rope_config
