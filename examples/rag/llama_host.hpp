// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// LlamaHost: the demo on llama.cpp as it is released (examples/llama_cpp), which runs all layers in one call. Full
// recompute, what comes behind an exact prefix, and decoding are plain calls of llama_decode.
#pragma once

#include <rag/blender.hpp>
#include <rag/host.hpp>
#include <rag/saliency.hpp>

#include <eigen_engine/thread_pool.hpp>
#include <llama_cpp/engine.hpp>
#include <llama_cpp/model.hpp>
#include <llama_cpp/state_blob.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace rag {

struct LlamaOptions {
  std::int32_t threads = 2;
  kvblend::DType cache_type = kvblend::DType::f16;
  bool flash_attention = true;
  llama_cpp::Route route = llama_cpp::Route::in_place;
};

class LlamaHost final : public Host {
 public:
  static kvblend::Result<std::unique_ptr<Host>> open(const std::string& model_path, const LlamaOptions& options);

  [[nodiscard]] const char* name() const override { return "llama.cpp"; }
  [[nodiscard]] std::string note() const override;
  [[nodiscard]] const kvblend::ModelIdentity& identity() const override { return identity_; }
  [[nodiscard]] std::int32_t vocabulary() const override { return model_.vocabulary(); }
  [[nodiscard]] std::int32_t context() const override { return model_.context(); }
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t layer) const override { return model_.rope(layer); }
  [[nodiscard]] kvblend::Status check(const Selection& selection) const override;
  // Decodes of many runs cost by the run, which the planner's model does not know.
  [[nodiscard]] bool can_plan() const override { return engine_->route() == llama_cpp::Route::in_place; }

  kvblend::Status reserve(std::int32_t rows) override;
  void clear() override {
    engine_->clear();
    context_.clear();
  }
  kvblend::Status truncate(std::int32_t rows) override {
    if (static_cast<std::size_t>(rows) < context_.size()) context_.clear();
    return engine_->truncate(rows);
  }
  kvblend::Status prefill(std::span<const kvblend::TokenId> tokens, Wanted wanted) override;
  kvblend::Status logits(std::span<float> out) override;

  kvblend::Result<kvblend::ChunkHandle> encode(std::span<const kvblend::TokenId> tokens,
                                               std::span<const kvblend::TokenId> context) override;
  kvblend::Status blend(const kvblend::Prompt& prompt, std::span<const kvblend::ChunkSource> sources,
                        const Selection& selection, Run& run, std::span<float> logits) override;
  // Before reserve(), which tries it: that it may.
  // Only reserve() finds out; scores that were asked for are then left out.
  [[nodiscard]] bool reports_attention() const override { return engine_ == nullptr || engine_->can_probe().ok(); }
  kvblend::Status probe(std::span<const kvblend::TokenId> tokens, ProbeSums& out) override;
  kvblend::Status store_scores(std::vector<std::vector<kvblend::TokenId>> probes) override;
  [[nodiscard]] std::string recipe() const override { return probes_.empty() ? "" : kSaliencyRecipe; }
  [[nodiscard]] LayerFlops layer_flops() const override;
  kvblend::Result<double> layer_time(const kvblend::ChunkHandle& chunk, std::int32_t rows,
                                     std::int32_t context) override;

 private:
  LlamaHost(llama_cpp::Model model, kvblend::ModelIdentity identity, const LlamaOptions& options)
      : model_(std::move(model)), identity_(std::move(identity)), options_(options), pool_(options.threads) {}

  kvblend::Status blend_rows(const kvblend::Prompt& prompt, std::span<const kvblend::ChunkSource> sources,
                             const Selection& selection, std::span<const kvblend::Row> outputs, Run& run);
  kvblend::Status prefill_behind_prefix(const kvblend::Prompt& prompt, std::span<const kvblend::ChunkSource> sources,
                                        Run& run);

  llama_cpp::Model model_;
  kvblend::ModelIdentity identity_;
  LlamaOptions options_;
  eigen_engine::ThreadPool pool_;  // for kvblend's part; llama.cpp has threads of its own
  std::unique_ptr<llama_cpp::Engine> engine_;
  llama_cpp::BlobWriter blob_;             // what blends are placed into
  std::vector<kvblend::TokenId> context_;  // of the chunk encoded last, if the cache still begins with it
  std::vector<std::vector<kvblend::TokenId>> probes_;
  std::vector<float> logits_;
  Blender blender_{pool_};
};

}  // namespace rag
