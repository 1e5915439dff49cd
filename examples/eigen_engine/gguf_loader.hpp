// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Reads a GGUF file into a Model: the first step of the way, before any token.
#pragma once

#include <eigen_engine/model.hpp>
#include <kvblend/core/status.hpp>

namespace eigen_engine {

// Reads llama and qwen2 models whose tensors ggml can turn into floats. Errors are one line that names the file, tensor
// or key at fault: a file that is missing, a directory, cut, or no GGUF; another architecture, or a feature of it that
// the engine does not have; a tensor that is missing or of another shape.
kvblend::Result<Model> load_gguf(const char* path);

// Stops ggml and llama.cpp from writing their log to stderr. The loader and the tokenizer call it.
void silence_llama();

}  // namespace eigen_engine
