// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// EigenHost: the demo on examples/eigen_engine, kvblend's reference host, which runs one layer at a time.
#pragma once

#include <rag/blender.hpp>
#include <rag/host.hpp>
#include <rag/saliency.hpp>

#include <eigen_engine/engine.hpp>
#include <eigen_engine/model.hpp>
#include <eigen_engine/thread_pool.hpp>

#include <utility>

namespace rag {

class EigenHost final : public Host {
 public:
  static kvblend::Result<std::unique_ptr<Host>> open(const std::string& model_path, std::int32_t threads);

  [[nodiscard]] const char* name() const override { return "eigen"; }
  [[nodiscard]] const kvblend::ModelIdentity& identity() const override { return identity_; }
  [[nodiscard]] std::int32_t vocabulary() const override { return model_.config().vocabulary; }
  [[nodiscard]] std::int32_t context() const override { return model_.config().context; }
  [[nodiscard]] const kvblend::RopeSpec& rope(std::int32_t layer) const override { return model_.rope(layer); }
  [[nodiscard]] eigen_engine::Engine& engine() { return *engine_; }  // reserve() makes it

  kvblend::Status reserve(std::int32_t rows) override;
  void clear() override {
    engine_->clear();
    blended_ = false;
  }
  kvblend::Status truncate(std::int32_t rows) override { return engine_->truncate(rows); }
  kvblend::Status prefill(std::span<const kvblend::TokenId> tokens, Wanted wanted) override;
  kvblend::Status logits(std::span<float> out) override { return engine_->logits(out); }

  kvblend::Result<kvblend::ChunkHandle> encode(std::span<const kvblend::TokenId> tokens,
                                               std::span<const kvblend::TokenId> context) override;
  kvblend::Status blend(const kvblend::Prompt& prompt, std::span<const kvblend::ChunkSource> sources,
                        const Selection& selection, Run& run, std::span<float> logits) override;
  [[nodiscard]] bool reports_attention() const override { return true; }
  kvblend::Status probe(std::span<const kvblend::TokenId> tokens, ProbeSums& out) override;
  kvblend::Status store_scores(std::vector<std::vector<kvblend::TokenId>> probes) override;
  [[nodiscard]] std::string recipe() const override { return probes_.empty() ? "" : kSaliencyRecipe; }
  [[nodiscard]] LayerFlops layer_flops() const override;
  kvblend::Result<double> layer_time(const kvblend::ChunkHandle& chunk, std::int32_t rows,
                                     std::int32_t context) override;

 private:
  EigenHost(eigen_engine::Model model, kvblend::ModelIdentity identity, std::int32_t threads)
      : model_(std::move(model)), identity_(std::move(identity)), pool_(threads) {}

  eigen_engine::Model model_;
  kvblend::ModelIdentity identity_;
  eigen_engine::ThreadPool pool_;
  std::unique_ptr<eigen_engine::Engine> engine_;
  bool blended_ = false;  // the cache is not what a prefill leaves
  std::vector<std::vector<kvblend::TokenId>> probes_;
  Blender blender_{pool_};
};

}  // namespace rag
