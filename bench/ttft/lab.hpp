// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Lab: a model on llama.cpp, prompts of instructions, passages and a question, and the ways to the first token that are
// compared: all on the same engine, with the same settings.
#pragma once

#include <rag/prompt_file.hpp>

#include <eigen_engine/thread_pool.hpp>
#include <eigen_engine/tokenizer.hpp>
#include <kvblend/kvblend.hpp>
#include <kvblend/store.hpp>
#include <llama_cpp/engine.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lab {

struct Settings {
  std::string model;           // GGUF file
  std::int32_t tokens = 3072;  // of a prompt, at most; passages are left out or cut until it fits
  std::int32_t threads = 2;
  kvblend::DType cache_type = kvblend::DType::f16;
  bool flash_attention = true;
  std::string store_directory;  // for the tiers in files; empty: they are not used
};

// A way to the first token.
//   full          the engine's own prefill of everything
//   prefix        the engine's own prefix cache: the instructions are there
//   cache_reuse   what llama-server's --cache-reuse does at its best: the slot holds the same passages in the same order
//                 behind one that is gone; it drops that one, shifts the keys of the others and prefills the question
//   reuse         full KV reuse: passages encoded alone are moved to their places, the question is computed
//   blend         reuse, and `ratio` of the passages' rows are computed anew
struct Variant {
  std::string name = "full";
  std::string selector = "none";
  double ratio = 0;
  std::string tier = "memory";  // memory, warm_file, cold_file
  bool gradual = false;
};

// Seconds, and what came of it.
struct Timing {
  double ttft_s = 0;
  double load_s = 0;   // waiting for stored KV, and the engine's reading of the state blob
  double shift_s = 0;  // keys rotated and values copied into the blob
  double score_s = 0;  // the engine up to the scored layer, and the deviations
  double select_s = 0;
  double merge_s = 0;
  double patch_s = 0;      // the inputs of graphs rewritten
  double recompute_s = 0;  // the engine's passes, without the patching
  double suffix_s = 0;     // the same where the question alone is computed
  std::int32_t rows_selected = 0;

  // Of the blend's own work in its TTFT.
  [[nodiscard]] double own_share() const {
    return ttft_s > 0 ? (load_s + shift_s + select_s + merge_s + patch_s) / ttft_s : 0;
  }
};

struct Closeness {
  double kl = 0;              // nats a token, mean over the tokens of full prefill's answer
  double top1_agreement = 0;  // share of those at which the most likely token is the same
};

// A prompt in tokens.
struct Request {
  std::vector<kvblend::TokenId> instructions;
  std::vector<std::vector<kvblend::TokenId>> passages;
  std::vector<kvblend::TokenId> question;

  [[nodiscard]] std::vector<kvblend::TokenId> all() const;
};

class Lab {
 public:
  static kvblend::Result<std::unique_ptr<Lab>> open(const Settings& settings);

  [[nodiscard]] llama_cpp::Engine& engine() { return *engine_; }
  // KV of a token, over all layers.
  [[nodiscard]] double row_bytes() const;
  // The file's items as requests of at most settings.tokens tokens.
  kvblend::Result<std::vector<Request>> requests(const rag::PromptFile& file) const;
  // Tokens of all passages of the file.
  kvblend::Result<std::vector<std::vector<kvblend::TokenId>>> passages(const rag::PromptFile& file) const;

  // Encodes what the store lacks of it: the instructions and the passages, each alone.
  kvblend::Status store(const Request& request);
  [[nodiscard]] bool stores(std::span<const kvblend::TokenId> tokens);
  // Leaves in the engine's cache what the variant leaves there. Passages that are not stored are computed as new.
  kvblend::Status run(const Request& request, const Variant& variant, Timing& timing);

  // Full prefill's answer, from the cache as full prefill left it.
  struct Reference {
    std::vector<kvblend::TokenId> answer;
    std::vector<std::vector<float>> logits;
  };
  kvblend::Status answer(std::int32_t tokens, Reference& out);
  // How close the cache, as a variant left it, comes.
  kvblend::Result<Closeness> judge(const Reference& reference);

 private:
  Lab(const Settings& settings, llama_cpp::Model model, eigen_engine::Tokenizer tokenizer)
      : settings_(settings),
        model_(std::make_unique<llama_cpp::Model>(std::move(model))),
        tokenizer_(std::move(tokenizer)),
        pool_(settings.threads),
        memory_(std::int64_t{8} << 30) {}

  struct Parts;
  [[nodiscard]] kvblend::ChunkIdentity identity_of(std::span<const kvblend::TokenId> tokens) const;
  kvblend::Status encode(std::span<const kvblend::TokenId> tokens);
  kvblend::Status look_up(const Request& request, const Variant& variant, Parts& parts);
  kvblend::Status run_blend(const Request& request, const Variant& variant, Timing& timing);
  kvblend::Status make_cold(const Request& request);
  kvblend::Status prepare(const Request& request, const Variant& variant);

  Settings settings_;
  std::unique_ptr<llama_cpp::Model> model_;
  eigen_engine::Tokenizer tokenizer_;
  eigen_engine::ThreadPool pool_;
  std::unique_ptr<llama_cpp::Engine> engine_;
  llama_cpp::BlobWriter staging_blob_;
  kvblend::ModelIdentity identity_;
  kvblend::MemoryTier<> memory_;
  kvblend::FileTier<> files_;
  std::vector<std::byte> staging_;  // of the loader
  std::vector<std::byte> workspace_;
  std::vector<std::byte> old_slot_;  // cache_reuse: what the slot holds before
  std::vector<kvblend::TokenId> old_slot_of_;
  std::int32_t old_rows_ = 0;
};

}  // namespace lab
