// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Stored scores: what a chunk's tokens are worth, measured when the chunk is encoded, by how much of them questions
// that have nothing to do with it fetch. A blend multiplies them by a prior of the distance and chooses before it
// loads.
#pragma once

#include <rag/host.hpp>

#include <eigen_engine/engine.hpp>
#include <eigen_engine/tokenizer.hpp>
#include <kvblend/core/status.hpp>
#include <kvblend/core/types.hpp>
#include <kvblend/select/prior.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace rag {

// Of chunks that carry such scores. The probes belong to the recipe: whoever changes them, or the sum, counts up.
inline constexpr const char* kSaliencyRecipe = "saliency of 3 probes, attention times value norm, v1";

// The recipe's questions in the model's tokens, each as a prompt's question would stand behind its last passage.
kvblend::Result<std::vector<std::vector<kvblend::TokenId>>> saliency_probes(const eigen_engine::Tokenizer& tokenizer);

// Runs `tokens` behind the engine's cached rows and forgets them again.
kvblend::Status run_probe(eigen_engine::Engine& engine, std::span<const kvblend::TokenId> tokens, ProbeSums& out);

// Runs a probe behind the cached rows, as Host::probe does.
using Probing = std::function<kvblend::Status(std::span<const kvblend::TokenId>, ProbeSums&)>;

// Of the last of an engine's cached rows, which are a chunk behind its context: s_j = mean over probes, layers behind
// the first, heads and probe rows of a·‖v_j‖, where a is the softmax weight that the probe row pays to row j and ‖v_j‖
// is over all heads. Each probe runs directly behind the chunk, and alone. `context` is how many rows stand before the
// chunk; `out` has one float for each row behind them. `layers` and `heads`, those of the queries, are the model's.
kvblend::Status saliency(const Probing& probing, std::int32_t layers, std::int32_t heads,
                         std::span<const std::vector<kvblend::TokenId>> probes, std::size_t context,
                         std::span<float> out);
kvblend::Status saliency(eigen_engine::Engine& engine, std::span<const std::vector<kvblend::TokenId>> probes,
                         std::size_t context, std::span<float> out);

// Collects how attention fades with the distance to the question, of prompts under full reuse.
class PriorSums {
 public:
  static constexpr std::int32_t kBins = 15;

  // Distances of up to `longest` positions.
  explicit PriorSums(std::int32_t longest);
  // A reused row `distance` positions before the prompt's last: what the question fetches of it there, and its stored
  // score. The first token of a chunk is none of these: of chunks encoded alone it is a false sink.
  void add(std::int32_t distance, double in_place, double stored);
  // c(d) = Σ in place / Σ stored of each bin, so that stored score × prior is right in the mean; bins without rows are
  // left out. Errors: fewer than two bins with rows.
  [[nodiscard]] kvblend::Result<kvblend::BinnedPrior> prior() const;

 private:
  double first_ = 8.0;  // where the second bin starts; the first takes all before it
  double step_ = 1.0;   // in log distance
  struct Bin {
    double log_distance = 0, in_place = 0, stored = 0, rows = 0;
  };
  std::vector<Bin> bins_;
};

}  // namespace rag
