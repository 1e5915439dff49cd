// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Turns a Hugging Face config.json into one RopeSpec a layer: the first question of an engine's author, answered.
//
// The keys described are those of an engine that rotates in place, as vLLM and SGLang do. How values pair is not in the
// file: the model_type decides (hf_models.cpp). GGUF files of the same model may pair otherwise (gguf_rope.hpp).
#pragma once

#include <rope_config/model_rope.hpp>

#include <kvblend/core/status.hpp>
#include <kvblend/rope/spec.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace rope_config {

// What a multi-head latent attention (DeepSeek) engine keeps as a token's key.
enum class LatentKeys : std::uint8_t {
  row,       // the latent, then the rope part: kv_lora_rank + qk_rope_head_dim values
  part,      // the rope part alone, in a cache of its own
  expanded,  // each head's whole key: qk_nope_head_dim values without rope, then the rope part
};

struct HfOptions {
  // Tokens of the prompt, that is, the highest position + 1. The frequencies of dynamic NTK and longrope depend on it.
  // 0: no more than the model's original length.
  std::int64_t length = 0;
  LatentKeys latent_keys = LatentKeys::row;
  // The engine's own pairing where it is not the model's: transformers itself caches DeepSeek-V3's keys as neox. With
  // it a model_type that is not known is read by the general rules.
  std::optional<kvblend::RopePairing> pairing;
  std::string model_type;  // where the file has none
};

// `text` is the file's content. Errors name the field by its path in the file: no JSON, larger than 16 MiB or deeper
// than 64 levels; a field that is missing, of another type or impossible; a rope type or model_type nobody knows; a
// model without rotary embedding, with the reason.
kvblend::Result<ModelRope> read_hf_config(std::string_view text, const HfOptions& options = {});

// The same from a file. Errors besides: a file that cannot be read.
kvblend::Result<ModelRope> read_hf_config_file(const std::string& path, const HfOptions& options = {});

}  // namespace rope_config
