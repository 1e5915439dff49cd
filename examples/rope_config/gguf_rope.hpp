// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Turns a GGUF file's metadata into one RopeSpec a layer: the rotation of the keys that llama.cpp caches.
//
// It is not always that of the config.json the file was made from. Converters reorder the query and key weights of
// llama's kin so that pairs lie side by side: the keys of one model are interleaved here and neox there. And llama.cpp
// has rules of its own: longrope's long list is taken by the size of the context, not of the prompt; YaRN's range is
// always rounded; pairs that Gemma 4 leaves alone turn by 1e-30 of their frequency.
#pragma once

#include <rope_config/gguf_file.hpp>
#include <rope_config/model_rope.hpp>

#include <kvblend/core/status.hpp>

#include <cstdint>

namespace rope_config {

struct GgufOptions {
  // Rows of the context a sequence is computed in (llama.cpp's n_ctx, shared out among its sequences). It decides which
  // list of longrope's holds. 0: the length the model was trained for, as in llama.cpp.
  std::int64_t context = 0;
};

// Errors name the key or tensor: an architecture that is not known, or has no rotary embedding; a scaling type that is
// not known; a value that is missing, of another type, or impossible.
kvblend::Result<ModelRope> read_gguf_rope(GgufFile& file, const GgufOptions& options = {});

// The same, and opens the file. ggml may write to its log, which is the caller's.
kvblend::Result<ModelRope> read_gguf_rope(const char* path, const GgufOptions& options = {});

}  // namespace rope_config
